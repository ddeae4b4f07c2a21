"""The noise of samples, drawn before it is needed: each row its own, in batches too, and drafts that allow for it."""

import statistics
import threading

import pytest
import torch
from support.pairs import make_draft, make_draft2, make_target
from support.rows import ragged_prompts
from transformers import LogitsProcessor

from dflash_hf.modeling import call_dflash
from dflash_hf.modeling.modeling_dflash import DFlashDraftModel
from dflash_hf.modeling.noise_dflash import Foresight, Noise, foreseeable, generator_of
from dflash_hf.serving.pieces import PieceStreamer


CPU = torch.device("cpu")
PROMPT = torch.tensor([[5, 9, 17, 33]])


@pytest.fixture
def knowing_nothing(monkeypatch):
    """A drafter to which all tokens are equally likely, nearly as for a target with random weights."""
    logits = DFlashDraftModel.draft_logits
    monkeypatch.setattr(DFlashDraftModel, "draft_logits", lambda *args: torch.zeros_like(logits(*args)))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_draws_of_this_torch_are_foreseen():
    assert foreseeable(CPU) and not foreseeable(torch.device("meta"))
    assert generator_of(CPU) is torch.default_generator


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_likeliest_token_is_the_one_that_is_drawn(temperature):
    logits = torch.randn(2, 5, 40, generator=seeded(0))
    chances = (logits / temperature).softmax(dim=-1)
    for seeds in ([3, 4], [3]):  # one generator per row, or one for both
        generators = [seeded(seed) for seed in seeds]
        noise = Noise([seeded(seed) for seed in seeds], 2, 5)
        noise.sample(chances[:, 0], [0, 1], 0)
        foreseen = Foresight(noise, 40, lambda ids: ids, temperature)(logits).argmax(dim=-1)
        for step in range(5):
            if len(seeds) == 1:
                drawn = torch.multinomial(chances[:, step], 1, generator=generators[0])[:, 0]
            else:
                pairs = zip(chances[:, step], generators, strict=True)
                drawn = torch.cat([torch.multinomial(one, 1, generator=generator) for one, generator in pairs])
            assert torch.equal(drawn, foreseen[:, step])
            assert torch.equal(drawn, noise.sample(chances[:, step], [0, 1], step))


def test_draws_made_for_nothing_are_undone_unless_somebody_else_has_drawn():
    plain, ahead = seeded(0), Noise([generator := seeded(0)], 2, 50)
    chances = torch.ones(2, 10)
    for _ in range(3):
        torch.multinomial(chances, 1, generator=plain)
    ahead.sample(chances, [0, 1], 2)
    ahead.ahead(8, torch.arange(10))
    ahead.close()
    assert torch.equal(plain.get_state(), generator.get_state())
    for others in (0, 2):  # by somebody else: after our last draw, and between those that would be undone
        ahead = Noise([generator], 2, 50)
        ahead.sample(chances, [0, 1], 2)
        ahead.ahead(4, torch.arange(10))
        torch.rand(1, generator=generator)
        ahead.ahead(4 + others, torch.arange(10))
        state = generator.get_state()
        ahead.close()
        assert torch.equal(generator.get_state(), state)


def test_noise_is_kept_until_the_last_row_has_used_it():
    noise, chances = Noise([seeded(0)], 3, 50), torch.ones(3, 10)
    first = noise.sample(chances, [0, 1, 2], 0)
    noise.sample(chances, [0], 9)
    noise.advance([10, 4, 6], [True, True, True])
    assert list(noise.draws[0].kept) == [4, 5, 6, 7, 8, 9]
    noise.advance([10, 4, 6], [True, False, True])
    assert list(noise.draws[0].kept) == [6, 7, 8, 9] and noise.ahead(2, torch.arange(10))[1].eq(0).all()
    assert torch.equal(first, torch.multinomial(chances, 1, generator=seeded(0))[:, 0])


def decode(target, draft, inputs, seed=7, **options):
    torch.manual_seed(seed)
    options = {"max_new_tokens": 40, "do_sample": True, "return_dict_in_generate": True, **options}
    return target.generate(**inputs, assistant_model=draft, **options)


@pytest.mark.parametrize("sizes", [{"block_size": 6}, {"block_size": None, "tree_nodes": 8}, {}])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"top_k": 5, "temperature": 0.7},
        {"top_p": 0.8, "top_k": 0, "eos_token_id": [3, 9, 14]},
        {"repetition_penalty": 1.3, "top_k": 6},
        {"min_new_tokens": 12, "eos_token_id": [3, 9, 14], "pad_token_id": 0},
        {"num_return_sequences": 2, "top_k": 3},
    ],
    ids=lambda options: ", ".join(options),
)
def test_a_seed_gives_a_batch_the_sample_it_gives_without_a_drafter(sizes, options):
    """Though rows advance at their own paces; the next call's sample too."""
    target = make_target(dtype=torch.float64)
    draft, (inputs, _) = make_draft2(target, block_size=6), ragged_prompts(3)
    for name, value in sizes.items():
        setattr(draft.decoding_config, name, value)
    expected, after = decode(target, None, inputs, **options).sequences, torch.rand(1)
    output = decode(target, draft, inputs, **options)
    assert torch.equal(output.sequences, expected)
    assert torch.equal(torch.rand(1), after)
    lengths = output.acceptance_lengths
    assert len({len(row) for row in lengths}) > 1 and max(map(max, lengths)) > 1  # rows had their own paces


@pytest.mark.parametrize("options", [{"max_time": 1000.0}, {"repetition_penalty": 1.3}])
def test_a_batch_that_the_host_reads_each_round_has_its_sample_with_look_ahead_too(options):
    target = make_target(dtype=torch.float64)
    draft, (inputs, _) = make_draft2(target, block_size=6), ragged_prompts(3)
    draft.decoding_config.look_ahead = 4
    expected = decode(target, None, inputs, **options).sequences
    assert torch.equal(decode(target, draft, inputs, **options).sequences, expected)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}])
def test_rows_that_are_far_ahead_take_one_token_a_round(options, knowing_nothing, monkeypatch):
    """So the noise that is kept for the others takes a bounded memory; texts are the same."""
    target, apart = make_target(dtype=torch.float64), []
    draft, (inputs, _) = make_draft(target, block_size=6), ragged_prompts(3)
    advance = Noise.advance

    def watched(self, taken, alive):
        advance(self, taken, alive)
        apart.append(max(taken) - min(taken))

    monkeypatch.setattr(Noise, "advance", watched)
    free = decode(target, draft, inputs, max_new_tokens=60, top_k=0, **options)
    monkeypatch.setattr(Noise, "MOST_BYTES", 4 * 3 * target.config.vocab_size * 4)
    most, apart = max(apart), []
    bounded = decode(target, draft, inputs, max_new_tokens=60, top_k=0, **options)
    assert torch.equal(free.sequences, bounded.sequences)
    assert max(apart) <= 5 < most


@pytest.mark.parametrize("make", [make_draft, make_draft2])
@pytest.mark.parametrize("sizes", [{"block_size": 6}, {"block_size": None, "tree_nodes": 8}])
@pytest.mark.parametrize("rows", [1, 3])
def test_more_is_accepted_and_a_seed_gives_the_same_sample(make, sizes, rows, knowing_nothing):
    target = make_target(dtype=torch.float64)
    draft, (inputs, _) = make(target, block_size=6), ragged_prompts(rows)
    for name, value in sizes.items():
        setattr(draft.decoding_config, name, value)
    with torch.no_grad():
        for parameter in target.lm_head.parameters():
            parameter.mul_(0.3)
    options = {"temperature": 0.9, "top_k": 0, "max_new_tokens": 60}
    expected = decode(target, None, inputs, **options).sequences
    outputs = []
    for temperature in (None, 0.0):
        draft.decoding_config.draft_temperature = temperature
        outputs.append(decode(target, draft, inputs, **options))
        assert torch.equal(outputs[-1].sequences, expected)
    seeing, blind = (statistics.mean(sum(output.acceptance_lengths, [])) for output in outputs)
    assert seeing > 1.5 > 1.3 > blind


def test_rows_with_generators_foresee_their_own(knowing_nothing):
    target = make_target(dtype=torch.float64)
    draft, (inputs, _) = make_draft(target, block_size=6), ragged_prompts(3)

    def with_generators(temperature):
        draft.decoding_config.draft_temperature = temperature
        draft.decoding_config.generators = [seeded(seed) for seed in (1, 2, 3)]
        return decode(target, draft, inputs, top_k=0), [one.get_state() for one in draft.decoding_config.generators]

    (seeing, states), (blind, others) = with_generators(None), with_generators(0.0)
    assert torch.equal(seeing.sequences, blind.sequences)
    assert all(map(torch.equal, states, others))
    rounds = [max(map(len, output.acceptance_lengths)) for output in (seeing, blind)]
    assert rounds[0] < rounds[1]


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}])
def test_generators_of_rows_that_end_early_are_left_after_their_last_token(options):
    target = make_target(dtype=torch.float64)
    draft, (inputs, _) = make_draft2(target, block_size=6), ragged_prompts(3)
    options |= {"eos_token_id": [3, 9, 14, 20, 30], "pad_token_id": 0}
    draft.decoding_config.generators = [seeded(seed) for seed in range(3)]
    texts = decode(target, draft, inputs, **options).sequences[:, inputs["input_ids"].shape[1] :]
    lengths = (texts != 0).sum(dim=1).tolist()
    assert len(set(lengths)) > 1
    for seed, length in enumerate(lengths):
        expected = seeded(seed)
        for _ in range(length):
            torch.multinomial(torch.ones(1, target.config.vocab_size), 1, generator=expected)
        assert torch.equal(draft.decoding_config.generators[seed].get_state(), expected.get_state())


def test_the_default_dtype_changes_no_noise():
    chances, texts = torch.rand(2, 1000, generator=seeded(1)), []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            texts.append(Noise([seeded(0)], 2, 5).sample(chances, [0, 1], 0).tolist())
        finally:
            torch.set_default_dtype(torch.float32)
    assert texts[0] == texts[1] == torch.multinomial(chances, 1, generator=seeded(0))[:, 0].tolist()


def test_a_streamer_whose_write_is_the_caller_s_is_not_trusted():
    class Tokenizer:
        def decode(self, ids, **options):
            return "".join(chr(97 + token % 26) for token in ids)

    target, texts = make_target(dtype=torch.float64), []
    draft = make_draft2(target, block_size=6)
    for assistant in (None, draft):
        streamer = PieceStreamer(Tokenizer(), lambda piece, source: torch.rand(1))
        texts.append(decode(target, assistant, {"input_ids": PROMPT}, top_k=0, streamer=streamer).sequences)
    assert torch.equal(*texts)


def test_calls_in_threads_draw_different_noise():
    target = make_target(dtype=torch.float64)
    draft, texts = make_draft(target, block_size=6), []
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


class Drawing(LogitsProcessor):
    """Uses torch's generator between tokens."""

    def __call__(self, input_ids, scores):
        return scores + torch.rand(1)


@pytest.mark.parametrize("rows", [1, 3])
def test_code_of_the_caller_s_that_draws_between_tokens_gets_its_own_numbers(rows):
    target = make_target(dtype=torch.float64)
    draft, (inputs, _) = make_draft2(target, block_size=6), ragged_prompts(rows)
    options = {"logits_processor": [Drawing()], "max_new_tokens": 20}
    expected, after = decode(target, None, inputs, **options).sequences, torch.rand(1)
    assert torch.equal(decode(target, draft, inputs, **options).sequences, expected)
    assert torch.equal(torch.rand(1), after)


def test_a_streamer_that_draws_gets_its_own_numbers():
    class Streamer:
        def put(self, value):
            torch.rand(1)

        def end(self):
            pass

    target, texts = make_target(dtype=torch.float64), []
    draft = make_draft2(target, block_size=6)
    for assistant in (None, draft):
        texts.append(decode(target, assistant, {"input_ids": PROMPT}, streamer=Streamer()).sequences)
    assert torch.equal(*texts)


def test_ids_past_the_drafter_s_vocabulary_may_be_sampled():
    target = make_target(dtype=torch.float64)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.1)
    target.resize_token_embeddings(112, mean_resizing=False)
    target.config.vocab_size = 96
    draft, (inputs, _) = make_draft2(target, block_size=6), ragged_prompts(3)
    expected = decode(target, None, inputs, top_k=0).sequences
    assert expected.max() >= 96
    assert torch.equal(decode(target, draft, inputs, top_k=0).sequences, expected)


def test_chances_that_are_no_numbers_are_an_error_as_without_a_drafter():
    noise = Noise([seeded(0)], 2, 5)
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        noise.sample(torch.tensor([[0.5, 0.5], [0.5, float("nan")]]), [0, 1], 0)


def test_what_cannot_be_foreseen_is_drafted_as_likeliest(monkeypatch):
    monkeypatch.setattr(call_dflash, "foreseeable", lambda device: False)
    target = make_target(dtype=torch.float64)
    draft = make_draft2(target, block_size=6)
    texts = [decode(target, one, {"input_ids": PROMPT}, max_new_tokens=30).sequences for one in (None, draft)]
    assert torch.equal(*texts)
