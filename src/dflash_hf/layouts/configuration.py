"""The package's `DFlashDraftConfig`: reads every layout, and is checked when it is created."""

import copy

import torch

from dflash_hf.layouts.all_layouts import PUBLISHED
from dflash_hf.layouts.check import check_derived, check_given, check_rope, check_rotary_table
from dflash_hf.layouts.errors import require
from dflash_hf.layouts.precedence import first_not_none, settled_causality, without_keys_of_arguments
from dflash_hf.layouts.read import canonical_config
from dflash_hf.layouts.rotary import with_rotary_width
from dflash_hf.layouts.target_layers import default_target_layer_ids, fitting_target_layer_ids
from dflash_hf.modeling import configuration_dflash
from dflash_hf.modeling.target_dflash import num_decoder_layers


# Fields for which a file may write null instead of the default.
_NULL_IS_DEFAULT = (
    "sample_from_anchor",
    "output_multiplier",
    "input_embedding_scale",
    "attention_value_scale",
    "attention_dropout",
)
# Types of rotary embedding that a drafter takes over from its target.
_COPIED_ROPE_TYPES = ("yarn", "llama3", "linear")


class DFlashDraftConfig(configuration_dflash.DFlashDraftConfig):
    r"""
    Configuration of a [`DFlashDraftModel`]. It has the fields of its base class, the configuration beside a drafter's
    weights, reads every layout (see `layouts.read`), and is checked when it is created.

    Args:
        target_layer_ids (`list[int]`): As in the base class. Default: the paper's rule for `num_target_layers` and
            `num_hidden_layers`.
        source_layout (`str`): The layout of the file that was read, by which tensors are renamed; not saved.
        interleaved_rotary (`bool`): Whether the rotary pairs in the file are interleaved; on loading, the rows of the
            weights are permuted. Not saved.

    Raises:
        `ValueError`: names key, value and remedy.
    """

    source_layout: str = PUBLISHED.name
    interleaved_rotary: bool = False

    def __post_init__(self, **arguments):
        """Completes and checks the fields, which the constructor has set; `arguments` as in the base class."""
        # 1. Values and keys that other projects write instead of a field.
        self.set_part_fields(arguments)
        self._read_other_values()
        use_swa = self._read_other_nested_keys()
        if self.dtype is None:
            self.dtype = arguments.get("torch_dtype")
        if isinstance(self.dtype, str | torch.dtype):
            self.dtype = str(self.dtype).removeprefix("torch.")
        # 2. The fields as they were given.
        check_given(self, arguments.get("rope_scaling"))
        # 3. Fields that follow from others.
        self._derive_layer_types(use_swa, arguments.get("max_window_layers") or 0)
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers, self.num_hidden_layers)
        self.derive_fields()
        check_derived(self)
        self.target_layer_ids = list(self.target_layer_ids)
        # 4. Upstream's fields, with `rope_parameters` in transformers' form. The base class finds nothing left to set.
        super().__post_init__(**arguments)
        check_rope(self)
        # 5. The rotated width of a head in both spellings.
        self.rope_parameters = with_rotary_width(self.rope_parameters, self.head_dim)
        check_rotary_table(self)

    def _read_other_values(self) -> None:
        """Set the fields for which files write null instead of the default, or a value instead of null."""
        for field in _NULL_IS_DEFAULT:
            if getattr(self, field) is None:
                setattr(self, field, getattr(type(self), field))
        if self.final_logit_softcapping == 0:  # no cap
            self.final_logit_softcapping = None
        if self.draft_vocab_size == self.vocab_size:  # not reduced
            self.draft_vocab_size = None

    def _read_other_nested_keys(self) -> bool | None:
        """
        Set `is_causal` from the names that other projects nest. Of these, only JetSpec's `causal_head` is kept, for
        re-saving. Returns `use_swa`, which concerns `layer_types`.
        """
        nested = self.other_nested_keys
        causal = nested.pop("causal", None)
        use_swa = nested.pop("use_swa", None)
        self.is_causal = settled_causality(self.is_causal, causal, nested.get("causal_head"))
        self.dflash_config = nested
        return use_swa

    def _derive_layer_types(self, use_swa: bool | None, first_sliding_layer: int) -> None:
        """
        Set `layer_types` where a file has older keys instead.

        Args:
            use_swa (`bool`, *optional*): From `dflash_config`: true gives all layers the window if none is sliding.
            first_sliding_layer (`int`): Qwen3's `max_window_layers`; ignored unless `use_sliding_window` and a window
                are set, and `use_swa` is not.
        """
        if self.layer_types is None:
            require(isinstance(first_sliding_layer, int), "a number of layers", max_window_layers=first_sliding_layer)
            has_sliding_layers = use_swa is None and self.use_sliding_window and self.sliding_window
            self.layer_types = [
                "sliding_attention" if has_sliding_layers and i >= first_sliding_layer else "full_attention"
                for i in range(self.num_hidden_layers)
            ]
        if use_swa and isinstance(self.layer_types, list | tuple) and "sliding_attention" not in self.layer_types:
            # The layers were full ones, and so stay bidirectional in the block unless the file says otherwise.
            self.layer_types = ["sliding_attention"] * self.num_hidden_layers
            self.is_causal = bool(self.is_causal)

    @classmethod
    def for_target(cls, target_config, mask_token_id: int, num_hidden_layers: int = 5, block_size: int = 16, **kwargs):
        """
        The configuration of a new drafter for a target: the target's width, vocabulary, rotary embedding and maximum
        length, and Qwen3-style layers.

        Args:
            target_config (`PreTrainedConfig`): Configuration of the target; of a multimodal target, its text part.
            mask_token_id (`int`): An id inside the target's embedding that its text never uses.
            num_hidden_layers (`int`): Draft layers.
            block_size (`int`): Tokens of a block, anchor included.
            kwargs: Any other field of the configuration. By default, `target_layer_ids` follow the paper's rule for
                one target layer per draft layer; for a shallow target they are fewer.

        Raises:
            `ValueError`: the target's embedding and head, both shared by a drafter, have different widths.
        """
        text = target_config.get_text_config()
        width = _shared_width(text)
        # Layers of several shapes (Gemma 4): the drafter uses the shape of the first.
        layer = (getattr(text, "per_layer_config", None) or [text])[0]
        heads = getattr(layer, "num_attention_heads", None) or max(text.hidden_size // 128, 1)
        inner_width = getattr(layer, "intermediate_size", None) or 3 * width
        max_length = getattr(text, "max_position_embeddings", 0)
        num_target_layers = num_decoder_layers(target_config)
        fields = {
            "vocab_size": text.vocab_size,
            "hidden_size": width,
            "target_hidden_size": text.hidden_size,
            # Gemma 3n has one for each layer.
            "intermediate_size": inner_width[0] if isinstance(inner_width, list) else inner_width,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(layer, "num_key_value_heads", None) or heads,
            "head_dim": getattr(layer, "head_dim", None) or text.hidden_size // heads,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "max_position_embeddings": max_length if max_length > 0 else 32768,  # XLNet, which has no limit, says -1
            "rope_parameters": _rope_of_target(text, cls.default_theta),
            "num_target_layers": num_target_layers,
            "num_hidden_layers": num_hidden_layers,
            "block_size": block_size,
            "mask_token_id": mask_token_id,
            "trained_length": 0,  # untrained; `None` would mean that the length is unknown
        }
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            # Multimodal configurations may have it beside the text configuration.
            fields[name] = first_not_none(getattr(text, name, None), getattr(target_config, name, None))
        if kwargs.get("target_layer_ids") is None:
            kwargs["target_layer_ids"] = fitting_target_layer_ids(num_target_layers, num_hidden_layers)
        return cls(**{**fields, **kwargs})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """
        Reads a file in any layout, with errors that name it.

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
        """Reads the content of a file in any layout; see `layouts.read`."""
        canonical = canonical_config({**config_dict, "model_type": config_dict.get("model_type", cls.model_type)})
        canonical["dflash_config"] = without_keys_of_arguments(canonical["dflash_config"], kwargs)
        return super().from_dict(canonical, **kwargs)

    def to_dict(self) -> dict:
        output = super().to_dict()
        del output["source_layout"], output["interleaved_rotary"]
        return output


def _shared_width(text) -> int:
    """
    The width of a target's embedding and LM head, both of which a drafter uses.

    Raises:
        `ValueError`: they have different widths.
    """
    width = getattr(text, "embedding_size", None) or getattr(text, "word_embed_proj_dim", None) or text.hidden_size
    input_width = getattr(text, "input_embedding_size", width)
    output_width = getattr(text, "output_embedding_size", width)
    if input_width != output_width:
        raise ValueError(
            f"{type(text).__name__} has input_embedding_size={input_width} and output_embedding_size={output_width}, "
            "but a drafter shares the target's embedding and head, in one width: this target cannot have a drafter."
        )
    return width


def _rope_of_target(text, default_theta: float) -> dict | None:
    """The rotary embedding of a new drafter: the target's, if it rotates whole heads and has a type that is copied."""
    rope = copy.deepcopy(getattr(text, "rope_parameters", None)) or {}
    # A table for each layer type (Gemma): the drafter uses that of full-attention layers, if these are rotated at all.
    tables = [table for table in rope.values() if isinstance(table, dict)]
    rope = rope.get("full_attention") or (tables[0] if tables else rope)
    if rope.get("partial_rotary_factor") is not None or rope.get("rope_type") not in (None, "default"):
        if rope.get("rope_type") not in _COPIED_ROPE_TYPES:
            rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", default_theta)}
        rope.pop("partial_rotary_factor", None)
    return rope or None
