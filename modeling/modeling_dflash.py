"""
The DFlash drafter (arXiv 2602.06036): a few Qwen3-style layers that fill a block of masked tokens in one pass.

Keys and values of every layer come from two places: the target's features of all tokens before the block (the context)
and the block itself. Queries come from the block alone. That is why keys outlive queries in `DFlashAttention`.
"""

import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .configuration_dflash import DFlashDraftConfig
from .generate_dflash import generate as custom_generate
from .generation_dflash import DFlashDecodingConfig, decode
from .hook_dflash import install_hook
from .target_dflash import check_pair


class DFlashRotaryEmbedding(Qwen3RotaryEmbedding):
    """Rotary tables whose frequencies stay in fp32: rounded to bf16 they are wrong by several positions at 10k tokens."""

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32 and self.inv_freq.device.type != "meta":
            fresh = type(self)(self.config)
            self.inv_freq = fresh.inv_freq.to(self.inv_freq.device)
            self.original_inv_freq = self.inv_freq.clone()
        return self


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` `[N, heads, T, head_dim]` by `cos`, `sin` `[N, T, head_dim]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return x * cos + rotate_half(x) * sin


def visible_in_block(num_keys: int, block_size: int, window: int | None, causal: bool, device) -> torch.Tensor | None:
    """
    Which of the last `num_keys` keys each slot of a block sees, when the block's own keys are the last `block_size` of
    them. `None` when every slot sees everything.

    Returns:
        `torch.BoolTensor` `[block_size, num_keys]` or `None`.
    """
    if not causal and (window is None or num_keys <= window):
        return None
    key = torch.arange(num_keys, device=device) - (num_keys - block_size)  # 0 is the anchor, negative is context
    slot = torch.arange(block_size, device=device)[:, None]
    visible = key <= slot if causal else torch.ones(block_size, num_keys, dtype=torch.bool, device=device)
    if window is not None:
        visible = visible & (slot - key < window)
    return visible  # [block, keys]


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float mask from a boolean one: eager attention would *add* a boolean mask as 0 and 1, silently."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


class DFlashAttention(nn.Module):
    """Attention of a draft layer: queries from the block, keys and values from context and block."""

    def __init__(self, config: DFlashDraftConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False  # read by SDPA; causality inside the block comes from the mask
        self.causal_in_block = config.layer_is_causal(layer_idx)
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def keys_values(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """Keys and values `[N, kv_heads, T, head_dim]` of `states` `[N, T, H]`."""
        shape = (*states.shape[:-1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(states).view(shape)).transpose(1, 2)
        values = self.v_proj(states).view(shape).transpose(1, 2)
        return apply_rotary(keys, cos, sin), values

    def forward(self, hidden_states, context, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        block_size = hidden_states.shape[1]
        cos, sin = position_embeddings  # [N, C + B, head_dim]
        states = hidden_states if context is None else torch.cat([context, hidden_states], dim=1)  # [N, C + B, H]

        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)  # [N, heads, B, head_dim]
        query = apply_rotary(query, cos[:, -block_size:], sin[:, -block_size:])
        key, value = self.keys_values(states, cos, sin)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)

        # A caller that keeps slots or trains hands over a 4-D mask; otherwise the block's keys are the last ones.
        if attention_mask is None or attention_mask.dim() == 2:
            attention_mask = self._mask_from_padding(attention_mask, key.shape[2], block_size, query)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights

    def _mask_from_padding(self, padding, num_keys, block_size, query):
        visible = visible_in_block(num_keys, block_size, self.sliding_window, self.causal_in_block, query.device)
        if padding is not None and not padding.all():
            real = padding[:, None, None, -num_keys:].bool()  # [N, 1, 1, keys]
            visible = real if visible is None else visible & real
        if visible is None:
            return None
        return additive(visible.expand(query.shape[0], 1, block_size, num_keys), query.dtype)


class DFlashDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DFlashDraftConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, context, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            context,
            position_embeddings,
            attention_mask,
            past_key_values,
            **kwargs,
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DFlashDraftModel(PreTrainedModel):
    """
    A block-diffusion drafter. It has neither embedding nor head: both are the target's, shared and frozen.

    `target.generate(**inputs, assistant_model=draft)` decodes with it; the output is the target's own.
    """

    config: DFlashDraftConfig
    config_class = DFlashDraftConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: DFlashDraftConfig):
        super().__init__(config)
        num_features = len(config.target_layer_ids)
        self.fc = nn.Linear(num_features * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DFlashRotaryEmbedding(config)
        self.decoding_config = DFlashDecodingConfig()
        install_hook()
        self.post_init()

    # The protocol attribute that the hook in `generate` looks for.
    def dflash_decode(self, target, *args, **kwargs):
        """The decoding loop that `target.generate(assistant_model=self)` runs; see `generation_dflash`."""
        return decode(target, self, *args, **kwargs)

    def dflash_validate(self, target, generation_mode, generation_config, generation_mode_kwargs):
        """What `generate` asks before it starts: does this drafter fit the target and the way it is called?"""
        check_pair(target, self.config)
        if generation_mode != GenerationMode.ASSISTED_GENERATION:
            raise ValueError(
                f"assistant_model is a DFlash drafter, which decodes greedily or by sampling, but the arguments of "
                f"`generate` ask for {generation_mode.value}: drop `assistant_model`, or `num_beams` and its like."
            )

    def project_context(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """`[N, C, L * H_target]` features of the target -> `[N, C, H]`, what every layer injects as keys and values."""
        width = self.fc.in_features
        if context_hidden_states.shape[-1] != width:
            raise ValueError(
                f"context_hidden_states has width {context_hidden_states.shape[-1]}, but this drafter reads "
                f"{len(self.config.target_layer_ids)} features of width {self.config.target_hidden_size} ({width} in "
                "all): concatenate the outputs of the target's layers `config.target_layer_ids`."
            )
        return self.hidden_norm(self.fc(context_hidden_states))

    def extend_context(self, context_hidden_states, position_ids, past_key_values):
        """
        Write the keys and values of context tokens into a cache, without a block: the prompt's features.

        Args:
            context_hidden_states (`torch.Tensor`): `[N, C, L * H_target]`.
            position_ids (`torch.LongTensor`): `[N, C]`.
            past_key_values (`Cache`): Updated in place.
        """
        context = self.project_context(context_hidden_states)
        cos, sin = self.rotary_emb(context, position_ids)
        for layer in self.layers:
            past_key_values.update(*layer.self_attn.keys_values(context, cos, sin), layer.self_attn.layer_idx)

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values=None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """
        One pass over one block (decoding) or several (training).

        Args:
            noise_embeds (`torch.Tensor`): `[N, B, H]`, the target's raw embeddings of `[anchor, MASK, ..., MASK]`.
            context_hidden_states (`torch.Tensor`): `[N, C, L * H_target]`, features of context tokens that are not in
                the cache yet; `None` when all are.
            attention_mask: `None` or `[N, keys]` padding when the block's keys are the last ones; else an additive
                mask `[N, 1, B, keys]`, or one for each layer type in a dictionary.
            position_ids (`torch.LongTensor`): `[N, C + B]`. Default: they continue the cache.
            past_key_values (`Cache`): Receives the keys of context *and* block; the caller drops the block's.

        Returns:
            `BaseModelOutputWithPast`: `last_hidden_state` `[N, B, H]` after the final norm, to be fed to the target's
            head.

        Raises:
            `ValueError`: neither context nor cache, or features of another width.
        """
        past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
        if context_hidden_states is None and past_length == 0:
            raise ValueError(
                "context_hidden_states is None and past_key_values is empty: a drafter reads the target's features; "
                "pass the outputs of the target's layers `config.target_layer_ids` for the tokens before the block."
            )
        context = None if context_hidden_states is None else self.project_context(context_hidden_states)
        if position_ids is None:
            new = noise_embeds.shape[1] + (0 if context is None else context.shape[1])
            position_ids = torch.arange(past_length, past_length + new, device=noise_embeds.device)[None]
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)

        hidden_states = noise_embeds
        for layer_type, layer in zip(self.config.layer_types, self.layers, strict=True):
            mask = attention_mask[layer_type] if isinstance(attention_mask, dict) else attention_mask
            hidden_states = layer(hidden_states, context, position_embeddings, mask, past_key_values, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """
        As upstream, but a tensor that is missing, unexpected or of another shape is an error: a drafter with a random
        layer still runs, and nobody notices but by a low acceptance length.

        Raises:
            `ValueError`: names the tensors.
        """
        kwargs["ignore_mismatched_sizes"] = True  # reported below, with the names
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[problem]:
                names = ", ".join(sorted(str(key) for key in info[problem])[:5])
                raise ValueError(
                    f"{pretrained_model_name_or_path}: {problem.replace('_', ' ')}: {names} "
                    f"({len(info[problem])} in all). The weights do not belong to this config.json; load a drafter "
                    "whose tensors carry the published names and the shapes that its config.json gives."
                )
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As upstream, and the code beside the weights, so that `trust_remote_code=True` works without the package."""
        self.config.auto_map = {
            "AutoConfig": "configuration_dflash.DFlashDraftConfig",
            "AutoModel": "modeling_dflash.DFlashDraftModel",
        }
        sources = {source.name: source for source in Path(__file__).parent.glob("*_dflash.py")}
        sources["custom_generate/generate.py"] = Path(custom_generate.__code__.co_filename)
        for name, source in sources.items():
            copy = Path(save_directory) / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.resolve() != copy.resolve():
                shutil.copyfile(source, copy)
        super().save_pretrained(save_directory, *args, **kwargs)

    def _get_files_timestamps(self, working_dir):
        """Upstream's list of what `push_to_hub=True` need not upload; the code was copied before it is made."""
        stamps = super()._get_files_timestamps(working_dir)
        return {name: t for name, t in stamps.items() if name != "custom_generate" and not name.endswith("_dflash.py")}
