"""
With a drafter a target writes what it writes alone, whatever is drafted and however it advances: a pairwise matrix,
and hypothesis over the same axes. Drafters know the text by what they read of it: with wrong features, positions or
masks nothing is accepted.

`DFLASH_MINUTES` says how long the slow tests of decoding run; default: ten.
"""

import contextlib
import copy
import os
import random
import time
from collections import Counter
from functools import cache
from itertools import combinations
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.calls import Call, Collected, EveryOther, StopAfter, difference, shape_of
from support.heads import EVERY
from support.pairs import make_draft, make_target
from support.recurrent_head import RecurrentHead, use_heads
from support.rows import ragged_prompts
from support.scripted_draft import RecognisingDraft, recognising, scripted
from transformers import DynamicCache

from dflash_hf.decoding import slots
from dflash_hf.decoding.adaptive import AdaptiveLength, DraftStatistics
from dflash_hf.decoding.policies import DraftPolicy


MINUTES = float(os.environ.get("DFLASH_MINUTES", 10))
KNOWN = 5  # columns of a cache that is handed in
STOPS = {"stops": 3}  # so many tokens of the free text end it
ROWS = {"one row": (1, False), "rows": (3, False), "padded rows": (4, True)}
RULES = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "warped": {"do_sample": True, "top_k": 9, "top_p": 0.9, "temperature": 0.7},
    "stops": STOPS,
    "sampled, stops": {"do_sample": True, "top_k": 0, **STOPS},
    "penalty": {"repetition_penalty": 1.3},
    "sampled, n-grams": {"do_sample": True, "no_repeat_ngram_size": 2},
    "minimum": {"min_new_tokens": 12, **STOPS},
    "bias": {"sequence_bias": [[[11], 2.0], [[5, 6], -3.0]], "bad_words_ids": [[5, 9], [17]]},
    "decay": {"exponential_decay_length_penalty": (5, 1.3), **STOPS},
    "ends": {"forced_eos_token_id": 3, "begin_suppress_tokens": [4, 6, 8]},
    "scores": {"output_scores": True, "output_logits": True},
    "processor": {"logits_processor": lambda call: [EveryOther()]},
    "criterion": {"stopping_criteria": lambda call: [StopAfter(17)]},
    "streamer": {"streamer": lambda call: Collected()},
}
IN_STEP = {"scores", "processor", "criterion"}  # rows are followed together: plainly
DRAFTS = {
    "block": {},
    "part of a block": {"block_size": 3},
    "one node": {"tree_nodes": 1},
    "tree": {"tree_nodes": 20},  # more than the spare slots of a ring
    "fastest": {"block_size": None},
    "any size": {"block_size": None},  # in every round another one, drawn at random
    "anything": {},  # a block, a tree, nothing, or tokens from anywhere
}
EXACT = {"block", "part of a block"}  # drafts whose acceptance is known beforehand
FAMILIES = {
    "qwen3": "slots",
    "gemma3": "slots",  # rings of slots
    "gpt_oss": "slots",  # and attention sinks, in eager attention
    "gpt2": "slots",  # a table of positions
    "deepseek_v3": "slots",  # latent attention, experts
    "qwen3_next": "replay",
    "lfm2": "replay",
    "jamba": "plain",
}
SOME_FAMILIES = list(FAMILIES)
EAGER = {"gpt_oss", "mpt", "bloom"}  # in eager attention upstream gives NaN for padded rows in double precision
FAMILIES |= dict.fromkeys(("llama", "gemma4", "mistral_sliding", "qwen3_moe", "opt", "mpt", "gpt_neox"), "slots")
FAMILIES |= dict.fromkeys(("qwen3_5_text", "falcon_h1"), "replay") | {"bloom": "plain"}
HEADS = {"none": {}, "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}}
SOME_HEADS = ["few tokens", "selector", "recurrent over few", "gated", "domino", "late"]
AXES = {
    "rows": list(ROWS),
    "rules": list(RULES),
    "draft": list(DRAFTS),
    "family": SOME_FAMILIES,
    "head": [*HEADS, *SOME_HEADS],
    "window": [None, 7],  # of the drafter
    "prompt": ["ids", "embeds", "chunks", "cache"],
    "errors": [0.0, 0.2, 0.7],  # the part of all places at which a drafter drafts another token
}


def pairwise(axes: dict[str, list]) -> list[dict]:
    """Few cases in which every pair of values of two axes occurs."""
    missing = set()
    for a, b in combinations(axes, 2):
        missing |= {frozenset({(a, x), (b, y)}) for x in axes[a] for y in axes[b]}
    chosen = []
    draws = random.Random(0)
    while missing:
        case = dict(min(missing, key=lambda pair: sorted(map(str, pair))))
        for name in draws.sample(sorted(axes), len(axes)):
            if name not in case:  # what adds most pairs to those chosen so far
                new = [sum(frozenset({(name, x), item}) in missing for item in case.items()) for x in axes[name]]
                case[name] = draws.choice([x for x, pairs in zip(axes[name], new) if pairs == max(new)])
        missing -= {frozenset(pair) for pair in combinations(case.items(), 2)}
        chosen.append({name: case[name] for name in axes})
    return chosen


@cache
def target_of(family: str, dtype: torch.dtype):
    return make_target(family, dtype, attn=None)


@pytest.fixture(autouse=True)
def heads(monkeypatch):
    use_heads(monkeypatch, RecurrentHead)
    monkeypatch.setattr(slots, "MIN_RING_MARGIN", 12)  # rings of slots go round several times in a short text


class Anything(DraftPolicy):
    """In every round something else, drawn at random."""

    draws = random.Random(0)
    max_draft = 40

    def get_candidates(self, state):
        most = state.remaining_tokens - 1
        kind = self.draws.randrange(5)
        if most < 1 or kind == 0:
            return self.no_draft(state)
        if kind == 1:  # depends on the text so far
            copied = state.sequences[:, -self.draws.randint(1, 9) :][:, :most]
            return self.copied(state, copied.tolist())
        if kind == 2 and self.call.capabilities.trees:
            return self.draft_tree(state, self.draws.randint(1, 40))
        return self.draft_block(state, self.draws.randint(1, 5))


@contextlib.contextmanager
def policy_of(case: dict, drafter):
    with contextlib.ExitStack() as patches:
        if case["draft"] == "anything":
            patches.enter_context(mock.patch.object(drafter.decoding_config, "policy", Anything))
        elif case["draft"] == "any size":
            draws = random.Random(case["seed"])
            any_length = lambda policy, expected, *_: draws.randrange(len(expected))  # noqa: E731
            patches.enter_context(mock.patch.object(AdaptiveLength, "choose_length", any_length))
            patches.enter_context(mock.patch.object(DraftStatistics, "_back_off", lambda *_: None))
            patches.enter_context(mock.patch.object(DraftStatistics, "speed", 0.0))  # any copy pays
        yield


def call_of(case: dict) -> Call:
    """What is asked for, of the target."""
    rules = dict(RULES[case["rules"]])
    rows, padded = ROWS[case["rows"]]
    if rows > 1:
        rules.pop("streamer", None)
    double = "scores" in case["rules"] or "do_sample" in rules or FAMILIES[case["family"]] != "slots"
    dtype = torch.float64 if double and case["family"] not in EAGER else torch.float32
    target = target_of(case["family"], dtype)
    inputs, pads = ragged_prompts(rows, case["longest"], case["seed"])
    if not padded:
        inputs["input_ids"] = (inputs["input_ids"][:1] + torch.arange(rows)[:, None]).clamp(2, 94)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        pads = [0] * rows
    ids = inputs["input_ids"]
    if case["prompt"] == "embeds" and case["family"] in SOME_FAMILIES:  # some others take none
        inputs["inputs_embeds"] = target.get_input_embeddings()(ids)
    elif case["prompt"] == "chunks":
        rules["prefill_chunk_size"] = 3

    def read_before(call: Call):
        past = DynamicCache(config=target.config)
        target(ids[:, :KNOWN], past_key_values=past, use_cache=True)
        return past

    if case["prompt"] == "cache" and not padded:
        rules["past_key_values"] = read_before
    options = {"max_new_tokens": case["new"], "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    stops = rules.pop("stops", 0)
    call = Call(target, inputs, pads, options, case["seed"])
    if stops:
        free = call(do_sample="do_sample" in rules).sequences[:, case["longest"] :].flatten().tolist()
        options["eos_token_id"] = [free[(case["seed"] * 31 + 7 * i) % len(free)] for i in range(1, stops + 1)]
    options |= rules
    return call


def drafter_of(case: dict, call: Call, sequences: torch.LongTensor):
    """A drafter that knows the text: by its context, if it has no head and sees all of it."""
    ranks = 1 if case["draft"] in EXACT else 3
    if case["head"] in HEADS and "past_key_values" not in call.options:
        options = {"error_rate": case["errors"], "seed": case["seed"], "window": case["window"]}
        draft = recognising(call.target, call.texts(sequences), **options, **HEADS[case["head"]])
    else:
        make = EVERY[case["head"]] if case["head"] in EVERY else make_draft
        draft = make(call.target, block_size=6, **HEADS.get(case["head"], {}))
        draft = scripted(draft, sequences, case["errors"], ranks, case["seed"])
    settings = {"block_size": draft.config.max_block_tokens, "window": case["window"], **DRAFTS[case["draft"]]}
    for name, value in settings.items():
        setattr(draft.decoding_config, name, value)
    return draft


def expected_lengths(draft, call: Call, sequences: torch.LongTensor) -> list[list[int]]:
    """What each verification of a block commits: drafts are right up to the first place where the script is wrong."""
    draft_vocabulary = draft.target_ids(torch.arange(draft.config.draft_vocab_size or draft.config.vocab_size))
    scripted_tokens = draft.likely[:, :, 0]
    can_be_drafted = torch.isin(scripted_tokens, draft_vocabulary)
    right = torch.where(can_be_drafted, scripted_tokens, draft_vocabulary[0]) == draft.texts  # [T, S]
    size = draft.decoding_config.block_size or draft.config.max_block_tokens
    ends = call.options.get("eos_token_id", ())
    longest = call.inputs["input_ids"].shape[1]
    expected = []
    for row, new in enumerate(sequences[:, longest:].tolist()):
        total = next((i + 1 for i, token in enumerate(new) if token in ends), len(new))
        first = longest
        if isinstance(draft, RecognisingDraft):  # whose script has no padding
            first -= call.pads[row]
        lengths = []
        done = 1
        while done < total:
            count = 1
            while count < min(size, total - done) and right[row, first + done - 1 + count]:
                count += 1
            lengths.append(count)
            done += count
        expected.append(lengths)
    return expected


def goes_on(call: Call, sequences: torch.LongTensor, cache, draft) -> None:
    """A cache that comes back continues the text, with a drafter or without, as if there were no cache."""
    more = torch.tensor([[5, 6, 7]]).expand(len(sequences), -1)
    mask = call.inputs["attention_mask"]
    ids = torch.cat([sequences, more], dim=1)
    mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    expected = call.target.generate(ids, **options)
    for assistant in (None, draft):
        options["past_key_values"] = copy.deepcopy(cache)
        assert torch.equal(call.target.generate(ids, **options, assistant_model=assistant), expected)


def check(case: dict) -> list[list[int]]:
    """Text, generator, what is listed, cache and acceptance; returns the acceptance lengths."""
    call = call_of(case)
    plain = call()
    draft = drafter_of(case, call, plain.sequences)
    session = FAMILIES[case["family"]]
    rows = len(call.pads)
    before = shape_of(call.target, draft)
    with policy_of(case, draft):
        drafted = call(draft)
        change = difference(plain, drafted)
        assert change is None, change
        if not call.options.get("eos_token_id") and session != "plain":  # Jamba's own turns differ from its own texts
            goes_on(call, plain.sequences, drafted.output.past_key_values, draft)
    assert shape_of(call.target, draft) == before, "something is left behind"
    if session == "plain" or rows > 1 and case["rules"] in IN_STEP:
        assert drafted.lengths == [[]] * rows
        return []
    if case["draft"] in EXACT:
        assert drafted.lengths == expected_lengths(draft, call, plain.sequences)
    return drafted.lengths


NUMBERED = [{**case, "seed": number, "longest": 11, "new": 28} for number, case in enumerate(pairwise(AXES), 1)]


@pytest.mark.parametrize("case", NUMBERED, ids=lambda case: ", ".join(map(str, list(case.values())[:8])))
def test_text_is_the_targets_own(case):
    lengths = check(case)
    if lengths and case["errors"] < 0.5 and case["draft"] != "fastest" and "few" not in case["head"]:
        assert max(sum(lengths, []), default=2) > 1, "drafts that are never accepted prove nothing"


CASES = st.fixed_dictionaries(
    {name: st.sampled_from(values) for name, values in AXES.items()}
    | {"family": st.sampled_from(list(FAMILIES)), "head": st.sampled_from([*HEADS, *EVERY])}
    | {"seed": st.integers(0, 10_000), "longest": st.integers(6, 14), "new": st.sampled_from([30, 12, 3, 2, 1])}
)
ANY = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    print_blob=True,
    phases=[Phase.explicit, Phase.generate],  # a case is small as it is
)


@given(CASES)
@settings(ANY, max_examples=25)
def test_text_is_the_same_in_any_case(case):
    check(case)


@pytest.mark.slow
def test_text_is_the_same_in_many_cases():
    began = time.monotonic()
    number = 0
    seen = Counter()

    def counted(case):
        nonlocal number
        number += 1
        seen.update(length for lengths in check(case) for length in lengths)

    while time.monotonic() < began + 60 * MINUTES:
        seed(int(began) + number)(
            settings(ANY, max_examples=50, derandomize=False, database=None)(given(CASES)(counted))
        )()
    print(f"{number} cases; committed: {sorted(seen.items())}")
    assert {*range(1, 7)} <= {*seen} and seen[1] > number and sum(seen[n] for n in range(4, 17)) > number
