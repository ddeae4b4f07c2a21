"""Tiny targets of many families, and tiny drafters."""

import functools

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from support.tiny_models import tiny_config


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
CHUNKS = {"layer_types": ["chunked_attention"] * 3 + ["full_attention"], "no_rope_layers": [1, 1, 1, 0]}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 4096, "rope_theta": 150000.0}
# Model types, and what the rules of `tiny_config` do otherwise; a family that is not listed needs none.
FAMILIES = {name: (name, {}) for name in ("falcon_h1", "gemma2", "mixtral", "qwen3_5_text")}
FAMILIES |= {"gemma3": ("gemma3_text", {}), "gemma4": ("gemma4_text", {}), "mistral_sliding": ("mistral", {})}
FAMILIES |= {
    "deepseek_v3": ("deepseek_v3", {"num_key_value_heads": 4, "head_dim": 4, "moe_intermediate_size": 16}),
    "falcon_mamba": ("falcon_mamba", {"time_step_rank": 2}),
    "gpt2": ("gpt2", {"n_inner": 48}),
    "gpt_oss": ("gpt_oss", {"rope_parameters": YARN}),
    "jamba": ("jamba", {"num_experts": 2, "num_experts_per_tok": 1, "mamba_dt_rank": 4}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "llama4_text": ("llama4_text", {**MOE, **CHUNKS, "intermediate_size_mlp": 16384}),
    "mamba2": ("mamba2", {"head_dim": 16}),
    "nemotron_h": ("nemotron_h", {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3_next": ("qwen3_next", {**MOE, "linear_num_value_heads": 2, "shared_expert_intermediate_size": 16}),
}


# The content of a small drafter's `config.json`.
DRAFT_CONFIG = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 3]},
}


def make_target(family: str = "qwen3", dtype=torch.float32, attn: str | None = "sdpa", seed: int = 0, **overrides):
    """A random target whose greedy text is diverse; the caller asserts that it is."""
    model_type, special = FAMILIES.get(family, (family, {}))
    fields = {**COMMON, **special, **overrides}
    configuration = functools.partial(tiny_config, model_type) if family in FAMILIES else CONFIG_MAPPING[model_type]
    if family == "gpt2":
        for alias in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
            fields.pop(alias)
    torch.manual_seed(seed)
    config = configuration(**fields)
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
    if config.has_own_lm_head:  # of the first tokens
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
