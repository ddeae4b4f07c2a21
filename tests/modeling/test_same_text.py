"""One matrix: with a drafter a target writes what it writes alone, whatever is drafted and however it advances."""

from collections import Counter
from functools import cache
from itertools import combinations, product

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import ragged_prompts
from support.scripted_draft import scripted

from dflash_hf.modeling.cache_dflash import SlotCache
from dflash_hf.modeling.generation_dflash import Strategy


ROWS = {"one row": (1, False), "rows": (3, False), "padded rows": (4, True)}
RULES = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "top-k": {"do_sample": True, "top_k": 9, "top_p": 0.9, "temperature": 0.7},
    "penalty": {"repetition_penalty": 1.3},
    "sampled, penalty": {"do_sample": True, "no_repeat_ngram_size": 2},
}
DRAFTS = {
    "block": {},
    "part of a block": {"block_size": 3},
    "tree": {"tree_nodes": 20},  # more than the spare slots of a ring
    "fastest": {"block_size": None},
}
SESSIONS = {"slots": "qwen3", "windows": "gemma3", "replay": "qwen3_next", "window of the drafter": "qwen3"}
LAYERS = ("package", "core")
AXES = (ROWS, RULES, DRAFTS, SESSIONS, LAYERS)


def pairwise(*axes):
    """Few combinations in which every pair of values of two axes occurs."""
    missing = {((i, a), (j, b)) for i, j in combinations(range(len(axes)), 2) for a in axes[i] for b in axes[j]}
    chosen = []
    while missing:
        best = max(product(*axes), key=lambda case: len(missing & {*combinations(enumerate(case), 2)}))
        missing -= {*combinations(enumerate(best), 2)}
        chosen.append(best)
    return chosen


@cache
def target_of(family):
    return make_target(family, torch.float64 if family == "qwen3_next" else torch.float32)


@pytest.fixture(autouse=True)
def small_rings(monkeypatch):
    """Rings of slots go round several times in a short text."""
    monkeypatch.setattr(SlotCache, "SPARE", 12)


@pytest.mark.parametrize(("rows", "rules", "draft", "session", "layer"), pairwise(*AXES))
def test_text_is_the_targets_own(monkeypatch, rows, rules, draft, session, layer):
    target = target_of(SESSIONS[session])
    drafter = make_draft(target, block_size=6)
    for name, value in DRAFTS[draft].items():
        setattr(drafter.decoding_config, name, value)
    drafter.decoding_config.window = 5 if session == "window of the drafter" else None
    if layer == "core":
        monkeypatch.setattr(type(drafter), "strategy", Strategy)
    number, padded = ROWS[rows]
    inputs, _ = ragged_prompts(number)
    if not padded:
        inputs = {name: value[:1].expand(number, -1).contiguous() for name, value in inputs.items()}
        inputs["input_ids"] = inputs["input_ids"].clone()
        inputs["input_ids"][:, 0] += torch.arange(number)
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True, **RULES[rules]}
    torch.manual_seed(1)
    alone = target.generate(**inputs, **options)
    after = torch.get_rng_state()
    assert len(set(alone.sequences[:, 11:].flatten().tolist())) > 12, "a constant text proves nothing"
    drafter = scripted(drafter, alone.sequences, error_rate=0.2, ranks=2)
    torch.manual_seed(1)
    output = target.generate(**inputs, **options, assistant_model=drafter)
    assert torch.equal(output.sequences, alone.sequences)
    assert torch.equal(torch.get_rng_state(), after)
    for ours, theirs in zip(output.past_key_values.layers, alone.past_key_values.layers, strict=True):
        if getattr(theirs, "keys", None) is not None and number == 1:
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-3, rtol=1e-3)
    if layer == "core" and session == "replay":
        assert output.acceptance_lengths == [[]] * number  # plainly
        return
    for lengths in output.acceptance_lengths:
        assert sum(lengths) == 39
    if draft != "fastest":
        seen = Counter(length for lengths in output.acceptance_lengths for length in lengths)
        assert len(seen) >= 2 and max(seen) > 2
