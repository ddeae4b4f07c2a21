"""
The noise of a call's samples, drawn before it is needed: drafts allow for it, and no text changes.

`torch.multinomial` takes the token with the largest `p / e`, where `e ~ Exp(1)` is its generator's noise: the
Gumbel-max trick. With the noise of the next draws at hand, each row takes its own sample of each of its tokens,
however far it is ahead of the others: a seed gives the text that it gives without a drafter, in batches too. And a
drafter that takes the token with the largest `q / e` drafts what the target will draw wherever `q` is near `p`
(Daliri et al., arXiv 2408.07978).

The life of one drawn number. Draw `i` is `[R, V]`, what `generate` would draw for the token number `i` of every row.
1. `_draw(i)` makes it from the generator, in order, and keeps the generator's state before it.
2. The drafter reads it as Gumbel noise (`gumbel`), so that it drafts the token that will be drawn.
3. The target's choice reads it again, of whole drafts (`race`) or of single tokens (`sample`).
4. `forget` drops it when all rows are past token `i`; a draw that memory had no room for is made again from its state.
5. `close` rewinds the generator to the first draw that no row used, where plain decoding would have left it.
"""

import functools

import torch
from transformers.utils import logging


logger = logging.get_logger(__name__)


class SamplingNoise:
    """
    The draws of a generator from distributions over a vocabulary, each for all rows of a batch.

    Args:
        generator (`torch.Generator`): What draws.
        rows (`int`): Rows of the batch.
        temperature (`float`): At which the target samples.
    """

    # Of draws that are kept, or twice those of a round, if that is more; those of rows far behind are made again.
    MOST_BYTES = 2**28

    def __init__(self, generator: torch.Generator, rows: int, temperature: float = 1.0):
        self.generator = generator
        self.rows = rows
        self.temperature = temperature
        self.vocab_size = 0
        self.states: dict[int, torch.Tensor] = {}  # of the generator, before each draw
        self.draws: dict[int, torch.Tensor] = {}  # [R, V], those used last
        self.made = 0
        self.draws_per_round = 1  # that a row needs

    @classmethod
    def of(cls, device: torch.device, rows: int, temperature: float | None) -> "SamplingNoise":
        """
        The noise of the samples that a seed gives on this device without a drafter; where it cannot be foreseen, noise
        of its own: another sample, of the same distribution.
        """
        if foreseeable(device):
            return cls(generator_of(device), rows, temperature or 1.0)
        logger.warning_once(
            f"The draws of torch.multinomial on {device} cannot be foreseen: samples follow the target's distribution,"
            " but a seed gives another text than without the drafter."
        )
        own = torch.Generator("cpu" if device.type == "mps" else device)
        return cls(own.manual_seed(int(torch.randint(2**62, ()))), rows, temperature or 1.0)

    def sample(self, scores: torch.Tensor, row: int, index: int) -> int:
        """What `torch.multinomial` draws for the token number `index` of a row, from processed scores `[1, V]`."""
        probabilities = scores.softmax(dim=-1)
        draw = self._draw(index, scores.shape[-1])[row].to(probabilities.device)
        best, token = (probabilities / draw).max(dim=-1)
        if best != best:  # NaN
            token = _error_of(probabilities)
        return int(token)

    def race(self, scores: torch.Tensor, depths: torch.LongTensor, lengths: list[int]) -> torch.Tensor:
        """
        Processed scores `[R, n, V]` after each token of a draft at these `depths` `[R, n]`, as probabilities over
        their noise: the largest is the sample. `lengths` are the tokens generated before in each row.
        """
        probabilities = scores.softmax(dim=-1)
        self.vocab_size = scores.shape[-1]
        noise = self._of_rows(lengths, int(depths.max()) + 1).to(scores.device)
        rows = torch.arange(len(lengths), device=depths.device)[:, None]
        return probabilities / noise[rows, depths]

    def gumbel(self, lengths: list[int], number: int, ids: torch.LongTensor | slice) -> torch.Tensor:
        """
        Standard Gumbel noise `[R, number, len(ids)]` of the next `number` tokens of each row: what is added to the
        log-probabilities of these ids.
        """
        return self._of_rows(lengths, number, ids).log_().neg_()

    def _of_rows(self, lengths: list[int], number: int, ids=slice(None)) -> torch.Tensor:
        """The noise `[R, number, V]` of the next draws of each row; each draw is made once, as few are kept."""
        self.draws_per_round = max(self.draws_per_round, number)
        indices = {length + step for length in lengths for step in range(number)}
        noise: dict[tuple[int, int], torch.Tensor] = {}  # (row, step) -> [V]
        for index in sorted(indices):
            draw = self._draw(index, self.vocab_size)
            for row, length in enumerate(lengths):
                if 0 <= index - length < number:
                    noise[row, index - length] = draw[row, ids]
        rows = [torch.stack([noise[row, step] for step in range(number)]) for row in range(len(lengths))]
        return torch.stack(rows)

    def _draw(self, index: int, vocab_size: int) -> torch.Tensor:
        """Exponential noise `[R, vocab_size]` of a draw."""
        self.vocab_size = vocab_size
        while self.made <= index:
            self.states[self.made] = self.generator.get_state()
            self._keep(self.made, self._drawn(self.generator))
            self.made += 1
        if index not in self.draws:
            again = torch.Generator(self.generator.device)
            again.set_state(self.states[index])
            self._keep(index, self._drawn(again))
        return self.draws[index]

    def _drawn(self, generator: torch.Generator) -> torch.Tensor:
        empty = torch.empty(self.rows, self.vocab_size, dtype=torch.float32, device=generator.device)
        return empty.exponential_(generator=generator)

    def _keep(self, index: int, draw: torch.Tensor) -> None:
        self.draws[index] = draw
        most = max(self.MOST_BYTES // draw.nbytes, 2 * self.draws_per_round)
        while len(self.draws) > most:
            oldest = next(iter(self.draws))
            del self.draws[oldest]

    def forget(self, before: int) -> None:
        """No row needs draws before this one any more."""
        for table in (self.states, self.draws):
            for index in [index for index in table if index < before]:
                del table[index]

    def close(self, taken: int) -> None:
        """Undo all draws but the first `taken`, unless other code has used the generator meanwhile."""
        if taken >= self.made:
            return
        again = torch.Generator(self.generator.device)
        again.set_state(self.states[taken])
        for _ in range(taken, self.made):
            self._drawn(again)
        if torch.equal(again.get_state(), self.generator.get_state()):
            self.generator.set_state(self.states[taken])


def _error_of(probabilities: torch.Tensor) -> torch.Tensor:
    """The error of `torch.multinomial`, if these are not probabilities."""
    return torch.multinomial(probabilities, 1, generator=torch.Generator(probabilities.device))[:, 0]


def generator_of(device: torch.device) -> torch.Generator:
    """Torch's own generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return torch.get_device_module(device).default_generators[index]


@functools.cache
def foreseeable(device: torch.device) -> bool:
    """Whether `torch.multinomial` draws on a device as described above, and its generators can be rewound."""
    try:
        generator = torch.Generator(device).manual_seed(0)
        again = torch.Generator(device)
        again.set_state(generator.get_state())
        scores = torch.arange(1.0, 3 * 4096 + 1, device=device).view(3, 4096).log()
        noise = SamplingNoise(again, rows=3)
        for step in range(8):
            drawn = torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)[:, 0].tolist()
            if drawn != [noise.sample(scores[row : row + 1], row, step) for row in range(3)]:
                return False
        return True
    except torch.OutOfMemoryError:  # says nothing about the device
        raise
    except (AttributeError, RuntimeError):  # generators of some devices cannot be copied
        return False
