"""
Loops that decode with a DFlash drafter without this package's engine, to compare with it: `generate` of transformers,
and a loop of the shape of the reference implementation, z-lab/dflash.

Each is called with a target, a drafter that knows the text ([`ScriptedDraft`]) and the arguments of `generate`, and
returns the text `[R, S]`.
"""

import torch
from random_pairs import native_oracle
from transformers import DynamicCache

from dflash_hf.modeling.candidates_dflash import CACHE_NAME, DFlashCandidateGenerator


def native_loop(target, draft, inputs: dict) -> torch.LongTensor:
    """Transformers' own DFlash, `speculation_type="dflash"`. It takes tokens from hidden states; the oracle's here."""
    with native_oracle([draft.likely[0, :, 0]], inputs["input_ids"].tolist()):
        return target.generate(**inputs, assistant_model=draft, speculation_type="dflash")


def candidates_loop(target, draft, inputs: dict) -> torch.LongTensor:
    """Transformers' own loop with a [`DFlashCandidateGenerator`]: how a drafter decodes without the package."""
    ids = inputs["input_ids"]
    draft.begin(ids)
    generator = DFlashCandidateGenerator(draft, target, ids.shape[1] + inputs["max_new_tokens"])
    return target.generate(**inputs, assistant_model=generator)


@torch.inference_mode()
def cropping_loop(target, draft, inputs: dict) -> torch.LongTensor:
    """
    Decode one row greedily as the reference implementation does: ordinary caches that grow and are cropped, whole
    blocks, features from `output_hidden_states`. The host waits once in a round. Of the arguments of `generate` it
    reads `input_ids` and `max_new_tokens`; nothing else ends the text.
    """
    ids = inputs["input_ids"]
    length = ids.shape[1] + inputs["max_new_tokens"]
    size = draft.config.block_size
    layers = draft.config.target_layer_ids
    head = target.get_output_embeddings()
    cache = DynamicCache(config=target.config)
    draft_cache = DynamicCache()
    draft.begin(ids)  # the oracle follows this prompt

    def forward(tokens: torch.LongTensor) -> tuple[torch.LongTensor, torch.Tensor]:
        """The target's choice after each token `[1, n]`, and the features `[1, n, L * H]`."""
        output = target(tokens, **{CACHE_NAME: cache}, use_cache=True, output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer + 1] for layer in layers], dim=-1)
        return output.logits.argmax(dim=-1), features

    # 1. The prompt, and the first token after it.
    choice, features = forward(ids)
    text = torch.cat([ids, choice[:, -1:]], dim=1)
    while text.shape[1] < length:
        # 2. Draft a block behind the last token, the anchor.
        start = text.shape[1] - 1
        block = torch.full((1, size), draft.config.mask_token_id, device=ids.device)
        block[:, 0] = text[:, -1]
        positions = torch.arange(start - features.shape[1], start + size, device=ids.device)[None]
        noise = draft.embed(target, block)
        hidden = draft(noise, features, position_ids=positions, past_key_values=draft_cache).last_hidden_state
        draft_cache.crop(-size)
        block[:, 1:] = draft.draft_logits(hidden[:, 1:], head).argmax(dim=-1)
        # 3. Verify it, and keep what the target agrees with.
        choice, features = forward(block)
        accepted = int((block[:, 1:] == choice[:, :-1]).long().cumprod(dim=1).sum())
        text = torch.cat([text, block[:, 1 : accepted + 1], choice[:, accepted : accepted + 1]], dim=1)
        if accepted + 1 < size:
            cache.crop(-(size - accepted - 1))
        features = features[:, : accepted + 1]
    return text[:, :length]
