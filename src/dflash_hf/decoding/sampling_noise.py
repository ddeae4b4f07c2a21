"""
The noise of a call's samples, drawn before it is needed, so that drafts take it into account and no output changes.

`torch.multinomial` takes the token with the largest `p / e`, where `e ~ Exp(1)` is its generator's noise: the
Gumbel-max trick. With the noise of the next draws at hand, each row takes its own sample of each of its tokens,
however far it is ahead of the others: a seed gives the same output as without a drafter, in batches too. And a drafter
that takes the token with the largest `q / e` drafts what the target will draw wherever `q` is near `p` (Daliri et al.,
arXiv 2408.07978).

The life of one draw. Draw `i` is `[R, V]`: the noise that `generate` would draw for generated token `i` of every row.

1. *Drawn*, when somebody first needs it: `_draw(i)` takes it from the generator, in order, and keeps the generator's
   state before it. A draw that memory has no room for is dropped, and drawn again from that state.
2. *Drafted with.* `DraftSession.logits` adds it to the draft logits as Gumbel noise (`gumbel`), so that the likeliest
   token is the one that the drafter would draw.
3. *Sampled with.* `TokenSelector` uses the same draw for the target's choice: of whole drafts at once (`perturb`), or
   token by token (`sample`).
4. *Forgotten.* After each round `GenerationState` calls `advance`: draw `i` is dropped once all rows have generated
   token `i`.
5. *Undone*, if no row has used it: at the end of the call `rewind` sets the generator back to the first unused draw,
   which is where decoding without a drafter leaves it.
"""

import functools

import torch
from transformers.utils import logging


logger = logging.get_logger(__name__)


class SamplingNoise:
    """
    The draws of a generator from distributions over a vocabulary, each for all rows of a batch. An index of a draw is
    the number of tokens that a row has generated before the token that is sampled with it.

    Args:
        generator (`torch.Generator`): What draws.
        rows (`int`): Rows of the batch.
        temperature (`float`): At which the target samples.

    Attributes:
        indices (`list[int]`): The index of each row's next draw.
    """

    # Memory of the kept draws, though never less than two rounds' worth. A dropped draw is repeated if a row needs it.
    MAX_BYTES = 2**28

    def __init__(self, generator: torch.Generator, rows: int, temperature: float = 1.0):
        self.generator = generator
        self.rows = rows
        self.temperature = temperature
        self.indices = [0] * rows
        self.vocab_size = 0  # set by the first sample, which comes before the first draft
        self.generator_states: dict[int, torch.Tensor] = {}  # before each draw, by its index
        self.draws: dict[int, torch.Tensor] = {}  # [R, V], the latest ones, by index
        self.next_index = 0  # of the draw that the generator gives next
        self.draws_per_round = 1  # the most that a row has needed in one round

    @classmethod
    def for_device(cls, device: torch.device, rows: int, temperature: float | None) -> "SamplingNoise":
        """
        The noise that `torch.multinomial` would draw on this device, from torch's own generator. Where that cannot be
        predicted, other noise: another sample, of the same distribution.
        """
        if multinomial_is_predictable(device):
            return cls(default_generator(device), rows, temperature or 1.0)
        logger.warning_once(
            f"The draws of torch.multinomial on {device} cannot be predicted: samples follow the target's "
            "distribution, but a seed gives another output than without the drafter."
        )
        generator = torch.Generator("cpu" if device.type == "mps" else device)
        return cls(generator.manual_seed(int(torch.randint(2**62, ()))), rows, temperature or 1.0)

    def sample(self, scores: torch.Tensor, row: int, index: int) -> int:
        """What `torch.multinomial` draws for generated token `index` of a row, from processed scores `[1, V]`."""
        probabilities = scores.softmax(dim=-1)
        draw = self._draw(index, scores.shape[-1])[row].to(probabilities.device)
        best, token = (probabilities / draw).max(dim=-1)
        if best.isnan():
            token = _sample_with_checks(probabilities)
        return int(token)

    def perturb(self, scores: torch.Tensor, depths: torch.LongTensor, max_depth: int) -> torch.Tensor:
        """
        Probabilities divided by their noise, whose argmax is the sample.

        Args:
            scores (`torch.Tensor`): `[R, n, V]`, processed, after each token of a draft.
            depths (`torch.LongTensor`): `[R, n]`, of these tokens. What follows depth 0 is sampled with a row's next
                draw.
            max_depth (`int`): No depth is larger.

        Returns:
            `torch.Tensor` `[R, n, V]`.
        """
        probabilities = scores.softmax(dim=-1)
        self.vocab_size = scores.shape[-1]
        noise = self._noise_of_rows(max_depth + 1).to(scores.device)
        rows = torch.arange(self.rows, device=depths.device)[:, None]
        return probabilities / noise[rows, depths]

    def gumbel(self, count: int, ids: torch.LongTensor | slice) -> torch.Tensor:
        """
        Standard Gumbel noise `[R, count, len(ids)]` of each row's next `count` draws: what is added to the
        log-probabilities of these ids. The first token must have been sampled, which `GenerationState.begin` does:
        until then the target's vocabulary is unknown.
        """
        return self._noise_of_rows(count, ids).log_().neg_()

    def _noise_of_rows(self, count: int, ids=slice(None)) -> torch.Tensor:
        """The noise `[R, count, V]` of each row's next draws. A draw that several rows need is drawn once."""
        self.draws_per_round = max(self.draws_per_round, count)
        noise: list[list[torch.Tensor]] = [[] for _ in self.indices]  # of each row, `count` times [V]
        for index in sorted({first + step for first in self.indices for step in range(count)}):
            draw = self._draw(index, self.vocab_size)  # may drop an earlier draw, of which the parts are taken by then
            for row, first in enumerate(self.indices):
                if first <= index < first + count:
                    noise[row].append(draw[row, ids])
        return torch.stack([torch.stack(draws) for draws in noise])

    def _draw(self, index: int, vocab_size: int) -> torch.Tensor:
        """Exponential noise `[R, vocab_size]` of a draw."""
        self.vocab_size = vocab_size
        while self.next_index <= index:
            self.generator_states[self.next_index] = self.generator.get_state()
            self._keep(self.next_index, self._draw_from(self.generator))
            self.next_index += 1
        if index not in self.draws:
            generator = torch.Generator(self.generator.device)
            generator.set_state(self.generator_states[index])
            self._keep(index, self._draw_from(generator))
        return self.draws[index]

    def _draw_from(self, generator: torch.Generator) -> torch.Tensor:
        empty = torch.empty(self.rows, self.vocab_size, dtype=torch.float32, device=generator.device)
        return empty.exponential_(generator=generator)

    def _keep(self, index: int, draw: torch.Tensor) -> None:
        self.draws[index] = draw
        max_draws = max(self.MAX_BYTES // draw.nbytes, 2 * self.draws_per_round)
        while len(self.draws) > max_draws:
            oldest = next(iter(self.draws))
            del self.draws[oldest]

    def advance(self, indices: list[int]) -> None:
        """Set the index of each row's next draw, and drop the draws that no row needs any more."""
        self.indices = indices
        first_needed = min(indices)
        for table in (self.generator_states, self.draws):
            for index in [index for index in table if index < first_needed]:
                del table[index]

    def rewind(self, used: int) -> None:
        """Undo all draws but the first `used`, unless other code has used the generator meanwhile."""
        if used >= self.next_index:
            return
        replayed = torch.Generator(self.generator.device)
        replayed.set_state(self.generator_states[used])
        for _ in range(used, self.next_index):
            self._draw_from(replayed)
        if torch.equal(replayed.get_state(), self.generator.get_state()):
            self.generator.set_state(self.generator_states[used])


def _sample_with_checks(probabilities: torch.Tensor) -> torch.Tensor:
    """A sample, or the error of `torch.multinomial` if these are not probabilities."""
    return torch.multinomial(probabilities, 1, generator=torch.Generator(probabilities.device))[:, 0]


def default_generator(device: torch.device) -> torch.Generator:
    """Torch's default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return torch.get_device_module(device).default_generators[index]


@functools.cache
def multinomial_is_predictable(device: torch.device) -> bool:
    """Whether `torch.multinomial` draws on a device as described above, and its generators can be rewound."""
    try:
        generator = torch.Generator(device).manual_seed(0)
        copied_generator = torch.Generator(device)
        copied_generator.set_state(generator.get_state())
        scores = torch.arange(1.0, 3 * 4096 + 1, device=device).view(3, 4096).log()
        noise = SamplingNoise(copied_generator, rows=3)
        for step in range(8):
            drawn = torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)[:, 0].tolist()
            if drawn != [noise.sample(scores[row : row + 1], row, step) for row in range(3)]:
                return False
        return True
    except torch.OutOfMemoryError:  # says nothing about the device
        raise
    except (AttributeError, RuntimeError):  # generators of some devices cannot be copied
        return False
