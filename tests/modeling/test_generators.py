"""One generator for each row: a row's sample is its own, whatever else is in the batch."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from support.pairs import make_draft, make_draft2, make_target
from support.rows import ragged_prompts
from support.sampling import STEPS, VOCAB, assert_follows, exact_distribution, sample
from support.scripted_draft import scripted


def seeded(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


WAYS = [
    ("qwen3", make_draft, {}),
    ("qwen3", make_draft2, {"temperature": 0.7, "top_p": 0.9}),
    # A repetition penalty counts padding as text: token 0 would be less likely in the batch.
    ("gpt2", make_draft, {"top_k": 8, "repetition_penalty": 1.3, "suppress_tokens": [0]}),
    ("lfm2", make_draft, {"temperature": 1.2}),
]


@pytest.mark.parametrize(("family", "make", "options"), WAYS)
@pytest.mark.parametrize("stops", [False, True])
def test_a_row_of_a_batch_is_what_its_generator_gives_alone(family, make, options, stops):
    """That is also what the target samples by itself, from a prompt alone, with torch's generator at that seed."""
    target = make_target(family, torch.float64, attn=None)
    draft = make(target)
    draft.decoding_config.draft_temperature = 0.0
    inputs, pads = ragged_prompts(4)
    options = {"max_new_tokens": 18, "do_sample": True, **options}
    alone, seeds = [], [11, 12, 13, 14]
    prompts = [ids[pad:][None] for ids, pad in zip(inputs["input_ids"], pads, strict=True)]
    for prompt, seed in zip(prompts, seeds, strict=True):
        torch.manual_seed(seed)
        alone.append(target.generate(prompt, **options)[0, prompt.shape[1] :])
    if stops:
        options["eos_token_id"] = int(alone[1][4])
        ends = [(text == alone[1][4]).nonzero().flatten().tolist() for text in alone]
        alone = [text[: end[0] + 1] if end else text for text, end in zip(alone, ends, strict=True)]
        assert min(map(len, alone)) < 18
    longest = max(map(len, alone))
    texts = torch.stack([torch.nn.functional.pad(text, (0, longest - len(text))) for text in alone])

    draft = scripted(draft, torch.cat([inputs["input_ids"], texts], dim=1), error_rate=0.1)
    draft.decoding_config.generators = seeded(*seeds)
    output = target.generate(**inputs, **options, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences[:, inputs["input_ids"].shape[1] :], texts)
    assert max(length for lengths in output.acceptance_lengths for length in lengths) > 1

    for row in (0, 2):
        draft.decoding_config.generators = seeded(seeds[row])
        draft = scripted(draft, torch.cat([prompts[row], texts[row : row + 1]], dim=1), error_rate=0.2)
        output = target.generate(prompts[row], **options, assistant_model=draft)
        assert torch.equal(output[0, prompts[row].shape[1] :], alone[row])


def test_samples_of_one_prompt(target, draft):
    """`num_return_sequences` counts as rows; equal seeds give equal rows."""
    draft.decoding_config.generators = seeded(3, 4, 3)
    prompt = torch.tensor([[5, 9, 17, 33]])
    output = target.generate(
        prompt, do_sample=True, num_return_sequences=3, max_new_tokens=12, assistant_model=draft
    ).tolist()
    assert output[0] == output[2] != output[1]


@pytest.mark.parametrize("make", [make_draft, make_draft2])
def test_drawn_drafts_are_reproducible(target, make):
    """Nothing is drawn from torch's own generator, and nothing depends on it."""
    draft, texts = make(target), []
    draft.decoding_config.draft_temperature = 1.0
    inputs, _ = ragged_prompts(3)
    for global_seed in (1, 2):
        draft.decoding_config.generators = seeded(7, 8, 9)
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        texts.append(target.generate(**inputs, do_sample=True, max_new_tokens=24, assistant_model=draft))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*texts)
    assert len({tuple(row) for row in texts[0][:, 11:].tolist()}) == 3


@pytest.mark.parametrize(
    ("temperature", "top_p", "drawn"),
    [
        (0.7, 0.9, False),
        (1.0, 1.0, True),
        pytest.param(1.0, 1.0, False, marks=pytest.mark.slow),
        pytest.param(0.7, 0.9, True, marks=pytest.mark.slow),
    ],
)
def test_samples_follow_the_target(small, temperature, top_p, drawn):
    """With the likeliest drafts, and with those that a path selector draws."""
    prompt, rows, draws = [3, 1, 4], 250, 5_000
    expected = exact_distribution(small, prompt, temperature, top_p)
    if drawn:
        draft = make_draft2(small)
    else:
        likely = torch.tensor([[*prompt, *max(expected, key=expected.get), 0]] * rows)
        draft = scripted(make_draft(small), likely, error_rate=0.2)
    # As torch advises, seeds of many bits.
    seeds = torch.randint(2**62, (rows,), generator=torch.Generator().manual_seed(0)).tolist()
    draft.decoding_config.generators = seeded(*seeds)
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=STEPS), 0)
    for _ in range(draws // rows):  # the generators go on
        for text in sample(small, draft, prompt, rows, temperature, top_p).sequences[:, 3:].tolist():
            counts[tuple(text)] += 1
    assert_follows(counts, expected)


def test_what_cannot_be_followed_is_named(target, draft):
    inputs, _ = ragged_prompts(3)
    config, options = draft.decoding_config, {"do_sample": True, "max_new_tokens": 3, "assistant_model": draft}
    twice = seeded(1)[0]
    for generators, named in (
        (seeded(1, 2), "holds 2 generators, but 3 rows"),
        (seeded(1, 2, 3, 4), "holds 4 generators, but 3 rows"),
        ([], "holds 0 generators, but 3 rows"),
        ([twice, twice, *seeded(2)], "holds 2 generators, but 3 rows"),
        ([SimpleNamespace(device=torch.device("cuda:0")), *seeded(1, 2)], r"cuda:0.*cpu: make them with"),
    ):
        config.generators = generators
        with pytest.raises(ValueError, match=named):
            target.generate(**inputs, **options)
    config.generators = seeded(1, 2, 3)
    with pytest.raises(ValueError, match=r"generators cannot be used: the ranks"):
        target.generate(**inputs, **options, synced_gpus=True)
    # Greedy texts draw nothing.
    config.generators = []
    output = target.generate(**inputs, **{**options, "do_sample": False})
    assert torch.equal(output, target.generate(**inputs, max_new_tokens=3, do_sample=False))
