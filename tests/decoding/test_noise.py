"""The noise of samples, drawn before it is needed: a seed gives its own sample, and drafts allow for the noise."""

import statistics
import threading

import pytest
import torch
from support.pairs import make_draft, make_draft2, make_target
from support.rows import ragged_prompts

from dflash_hf.decoding.sampling_noise import SamplingNoise, default_generator, multinomial_is_predictable


CPU = torch.device("cpu")
PROMPT = torch.tensor([[5, 9, 17, 33]])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def target():
    return make_target(dtype=torch.float64)


def sampled(target, draft, inputs, seed=7, **options):
    torch.manual_seed(seed)
    options = {"max_new_tokens": 40, "do_sample": True, "return_dict_in_generate": True, **options}
    return target.generate(**inputs, assistant_model=draft, **options)


def ignorant(draft):
    """To it all tokens are equally likely, nearly as for a target with random weights."""
    draft.draft_logits = lambda *args: torch.zeros_like(type(draft).draft_logits(draft, *args))
    return draft


def test_torch_draws_can_be_foreseen_on_the_cpu():
    assert multinomial_is_predictable(CPU) and not multinomial_is_predictable(torch.device("meta"))
    assert default_generator(CPU) is torch.default_generator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_noise_foretells_torchs_samples(temperature, dtype):
    """To a drafter, to a target token by token and at once, whatever the default dtype is."""
    logits = torch.randn(2, 5, 999, generator=seeded(0))
    generator = seeded(3)
    noise = SamplingNoise(seeded(3), 2, temperature)
    scores = logits / temperature
    depths = torch.arange(5).expand(2, 5)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        at_once = noise.perturb(scores, depths, int(depths.max())).argmax(dim=-1)
        gumbel = noise.gumbel(5, torch.arange(999))
    finally:
        torch.set_default_dtype(before)
    foreseen = (scores + gumbel).argmax(dim=-1)
    first = torch.empty(2, 999).exponential_(generator=seeded(3))
    assert torch.equal(gumbel[:, 0], -first.log())
    for step in range(5):
        drawn = torch.multinomial(scores[:, step].softmax(dim=-1), 1, generator=generator)[:, 0].tolist()
        assert at_once[:, step].tolist() == foreseen[:, step].tolist() == drawn
        assert [noise.sample(scores[row : row + 1, step], row, step) for row in range(2)] == drawn


def test_unused_draws_are_undone():
    """Unless other code has used the generator: after our last draw, or between those that would be undone."""
    plain = seeded(0)
    generator = seeded(0)
    scores = torch.zeros(1, 10)
    ahead = SamplingNoise(generator, 2)
    for _ in range(3):
        torch.multinomial(torch.ones(2, 10), 1, generator=plain)
    ahead.sample(scores, 0, 8)
    ahead.rewind(3)
    assert torch.equal(plain.get_state(), generator.get_state())
    for further in (0, 2):
        ahead = SamplingNoise(generator, 2)
        ahead.sample(scores, 0, 5)
        torch.rand(1, generator=generator)
        ahead.sample(scores, 0, 5 + further)
        state = generator.get_state()
        ahead.rewind(3)
        assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}])
def test_noise_memory_of_uneven_rows_is_bounded(target, monkeypatch, options):
    """What rows far behind need is drawn again; texts are the same."""
    draft = ignorant(make_draft(target, block_size=6))
    inputs, _ = ragged_prompts(3)
    sizes = []
    options = {"max_new_tokens": 60, "top_k": 0, **options}
    expected = sampled(target, None, inputs, **options).sequences
    keep = SamplingNoise._keep
    of_rounds = 2 * 6 * 3 * target.config.vocab_size * 4

    def watched(self, *args):
        keep(self, *args)
        sizes.append(sum(noise.nbytes for noise in self.draws.values()))

    monkeypatch.setattr(SamplingNoise, "MAX_BYTES", 0)
    monkeypatch.setattr(SamplingNoise, "_keep", watched)
    assert torch.equal(sampled(target, draft, inputs, **options).sequences, expected)
    assert of_rounds / 2 < max(sizes) <= of_rounds


@pytest.mark.parametrize("make", [make_draft, make_draft2])
@pytest.mark.parametrize("nodes", [None, 8])
@pytest.mark.parametrize("rows", [1, 3])
def test_noise_raises_acceptance_of_samples(make, nodes, rows):
    """A drafter that knows nothing would be right once in 96 tokens."""
    target = make_target(dtype=torch.float64)
    target.lm_head.weight.mul_(0.3)
    draft = ignorant(make(target, block_size=6))
    inputs, _ = ragged_prompts(rows)
    draft.decoding_config.tree_nodes = nodes
    options = {"temperature": 0.9, "top_k": 0, "max_new_tokens": 60}
    output = sampled(target, draft, inputs, **options)
    assert torch.equal(output.sequences, sampled(target, None, inputs, **options).sequences)
    assert statistics.mean(sum(output.acceptance_lengths, [])) > 1.5


def test_threads_draw_different_noise(target):
    draft = make_draft(target, block_size=6)
    texts = []
    torch.manual_seed(1)

    def call():
        options = {"max_new_tokens": 60, "do_sample": True, "top_k": 0}
        texts.append(target.generate(PROMPT, **options, assistant_model=draft)[0].tolist())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tuple(text[4:14]) for text in texts}) == 4


def test_ids_past_the_drafters_vocabulary_are_sampled():
    target = make_target(dtype=torch.float64)
    target.lm_head.weight.mul_(0.1)
    target.resize_token_embeddings(112, mean_resizing=False)
    target.config.vocab_size = 96
    draft = make_draft2(target, block_size=6)
    inputs, _ = ragged_prompts(3)
    expected = sampled(target, None, inputs, top_k=0).sequences
    assert expected.max() >= 96
    assert torch.equal(sampled(target, draft, inputs, top_k=0).sequences, expected)


def test_nan_probabilities_raise():
    noise = SamplingNoise(seeded(0), 2)
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        noise.sample(torch.tensor([[0.5, float("nan")]]), 1, 0)


def test_draw_of_many_rows_is_made_once(monkeypatch):
    """Made again for each row, large batches came to a stand; or in each round, those that the last one had."""
    noise = SamplingNoise(seeded(0), rows=12)
    made = []
    monkeypatch.setattr(noise, "MAX_BYTES", 12 * 50 * 4 * 3)  # three draws
    drawn = noise._draw_from
    monkeypatch.setattr(noise, "_draw_from", lambda generator: made.append(0) or drawn(generator))
    depths = torch.arange(8).expand(12, 8)
    lengths = [*range(12)]
    noise.advance(lengths)
    perturbed = noise.perturb(torch.zeros(12, 8, 50), depths, int(depths.max()))
    assert len(made) == 19  # 8 + 11, the distinct numbers of the rows' next draws
    noise.advance([14] * 12)
    noise.perturb(torch.zeros(12, 8, 50), depths, int(depths.max()))
    assert len(made) == 22  # three new ones
    other = SamplingNoise(seeded(0), rows=12)
    other.advance(lengths)
    assert torch.equal(perturbed, other.perturb(torch.zeros(12, 8, 50), depths, int(depths.max())))
    other.vocab_size = 50
    ids = torch.tensor([3, 7, 49])
    few = torch.stack([other._draw(n + step, 50)[row, ids] for row, n in enumerate(lengths) for step in range(8)])
    assert torch.equal(other.gumbel(8, ids), -few.view(12, 8, 3).log())
