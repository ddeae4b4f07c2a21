"""
The code beside the weights, as a drafter without the package runs it: upstream's loop with our candidate generator.
Texts equal the target's, drafts are accepted and rejected, and whatever that loop cannot do decodes plainly.
"""

import copy
from collections import Counter

import pytest
import torch
from support.calls import Collected, EveryOther, StopAfter
from support.heads import EVERY
from support.pairs import make_draft, make_target
from support.sampling import assert_follows, exact_distribution, sample, small_target
from support.scripted_draft import recognising, scripted

from dflash_hf.modeling.candidates_dflash import DFlashCandidateGenerator, generate_with_candidates


PROMPT = torch.tensor([[5, 9, 17, 33, 21, 8, 60, 44, 13]])
NEW_TOKENS = 30
OPTIONS = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


@pytest.fixture
def matches(monkeypatch):
    """Drafted tokens that each verification accepted, of drafters that decode with upstream's loop."""
    accepted: list[int] = []

    def update(self, input_ids, scores, num_matches):
        accepted.append(int(num_matches))

    monkeypatch.setattr(DFlashCandidateGenerator, "update_candidate_strategy", update)
    return accepted


def beside_the_weights(draft):
    """The same drafter, with the decoding of the code beside its weights."""
    kind = type(draft)

    def dflash_decode(self, target, *args, **kwargs):
        return generate_with_candidates(self, target, *args, **kwargs)

    draft.__class__ = type(kind.__name__, (kind,), {"dflash_decode": dflash_decode})
    return draft


def pair(family: str = "qwen3", block_size: int = 6, **options):
    """A target, and a drafter that knows its text and drafts another token at one place in five."""
    target = make_target(family, attn=None, **options)
    text = target.generate(PROMPT, **OPTIONS, eos_token_id=None)
    draft = scripted(make_draft(target, block_size=block_size), text, error_rate=0.2)
    return target, beside_the_weights(draft), text


@pytest.mark.parametrize(
    "family", ["qwen3", "mixtral", "gpt2", "deepseek_v3", "gpt_oss", "gemma3", "mistral_sliding", "llama4_text"]
)
def test_upstream_loop_writes_the_targets_text(family, matches):
    target, draft, text = pair(family)
    assert torch.equal(target.generate(PROMPT, **OPTIONS, assistant_model=draft), text)
    assert max(matches) > 1 and min(matches) < 5


@pytest.mark.parametrize("family", ["gemma3", "mistral_sliding"])
def test_block_may_exceed_the_window(family, matches):
    target, draft, text = pair(family, block_size=12, sliding_window=5)
    assert torch.equal(target.generate(PROMPT, **OPTIONS, assistant_model=draft), text)
    assert max(matches) > 5


RULES = {
    "end inside a block": {"eos_token_id": None},  # one of the text
    "repetition penalty": {"repetition_penalty": 1.3},
    "minimum length": {"eos_token_id": None, "min_new_tokens": 15},
    "padding": {"attention_mask": torch.tensor([[0] * 3 + [1] * 6])},
    "fewer tokens": {"num_assistant_tokens": 2},
}


@pytest.mark.parametrize("rule", RULES)
def test_generation_rules_hold_in_upstream_loop(rule, matches):
    target, draft, text = pair()
    options = {**OPTIONS, **RULES[rule]}
    if "eos_token_id" in options:
        options["eos_token_id"] = int(text[0, PROMPT.shape[1] + 8])
    expected = target.generate(PROMPT, **options)
    draft = beside_the_weights(scripted(make_draft(target, block_size=6), expected, error_rate=0.2))
    assert torch.equal(target.generate(PROMPT, **options, assistant_model=draft), expected)
    assert sum(matches) > 0
    assert rule != "fewer tokens" or max(matches) <= 2


def test_drafter_reads_no_padding(matches):
    """It recognises the text by the features and positions of its tokens."""
    target = make_target()
    text = target.generate(PROMPT, **OPTIONS)
    draft = beside_the_weights(recognising(target, [text[0]]))
    padded = torch.nn.functional.pad(PROMPT, (3, 0))
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    output = target.generate(padded, attention_mask=mask, **OPTIONS, assistant_model=draft)
    assert torch.equal(output[:, 3:], text)
    assert max(matches) > 1


def test_streamer_gets_the_same_tokens(matches):
    target, draft, _ = pair()
    streams = [Collected(), Collected()]
    target.generate(PROMPT, **OPTIONS, streamer=streams[0])
    target.generate(PROMPT, **OPTIONS, streamer=streams[1], assistant_model=draft)
    texts = [torch.cat([part.flatten() for part in stream.tokens]).tolist() for stream in streams]
    assert texts[0] == texts[1] and sum(matches) > 0


def test_nested_plain_call_is_not_read(matches):
    """A plain call of the same target, in the middle of a drafted one, leaves its features and drafts alone."""
    target, _, text = pair()
    draft = beside_the_weights(recognising(target, [text[0]]))
    target.generate(PROMPT, **OPTIONS, assistant_model=draft)
    alone = list(matches)
    matches.clear()

    class PlainCallInside(Collected):
        def put(self, value):
            target.generate(PROMPT[:, :4], max_new_tokens=3, do_sample=False)
            super().put(value)

    output = target.generate(PROMPT, **OPTIONS, assistant_model=draft, streamer=PlainCallInside())
    assert torch.equal(output, text)
    assert matches == alone and max(matches) > 1


def test_generator_drafts_two_texts_alike(matches):
    """What it has read of the first text is gone."""
    target, _, text = pair()
    draft = recognising(target, [text[0]])
    generator = DFlashCandidateGenerator(draft, target, max_length=PROMPT.shape[1] + NEW_TOKENS)
    target.generate(PROMPT, **OPTIONS, assistant_model=generator)
    first = list(matches)
    matches.clear()
    assert torch.equal(target.generate(PROMPT, **OPTIONS, assistant_model=generator), text)
    assert matches == first and max(matches) > 1


@pytest.mark.parametrize("head", EVERY)
def test_every_head_drafts_in_upstream_loop(head, matches):
    target = make_target()
    draft = beside_the_weights(EVERY[head](target))
    assert torch.equal(target.generate(PROMPT, **OPTIONS, assistant_model=draft), target.generate(PROMPT, **OPTIONS))
    assert len(matches) > 1, "plain decoding proves nothing"


def test_generator_drafts_what_the_engine_drafts(matches):
    """Without windows, the same blocks: both read the same features, at the same positions."""
    target = make_target()
    draft = make_draft(target)
    draft.decoding_config.block_size = draft.config.max_block_tokens
    engine = target.generate(PROMPT, **OPTIONS, assistant_model=draft, return_dict_in_generate=True)
    target.generate(PROMPT, **OPTIONS, assistant_model=beside_the_weights(copy.deepcopy(draft)))
    assert [count + 1 for count in matches[1:]] == engine.acceptance_lengths[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rows": 2}, "2 rows"),
        ({"logits_processor": [EveryOther()]}, "EveryOther may keep state"),
        ({"stopping_criteria": [StopAfter(11)]}, "StopAfter may keep state"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden states of each token"),
        ({"cache_implementation": "static"}, "StaticCache"),
        ({"family": "qwen3_5_text"}, "cannot be cropped"),
        ({"family": "falcon_h1"}, "cannot be cropped"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_upstream_cannot_do_decodes_plainly(options, reason, matches, caplog):
    options = dict(options)
    target = make_target(options.pop("family", "qwen3"), attn=None)
    draft = beside_the_weights(make_draft(target))
    prompt = PROMPT.repeat(options.pop("rows", 1), 1)
    with caplog.at_level("WARNING"):
        drafted = target.generate(prompt, **OPTIONS, **copy.deepcopy(options), assistant_model=draft)
    expected = target.generate(prompt, **OPTIONS, **copy.deepcopy(options))
    texts = [output if torch.is_tensor(output) else output.sequences for output in (drafted, expected)]
    assert torch.equal(*texts) and not matches
    assert any(
        reason in record.getMessage() and "package dflash-hf" in record.getMessage() for record in caplog.records
    )


def test_samples_follow_the_targets_distribution(matches):
    """Not its seed's own sample, which the package alone gives."""
    target = small_target()
    prompt = [1, 5, 2, 7]
    expected = exact_distribution(target, prompt, temperature=1.0, top_p=1.0)
    draft = beside_the_weights(make_draft(target, block_size=4))
    torch.manual_seed(3)
    counts = Counter()
    for _ in range(1500):
        output = sample(target, draft, prompt, rows=1, temperature=1.0, top_p=1.0)
        counts[tuple(output.sequences[0, len(prompt) :].tolist())] += 1
    assert_follows(counts, expected)
    assert 0 < sum(matches) < 2 * len(matches)
