"""
Losslessness, over everything that a call may combine: with a drafter, a target returns what it returns alone.

A `Case` is one call, with a value for each axis. `check` decodes it twice, without a drafter and with one, and
compares text, generator, scores, cache and, where they can be known beforehand, the acceptance lengths. Cases are

- chosen by `pairwise`, so that any two values of two axes occur together in one (`test_text_is_the_targets_own`);
- drawn by hypothesis, with more families, heads and lengths (the other two tests).

The drafters are scripted: they know the target's text, and err at places that are known (`support.scripted_draft`).
Some recognise it by the features, positions and masks that they read: if one of these is wrong, nothing is accepted.

`tests/README.md` explains how to add a value or an axis, and how to repeat one case. `DFLASH_MINUTES` sets how long
the slow tests of decoding run; default: ten.
"""

import contextlib
import copy
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
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


# ------------------------------------------------------------------------------------------------------------ the axes


@dataclass(frozen=True)
class Case:
    """
    One call of `generate`, and the drafter that it is made with.

    Attributes:
        rows (`str`): How many prompts there are, and whether their lengths differ: a key of `ROWS`.
        rules (`str`): How tokens are chosen, where a text ends, and what else is returned: a key of `RULES`.
        draft (`str`): What each round verifies: a key of `DRAFTS`.
        family (`str`): The target's architecture: a key of `SESSIONS`.
        head (`str`): The drafter's layers and token head: a key of `LAYERS` or of `support.heads.EVERY`.
        window (`int`, *optional*): How much of the text the drafter sees: `decoding_config.window`.
        prompt (`str`): How the target gets the prompt: as ids, as embeddings, in chunks, or with a cache that already
            holds its first tokens. One of `PROMPTS`.
        error_rate (`float`): The share of all places at which the drafter drafts another token than the target's.
        seed (`int`): The seed of the prompts, of the drafter's errors and of samples.
        prompt_length (`int`): Columns of the prompts, padding included.
        new_tokens (`int`): The limit of the call, `max_new_tokens`.
    """

    rows: str
    rules: str
    draft: str
    family: str
    head: str
    window: int | None
    prompt: str
    error_rate: float
    seed: int
    prompt_length: int
    new_tokens: int

    @property
    def num_rows(self) -> int:
        return ROWS[self.rows]

    @property
    def is_padded(self) -> bool:
        return self.rows == "padded rows"

    @property
    def session(self) -> str:
        return SESSIONS[self.family]

    @property
    def continues_cache(self) -> bool:
        """Whether a cache is handed in. With padded prompts none is: the first columns of a row may be padding."""
        return self.prompt == "cache" and not self.is_padded

    @property
    def is_sampled(self) -> bool:
        return "do_sample" in RULES[self.rules]

    @property
    def is_drafted(self) -> bool:
        """Whether any round drafts; the other calls are decoded without the drafter."""
        return self.session != "plain" and not (self.num_rows > 1 and self.rules in DRAFTED_FOR_ONE_ROW)


# Number of prompts. "padded rows" have different lengths, and padding on the left.
ROWS = {"one row": 1, "rows": 3, "padded rows": 4}

# Arguments of `generate`. A function gets the call and makes what belongs to one run of it, such as a streamer.
RULES = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "warped": {"do_sample": True, "top_k": 9, "top_p": 0.9, "temperature": 0.7},
    "stops": {},
    "sampled, stops": {"do_sample": True, "top_k": 0},
    "penalty": {"repetition_penalty": 1.3},
    "sampled, n-grams": {"do_sample": True, "no_repeat_ngram_size": 2},
    "minimum": {"min_new_tokens": 12},
    "bias": {"sequence_bias": [[[11], 2.0], [[5, 6], -3.0]], "bad_words_ids": [[5, 9], [17]]},
    "decay": {"exponential_decay_length_penalty": (5, 1.3)},
    "ends": {"forced_eos_token_id": 3, "begin_suppress_tokens": [4, 6, 8]},
    "scores": {"output_scores": True, "output_logits": True},
    "processor": {"logits_processor": lambda call: [EveryOther()]},
    "criterion": {"stopping_criteria": lambda call: [StopAfter(17)]},
    "streamer": {"streamer": lambda call: Collected()},
}
# Under these rules the text ends early: some of its own tokens are end tokens (`end_tokens`).
WITH_END_TOKENS = {"stops", "sampled, stops", "minimum", "decay"}
NUM_END_TOKENS = 3
DRAFTED_FOR_ONE_ROW = {"scores", "processor", "criterion"}  # several rows are decoded without the drafter

# Fields of `draft.decoding_config`. The last two also replace what decides, see `decisions_of`.
DRAFTS = {
    "block": {},
    "part of a block": {"block_size": 3},
    "one node": {"tree_nodes": 1},
    "tree": {"tree_nodes": 20},  # more than the spare slots of a ring
    "fastest": {"block_size": None},  # the default policy
    "any size": {"block_size": None},  # the default policy with another length in every round, drawn at random
    "anything": {},  # in every round a block, a tree, nothing, or tokens from anywhere
}
WITH_KNOWN_LENGTHS = {"block", "part of a block"}  # drafts whose acceptance follows from the script

# Families of targets, and how a call of each verifies: in slots, in slots with recurrent states that are replayed, or
# not at all ("plain": it is decoded without the drafter).
PAIRWISE_SESSIONS = {
    "qwen3": "slots",
    "gemma3": "slots",  # rings of slots
    "gpt_oss": "slots",  # and attention sinks, in eager attention
    "gpt2": "slots",  # a table of positions
    "deepseek_v3": "slots",  # latent attention, experts
    "qwen3_next": "replay",
    "lfm2": "replay",
    "jamba": "plain",
}
SESSIONS = {
    **PAIRWISE_SESSIONS,
    **dict.fromkeys(("llama", "gemma4", "mistral_sliding", "qwen3_moe", "opt", "mpt", "gpt_neox"), "slots"),
    **dict.fromkeys(("qwen3_5_text", "falcon_h1"), "replay"),
    "bloom": "plain",
}
EAGER = {"gpt_oss", "mpt", "bloom"}  # in eager attention upstream gives NaN for padded rows in double precision

# Fields of a drafter without a token head. The drafters with one are made by the functions of `support.heads.EVERY`.
LAYERS = {"none": {}, "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}}
PAIRWISE_HEADS = [*LAYERS, "few tokens", "selector", "recurrent over few", "gated", "domino", "late"]

PROMPTS = ["ids", "embeds", "chunks", "cache"]
CHUNK = 3  # tokens
CACHED_TOKENS = 5  # columns that a handed-in cache already holds

AXES = {
    "rows": list(ROWS),
    "rules": list(RULES),
    "draft": list(DRAFTS),
    "family": list(PAIRWISE_SESSIONS),
    "head": PAIRWISE_HEADS,
    "window": [None, 7],
    "prompt": PROMPTS,
    "error_rate": [0.0, 0.2, 0.7],
}


def pairwise(axes: dict[str, list]) -> list[dict]:
    """Few combinations, in which every pair of values of two axes occurs: each takes as many new pairs as it can."""
    missing = set()
    for axis, other_axis in combinations(axes, 2):
        missing |= {frozenset({(axis, x), (other_axis, y)}) for x in axes[axis] for y in axes[other_axis]}
    chosen = []
    draws = random.Random(0)
    while missing:
        # 1. Begin with a pair that has not occurred.
        values = dict(min(missing, key=lambda pair: sorted(map(str, pair))))
        # 2. On each other axis, take one of the values that make most new pairs with the values so far.
        for axis in draws.sample(sorted(axes), len(axes)):
            if axis in values:
                continue
            new_pairs = [sum(frozenset({(axis, x), item}) in missing for item in values.items()) for x in axes[axis]]
            best = [x for x, count in zip(axes[axis], new_pairs) if count == max(new_pairs)]
            values[axis] = draws.choice(best)
        missing -= {frozenset(pair) for pair in combinations(values.items(), 2)}
        chosen.append({axis: values[axis] for axis in axes})
    return chosen


# ------------------------------------------------------------------------------------------- a case's call and drafter


@cache
def target_of(family: str, dtype: torch.dtype):
    return make_target(family, dtype, attn=None)


@pytest.fixture(autouse=True)
def heads(monkeypatch):
    use_heads(monkeypatch, RecurrentHead)
    monkeypatch.setattr(slots, "MIN_RING_MARGIN", 12)  # rings of slots go round several times in a short text


def call_of(case: Case) -> Call:
    """The call, with its target."""
    target = target_of(case.family, dtype_of(case))
    inputs, pads = prompts_of(case)
    options = {
        "max_new_tokens": case.new_tokens,
        "do_sample": False,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
    }
    call = Call(target, inputs, pads, options, case.seed)
    if case.prompt == "embeds" and case.family in PAIRWISE_SESSIONS:  # some of the other families take none
        inputs["inputs_embeds"] = target.get_input_embeddings()(inputs["input_ids"])
    if case.rules in WITH_END_TOKENS:
        options["eos_token_id"] = end_tokens(case, call)
    options |= RULES[case.rules]
    if case.num_rows > 1:
        options.pop("streamer", None)
    if case.prompt == "chunks":
        options["prefill_chunk_size"] = CHUNK
    if case.continues_cache:
        options["past_key_values"] = cache_of_first_tokens
    return call


def dtype_of(case: Case) -> torch.dtype:
    """fp64 where rounding would be seen in fp32: in samples, in scores, and in recurrent states, which add it up."""
    is_sensitive = case.is_sampled or case.rules == "scores" or case.session != "slots"
    return torch.float64 if is_sensitive and case.family not in EAGER else torch.float32


def prompts_of(case: Case) -> tuple[dict, list[int]]:
    """Arguments of `generate`, and the padding of each row."""
    inputs, pads = ragged_prompts(case.num_rows, case.prompt_length, case.seed)
    if case.is_padded:
        return inputs, pads
    ids = inputs["input_ids"][:1] + torch.arange(case.num_rows)[:, None]
    inputs["input_ids"] = ids.clamp(2, 94)
    inputs["attention_mask"] = torch.ones_like(ids)
    return inputs, [0] * case.num_rows


def end_tokens(case: Case, call: Call) -> list[int]:
    """Some tokens of the text that the target writes if nothing ends it."""
    free_text = call(do_sample=case.is_sampled).sequences[:, case.prompt_length :].flatten().tolist()
    places = [(case.seed * 31 + 7 * number) % len(free_text) for number in range(1, NUM_END_TOKENS + 1)]
    return [free_text[place] for place in places]


def cache_of_first_tokens(call: Call) -> DynamicCache:
    """What a caller hands in who has read the first tokens of the prompts already."""
    past = DynamicCache(config=call.target.config)
    call.target(call.inputs["input_ids"][:, :CACHED_TOKENS], past_key_values=past, use_cache=True)
    return past


def drafter_of(case: Case, call: Call, sequences: torch.LongTensor):
    """
    A drafter that knows `sequences`, the target's own output. It recognises the text by what it reads, if it has no
    head and reads all of it; else it counts rows and columns.
    """
    if case.head in LAYERS and not case.continues_cache:
        draft = recognising(
            call.target,
            call.texts(sequences),
            error_rate=case.error_rate,
            seed=case.seed,
            window=case.window,
            **LAYERS[case.head],
        )
    else:
        make = EVERY.get(case.head, make_draft)
        draft = make(call.target, block_size=6, **LAYERS.get(case.head, {}))
        # In blocks of known lengths the right token comes first; elsewhere it may be the second or third likeliest.
        ranks = 1 if case.draft in WITH_KNOWN_LENGTHS else 3
        draft = scripted(draft, sequences, case.error_rate, ranks, case.seed)
    fields = {"block_size": draft.config.max_block_tokens, "window": case.window, **DRAFTS[case.draft]}
    for name, value in fields.items():
        setattr(draft.decoding_config, name, value)
    return draft


class Anything(DraftPolicy):
    """In every round something else, drawn at random."""

    draws = random.Random(0)
    max_draft = 40

    def get_candidates(self, state):
        longest = state.remaining_tokens - 1
        kind = self.draws.choice(["nothing", "copy", "tree", "block", "block"])
        if longest < 1 or kind == "nothing":
            return self.no_draft(state)
        if kind == "copy":  # depends on the text so far
            last_tokens = state.sequences[:, -self.draws.randint(1, 9) :]
            return self.copied(state, last_tokens[:, :longest].tolist())
        if kind == "tree" and self.call.capabilities.trees:
            return self.draft_tree(state, self.draws.randint(1, 40))
        return self.draft_block(state, self.draws.randint(1, 5))


@contextlib.contextmanager
def decisions_of(case: Case, drafter):
    """Within the context, "anything" and "any size" decide at random what a round verifies."""
    with contextlib.ExitStack() as patches:
        if case.draft == "anything":
            patches.enter_context(mock.patch.object(drafter.decoding_config, "policy", Anything))
        elif case.draft == "any size":
            draws = random.Random(case.seed)

            def any_length(policy, expected, *_):
                return draws.randrange(len(expected))

            patches.enter_context(mock.patch.object(AdaptiveLength, "choose_length", any_length))
            patches.enter_context(mock.patch.object(DraftStatistics, "_back_off", lambda *_: None))
            patches.enter_context(mock.patch.object(DraftStatistics, "speed", 0.0))  # any copy pays
        yield


# --------------------------------------------------------------------------------------------------------- comparisons


def check(case: Case) -> list[list[int]]:
    """
    Decode a case without and with its drafter, and compare: text, generator, scores, cache, and acceptance.

    Returns:
        `list[list[int]]`: The acceptance lengths of each row; empty if the call is decoded without the drafter.
    """
    call = call_of(case)
    plain = call()
    draft = drafter_of(case, call, plain.sequences)
    before = shape_of(call.target, draft)
    with decisions_of(case, draft):
        drafted = call(draft)
        change = difference(plain, drafted)
        assert change is None, change
        # Rows that end early have padding, for which a cache holds what nobody reads. Jamba continues its own cache
        # with another text than it writes at once, with or without a drafter.
        if not call.options.get("eos_token_id") and case.session != "plain":
            check_continuation(call, plain.sequences, drafted.output.past_key_values, draft)
    assert shape_of(call.target, draft) == before, "something is left behind"
    if not case.is_drafted:
        assert drafted.lengths == [[]] * case.num_rows
        return []
    if case.draft in WITH_KNOWN_LENGTHS:
        assert drafted.lengths == expected_lengths(draft, call, plain.sequences)
    return drafted.lengths


def check_continuation(call: Call, sequences: torch.LongTensor, cache, draft) -> None:
    """The cache that a call returned continues its text, with a drafter or without, as if there were no cache."""
    next_turn = torch.tensor([[5, 6, 7]]).expand(len(sequences), -1)
    ids = torch.cat([sequences, next_turn], dim=1)
    mask = call.inputs["attention_mask"]
    mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    expected = call.target.generate(ids, **options)
    for assistant in (None, draft):
        options["past_key_values"] = copy.deepcopy(cache)
        assert torch.equal(call.target.generate(ids, **options, assistant_model=assistant), expected)


def expected_lengths(draft, call: Call, sequences: torch.LongTensor) -> list[list[int]]:
    """
    What each verification of a block commits: the drafted tokens up to the first one that the script has wrong, and
    the target's own.
    """
    is_right = is_drafted_right(draft)
    block_tokens = draft.decoding_config.block_size or draft.config.max_block_tokens
    prompt_length = call.inputs["input_ids"].shape[1]
    expected = []
    for row, generated in enumerate(sequences[:, prompt_length:].tolist()):
        total = num_tokens_to_end(generated, call.options.get("eos_token_id", ()))
        first = prompt_length
        if isinstance(draft, RecognisingDraft):  # whose script has no padding
            first -= call.pads[row]
        lengths = []
        committed = 1  # the token after the prompt, which the target chooses
        while committed < total:
            longest = min(block_tokens, total - committed)
            accepted = 0
            while accepted < longest - 1 and is_right[row, first + committed + accepted]:
                accepted += 1
            lengths.append(accepted + 1)
            committed += accepted + 1
        expected.append(lengths)
    return expected


def is_drafted_right(draft) -> torch.BoolTensor:
    """`[T, S]`: where a scripted drafter drafts the token of the text; with a draft vocabulary it may not have it."""
    vocabulary = draft.target_ids(torch.arange(draft.config.draft_vocab_size or draft.config.vocab_size))
    scripted_tokens = draft.likely[:, :, 0]
    can_be_drafted = torch.isin(scripted_tokens, vocabulary)
    return torch.where(can_be_drafted, scripted_tokens, vocabulary[0]) == draft.texts


def num_tokens_to_end(tokens: list[int], end_tokens) -> int:
    """The number of tokens up to the first end token, which counts; all of them if there is none."""
    for number, token in enumerate(tokens, start=1):
        if token in end_tokens:
            return number
    return len(tokens)


# --------------------------------------------------------------------------------------------------------------- tests


PAIRWISE = [
    Case(**values, seed=number, prompt_length=11, new_tokens=28)
    for number, values in enumerate(pairwise(AXES), start=1)
]


@pytest.mark.parametrize("case", PAIRWISE, ids=lambda case: ", ".join(str(getattr(case, axis)) for axis in AXES))
def test_text_is_the_targets_own(case):
    lengths = check(case)
    is_accepted_by_script = case.error_rate < 0.5 and case.draft != "fastest" and "few" not in case.head
    if lengths and is_accepted_by_script:
        assert max(sum(lengths, []), default=2) > 1, "drafts that are never accepted prove nothing"


CASES = st.builds(
    Case,
    **{axis: st.sampled_from(values) for axis, values in AXES.items() if axis not in ("family", "head")},
    family=st.sampled_from(list(SESSIONS)),
    head=st.sampled_from([*LAYERS, *EVERY]),
    seed=st.integers(0, 10_000),
    prompt_length=st.integers(6, 14),
    new_tokens=st.sampled_from([30, 12, 3, 2, 1]),
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
    num_cases = 0
    rounds_by_length = Counter()

    def check_and_count(case):
        nonlocal num_cases
        num_cases += 1
        rounds_by_length.update(length for lengths in check(case) for length in lengths)

    while time.monotonic() < began + 60 * MINUTES:
        more_cases = settings(ANY, max_examples=50, derandomize=False, database=None)(given(CASES)(check_and_count))
        seed(int(began) + num_cases)(more_cases)()
    print(f"{num_cases} cases; rounds by number of committed tokens: {sorted(rounds_by_length.items())}")
    assert {*range(1, 7)} <= {*rounds_by_length}
    assert rounds_by_length[1] > num_cases
    assert sum(rounds_by_length[length] for length in range(4, 17)) > num_cases
