"""
The DFlash drafter (arXiv 2602.06036): a few Qwen3-style layers that fill a block of masked tokens in one pass.

Keys and values of every layer come from two sources: the target's features of all tokens before the block (the
context) and the block itself. Queries come from the block only. That is why keys outnumber queries in
`DFlashAttention`.

The files beside this one: `configuration_dflash` defines the terms of a block, `head_dflash` chooses its tokens,
`candidates_dflash` drafts in transformers' own loop, `hook_dflash` and `custom_generate_dflash` connect it to
`generate`, and `target_dflash` says what a target must have.

These files are saved beside a drafter's weights and run without the package `dflash-hf`. With the package, `AutoModel`
returns its subclasses instead, which have the same names:

    published, in this folder                 with the package
    configuration_dflash.DFlashDraftConfig <- layouts.configuration.DFlashDraftConfig   reads and checks every layout
    modeling_dflash.DFlashDraftModel       <- drafter.DFlashDraftModel                  loads them; decodes by itself

Only the package's drafter has a `decoding_config`. Both use the token heads of this folder, `TokenHead` and its
subclasses, and both save the same files.

Shapes: `N` sequences (`R` rows in decoding), `B` slots of a block, `Q` queries of a forward (`B` in decoding, `A * B`
for `A` blocks of a sequence in training), `C` tokens of the context that are not in the cache, `L` layers of the
target whose outputs are read, `H` hidden size, `V` vocabulary size.

Words: the target's *features* of a token are the outputs of some of its layers, side by side; `context_hidden_states`
holds those of the tokens before a block. The *context* is what `project_context` makes of them.

Precision: weights and activations have the drafter's dtype, draft logits that of the LM head. Three things are
computed in fp32 whatever the dtype: cosines and sines of the rotary embedding, which are then cast; RMS norms,
internally; and the sum of draft logits and a token head's correction.
"""

import copy
import shutil
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, eager_attention_forward, rotate_half

from .candidates_dflash import CACHE_NAME, generate_with_candidates
from .configuration_dflash import DFlashDraftConfig
from .custom_generate_dflash import generate as custom_generate
from .hook_dflash import check_mode, wrap_generation
from .target_dflash import check_pair


# File of a drafter's own mask embedding, next to its weights: inference engines read it from nowhere else.
MASK_EMBEDDING = "mask_embedding.pt"


def execution_device(module: nn.Module) -> torch.device:
    """The device on which a module's forward runs, even if accelerate has offloaded its weight."""
    device = module.weight.device
    if device.type != "meta":
        return device
    if not hasattr(module, "_hf_hook"):
        raise ValueError(f"A {type(module).__name__} is on the meta device, without values: load the model first.")
    return torch.device(module._hf_hook.execution_device)


def raw_embedding(model: PreTrainedModel, input_ids: torch.LongTensor) -> torch.Tensor:
    """`[..., H]` rows of a model's embedding table, without the scale or norm that its embedding module may add."""
    module = model.get_input_embeddings()
    if module.weight.device.type != "meta":
        return nn.functional.embedding(input_ids, module.weight)
    module._hf_hook.pre_forward(module)  # offloaded by accelerate: fetch the weights, as for a forward
    try:
        return nn.functional.embedding(input_ids, module.weight)
    finally:
        module._hf_hook.post_forward(module, None)


def input_dtype(layer: nn.Module, states: torch.Tensor) -> torch.dtype:
    """
    The dtype in which a linear layer takes `states`: that of its weight. A quantised weight may hold codes, integers
    or eight-bit floats; such a layer casts its input itself, and takes it as it is.
    """
    dtype = layer.weight.dtype
    holds_codes = not dtype.is_floating_point or dtype.itemsize == 1
    return states.dtype if holds_codes else dtype


def additive_mask(visible: torch.BoolTensor, dtype: torch.dtype) -> torch.Tensor:
    """An additive mask from a boolean one, true = visible: eager attention would add the booleans as 0 and 1."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


class DFlashRotaryEmbedding(GlmRotaryEmbedding):
    """
    Cosines and sines for the rotated channels of a head. GLM's class supports `partial_rotary_factor`; Qwen3's always
    rotates the whole head. The frequencies stay in fp32: rounded to bf16, angles at 10k tokens are wrong by several
    positions.
    """

    def _apply(self, fn, recurse=True):
        def move_without_cast(buffer):
            moved = fn(buffer)
            return moved if moved.dtype == buffer.dtype else buffer.to(moved.device)

        return super()._apply(move_without_cast, recurse)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first `d` channels of `x` `[N, heads, T, head_dim]` by `cos`, `sin` `[N, T, d]`."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    dim = cos.shape[-1]
    if dim == x.shape[-1]:
        return x * cos + rotate_half(x) * sin
    rotated = x[..., :dim]
    rest = x[..., dim:]
    return torch.cat([rotated * cos + rotate_half(rotated) * sin, rest], dim=-1)


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
        self.is_causal = False  # read by SDPA; the mask makes a block causal
        self.causal_in_block = config.layer_is_causal(layer_idx)
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.v_head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.v_head_dim, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.v_head_dim = config.v_head_dim
        self.value_scale = config.attention_value_scale
        if config.attention_sink_bias:
            self.attention_sink_bias = nn.Parameter(torch.empty(config.num_attention_heads))

    def project_keys_values(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """Keys `[N, kv_heads, T, head_dim]` and values `[N, kv_heads, T, v_head_dim]` of `states` `[N, T, H]`."""
        keys = self.k_norm(self.k_proj(states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        values = self.v_proj(states).unflatten(-1, (-1, self.v_head_dim)).transpose(1, 2)
        if self.value_scale != 1.0:
            values = values * self.value_scale
        return apply_rotary(keys, cos, sin), values

    def forward(
        self,
        hidden_states,
        context,
        position_embeddings,
        attention_mask,
        past_key_values=None,
        attn_implementation=None,
        **kwargs,
    ):
        """
        Args:
            hidden_states (`torch.Tensor`): `[N, Q, H]`, of the block, or of several blocks side by side.
            context (`torch.Tensor`, *optional*): `[N, C, H]`, from `project_context`.
            position_embeddings (`tuple[torch.Tensor]`): Cosines and sines of context and block, `[N, C + Q, d]` each.
            attention_mask: As in [`DFlashDraftModel.forward`], for this layer.
            attn_implementation (`str`, *optional*): Attention for this forward in place of the configuration's.
        """
        num_queries = hidden_states.shape[1]
        cos, sin = position_embeddings
        states = hidden_states if context is None else torch.cat([context, hidden_states], dim=1)  # [N, C + Q, H]

        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)  # [N, heads, Q, head_dim]
        query = apply_rotary(query, cos[:, -num_queries:], sin[:, -num_queries:])
        key, value = self.project_keys_values(states, cos, sin)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)

        attention_mask, implementation = self._resolve_mask(attention_mask, key, query)
        implementation = attn_implementation or implementation
        if self.config.attention_sink_bias:
            if isinstance(attention_mask, BlockMask):
                raise ValueError(
                    "attention_mask is a BlockMask, which has no scores to which attention_sink_bias could be added: "
                    "pass an additive mask."
                )
            key, value, attention_mask = self._with_sink(key, value, attention_mask, query)
        if isinstance(attention_mask, BlockMask):  # flex attention takes one dtype; norms and rotation may change it
            query = query.to(value.dtype)
            key = key.to(value.dtype)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
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

    def _resolve_mask(self, attention_mask, key, query):
        """
        The mask that attention gets, and the attention implementation. The forms of a mask:

        - `None` or padding `[N, keys]`, as in transformers' own loop: the default mask, for a block whose keys are the
          last ones;
        - an additive mask `[N, 1, Q, keys]`, as in decoding with the package: taken as it is;
        - a `BlockMask`, as in training with the package: only flex attention reads it.
        """
        if attention_mask is None or (torch.is_tensor(attention_mask) and attention_mask.dim() == 2):
            attention_mask = self._default_mask(attention_mask, key.shape[2], query)
        if isinstance(attention_mask, BlockMask):
            return attention_mask, "flex_attention"
        return attention_mask, self.config._attn_implementation

    def _with_sink(self, key, value, attention_mask, query):
        """
        A sink is an extra key whose score is a learned constant per attention head and whose value is zero: it takes
        weight from the others and adds nothing. As a mask column it works with every attention function that takes an
        additive mask.
        """
        batch, heads, num_queries, _ = query.shape
        num_keys = key.shape[2]
        mask = query.new_zeros(()) if attention_mask is None else attention_mask[..., :num_keys]
        mask = mask.to(query.dtype).expand(batch, heads, num_queries, num_keys)
        sink = self.attention_sink_bias.to(query.dtype)[None, :, None, None].expand(batch, heads, num_queries, 1)
        one_more_key = (0, 0, 0, 1)
        key = nn.functional.pad(key, one_more_key)  # a key of zeros scores 0 before the mask is added
        value = nn.functional.pad(value, one_more_key)
        return key, value, torch.cat([mask, sink], dim=-1)  # the mask: [N, heads, Q, keys + 1]

    def _default_mask(self, padding, num_keys, query):
        """
        The additive mask `[N, 1, B, keys]` of a block whose keys are the last of `num_keys`; `None` if every slot sees
        all keys. `padding`: `[N, keys]`, 0 for padding, or `None`; `query`: `[N, heads, B, head_dim]`.
        """
        block_size = query.shape[2]
        is_padded = padding is not None and not padding.all()
        window = self.sliding_window
        if not (is_padded or self.causal_in_block or (window is not None and num_keys > window)):
            return None
        key_index = torch.arange(num_keys, device=query.device)
        query_index = torch.arange(num_keys - block_size, num_keys, device=query.device)[:, None]  # [B, 1]
        last_visible = query_index if self.causal_in_block else num_keys - 1
        visible = key_index <= last_visible
        if window is not None:
            visible = visible & (query_index - key_index < window)
        mask = additive_mask(visible.expand(query.shape[0], 1, block_size, num_keys), query.dtype)
        if is_padded:
            mask.masked_fill_(padding[:, None, None, -num_keys:] == 0, torch.finfo(mask.dtype).min)
        return mask


class BlockConvolution(nn.Module):
    """
    DFlash 2's convolution: mixes each slot of a block with the slots before it. One instance is applied to a
    sublayer's input and again to its output.

    With `x` the sublayer's input after its norm, a projection of `x_t` gives the kernel corrections `delta` of *both*
    applications, and each computes `y_t[c] = sum_o (base[o, c] + delta_t[o, group(c)]) * x_{t-o}[c]`. Slots before the
    anchor are zeros: a convolution never crosses a block boundary. At initialisation it is the identity, bit for bit.

    Args:
        config (`DFlashDraftConfig`): `conv_kernel_size` taps, `conv_group_size` channels that share a correction.
    """

    def __init__(self, config):
        super().__init__()
        self.block_size = config.block_size
        self.taps = config.conv_kernel_size
        self.group_size = config.conv_group_size
        self.groups = config.hidden_size // config.conv_group_size
        # [0]: applied before the sublayer, [1]: after it.
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def corrections(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`delta` before and after the sublayer, each `[N, Q, taps, G]`, from the sublayer's input `[N, Q, H]`."""
        delta = self.kernel_projection(hidden_states).unflatten(-1, (2, self.taps, self.groups))
        return delta[:, :, 0], delta[:, :, 1]

    def forward(self, hidden_states: torch.Tensor, delta: torch.Tensor, after_sublayer: bool) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor`): `[N, Q, H]`, `Q` a single block or a whole number of them side by side.
            delta (`torch.Tensor`): `[N, Q, taps, G]`, from `corrections`.
            after_sublayer (`bool`): Whether `hidden_states` are the sublayer's output, not its input.

        Raises:
            `ValueError`: a length that is not a whole number of blocks.
        """
        length = hidden_states.shape[1]
        block_size = min(self.block_size, length)  # decoding may draft a shorter block
        if length % block_size:
            raise ValueError(
                f"noise_embeds has {length} slots, which are not whole blocks of block_size={self.block_size}: the "
                "convolution would cross a block boundary."
            )
        blocks = hidden_states.unflatten(-1, (self.groups, self.group_size))  # [N, Q, G, C/G]
        blocks = blocks.unflatten(1, (-1, block_size))  # [N, blocks, B, G, C/G]
        delta = delta.unflatten(1, (-1, block_size)).unsqueeze(-1)  # [N, blocks, B, taps, G, 1]
        base = self.base_kernel[int(after_sublayer)].unflatten(-1, (self.groups, self.group_size))  # [taps, G, C/G]
        output = (base[0] + delta[:, :, :, 0]) * blocks
        for tap in range(1, min(self.taps, block_size)):  # in a shorter block, later taps read only zeros
            shifted = nn.functional.pad(blocks[:, :, :-tap], (0, 0, 0, 0, tap, 0))  # slot t - tap; zeros before slot 0
            output = output + (base[tap] + delta[:, :, :, tap]) * shifted
        return output.flatten(1, 2).flatten(-2)


class DFlashDecoderLayer(GradientCheckpointingLayer):
    """Qwen3's decoder layer with the drafter's attention and, in DFlash 2, a convolution around each sublayer."""

    def __init__(self, config: DFlashDraftConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_conv = None
        self.mlp_conv = None
        if config.conv_kernel_size is not None:
            self.attention_conv = BlockConvolution(config)
            self.mlp_conv = BlockConvolution(config)

    def forward(self, hidden_states, context, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        def attend(x):
            return self.self_attn(x, context, position_embeddings, attention_mask, past_key_values, **kwargs)[0]

        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self._apply_sublayer(attend, self.attention_conv, normed)
        normed = self.post_attention_layernorm(hidden_states)
        return hidden_states + self._apply_sublayer(self.mlp, self.mlp_conv, normed)

    @staticmethod
    def _apply_sublayer(sublayer, convolution: BlockConvolution | None, normed: torch.Tensor) -> torch.Tensor:
        """The output of attention or MLP, with the convolution around it if there is one; `normed`: after the norm."""
        if convolution is None:
            return sublayer(normed)
        # The corrections of both applications follow from the sublayer's input.
        delta_before, delta_after = convolution.corrections(normed)
        output = sublayer(convolution(normed, delta_before, after_sublayer=False))
        return convolution(output, delta_after, after_sublayer=True)


class DFlashDraftModel(PreTrainedModel):
    """
    A block-diffusion drafter. Unless its configuration says otherwise it has neither an embedding nor an LM head: both
    are the target's, shared and frozen.

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
        self.context_rotary_emb = None
        if config.backbone_rotary_base is not None:
            context_config = copy.copy(config)
            context_config.rope_parameters = {**config.rope_parameters, "rope_theta": config.backbone_rotary_base}
            self.context_rotary_emb = DFlashRotaryEmbedding(context_config)
        if config.has_embed_tokens:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.own_mask_embedding:
            self.mask_embedding = nn.Parameter(torch.empty(config.hidden_size))
        for name, module in config.token_head_class.build_modules(config).items():
            self.add_module(name, module)
        if config.has_own_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            # Draft id `i` is the target's id `i + d2t[i]`.
            self.d2t = nn.Buffer(torch.zeros(config.draft_vocab_size, dtype=torch.long))
        wrap_generation()
        self.post_init()

    def get_input_embeddings(self):
        """`None` if the embedding is the target's. Upstream's quantisers call it."""
        return getattr(self, "embed_tokens", None)

    def embed(self, target, input_ids: torch.LongTensor) -> torch.Tensor:
        """Raw embeddings `[..., H]` of the target's ids, from the drafter's own embedding or else the target's."""
        if not self.config.has_embed_tokens:
            return raw_embedding(target, input_ids.to(execution_device(target.get_input_embeddings())))
        weight = self.embed_tokens.weight
        # A target whose embedding was extended may have ids past the drafter's table. Its last row stands in for them,
        # which may lower acceptance, but does not change the text.
        ids = input_ids.to(weight.device).clamp(max=len(weight) - 1)
        return raw_embedding(self, ids)

    def embed_block(self, target, anchors: torch.LongTensor, num_tokens: int) -> torch.Tensor:
        """
        The input `[R, slots, H]` of a forward that drafts a block: raw embeddings of `[anchor, MASK, ..., MASK]`.

        Args:
            target (`PreTrainedModel`): The target, whose embedding is used unless the drafter has its own.
            anchors (`torch.LongTensor`): `[R]`, the last committed token of each row.
            num_tokens (`int`): Tokens of the block, anchor included; a whole block has `config.max_block_tokens`.
        """
        num_slots = self.config.num_slots(num_tokens)
        masks = anchors.new_full((len(anchors), num_slots - 1), self.config.mask_token_id)
        return self.embed(target, torch.cat([anchors[:, None], masks], dim=1))

    def states_of_drafting_slots(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        The hidden states of the slots that draft a token, from those of all slots `[R, slots, H]`: without the
        anchor's slot, unless `config.sample_from_anchor`.
        """
        return hidden_states if self.config.sample_from_anchor else hidden_states[:, 1:]

    def clamp_to_vocabulary(self, ids: torch.LongTensor) -> torch.LongTensor:
        """
        Ids that a token head can embed: a target whose embedding was padded may sample ids past the vocabulary that
        the drafter was trained on.
        """
        vocab_size = self.config.vocab_size
        return ids if vocab_size is None else ids.clamp(max=vocab_size - 1)

    def draft_logits(self, hidden_states: torch.Tensor, target_head: nn.Module) -> torch.Tensor:
        """
        Logits `[..., V]` over the drafter's vocabulary; without its last tokens if the target's LM head is smaller.

        Args:
            hidden_states (`torch.Tensor`): `[..., H]`, after the final norm.
            target_head (`nn.Module`): The target's LM head, used unless the drafter has its own.
        """
        lm_head = self.lm_head if self.config.has_own_lm_head else target_head
        dtype = input_dtype(lm_head, hidden_states)
        logits = lm_head(hidden_states.to(device=execution_device(lm_head), dtype=dtype))
        if not self.config.has_own_lm_head:
            logits = logits[..., : self.config.vocab_size]
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def target_ids(self, draft_ids: torch.LongTensor) -> torch.LongTensor:
        """The target's ids for tokens of the drafter's vocabulary."""
        if not self.config.has_own_lm_head:
            return draft_ids
        return draft_ids + self.d2t[draft_ids.to(self.d2t.device)].to(draft_ids.device)

    # The protocol of `hook_dflash`: both methods. The package's subclass overrides them.
    def dflash_decode(self, target, *args, **kwargs):
        """What `target.generate(assistant_model=self)` runs: upstream's loop, with this drafter's candidates."""
        return generate_with_candidates(self, target, *args, **kwargs)

    def dflash_validate(self, target, generation_mode, generation_config, generation_mode_kwargs):
        """Called by `generate` before it starts: check that this drafter fits the target and the arguments."""
        check_pair(target, self.config)
        self.check_layers()
        check_mode(generation_mode, generation_config)

    def check_layers(self) -> None:
        """
        Check that the layers that drafting reads have weights, whichever library quantised them.

        Raises:
            `ValueError`: one has none.
        """
        for name in ("fc", "lm_head", "embed_tokens"):
            layer = getattr(self, name, None)
            if layer is not None and not isinstance(getattr(layer, "weight", None), torch.Tensor):
                kind = f"{type(layer).__module__}.{type(layer).__name__}"
                raise ValueError(
                    f"assistant_model.{name} is a {kind}, which has no tensor `weight`: quantise the drafter with "
                    "torchao's `quantize_` or a `quantization_config`, or draft with it as it was before."
                )

    def spec_generate(
        self,
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        max_new_tokens: int,
        stop_token_ids: list[int] | None = None,
        temperature: float = 0.0,
    ) -> torch.LongTensor:
        """
        The reference implementation's method (z-lab/dflash), so that scripts which call it run unchanged. It is a call
        of `target.generate(..., assistant_model=self)`, which has all other arguments.

        Args:
            target (`PreTrainedModel`): The target.
            input_ids (`torch.LongTensor`): `[N, S]`, without padding.
            max_new_tokens (`int`): Maximum length of an answer.
            stop_token_ids (`list[int]`, *optional*): Each of them ends the answer. Default: those that end the
                target's own answers.
            temperature (`float`): 0 is greedy; samples are not truncated, whatever the target's own `top_k` and
                `top_p`.

        Returns:
            `[N, S + n]`: prompt and answer, up to and with the first stop token.
        """
        self.eval()
        input_ids = input_ids.to(target.device)
        options: dict = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if stop_token_ids is not None:
            options["eos_token_id"] = list(stop_token_ids)
        return target.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            assistant_model=self,
            return_dict_in_generate=False,
            repetition_penalty=1.0,
            **options,
        )

    def project_context(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """
        From the target's features `[N, C, L * H_target]` to the context `[N, C, H]`, from which every layer computes
        keys and values.

        Raises:
            `ValueError`: features of the wrong width.
        """
        width = self.fc.in_features
        if context_hidden_states.shape[-1] != width:
            raise ValueError(
                f"context_hidden_states has width {context_hidden_states.shape[-1]}, but this drafter reads "
                f"{len(self.config.target_layer_ids)} features of width {self.config.target_hidden_size} ({width} in "
                "all): concatenate the outputs of the target's layers `config.target_layer_ids`."
            )
        return self.hidden_norm(self.fc(context_hidden_states))

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values=None,
        cache=None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """
        One pass over one block (decoding) or several (training).

        Args:
            noise_embeds (`torch.Tensor`): `[N, B, H]`, raw embeddings of `[anchor, MASK, ..., MASK]`, see
                [`embed_block`]; of `A` blocks, `[N, A * B, H]`. `config.input_embedding_scale` is applied here. The
                name is that of the reference implementation; nothing in it is random.
            context_hidden_states (`torch.Tensor`): `[N, C, L * H_target]`, features of context tokens that are not in
                the cache yet; `None` when all are.
            attention_mask: `None`, or padding `[N, keys]`, if the block's keys are the last ones. Otherwise an
                additive mask `[N, 1, Q, keys]` or a `BlockMask`, or a dictionary with one of them per layer type.
            position_ids (`torch.LongTensor`): `[N, C + Q]`. Default: continue the cache.
            past_key_values (`Cache`): Receives the keys of context *and* block; the caller drops the block's.
            cache (`Cache`): The same, as transformers' own loop names it from 5.24 on.

        Returns:
            `BaseModelOutputWithPast`: `last_hidden_state` `[N, Q, H]` after the final norm, the input of the LM head.

        Raises:
            `ValueError`: neither context nor cache, or features of the wrong width.
        """
        past_key_values = cache if past_key_values is None else past_key_values
        past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
        if context_hidden_states is None and past_length == 0:
            raise ValueError(
                "context_hidden_states is None and past_key_values is empty: a drafter reads the target's features; "
                "pass the outputs of the target's layers `config.target_layer_ids` for the tokens before the block."
            )
        context = None if context_hidden_states is None else self.project_context(context_hidden_states)
        if position_ids is None:
            new_length = noise_embeds.shape[1] + (0 if context is None else context.shape[1])
            position_ids = torch.arange(past_length, past_length + new_length, device=noise_embeds.device)[None]
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)  # [N, C + Q, d]
        if context is not None and self.context_rotary_emb is not None:
            context_length = context.shape[1]
            context_cos, context_sin = self.context_rotary_emb(context, position_ids[:, :context_length])
            cos, sin = position_embeddings
            cos = torch.cat([context_cos, cos[:, context_length:]], dim=1)
            sin = torch.cat([context_sin, sin[:, context_length:]], dim=1)
            position_embeddings = (cos, sin)

        hidden_states = noise_embeds
        if self.config.own_mask_embedding:
            slots = torch.arange(noise_embeds.shape[1], device=noise_embeds.device) % self.config.block_size
            is_anchor = (slots == 0)[:, None]
            hidden_states = torch.where(is_anchor, noise_embeds, self.mask_embedding.to(noise_embeds.dtype))
        if self.config.input_embedding_scale != 1.0:
            hidden_states = hidden_states * self.config.input_embedding_scale
        for layer_type, layer in zip(self.config.layer_types, self.layers, strict=True):
            mask = attention_mask[layer_type] if isinstance(attention_mask, dict) else attention_mask
            hidden_states = layer(hidden_states, context, position_embeddings, mask, past_key_values, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{CACHE_NAME: past_key_values})

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        """
        Adds an error if tensors are missing or have the wrong shape: a drafter with a random layer still runs, and
        only a low acceptance length shows it.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        wrong = [*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])]
        if wrong:
            raise ValueError(
                f"The weights do not belong to this config.json: {wrong[0]} ({len(wrong)} tensors in all)."
            )
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory, is_main_process: bool = True, state_dict: dict | None = None, **kwargs):
        """
        Adds the code, so that `trust_remote_code=True` works without the package, and the drafter's own mask
        embedding, if it has one, in the file that engines read. As upstream does, a drafter with adapters saves the
        active adapter alone.
        """
        if self._hf_peft_config_loaded:
            return super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        self.config.auto_map = {
            "AutoConfig": "configuration_dflash.DFlashDraftConfig",
            "AutoModel": "modeling_dflash.DFlashDraftModel",
        }
        if is_main_process:
            folder = Path(save_directory)
            for name, source in code_files().items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                if source.resolve() != (folder / name).resolve():
                    shutil.copyfile(source, folder / name)
            embedding = (state_dict or {}).get("mask_embedding", getattr(self, "mask_embedding", None))
            if embedding is None:  # an older file would be used instead of the target's embedding
                (folder / MASK_EMBEDDING).unlink(missing_ok=True)
            else:
                stored = {"embedding": embedding.detach().cpu().clone(), "mask_token_id": self.config.mask_token_id}
                torch.save(stored, folder / MASK_EMBEDDING)
        super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs)

    def _get_files_timestamps(self, working_dir):
        """
        Upstream's list of files that were there before, which `push_to_hub=True` does not upload. `save_pretrained`
        has written the code and the mask embedding by then; they must be uploaded, so they are removed from the list.
        """
        timestamps = super()._get_files_timestamps(working_dir)
        written = [name for name in timestamps if name.endswith("_dflash.py")]
        written += ["custom_generate", MASK_EMBEDDING]
        return {name: timestamp for name, timestamp in timestamps.items() if name not in written}


def code_files() -> dict[str, Path]:
    """The code that is saved with a drafter's weights: file names in its folder, and the files to copy."""
    sources = {source.name: source for source in sorted(Path(__file__).parent.glob("*_dflash.py"))}
    return {**sources, "custom_generate/generate.py": Path(custom_generate.__code__.co_filename)}
