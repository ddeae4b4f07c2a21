"""Any prompt, padding, processor, length, block size and stop token: the text is what the target writes alone."""

import contextlib
import random
from collections import Counter
from functools import cache
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.pairs import VOCAB, make_draft, make_target
from support.scripted_draft import scripted
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from dflash_hf.decoding import strategy
from dflash_hf.decoding.sizes import Throughput


# By slots, with windows, without rotary positions, by replay.
FAMILIES = ("qwen3", "qwen3", "gemma3", "gemma3", "gpt2", "qwen3_5_text", "lfm2")
COMMITTED = Counter()


@cache
def target_of(family, dtype):
    return make_target(family, dtype, attn=None)


MARKOV, DOMINO = {"markov_rank": 6}, {"gru_hidden_dim": 9, "emb_dim": 7}
SELECTOR = {"selector_rank": 6, "selector_top_k": 5}
HEADS = {
    "no head": {},
    "selector": {**SELECTOR, "conv_kernel_size": 2, "conv_group_size": 4},
    "anchor first": {"sample_from_anchor": True},
    "Markov": {**MARKOV, "sample_from_anchor": True},
    "gated": {**MARKOV, "markov_head_type": "gated"},
    "rnn": {**MARKOV, "markov_head_type": "rnn", "enable_confidence_head": True, "sample_from_anchor": True},
    "Domino": {**DOMINO, "pure_draft_prefix_len": 1},
    "Domino, shifted": {**DOMINO, "sample_from_anchor": True},
}
# Of drafters with a head.
FORMS = {
    "as it is": {},
    "reduced": {"draft_vocab_size": VOCAB - 10},
    "windows": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
}


@cache
def drafter(family, dtype, block_size, head="no head", form="as it is"):
    draft = make_draft(target_of(family, dtype), block_size, **HEADS[head], **FORMS[form])
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.startswith(("markov_head.", "prefix_gru.", "embed_proj.", "candidate_selector.")):
                parameter += 0.3 * torch.randn(parameter.shape, generator=random)
    return draft


class EveryOther(LogitsProcessor):
    """A processor of somebody's own, which keeps count of its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % VOCAB] += 3.0
        scores[:, int(input_ids[0, -1]) % VOCAB] -= 2.0
        return scores


class StopWhen(StoppingCriteria):
    """A criterion of somebody's own: a token that any row may write, seen so many times."""

    def __init__(self, token, times):
        self.token, self.times = token, times

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids == self.token).sum(dim=1) >= self.times


PROCESSORS = st.sampled_from(
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 6},
        {"suppress_tokens": [3, 4, 5]},
        {"bad_words_ids": [[7], [8, 9]]},
        {"forced_eos_token_id": 11},
        {"sequence_bias": [[[12], 4.0]]},
        {"exponential_decay_length_penalty": (4, 1.2)},
        {"logits_processor": EveryOther},
        {"prefill_chunk_size": 3},
        {"renormalize_logits": True},
    ]
)


@st.composite
def cases(draw):
    longest = draw(st.integers(1, 12))
    rows = draw(st.integers(1, 3))
    pads = [0] + [draw(st.integers(0, longest - 1)) for _ in range(rows - 1)]
    return {
        "family": draw(st.sampled_from(FAMILIES)),
        "prompt": torch.tensor([[draw(st.integers(2, VOCAB - 2)) for _ in range(longest)] for _ in range(rows)]),
        "pads": pads,
        "block_size": draw(st.sampled_from([16, 8, 4, 3, 2])),
        "tree": draw(st.sampled_from([None, None, 1, 6, 20])),
        "verified": draw(st.sampled_from([16, 16, None, None, None, 5, 2])),  # `None`: sizes are chosen
        "any_size": draw(st.sampled_from([True, True, False])),
        "sampled": draw(st.booleans()),
        "max_new_tokens": draw(st.sampled_from([30, 20, 30, 9, 3, 2, 1])),
        "error_rate": draw(st.sampled_from([0.0, 0.1, 0.3, 0.7])),
        "stops": draw(st.sampled_from([0, 0, 0, 1, 3])),
        "processor": draw(PROCESSORS),
        "scores": draw(st.booleans()),
        "criterion": draw(st.sampled_from([None, None, None, None, (5, 1), (9, 2)])),
        "seed": draw(st.integers(0, 10_000)),
    }


@st.composite
def cases_of_heads(draw):
    """How other families go back is no matter of the head."""
    head, form = draw(st.sampled_from(list(HEADS)[1:])), draw(st.sampled_from(list(FORMS)))
    return {**draw(cases()), "family": "qwen3", "head": head, "form": form}


@contextlib.contextmanager
def at_any_size(seed):
    """Where sizes are chosen, in every round another one, drawn at random: none, a part of what is drafted, or all."""
    draws = random.Random(seed)
    never_rests = mock.patch.object(Throughput, "note", lambda *args, **kwargs: None)
    with never_rests, mock.patch.object(strategy, "worth", lambda gains, *_: draws.randrange(len(gains))):
        yield


def check(case):
    sampled, pads = case["sampled"], case["pads"]
    # Scores and chances can be compared closely where rounding is far away.
    dtype = torch.float64 if case["scores"] or sampled else torch.float32
    target, prompt = target_of(case["family"], dtype), case["prompt"].clone()
    mask = torch.ones_like(prompt)
    for row, pad in enumerate(pads):
        prompt[row, :pad], mask[row, :pad] = 0, 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": case["max_new_tokens"],
        "do_sample": sampled,
        "return_dict_in_generate": True,
        "output_scores": case["scores"],
    }
    # Stop tokens that really occur, at places chosen by the case.
    if case["stops"]:
        free = target.generate(prompt, **options).sequences[:, prompt.shape[1] :].flatten().tolist()
        options["eos_token_id"] = [free[(case["seed"] * 31 + i * 7) % len(free)] for i in range(case["stops"])]
    if case["stops"] or "exponential_decay_length_penalty" not in case["processor"]:  # that one needs a stop token
        options |= case["processor"]

    def generate(**more):
        own = {}
        torch.manual_seed(case["seed"])
        if "logits_processor" in options:
            own["logits_processor"] = LogitsProcessorList([options["logits_processor"]()])
        if case["criterion"] is not None:
            own["stopping_criteria"] = StoppingCriteriaList([StopWhen(*case["criterion"])])
        return target.generate(prompt, **{**options, **own, **more}), torch.get_rng_state()

    expected, after = generate()
    form = {key: case[key] for key in ("head", "form") if key in case}
    draft = drafter(case["family"], dtype, case["block_size"], **form)
    draft.decoding_config.tree_nodes = case["tree"]
    draft.decoding_config.block_size = case["verified"] and min(case["verified"], case["block_size"])
    ranks = 1 if case["tree"] is None else 3
    draft = scripted(draft, expected.sequences, case["error_rate"], ranks, case["seed"])
    with at_any_size(case["seed"]) if case["any_size"] else contextlib.nullcontext():
        output, ours_after = generate(assistant_model=draft)
    assert torch.equal(output.sequences, expected.sequences)
    assert torch.equal(ours_after, after), "the generator goes on elsewhere"
    for ours, theirs in zip(output.scores or (), expected.scores or (), strict=True):
        # Recurrences are computed in fp32 whatever the dtype is.
        torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=1e-4, equal_nan=True)
    for lengths in output.acceptance_lengths:
        COMMITTED.update(lengths)


ANY = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    print_blob=True,
    phases=[Phase.explicit, Phase.generate],  # a case is small as it is
)


@given(cases())
@settings(ANY, max_examples=100)
def some_cases(case):
    check(case)


def test_texts_are_equal():
    COMMITTED.clear()
    some_cases()
    # Drafts were accepted whole, in part and not at all.
    assert len(COMMITTED) >= 10 and COMMITTED[1] > 20 and sum(COMMITTED[n] for n in range(4, 17)) > 50, COMMITTED


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_texts_are_equal_whatever_the_head(count):
    COMMITTED.clear()
    settings(ANY, max_examples=count)(given(cases_of_heads())(check))()
    assert COMMITTED[1] and max(COMMITTED) >= 4, COMMITTED


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(10))
def test_texts_are_equal_in_many_cases(shard):
    """10,000 cases in ten parts, which may run side by side."""
    COMMITTED.clear()

    @seed(shard)
    @given(cases())
    @settings(ANY, max_examples=1000, derandomize=False, database=None)
    def many_cases(case):
        check(case)

    many_cases()
    assert len(COMMITTED) >= 10 and COMMITTED[1] > 500 and sum(COMMITTED[n] for n in range(4, 17)) > 500, COMMITTED
