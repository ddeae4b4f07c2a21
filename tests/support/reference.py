"""
Slow reference implementations: the drafter, element by element from its published tensors, and the published loop,
line by line for one row. Of the package they use only the name of the cache argument.
"""

import math

import torch
from transformers import DynamicCache

from dflash_hf.modeling.candidates_dflash import CACHE_NAME


def rms_norm(x, weight, eps):
    """`x` `[..., H]` divided by its root mean square, times `weight` `[H]`."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def frequencies(config, theta):
    """Angles by position of the rotated channel pairs, and the factor on cosine and sine (YaRN, 2309.00071)."""
    dim = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    plain = [theta ** (-2.0 * i / dim) for i in range(dim // 2)]
    yarn = config.get("yarn")
    if yarn is None:
        return plain, 1.0
    factor = yarn["factor"]
    length = yarn["original_max_position_embeddings"]

    def pair_that_turns(times):
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(32.0)), 0)
    high = min(math.ceil(pair_that_turns(1.0)), dim - 1)
    ramp = [min(max((i - low) / max(high - low, 0.001), 0.0), 1.0) for i in range(dim // 2)]
    return [f / factor * r + f * (1 - r) for f, r in zip(plain, ramp)], 0.1 * math.log(factor) + 1.0


def rotate(x, position, table):
    """One vector `[head_dim]` at one position; channels past the rotated ones stay."""
    angles, scale = table
    half = len(angles)
    out = x.clone()
    for i, angle in enumerate(angles):
        c = math.cos(position * angle) * scale
        s = math.sin(position * angle) * scale
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return out


def convolve(x, driver, projection, base, side, group, taps):
    """
    `x` `[B, H]`, one block; the kernel's corrections come from `driver` `[B, H]`. `side` 0 before a sublayer, 1 after.
    """
    size, width = x.shape
    out = torch.zeros_like(x)
    for t in range(size):
        delta = (projection @ driver[t]).view(2, taps, width // group)
        for c in range(width):
            for o in range(taps):
                if t - o >= 0:
                    out[t, c] += (base[side, o, c] + delta[side, o, c // group]) * x[t - o, c]
    return out


def draft_hidden_states(tensors, config, features, block):
    """
    Final hidden states `[B, H]` of one block.

    Args:
        tensors (`dict`): The published tensors by name.
        config (`dict`): The published config.json, flat.
        features (`torch.Tensor`): `[S, L * H_t]`, the target's features of tokens 0..S-1.
        block (`torch.Tensor`): `[B, H]`, embeddings of anchor and masks; the anchor is token S.
    """
    eps = config["rms_norm_eps"]
    theta = config["rope_theta"]
    dim = config["head_dim"]
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    v_dim = config.get("v_head_dim", dim)
    v_scale = config.get("attention_value_scale", 1.0)
    table = frequencies(config, theta)
    context_table = frequencies(config, config.get("backbone_rotary_base", theta))
    context = rms_norm(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    past = len(features)
    size = len(block)
    hidden = block * config.get("input_embedding_scale", 1.0)
    taps = config.get("conv_kernel_size")
    group = config.get("conv_group_size")

    def project(x, prefix, name):
        bias = tensors.get(f"{prefix}{name}.bias")
        y = x @ tensors[f"{prefix}{name}.weight"].T
        return y if bias is None else y + bias

    def around(sublayer, x, prefix):
        if taps is None:
            return sublayer(x)
        kernel = (tensors[f"{prefix}.kernel_projection.weight"], tensors[f"{prefix}.base_kernel"])
        y = sublayer(convolve(x, x, *kernel, 0, group, taps))
        return convolve(y, x, *kernel, 1, group, taps)

    for layer in range(config["num_hidden_layers"]):
        p = f"layers.{layer}.self_attn."
        sliding = config["layer_types"][layer] == "sliding_attention"
        causal = config.get("is_causal", sliding)
        sinks = tensors.get(f"{p}attention_sink_bias")

        def attention(x, p=p, sliding=sliding, causal=causal, sinks=sinks):
            source = torch.cat([context, x])
            keys = project(source, p, "k_proj").view(past + size, kv_heads, dim)
            values = project(source, p, "v_proj").view(past + size, kv_heads, v_dim) * v_scale
            queries = project(x, p, "q_proj").view(size, heads, dim)
            attended = torch.zeros(size, heads, v_dim, dtype=x.dtype)
            for slot in range(size):
                for head in range(heads):
                    q = rotate(rms_norm(queries[slot, head], tensors[f"{p}q_norm.weight"], eps), past + slot, table)
                    scores = []
                    seen = []
                    for j in range(past + size):
                        if causal and j > past + slot:
                            continue
                        if sliding and past + slot - j >= config["sliding_window"]:
                            continue
                        k = rms_norm(keys[j, head * kv_heads // heads], tensors[f"{p}k_norm.weight"], eps)
                        k = rotate(k, j, context_table if j < past else table)
                        scores.append(q @ k / math.sqrt(dim))
                        seen.append(j)
                    if sinks is not None:
                        scores.append(sinks[head])
                    weights = torch.stack(scores).softmax(0)
                    attended[slot, head] = sum(w * values[j, head * kv_heads // heads] for w, j in zip(weights, seen))
            return project(attended.reshape(size, -1), p, "o_proj")

        def mlp(x, m=f"layers.{layer}.mlp."):
            gate = x @ tensors[f"{m}gate_proj.weight"].T
            up = x @ tensors[f"{m}up_proj.weight"].T
            return (gate * torch.sigmoid(gate) * up) @ tensors[f"{m}down_proj.weight"].T

        x = rms_norm(hidden, tensors[f"layers.{layer}.input_layernorm.weight"], eps)
        hidden = hidden + around(attention, x, f"layers.{layer}.attention_conv")
        x = rms_norm(hidden, tensors[f"layers.{layer}.post_attention_layernorm.weight"], eps)
        hidden = hidden + around(mlp, x, f"layers.{layer}.mlp_conv")
    return rms_norm(hidden, tensors["norm.weight"], eps)


def draft_tokens(tensors, config, hidden, head, anchor, embedding=None):
    """
    The drafted tokens of one block, greedy.

    Args:
        hidden (`torch.Tensor`): `[B, H]`, final hidden states.
        head (`torch.Tensor`): `[V, H]`, the target's head.
        anchor (`int`): The token of slot 0.
        embedding (`torch.Tensor`): `[V, H]`, the target's.
    """
    drafting = hidden[1:]
    if config.get("anchor_first"):
        drafting = hidden[:-1] if "gru_hidden_dim" in config else hidden
    tokens = [anchor]
    for _ in drafting:
        tokens.append(int(scores_after(tensors, config, drafting, head, embedding, tokens).argmax()))
    return tokens[1:]


def scores_after(tensors, config, hidden, head, embedding, tokens):
    """
    `[V]` over the target's ids: the scores of the token after `tokens`, anchor first, from the states `[n, H]` of all
    slots that draft.
    """
    h = hidden[len(tokens) - 1]
    own = "d2t" in tensors
    logits = (tensors["lm_head.weight"] if own else head) @ h * config.get("output_multiplier", 1.0)
    ids = torch.arange(len(logits)) + (tensors["d2t"] if own else 0)
    cap = config.get("final_logit_softcapping")
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if config.get("markov_rank"):
        state = torch.zeros(config["markov_rank"], dtype=h.dtype)
        for before, states in zip(tokens, hidden):
            bias, state = markov_bias(tensors, config, state, before, states)
        logits = logits + bias
    if config.get("gru_hidden_dim"):
        state = torch.zeros(config["gru_hidden_dim"], dtype=h.dtype)
        for before in tokens:
            state = gru_step(tensors, state, embedding[before])
        if len(tokens) > config["pure_draft_prefix_len"]:
            mixed = tensors["embed_proj.0.weight"] @ torch.cat([h, state])
            logits = logits + tensors["embed_proj.2.weight"] @ (mixed * torch.sigmoid(mixed))
    if config.get("selector_rank"):
        prefix = "candidate_selector."
        query = tensors[f"{prefix}predecessor_codebook"][tokens[-1]]
        query = query * (tensors[f"{prefix}hidden_projection.weight"] @ h)
        excluded = torch.full_like(logits, -math.inf)
        excluded[logits.topk(config["selector_top_k"]).indices] = 0.0
        logits = logits + tensors[f"{prefix}successor_codebook"][ids] @ query + excluded
    return torch.full((len(head),), -math.inf, dtype=logits.dtype).scatter(0, ids, logits)


def markov_bias(tensors, config, state, before, h):
    """DSpark's bias of every token after the token `before`, and the next state of its recurrence."""
    rank = config["markov_rank"]
    kind = config["markov_head_type"]
    w = tensors["markov_head.markov_w1.weight"][before]
    if kind == "gated":
        gate = tensors["markov_head.gate_proj.weight"] @ torch.cat([h, w]) + tensors["markov_head.gate_proj.bias"]
        w = w / (1 + torch.exp(-gate))
    elif kind == "rnn":
        z = (
            tensors["markov_head.joint_proj.weight"] @ torch.cat([state, w, h])
            + tensors["markov_head.joint_proj.bias"]
        )
        keep = 1 / (1 + torch.exp(-z[:rank]))
        state = keep * state + (1 - keep) * torch.tanh(z[rank : 2 * rank])
        w = torch.tanh(z[2 * rank :])
    return tensors["markov_head.markov_w2.weight"] @ w, state


def gru_step(tensors, state, x):
    """One step of a GRU without biases, gate by gate."""
    width = len(state)
    of_input = tensors["prefix_gru.weight_ih_l0"] @ x
    of_state = tensors["prefix_gru.weight_hh_l0"] @ state
    reset, update = (torch.sigmoid((of_input + of_state)[i * width :][:width]) for i in range(2))
    candidate = torch.tanh(of_input[2 * width :] + reset * of_state[2 * width :])
    return (1 - update) * candidate + update * state


@torch.no_grad()
def published_loop(draft_hidden, target, config, input_ids, max_new_tokens, stop_ids):
    """
    The published decoding loop for one row, greedy.

    Args:
        draft_hidden (`callable`): `(features [S, L * H_t], block [B, H]) -> [B, H]`.

    Returns:
        The text, and the committed tokens of each verification, not cut at a stop token.
    """
    layer_ids = config["target_layer_ids"]
    size = config["block_size"]
    mask = config["mask_token_id"]
    captured = {}
    handles = [
        target.model.layers[i].register_forward_hook(
            lambda module, args, output, i=i: captured.__setitem__(i, output if torch.is_tensor(output) else output[0])
        )
        for i in layer_ids
    ]

    def forward(ids, start, cache):
        positions = torch.arange(start, start + ids.shape[1])[None]
        logits = target(ids, position_ids=positions, **{CACHE_NAME: cache}, use_cache=True).logits
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
