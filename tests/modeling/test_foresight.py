"""Drafts that allow for the noise of the target's next samples: more is accepted, and no text changes."""

import statistics

import pytest
import torch
from support.pairs import make_draft, make_draft2, make_target
from support.rows import ragged_prompts

from dflash_hf.modeling import call_dflash
from dflash_hf.modeling.foresight_dflash import Foresight, Upcoming, foreseeable, generator_of
from dflash_hf.modeling.modeling_dflash import DFlashDraftModel


CPU = torch.device("cpu")
PROMPT = torch.tensor([[5, 9, 17, 33]])


@pytest.fixture
def knowing_nothing(monkeypatch):
    """A drafter to which all tokens are equally likely, nearly as for a target with random weights."""
    logits = DFlashDraftModel.draft_logits
    monkeypatch.setattr(DFlashDraftModel, "draft_logits", lambda *args: torch.zeros_like(logits(*args)))


def test_draws_of_this_torch_are_foreseen():
    assert foreseeable(CPU) and not foreseeable(torch.device("meta"))
    assert generator_of(CPU) is torch.default_generator


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_likeliest_token_is_the_one_that_is_drawn(temperature):
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    logits = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(0))
    likeliest = Foresight(generators, 40, lambda ids: ids, temperature)(logits).argmax(dim=-1)
    chances = (logits / temperature).softmax(dim=-1)
    for row, generator in enumerate(generators):
        drawn = [int(torch.multinomial(one[None], 1, generator=generator)) for one in chances[row]]
        assert drawn == likeliest[row].tolist()


def test_only_what_is_new_is_computed_and_other_draws_in_between_are_noticed():
    generator, ids = torch.Generator().manual_seed(0), torch.arange(10)
    upcoming, chances = Upcoming(generator, 10), torch.ones(1, 10)
    first = upcoming.noise(4, ids)
    for _ in range(3):
        torch.multinomial(chances, 1, generator=generator)
    kept = upcoming.known[3][1]
    again = upcoming.noise(4, ids)
    assert torch.equal(again[0], first[3]) and upcoming.known[0][1] is kept
    torch.rand(1, generator=generator)  # by somebody else
    drawn = upcoming.noise(1, ids)[0].argmax()
    assert drawn == torch.multinomial(chances, 1, generator=generator)[0, 0]


def lengths(target, draft, **options) -> list[int]:
    output = target.generate(
        PROMPT, max_new_tokens=60, do_sample=True, assistant_model=draft, return_dict_in_generate=True, **options
    )
    return [length for row in output.acceptance_lengths for length in row]


@pytest.mark.parametrize("make", [make_draft, make_draft2])
@pytest.mark.parametrize("sizes", [{"block_size": 6}, {"block_size": None, "tree_nodes": 8}])
def test_more_is_accepted_and_a_seed_gives_the_same_sample(make, sizes, knowing_nothing):
    target = make_target(dtype=torch.float64)
    draft = make(target, block_size=6)
    for name, value in sizes.items():
        setattr(draft.decoding_config, name, value)
    with torch.no_grad():
        for parameter in target.lm_head.parameters():
            parameter.mul_(0.3)
    torch.manual_seed(7)
    expected = target.generate(PROMPT, max_new_tokens=60, do_sample=True, temperature=0.9)
    torch.manual_seed(7)
    output = target.generate(PROMPT, max_new_tokens=60, do_sample=True, temperature=0.9, assistant_model=draft)
    assert torch.equal(output, expected)
    torch.manual_seed(7)
    seeing = statistics.mean(lengths(target, draft, temperature=0.9, top_k=0))
    draft.decoding_config.draft_temperature = 0.0
    torch.manual_seed(7)
    blind = statistics.mean(lengths(target, draft, temperature=0.9, top_k=0))
    assert seeing > 1.6 > 1.3 > blind


def test_rows_with_generators_foresee_their_own(knowing_nothing):
    target = make_target(dtype=torch.float64)
    draft, (inputs, _) = make_draft(target, block_size=6), ragged_prompts(3)

    def decode(**settings):
        for name, value in settings.items():
            setattr(draft.decoding_config, name, value)
        draft.decoding_config.generators = [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]
        options = {"max_new_tokens": 20, "do_sample": True, "top_k": 0, "return_dict_in_generate": True}
        return target.generate(**inputs, **options, assistant_model=draft)

    seeing, blind = decode(), decode(draft_temperature=0.0)
    assert torch.equal(seeing.sequences, blind.sequences)
    rounds = [max(map(len, output.acceptance_lengths)) for output in (seeing, blind)]
    assert rounds[0] < rounds[1]


def test_what_cannot_be_foreseen_is_drafted_as_likeliest(monkeypatch):
    monkeypatch.setattr(call_dflash, "foreseeable", lambda device: False)
    target = make_target(dtype=torch.float64)
    draft, texts = make_draft2(target, block_size=6), []
    for assistant in (None, draft):
        torch.manual_seed(5)
        texts.append(target.generate(PROMPT, max_new_tokens=30, do_sample=True, assistant_model=assistant))
    assert torch.equal(*texts)
