"""Drafters that engines read in different ways: fields of their configuration."""

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 50_000.0}
CONVOLUTION = {"conv_kernel_size": 2, "conv_group_size": 4}
SELECTOR = {"selector_rank": 6, "selector_top_k": 5}
VARIANTS = {
    "v1": {},
    "theta 1e4": THETA,
    "sliding": {**SLIDING, **THETA},
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "causal": {"is_causal": True},
    "sinks": {"attention_sink_bias": True, "attention_value_scale": 0.5},
    "bias": {"attention_bias": True},
    "yarn": {"rope_parameters": YARN},
    "partial rotary": {"rope_parameters": {**THETA["rope_parameters"], "partial_rotary_factor": 0.5}},
    "DFlash 2": {**SLIDING, **THETA, **CONVOLUTION, **SELECTOR, "is_causal": False},
    "DFlash 2, capped": {**CONVOLUTION, **SELECTOR, "output_multiplier": 0.5, "final_logit_softcapping": 30.0},
    "own mask embedding": {"own_mask_embedding": True},
    "JetSpec": {"dflash_config": {"causal_head": True}},
}
