"""
The noise of a call's samples, drawn before it is needed: drafts allow for it, and no text changes.

`torch.multinomial` takes the token with the largest `p / e`, where `e ~ Exp(1)` is its generator's noise: the
Gumbel-max trick. With the noise of the next draws at hand, each row takes its own sample of each of its tokens,
however far it is ahead of the others: a seed gives the text that it gives without a drafter, in batches too. And a
drafter that takes the token with the largest `q / e` drafts what the target will draw wherever `q` is near `p`
(Daliri et al., arXiv 2408.07978).
"""

import functools

import torch


class Noise:
    """
    The noise of the samples of a call.

    Args:
        generators (`list[torch.Generator]`): One for all rows, which takes one draw for the next token of all of them,
            or one per row.
        rows (`int`): Rows of the batch.
        most (`int`): Maximum number of tokens per row.

    Attributes:
        taken (`list[int]`): The number of tokens that each row had sampled before this round.
    """

    MOST_BYTES = 2**29  # of noise that is kept for rows that are behind

    def __init__(self, generators: list[torch.Generator], rows: int, most: int):
        sharing = rows // len(generators)
        self.draws = [Draws(one, range(n * sharing, (n + 1) * sharing)) for n, one in enumerate(generators)]
        self.of_row = [draws for draws in self.draws for _ in draws.rows]
        self.taken, self.alive, self.most = [0] * rows, [True] * rows, most
        self.sampled = [0] * rows  # this round's tokens included

    def sample(self, chances: torch.Tensor, rows: list[int], step: int) -> torch.LongTensor:
        """
        Args:
            chances (`torch.Tensor`): `[r, V]`, the distributions of the next token but `step` of some rows.
            rows (`list[int]`): Their indices.
            step (`int`): Tokens that they have sampled in this round.

        Returns:
            `torch.LongTensor` `[r]`: what `torch.multinomial` draws from them.
        """
        noise = []
        for row in rows:
            noise.append(self.of_row[row].noise(row, self.taken[row] + step, chances.shape[-1]))
            self.sampled[row] = self.taken[row] + step + 1
        best, tokens = (chances / torch.stack(noise)).max(dim=-1)
        if best.isnan().any():  # an error, if they are no chances
            return torch.multinomial(chances, 1, generator=torch.Generator(chances.device))[:, 0]
        return tokens

    def goes_on(self, row: int, step: int) -> bool:
        """
        Whether a row may sample more than `step` tokens in this round: not if it is so far ahead of others that the
        noise kept for them takes too much memory.
        """
        draws = self.of_row[row]
        return (self.taken[row] + step - self._first_needed(draws)) * draws.bytes < self.MOST_BYTES

    def ahead(self, number: int, ids: torch.LongTensor) -> torch.Tensor:
        """
        Standard Gumbel noise `[R, number, len(ids)]` of the next `number` tokens of each row: what is added to the
        log-probabilities of these ids.
        """
        noise = torch.zeros(len(self.taken), number, len(ids), dtype=torch.float32, device=ids.device)
        for row in [row for row, goes_on in enumerate(self.alive) if goes_on]:
            for step in range(min(number, self.most - self.taken[row])):
                noise[row, step] = self.of_row[row].gumbel(row, self.taken[row] + step, ids)
        return noise

    def advance(self, taken: list[int], alive: list[bool]) -> None:
        """Rows have sampled so many tokens; what no row needs any more is dropped."""
        self.taken, self.alive = [*taken], [*alive]
        for draws in self.draws:
            draws.drop(self._first_needed(draws))

    def _first_needed(self, draws: "Draws") -> int:
        """The first draw that a row has not taken yet."""
        waiting = [self.taken[row] for row in draws.rows if self.alive[row]]
        return min(waiting) if waiting else max(self.taken[row] for row in draws.rows)

    def close(self) -> None:
        """Leave the generators as without a drafter, after as many draws as the text has tokens."""
        for draws in self.draws:
            draws.close(max(self.sampled[row] for row in draws.rows))


class Draws:
    """
    A generator's draws from distributions over a vocabulary, for all of its rows at a time. Draws that were made for
    nothing are undone at the end, unless somebody else has used the generator in between.
    """

    def __init__(self, generator: torch.Generator, rows: range):
        self.generator, self.rows, self.width = generator, rows, 0
        self.states: dict[int, torch.Tensor] = {}  # of the generator, before each draw
        self.kept: dict[int, torch.Tensor] = {}  # [rows, V], exponential noise of each draw
        self.gumbels: dict[int, torch.Tensor] = {}  # [rows, len(ids)]
        self.made = 0

    def noise(self, row: int, index: int, width: int) -> torch.Tensor:
        """A row's noise `[V]` in a draw from a vocabulary of `width` tokens."""
        self.width = width
        return self._draw(index)[row - self.rows.start]

    def gumbel(self, row: int, index: int, ids: torch.LongTensor) -> torch.Tensor:
        """A row's standard Gumbel noise `[len(ids)]` of some tokens in a draw."""
        if index not in self.gumbels:
            self.gumbels[index] = self._draw(index)[:, ids].log_().neg_()
        return self.gumbels[index][row - self.rows.start]

    def _draw(self, index: int) -> torch.Tensor:
        """The noise `[rows, V]` of a draw."""
        while self.made <= index:
            self.states[self.made] = self.generator.get_state()
            self.kept[self.made] = self._drawn(self.generator)
            self.made += 1
        return self.kept[index]

    def _drawn(self, generator: torch.Generator) -> torch.Tensor:
        noise = torch.empty(len(self.rows), self.width, dtype=torch.float32, device=generator.device)
        return noise.exponential_(generator=generator)

    @property
    def bytes(self) -> int:
        """Memory of one draw's noise."""
        return 4 * len(self.rows) * self.width

    def drop(self, before: int) -> None:
        """Draws before one of them are not needed any more."""
        for held in (self.states, self.kept, self.gumbels):
            for index in [index for index in held if index < before]:
                del held[index]

    def close(self, taken: int) -> None:
        """Undo all but the first `taken` draws, if these alone lead to the present state."""
        if taken < self.made:
            again = torch.Generator(self.generator.device)
            again.set_state(self.states[taken])
            for _ in range(taken, self.made):
                self._drawn(again)
            if torch.equal(again.get_state(), self.generator.get_state()):
                self.generator.set_state(self.states[taken])


class Foresight:
    """
    Adds the noise of the next samples to draft logits.

    Args:
        noise (`Noise`): The noise of the call.
        vocab_size (`int`): Of the target.
        target_ids (`callable`): The target's ids for ids of the drafter's vocabulary.
        temperature (`float`): At which the target samples.
    """

    def __init__(self, noise: Noise, vocab_size: int, target_ids, temperature: float):
        self.noise, self.last, self.target_ids, self.temperature = noise, vocab_size - 1, target_ids, temperature
        self.ids: torch.LongTensor | None = None  # [V], target ids of the drafter's vocabulary

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """
        Args:
            logits (`torch.Tensor`): `[R, n, V]`, draft logits of the next `n` tokens.

        Returns:
            `torch.Tensor` `[R, n, V]` in fp32: the likeliest token of a slot is the one that would be drawn from them.
        """
        if self.ids is None:
            ids = self.target_ids(torch.arange(logits.shape[-1], device=logits.device))
            self.ids = ids.clamp(max=self.last).to(self.noise.draws[0].generator.device)
        return logits.float() / self.temperature + self.noise.ahead(logits.shape[1], self.ids).to(logits.device)


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
        generator, again = torch.Generator(device).manual_seed(0), torch.Generator(device)
        again.set_state(generator.get_state())
        chances = torch.arange(1.0, 3 * 4096 + 1, device=device).view(3, 4096)
        noise = Noise([again], rows=3, most=8)
        for step in range(8):
            drawn = torch.multinomial(chances, 1, generator=generator)[:, 0]
            if not torch.equal(noise.sample(chances, [0, 1, 2], step), drawn):
                return False
        return True
    except (AttributeError, RuntimeError):  # generators of some devices cannot be copied
        return False
