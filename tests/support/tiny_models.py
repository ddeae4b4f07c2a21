"""
Any language model that the installed transformers knows, made tiny by rules: the defaults of its configuration class,
shrunk field by field according to the fields' names, with random weights whose greedy text is diverse.
"""

import copy
import re

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig


VOCAB = 96
LAYERS = 4
WIDTH = 32
HEAD = 8
LAST_TEXT_TOKEN = 85  # those after it stand for images, audio and the drafter's mask
# Factors on all matrices, and on the embedding besides; the first pair is taken whose text is diverse.
GAINS = ((20.0, 1.0), (20.0, 20.0), (8.0, 20.0), (8.0, 1.0), (3.0, 1.0), (60.0, 1.0))
DIVERSE = 20  # different tokens in a diverse text
# The first pattern that matches a field's whole name says what a greater number becomes; in a list, each number. The
# products agree: 4 heads of 8 are the width, 4 Mamba heads of 16 twice that.
RULES = {
    r".*vocab.*size.*|n_vocab": VOCAB,
    r"hidden_size_per_layer_input|ple_embed_dim": 8,
    r"(input_)?embedding_size": 16,
    r"output_embedding_size": 24,
    r"attn_layer_period": 2,
    r"attn_layer_offset": 1,
    r"linear_num_key_heads|.*kv_n?_?heads": 2,
    r"index_n_heads": 8,  # with fewer, scores tie at zero, and which keys are taken is left to chance
    r"mamba_d_ssm": 2 * WIDTH,
    r"mamba_d_head|mamba_head_?dim": 16,
    r"qk_rope_head_dim|rotary_dim": 4,
    r"qk_head_dim": HEAD + 4,
    r".*head_dim|kv_channels|d_kv|d_head|dim_head|attention_head_size|d_rel": HEAD,
    r".*heads?(_per_layer)?|num_query_groups": 4,
    r"q_lora_rank|o_lora_rank": 16,
    r".*rank": 8,
    r".*(intermediate|ffn|mlp).*_(size|dim|mlp)|dff|dim_ff|d_inner|n_inner|feed_forward_size": 48,
    r".*hidden_size|d_model|n_embd|emb_dim|embed(ding)?_dim|lru_width|word_embed_proj_dim": WIDTH,
    r"projector_(in|out)put_dim|adapter_(in|out)_dim|adapter_input_size|vision_output_dim": WIDTH,
    r"zero_expert_num": 2,
    r"(n|num|moe_num)_shared_experts?|first_k_dense_replace|num_dense_layers": 1,
    r"n_group|topk_group|num_expert_group|(mamba_)?n_?groups": 1,
    r"num_experts_per_.*|moe_top_?k|moe_k|top_k_experts": 2,
    r".*num(_\w+)?_experts|n_routed_experts": 4,
    r"num_kv_shared_layers": 2,
    r"index_top_?k": 16,
    r".*window.*|local_attention|attention_chunk_size": 8,
    r"(mamba_)?chunk_size|.*_attn_chunk_length": 8,
    r".*state_size|mamba_d_state|mamba_dt_rank|time_step_rank": 8,
    r"max_(position|source_position|target_position)s?(_embeddings)?|n_positions|n_ctx|max_seq_len": 256,
    r"model_max_length|context_length": 256,
}
LAYER_COUNTS = r"(num_)?(hidden|decoder|encoder|text)?_?layers?|n_layers?|num_(en|de)coder_layers|depth|num_blocks"
OTHER_PARTS = r".*(vision|audio|image|vq|speech|encoder)"  # of a wrapper, besides its text model
# Fields that some classes leave empty though their models need them.
NEEDED = {"num_key_value_heads": 4, "head_dim": HEAD, "num_experts_per_tok": 2}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Models whose three axes stand in no field of the defaults.
MROPE = {"rope_parameters": {**PLAIN_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}}
# What rules cannot know: relations between the fields of one class.
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
OVERRIDES: dict[str, dict] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": LAYERS},
    "cohere_compass_text": {"rope_parameters": {"full_attention": PLAIN_ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dots1": {**EXPERTS, "first_k_dense_replace": 1},
    "dots3_note_text": {
        "per_layer_config": {},
        "qk_nope_head_dim": HEAD,
        "head_dim": HEAD + 4,
        "num_key_value_heads": 4,
        "n_group": 1,
    },
    "gemma4_text": {"global_head_dim": HEAD},
    "gemma4_unified_text": {"global_head_dim": HEAD},
    "glm4v_moe_text": MROPE,
    "glm4v_text": MROPE,
    "glm_ocr_text": MROPE,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16},
    "mimo_v2_flash": {"num_key_value_heads": 2},  # its sliding layers have twice as many
    "ministral3": {
        "rope_parameters": {**PLAIN_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
    },
    "mistral4": {
        "qk_nope_head_dim": HEAD,
        "head_dim": 4,  # of its rotary part
        "rope_parameters": {**PLAIN_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
    },
    "paddleocr_vl_text": MROPE,
    "qwen2_5_vl_text": MROPE,
    "qwen2_vl_text": MROPE,
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "hybrid_layer_ids": [1, 3]},
}
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 1}


def tiny_config(model_type: str, **overrides) -> PreTrainedConfig:
    """The configuration of a tiny model of a type, from the defaults of its class."""
    fields = {**OVERRIDES.get(model_type, {}), **overrides}
    return _tiny(CONFIG_MAPPING[model_type], fields, fields.get("num_hidden_layers", LAYERS))


def tiny_model(model_type: str, wrapper: bool = False, **overrides):
    """
    A random model of a type, in fp32, with the first gain at which its greedy text is diverse.

    Args:
        model_type (`str`): A key of transformers' `CONFIG_MAPPING`.
        wrapper (`bool`): The class for text with images.
    """
    best = -1, None
    for gains in GAINS:
        model = _random_model(tiny_config(model_type, **overrides), wrapper, *gains)
        texts = greedy_texts(model)
        score = min(len(set(texts.flatten().tolist())), 4 * min(len(set(row)) for row in texts.tolist()))
        if score > best[0]:
            best = score, model
        if score >= DIVERSE:
            break
    return best[1]


def prompts(rows: int, longest: int = 11, seed: int = 0):
    """Left-padded prompts `[rows, longest]` of different lengths, of text tokens alone, and their padding."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, LAST_TEXT_TOKEN, (rows, longest), generator=random)
    pads = [0] + [int(torch.randint(1, longest - 2, (1,), generator=random)) for _ in range(rows - 1)]
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad] = 0
        mask[row, :pad] = 0
    return {"input_ids": ids, "attention_mask": mask}, pads


@torch.no_grad()
def greedy_texts(model) -> torch.Tensor:
    """The first 24 tokens `[4, 24]` that a model says after four prompts of one length."""
    ids = torch.cat([prompts(1, seed=seed)[0]["input_ids"] for seed in range(4)])
    text = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    return text[:, ids.shape[1] :]


def _random_model(config, wrapper: bool, gain: float, embedding_gain: float):
    """Matrices multiplied by a gain: at initialisation they are too small to say different things."""
    torch.manual_seed(0)
    model = (AutoModelForImageTextToText if wrapper else AutoModelForCausalLM).from_config(copy.deepcopy(config))
    model = model.float().eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(gain)
        model.get_input_embeddings().weight.mul_(embedding_gain)
    generation = model.generation_config
    for name in ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        setattr(generation, name, None)
    generation.update(**SPECIAL_TOKENS, use_cache=True)
    return model


def _tiny(config_class, overrides: dict, layers: int = LAYERS) -> PreTrainedConfig:
    default = vars(config_class())
    fields = {}
    special = VOCAB - 1
    for name, value in default.items():
        if isinstance(value, PreTrainedConfig):
            more = overrides.get(name, OVERRIDES.get(value.model_type, {}))
            fields[name] = _tiny(type(value), more, 2 if re.match(OTHER_PARTS, name) else LAYERS)
        elif name in overrides or name.startswith("_"):
            continue
        elif name in SPECIAL_TOKENS:
            fields[name] = SPECIAL_TOKENS[name]
        elif re.search(r"_token_(id|index)$", name):
            special -= 1
            fields[name] = special
        elif name == "rope_parameters":
            fields[name] = _plain_rope(value)
        elif value is None:
            fields[name] = NEEDED.get(name)
        elif isinstance(value, list | tuple) and len(value) == _depth(default) > LAYERS:
            fields[name] = _cycled([_shrunk(name, item) for item in value], layers)
        else:
            fields[name] = layers if re.fullmatch(LAYER_COUNTS, name) else _shrunk(name, value)
    if default.get("num_key_value_heads") == default.get("num_attention_heads") != 1:
        fields["num_key_value_heads"] = fields.get("num_attention_heads")
    if "qk_rope_head_dim" in default and default["qk_rope_head_dim"] == default.get("head_dim"):
        fields["head_dim"] = fields["qk_rope_head_dim"]
    if "is_decoder" in default and not default.get("is_encoder_decoder"):
        fields["is_decoder"] = True
    fields["tie_word_embeddings"] = False
    parts = {name for name, value in fields.items() if isinstance(value, PreTrainedConfig)}
    changed = {name: fields[name] for name in fields if name in parts or fields[name] != default.get(name)}
    return config_class(**{**changed, **{name: value for name, value in overrides.items() if name not in parts}})


def _shrunk(name: str, value):
    if isinstance(value, list | tuple):
        return [_shrunk(name, item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        for pattern, tiny in RULES.items():
            if re.fullmatch(pattern, name):
                return min(value, tiny)
    return value


def _depth(fields: dict) -> int:
    return next((fields[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in fields), 0)


def _cycled(items: list, layers: int) -> list:
    """As many as there are layers, every kind in turn."""
    kinds = list(dict.fromkeys(map(str, items)))
    first = {str(item): item for item in reversed(items)}
    return [first[kinds[i % len(kinds)]] for i in range(layers)]


def _plain_rope(rope):
    """Without scaling; sections of a rotary embedding with three axes share the four pairs of a head."""
    if not rope:
        return rope
    if any(isinstance(value, dict) for value in rope.values()):
        return {name: _plain_rope(value) for name, value in rope.items()}
    plain = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if rope.get(name) is not None}
    plain.setdefault("rope_theta", 10000.0)
    plain["rope_type"] = rope.get("rope_type") if rope.get("rope_type") == "proportional" else "default"
    if "mrope_section" in rope:
        plain |= {"mrope_section": [2, 1, 1], "mrope_interleaved": rope.get("mrope_interleaved", False)}
        plain["partial_rotary_factor"] = 1.0
    return plain
