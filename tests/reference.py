"""
Slow restatements to be equal to: the drafter element by element from its published tensors, and the published loop
line by line for one row. Neither imports the package.
"""

import math

import torch
from transformers import DynamicCache


def rms_norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x, position, theta):
    """One vector `[head_dim]` at one position."""
    half = x.shape[0] // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2.0 * i / x.shape[0])
        c, s = math.cos(angle), math.sin(angle)
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return out


def draft_hidden_states(tensors, config, features, block):
    """
    Final hidden states `[B, H]` of one block.

    Args:
        tensors (`dict`): The published tensors by name.
        config (`dict`): The published config.json.
        features (`torch.Tensor`): `[S, L * H_t]`, the target's features of tokens 0..S-1.
        block (`torch.Tensor`): `[B, H]`, embeddings of anchor and masks; the anchor is token S.
    """
    eps, theta, dim = config["rms_norm_eps"], config["rope_theta"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    context = rms_norm(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    past, size = len(features), len(block)
    hidden = block

    def project(x, prefix, name):
        bias = tensors.get(f"{prefix}{name}.bias")
        y = x @ tensors[f"{prefix}{name}.weight"].T
        return y if bias is None else y + bias

    for layer in range(config["num_hidden_layers"]):
        p = f"layers.{layer}.self_attn."
        sliding = config["layer_types"][layer] == "sliding_attention"
        causal = config.get("is_causal", sliding)
        x = rms_norm(hidden, tensors[f"layers.{layer}.input_layernorm.weight"], eps)
        source = torch.cat([context, x])
        keys = project(source, p, "k_proj").view(past + size, kv_heads, dim)
        values = project(source, p, "v_proj").view(past + size, kv_heads, dim)
        queries = project(x, p, "q_proj").view(size, heads, dim)
        attended = torch.zeros(size, heads, dim, dtype=x.dtype)
        for slot in range(size):
            for head in range(heads):
                q = rotate(rms_norm(queries[slot, head], tensors[f"{p}q_norm.weight"], eps), past + slot, theta)
                scores, seen = [], []
                for j in range(past + size):
                    if causal and j > past + slot:
                        continue
                    if sliding and past + slot - j >= config["sliding_window"]:
                        continue
                    k = rms_norm(keys[j, head * kv_heads // heads], tensors[f"{p}k_norm.weight"], eps)
                    scores.append(q @ rotate(k, j, theta) / math.sqrt(dim))
                    seen.append(j)
                weights = torch.stack(scores).softmax(0)
                attended[slot, head] = sum(w * values[j, head * kv_heads // heads] for w, j in zip(weights, seen))
        hidden = hidden + project(attended.reshape(size, -1), p, "o_proj")
        x = rms_norm(hidden, tensors[f"layers.{layer}.post_attention_layernorm.weight"], eps)
        m = f"layers.{layer}.mlp."
        gate, up = x @ tensors[f"{m}gate_proj.weight"].T, x @ tensors[f"{m}up_proj.weight"].T
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ tensors[f"{m}down_proj.weight"].T
    return rms_norm(hidden, tensors["norm.weight"], eps)


@torch.no_grad()
def published_loop(draft_hidden, target, config, input_ids, max_new_tokens, stop_ids):
    """
    The published decoding loop for one row, greedy.

    Args:
        draft_hidden (`callable`): `(features [S, L * H_t], block [B, H]) -> [B, H]`.

    Returns:
        The text, and the committed tokens of each verification, not cut at a stop token.
    """
    layer_ids, size, mask = config["target_layer_ids"], config["block_size"], config["mask_token_id"]
    captured = {}
    handles = [
        target.model.layers[i].register_forward_hook(
            lambda module, args, output, i=i: captured.__setitem__(i, output if torch.is_tensor(output) else output[0])
        )
        for i in layer_ids
    ]

    def forward(ids, start, cache):
        positions = torch.arange(start, start + ids.shape[1])[None]
        logits = target(ids, position_ids=positions, past_key_values=cache, use_cache=True).logits
        return logits[0], torch.cat([captured[i] for i in layer_ids], dim=-1)[0]

    try:
        cache = DynamicCache(config=target.config)
        prompt = input_ids.shape[1]
        logits, features = forward(input_ids, 0, cache)
        text = input_ids[0].tolist() + [int(logits[-1].argmax())]
        trace = []
        while len(text) - prompt < max_new_tokens and not set(stop_ids) & set(text[prompt:]):
            start = len(text) - 1
            noise = torch.tensor([text[-1]] + [mask] * (size - 1))
            hidden = draft_hidden(features[:start], target.get_input_embeddings().weight[noise])
            block = torch.tensor([[text[-1], *target.lm_head(hidden[1:]).argmax(-1).tolist()]])
            logits, new = forward(block, start, cache)
            choice = logits.argmax(-1)
            accepted = 0
            while accepted < size - 1 and block[0, accepted + 1] == choice[accepted]:
                accepted += 1
            text += block[0, 1 : accepted + 1].tolist() + [int(choice[accepted])]
            trace.append(accepted + 1)
            if accepted + 1 < size:
                cache.crop(-(size - accepted - 1))
            features = torch.cat([features[:start], new[: accepted + 1]])
    finally:
        for handle in handles:
            handle.remove()
    text = text[: prompt + max_new_tokens]
    stops = [i for i, token in enumerate(text) if i >= prompt and token in stop_ids]
    return text[: stops[0] + 1] if stops else text, trace
