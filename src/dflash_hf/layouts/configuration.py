"""The configuration that people use: every published spelling in, checked once at construction."""

import copy

from transformers.utils import logging

from dflash_hf.layouts.all_layouts import PUBLISHED
from dflash_hf.layouts.check import (
    check_fields,
    check_layers,
    check_nested,
    check_parts,
    check_quantization,
    check_rope,
    check_rope_is_one_table,
    check_rotary_table,
    check_tokens,
)
from dflash_hf.layouts.heads import require
from dflash_hf.layouts.read import canonical_config
from dflash_hf.layouts.rotary import with_rotary_width
from dflash_hf.layouts.target_layers import default_target_layer_ids, fitting_target_layer_ids
from dflash_hf.modeling import configuration_dflash
from dflash_hf.modeling.configuration_dflash import LAYER_TYPES
from dflash_hf.modeling.target_dflash import num_decoder_layers


logger = logging.get_logger(__name__)
# Keys of `dflash_config` that set a field in another form.
_IMPLIED_FIELDS = {"causal": "is_causal", "causal_head": "is_causal", "use_swa": "layer_types"}


class DFlashDraftConfig(configuration_dflash.DFlashDraftConfig):
    r"""
    Configuration of a [`DFlashDraftModel`], read from any published layout and checked; its fields are those of the
    configuration beside a drafter's weights.

    Args:
        source_layout (`str`): The layout of the file that was read, by which tensors are renamed; it is not saved.
        interleaved_rotary (`bool`): Whether the rotary pairs of a file are interleaved; rows are permuted on loading.
        dflash_config (`dict`): JetSpec's `causal_head: true` is another name for `is_causal: true`.

    Raises:
        `ValueError`: names key, value and remedy.
    """

    source_layout: str = PUBLISHED.name
    interleaved_rotary: bool = False

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        check_rope(self)
        self.rope_parameters = with_rotary_width(self.rope_parameters, self.head_dim)
        check_rotary_table(self)
        check_quantization(self)

    def _read_nested(self, kwargs: dict) -> None:
        check_nested(self.__dict__["dflash_config"])
        super()._read_nested(kwargs)
        nested = self.__dict__["dflash_config"]
        # Here the top level wins: SGLang reads nothing else, vLLM reads it first.
        causal = nested.pop("causal", None)
        if self.is_causal is None:
            self.is_causal = causal
        elif causal not in (None, self.is_causal):
            logger.warning_once(
                f"is_causal={self.is_causal} and dflash_config.causal={causal} contradict each other: is_causal wins, "
                f"as in the engines; if few drafts are accepted, load the drafter with `is_causal={causal}`."
            )
        if nested.get("causal_head"):
            if self.is_causal is not None and not self.is_causal:
                raise ValueError(
                    f"dflash_config.causal_head={nested['causal_head']!r} and is_causal={self.is_causal} contradict "
                    "each other; remove one."
                )
            self.is_causal = nested["causal_head"]
        kwargs["use_swa"] = nested.pop("use_swa", None)
        # A null is a field's default; no cap may be written as 0, and a whole vocabulary as a reduced one.
        for key in (
            "sample_from_anchor",
            "output_multiplier",
            "input_embedding_scale",
            "attention_value_scale",
            "attention_dropout",
        ):
            if getattr(self, key) is None:
                setattr(self, key, getattr(type(self), key))
        if self.final_logit_softcapping == 0:
            self.final_logit_softcapping = None
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None

    def _derive_fields(self, kwargs: dict) -> None:
        check_fields(self)
        use_swa = kwargs.pop("use_swa")
        first_sliding = kwargs.get("max_window_layers") or 0
        if self.layer_types is None:
            require(isinstance(first_sliding, int), "a number of layers", max_window_layers=first_sliding)
            if not (use_swa is None and self.use_sliding_window and self.sliding_window):
                first_sliding = self.num_hidden_layers
            full, sliding = LAYER_TYPES
            self.layer_types = [sliding if i >= first_sliding else full for i in range(self.num_hidden_layers)]
        if use_swa and isinstance(self.layer_types, list | tuple) and "sliding_attention" not in self.layer_types:
            # Forces the window on every layer, even full ones, which stay bidirectional in the block.
            self.layer_types = ["sliding_attention"] * self.num_hidden_layers
            self.is_causal = bool(self.is_causal)
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers, self.num_hidden_layers)
        super()._derive_fields(kwargs)
        check_rope_is_one_table(self.rope_parameters, kwargs.get("rope_scaling"))
        check_layers(self)
        check_tokens(self)
        check_parts(self)

    @classmethod
    def for_target(cls, target_config, mask_token_id: int, num_hidden_layers: int = 5, block_size: int = 16, **kwargs):
        """
        A fresh drafter's configuration for a target: the target's width, vocabulary, rotary embedding and length, and
        Qwen3-style layers.

        Args:
            target_config (`PreTrainedConfig`): Configuration of the target; of a multimodal target, its text part.
            mask_token_id (`int`): An id inside the target's embedding that its text never uses.
            num_hidden_layers (`int`): Draft layers.
            block_size (`int`): Tokens of a block, anchor included.
            kwargs: Any other field of the configuration. By default, `target_layer_ids` follow the paper's rule, for
                as many target layers as the drafter has layers, or as fit.

        Raises:
            `ValueError`: the target's embedding and head, both shared by a drafter, have different widths.
        """
        text = target_config.get_text_config()
        width = getattr(text, "embedding_size", None) or getattr(text, "word_embed_proj_dim", None) or text.hidden_size
        input_width = getattr(text, "input_embedding_size", width)
        output_width = getattr(text, "output_embedding_size", width)
        if input_width != output_width:
            raise ValueError(
                f"{type(text).__name__} has input_embedding_size={input_width} and "
                f"output_embedding_size={output_width}, but a drafter shares the target's embedding and head, in one "
                "width: this target cannot have a drafter."
            )
        rope = copy.deepcopy(getattr(text, "rope_parameters", None)) or {}
        # Tables by layer type (Gemma): the drafter uses that of the full-attention layers, if they rotate at all.
        tables = [table for table in rope.values() if isinstance(table, dict)]
        rope = rope.get("full_attention") or (tables[0] if tables else rope)
        if rope.get("partial_rotary_factor") is not None or rope.get("rope_type") not in (None, "default"):
            if rope.get("rope_type") not in ("yarn", "llama3", "linear"):
                rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", cls.default_theta)}
            rope.pop("partial_rotary_factor", None)
        # Layers of several shapes (Gemma 4): the drafter uses the shape of the first.
        layer = (getattr(text, "per_layer_config", None) or [text])[0]
        heads = getattr(layer, "num_attention_heads", None) or max(text.hidden_size // 128, 1)
        head_dim = getattr(layer, "head_dim", None) or text.hidden_size // heads
        inner = getattr(layer, "intermediate_size", None) or 3 * width
        length = getattr(text, "max_position_embeddings", 0)
        ids = {}
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids[name] = getattr(text, name, None)
            if ids[name] is None:  # in a wrapper, next to its text configuration
                ids[name] = getattr(target_config, name, None)
        fields = {
            "vocab_size": text.vocab_size,
            "hidden_size": width,
            "target_hidden_size": text.hidden_size,
            "intermediate_size": inner[0] if isinstance(inner, list) else inner,  # Gemma 3n has one per layer
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(layer, "num_key_value_heads", None) or heads,
            "head_dim": head_dim,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "max_position_embeddings": length if length > 0 else 32768,  # XLNet, which has no limit, says -1
            "rope_parameters": rope or None,
            "num_target_layers": num_decoder_layers(target_config),
            "num_hidden_layers": num_hidden_layers,
            "block_size": block_size,
            "mask_token_id": mask_token_id,
            **ids,
        }
        if kwargs.get("target_layer_ids") is None:
            kwargs["target_layer_ids"] = fitting_target_layer_ids(fields["num_target_layers"], num_hidden_layers)
        config = cls(**{**fields, **kwargs})
        config.trained_length = 0  # not written; of drafters with a past of which nothing is known it is None
        return config

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """
        As upstream, from any published layout.

        Raises:
            `ValueError`: names the file and the problem.
            `OSError`: the file is missing or not JSON.
        """
        try:
            return super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        except OSError:
            raise
        except Exception as error:  # upstream's own validation raises many types
            raise ValueError(f"config.json of {pretrained_model_name_or_path}: {error}") from error

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As upstream, from any published layout; see `layouts.read`."""
        canonical = canonical_config({**config_dict, "model_type": config_dict.get("model_type", cls.model_type)})
        # A caller's own value of a field replaces the keys that would set it.
        nested = canonical["dflash_config"]
        nested = {key: value for key, value in nested.items() if _IMPLIED_FIELDS.get(key) not in kwargs}
        return super().from_dict({**canonical, "dflash_config": nested}, **kwargs)

    def to_dict(self) -> dict:
        output = super().to_dict()
        del output["source_layout"], output["interleaved_rotary"]
        return output
