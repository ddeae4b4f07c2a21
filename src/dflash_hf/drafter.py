"""
The drafter that users import, `dflash_hf.DFlashDraftModel`.

It is a subclass of the published model of the same name, whose code stands beside the weights on the Hub
(`modeling/`). It also loads every published layout, initialises fresh weights, and decodes with the engine of
`decoding/`. To tell which of the two a drafter is: only this one has a `decoding_config`.
"""

import torch
from transformers import initialization as init

from dflash_hf.decoding.generate_hook import install_hook
from dflash_hf.decoding.loop import decode
from dflash_hf.decoding.settings import DFlashDecodingConfig
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.layouts.loading import load_drafter
from dflash_hf.modeling import modeling_dflash


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
        if name == "generate":  # not a method: upstream takes a class that has one for a language model
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
        with torch.device("meta"):  # only their names are needed
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
        """Initialise fresh weights; added parts start as the identity, so that they change nothing at first."""
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
        elif self.config.has_own_lm_head and module is self.lm_head:  # zeros: its tokens have not been chosen yet
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
        model, info = load_drafter(cls, name, model_args, config, key_mapping, **kwargs)
        return (model, info) if output_loading_info else model

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
            cache.update(*attention.project_keys_values(context, cos, sin), attention.layer_idx)

    def check_decoding_config(self) -> None:
        """
        Raises:
            `ValueError`: `decoding_config` is of another class, or has an invalid value.
        """
        if not isinstance(self.decoding_config, DFlashDecodingConfig):
            raise ValueError(f"decoding_config={self.decoding_config!r} must be a DFlashDecodingConfig.")
        self.decoding_config.check(self.config.max_block_tokens)

    def dflash_validate(self, target, generation_mode, generation_config, generation_mode_kwargs):
        """As the published model, and check that the target has all tokens of a reduced vocabulary."""
        super().dflash_validate(target, generation_mode, generation_config, generation_mode_kwargs)
        embedding_rows = target.get_input_embeddings().weight.shape[0]
        if self.config.has_own_lm_head and embedding_rows < self.config.vocab_size:
            last = int(self.target_ids(torch.arange(self.config.draft_vocab_size, device=self.device)).max())
            if last >= embedding_rows:
                raise ValueError(
                    f"The drafter drafts tokens up to {last} (draft_vocab_size={self.config.draft_vocab_size}), but "
                    f"target {type(target).__name__} has {embedding_rows} rows: resize its embedding to {last + 1} or "
                    "more."
                )
