"""Tiny targets of many families, and tiny drafters."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dflash_hf import DFlashDraftConfig, DFlashDraftModel


VOCAB = 96
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "use_cache": True,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Model type, and what its configuration needs; those that need nothing are not listed.
FAMILIES = {
    "gemma3": ("gemma3_text", SLIDING),
    "gemma4": (
        "gemma4_text",
        {
            **SLIDING,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 0,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral_sliding": ("mistral", {"sliding_window": 8}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 4,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **MOE,
            **DELTA,
            "linear_num_value_heads": 2,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "gemma2": ("gemma2", SLIDING),
    "mixtral": ("mixtral", MOE),
    "llama4_text": ("llama4_text", {**MOE, "attention_chunk_size": 8}),
    "qwen3_5_text": ("qwen3_5_text", DELTA),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "falcon_h1": (
        "falcon_h1",
        {
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "mamba_d_ssm": 64,
        },
    ),
    "mamba2": (
        "mamba2",
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2},
    ),
    "falcon_mamba": ("falcon_mamba", {"state_size": 8}),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256, "n_inner": 48}),
}


def make_target(family: str = "qwen3", dtype=torch.float32, attn: str | None = "sdpa", seed: int = 0, **overrides):
    """A random target whose greedy text is diverse; the caller asserts that it is."""
    model_type, special = FAMILIES.get(family, (family, {}))
    fields = {**COMMON, **special, **overrides}
    if family == "gpt2":
        for alias in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
            fields.pop(alias)
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**fields)
    if dtype == torch.float64:  # the grouped matrix product of experts knows no fp64
        config._experts_implementation = "eager"
    target = AutoModelForCausalLM.from_config(config, attn_implementation=attn).to(dtype).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20.0)
    target.generation_config.pad_token_id = 0
    target.generation_config.eos_token_id = None
    return target.requires_grad_(False)


def make_draft(target, block_size: int = 4, seed: int = 1, num_hidden_layers: int = 2, **overrides):
    """A random drafter for a target, which verifies whole blocks: left alone it would rest, for it saves nothing."""
    torch.manual_seed(seed)
    read = [0, 2, 3] if target.config.get_text_config().num_hidden_layers > 3 else [0, 1]
    fields = {"target_layer_ids": read, "intermediate_size": 48, **overrides}
    config = DFlashDraftConfig.for_target(
        target.config,
        target.config.get_text_config().vocab_size - 1,
        num_hidden_layers=num_hidden_layers,
        block_size=block_size,
        **fields,
    )
    draft = DFlashDraftModel(config)
    if config.has_own_head:  # of the first tokens
        torch.nn.init.normal_(draft.lm_head.weight, std=0.02)
    draft.decoding_config.block_size = block_size
    return draft.to(target.dtype).eval()


SWITCHES = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}


def make_draft2(target, trained=True, **overrides):
    """A DFlash 2 drafter; `trained` moves its own parameters away from the identity."""
    draft = make_draft(target, **{**SWITCHES, **overrides})
    if trained:
        random = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in draft.named_parameters():
                if "_conv." in name or "candidate_selector" in name:
                    parameter += 0.5 * torch.randn(parameter.shape, generator=random)
    return draft


def shallow_pair(make=make_draft, **overrides):
    """A target of two layers and a drafter of one, for a compiler, to which every layer costs a second."""
    target = make_target(num_hidden_layers=2)
    return target, make(target, num_hidden_layers=1, **overrides)
