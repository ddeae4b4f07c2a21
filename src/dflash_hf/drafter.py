"""The drafter that people use: loaded from any published layout, with everything that makes decoding fast."""

import copy

import torch
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.integrations.peft import maybe_load_adapters

from dflash_hf.decoding.generate_hook import install_hook
from dflash_hf.decoding.loop import decode
from dflash_hf.decoding.settings import DFlashDecodingConfig
from dflash_hf.layouts.checkpoint import Checkpoint, read_checkpoint
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.modeling import modeling_dflash


_HUB_ARGUMENTS = (
    "subfolder",
    "revision",
    "token",
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "user_agent",
    "repo_type",
    "_commit_hash",
)


class DFlashDraftModel(modeling_dflash.DFlashDraftModel):
    """
    A block-diffusion drafter: the model beside the weights, loaded from any published layout, and decoding as fast as
    this package can. It is saved in one layout, with the code that runs it without the package.

    `target.generate(**inputs, assistant_model=draft)` decodes with it; the output is the target's own.
    """

    config: DFlashDraftConfig
    config_class = DFlashDraftConfig
    # Checked by name before loading; no second report needed.
    _keys_to_ignore_on_load_unexpected = [
        r"rotary_emb\.",
        r"^embed_tokens\.",
        r"^verifier_",
        r"^lm_head\.",
        "d2t",
        "t2d",
        r"\.(input|output)_(global_)?(scale|zero_point)$",  # of activations, beside quantised weights
    ]

    def __init__(self, config: DFlashDraftConfig):
        super().__init__(config)
        self.decoding_config = DFlashDecodingConfig()
        install_hook()

    def __getattr__(self, name: str):
        if name == "generate":  # no method: upstream takes a class with one for a language model
            raise AttributeError(
                "A drafter does not generate; swap the models: `target.generate(..., assistant_model=draft)`."
            )
        return super().__getattr__(name)

    @torch.no_grad()
    def initialize_weights(self):
        """
        As upstream, and then the head's modules. `_init_weights` is not called for all of them: upstream leaves out a
        module of custom code whose parameters are all those of its submodules.
        """
        with torch.device("meta"):  # their names alone
            names = list(self.config.token_head_class.build_modules(self.config))
        new_modules = []
        for name in names:
            for module in self.get_submodule(name).modules():
                if not getattr(module, "_is_hf_initialized", False):
                    new_modules.append(module)
        super().initialize_weights()
        for module in new_modules:
            self.config.token_head_class.init_weights(module, self.config)

    @torch.no_grad()
    def _init_weights(self, module):
        """A fresh drafter's weights: added parts change nothing at first."""
        super()._init_weights(module)
        if isinstance(module, modeling_dflash.BlockConvolution):  # the identity
            identity = torch.zeros_like(module.base_kernel)
            identity[:, 0] = 1.0
            init.copy_(module.base_kernel, identity)
            init.zeros_(module.kernel_projection.weight)
        elif module is self and self.config.own_mask_embedding:
            init.normal_(module.mask_embedding, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, modeling_dflash.DFlashAttention) and self.config.attention_sink_bias:
            init.zeros_(module.attention_sink_bias)
        elif self.config.has_own_lm_head and module is self.lm_head:  # marks that its tokens were never chosen
            init.zeros_(module.weight)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        *model_args,
        config=None,
        key_mapping: dict[str, str] | None = None,
        output_loading_info: bool = False,
        **kwargs,
    ):
        r"""
        As upstream, from any published layout, and with an error for a tensor that is missing, unexpected or of the
        wrong shape: a drafter with a random layer still runs, and only a low acceptance length shows it. An adapter's
        folder loads the drafter that it was trained on, with the adapter.

        Args:
            key_mapping (`dict[str, str]`, *optional*): Regular expressions of tensor names and their replacements,
                applied in order as by `re.sub` (`\1`, `\2`, ...), before the names of the file's layout are replaced.

        Raises:
            `ValueError`: names the file and the key or tensor.
            `OSError`: a file is missing; only safetensors are read.
        """
        name = pretrained_model_name_or_path
        options = {"config": config, "key_mapping": key_mapping, **kwargs}
        hub = {key: kwargs[key] for key in _HUB_ARGUMENTS if kwargs.get(key) is not None}
        adapter, base, _ = maybe_load_adapters(name, hub)
        if base == name:
            model, info = cls._load(name, model_args, hub, **options)
        else:
            model, info = cls._load_base_of_adapter(base, model_args, **options)
            model.load_adapter(adapter, **hub)
        return (model, info) if output_loading_info else model

    @classmethod
    def _load_base_of_adapter(cls, base: str, model_args, revision=None, subfolder=None, **options):
        """The drafter that an adapter was trained on, and what was loaded; revision and folder are the adapter's."""
        return cls.from_pretrained(base, *model_args, output_loading_info=True, **options)

    @classmethod
    def _load(cls, name, model_args, hub: dict, config, key_mapping, **kwargs):
        """A drafter without adapters, and what was loaded."""
        # 1. The configuration, with the fields that the caller changes.
        config, kwargs = cls._read_config(name, config, hub, kwargs)
        # 2. What the files hold, before any weight is read.
        files = {"variant": kwargs.get("variant"), "state_dict": kwargs.get("state_dict")}
        checkpoint = read_checkpoint(name, cls, config, key_mapping, hub, **files)
        kwargs.pop("force_download", None)  # has been done
        # 3. The weights. Nothing may be left random.
        model, info = cls._load_weights(name, model_args, config, checkpoint, **kwargs)
        checkpoint.check_loaded(model, info)
        # 4. The parts that other files hold, or that other projects store in another order.
        if checkpoint.mask_embedding is not None:
            model.mask_embedding.data.copy_(checkpoint.mask_embedding)
        if config.interleaved_rotary:
            model._halve_rotary_pairs()
        model._forget_renamings(checkpoint)
        model.check_draft_vocabulary()
        return model, info

    @classmethod
    def _read_config(cls, name, config, hub: dict, kwargs: dict):
        """A configuration of its own for the drafter, and the arguments that are not fields of it."""
        if isinstance(config, PreTrainedConfig):
            return copy.deepcopy(config), kwargs
        fields = cls.config_class.field_names() - {"dtype"}
        changes = {key: value for key, value in kwargs.items() if key in fields}
        config = cls.config_class.from_pretrained(name if config is None else config, **hub, **changes)
        return config, {key: value for key, value in kwargs.items() if key not in fields}

    @classmethod
    def _load_weights(cls, name, model_args, config, checkpoint: Checkpoint, **kwargs):
        """The drafter with the weights of its files, and what was loaded, by the loader of transformers."""
        kwargs |= {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
        # The parent class stands beside published weights and has a `from_pretrained` for them, which accepts fewer
        # layouts and gives errors without names: it is skipped.
        load = super(modeling_dflash.DFlashDraftModel, cls).from_pretrained
        try:
            return load(name, *model_args, config=config, key_mapping=checkpoint.renamings, **kwargs)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        except ImportError as error:
            if not checkpoint.is_quantized:
                raise
            raise ImportError(f"{name} is quantised, and its library is missing: {error}") from error

    def _forget_renamings(self, checkpoint: Checkpoint) -> None:
        """Save published names: upstream would restore the file's names, and the bits of quantised weights."""
        conversions = getattr(self, "_weight_conversions", None) or []
        if checkpoint.is_quantized and getattr(self.config, "quantization_config", None) is None:
            conversions = []  # its weights are plain ones now
        renamings = set(checkpoint.renamings)
        self._weight_conversions = [
            conversion for conversion in conversions if not renamings.intersection(conversion.source_patterns)
        ]

    @torch.no_grad()
    def _halve_rotary_pairs(self) -> None:
        """Convert interleaved rotary pairs (`rope_is_neox_style: false`) to halves: even channels come first."""
        size = self.config.head_dim
        rotated = int(size * self.config.rope_parameters.get("partial_rotary_factor", 1.0))
        order = torch.cat([torch.arange(0, rotated, 2), torch.arange(1, rotated, 2), torch.arange(rotated, size)])
        for layer in self.layers:
            attention = layer.self_attn
            projections = (*attention.q_proj.parameters(), *attention.k_proj.parameters())
            for rows in (*projections, attention.q_norm.weight, attention.k_norm.weight):
                rows.copy_(rows.unflatten(0, (-1, size))[:, order.to(rows.device)].flatten(0, 1))
        self.config.interleaved_rotary = False

    def check_draft_vocabulary(self) -> None:
        """
        Check the tokens of a reduced vocabulary.

        Raises:
            `ValueError`: `d2t` maps outside the target's vocabulary, or twice to the same token, which would give a
                tree two equal branches.
        """
        if self.config.has_own_lm_head and self.d2t.device.type != "meta":
            ids = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
            unique = ids.unique()  # sorted
            first = int(unique[0])
            last = int(unique[-1])
            size = self.config.vocab_size
            if first < 0 or last >= size or len(unique) < len(ids):
                raise ValueError(
                    f"d2t maps {len(ids)} draft tokens to {len(unique)} ids {first}..{last} of a "
                    f"target with vocab_size={size}. It holds differences: draft id i is the target's id i + d2t[i]."
                )

    def dflash_decode(self, target, *args, **kwargs):
        """The decoding loop that `target.generate(assistant_model=self)` runs; see `dflash_hf.decoding.loop`."""
        return decode(target, self, *args, **kwargs)

    def extend_context(self, context: torch.Tensor, position_ids: torch.LongTensor, cache) -> None:
        """
        Write the keys and values of context tokens, such as the prompt's, into a cache, without a block.

        Args:
            context (`torch.Tensor`): `[N, C, H]`, from `project_context`.
            position_ids (`torch.LongTensor`): `[N, C]`.
            cache (`Cache`): Updated in place.
        """
        rotary = self.context_rotary_emb or self.rotary_emb
        cos, sin = rotary(context, position_ids)
        for layer in self.layers:
            attention = layer.self_attn
            cache.update(*attention.keys_values(context, cos, sin), attention.layer_idx)

    def check_decoding_config(self) -> None:
        """
        Raises:
            `ValueError`: `decoding_config` is of another class, or has an invalid value.
        """
        if not isinstance(self.decoding_config, DFlashDecodingConfig):
            raise ValueError(f"decoding_config={self.decoding_config!r} must be a DFlashDecodingConfig.")
        self.decoding_config.check(self.config.max_block_tokens)

    def dflash_validate(self, target, *args):
        """Called by `generate` before it starts: check that this drafter fits the target and the arguments."""
        super().dflash_validate(target, *args)
        rows = target.get_input_embeddings().weight.shape[0]
        if self.config.has_own_lm_head and rows < self.config.vocab_size:
            last = int(self.target_ids(torch.arange(self.config.draft_vocab_size, device=self.device)).max())
            if last >= rows:
                raise ValueError(
                    f"The drafter drafts tokens up to {last} (draft_vocab_size={self.config.draft_vocab_size}), but "
                    f"target {type(target).__name__} has {rows} rows: resize its embedding to {last + 1} or more."
                )
