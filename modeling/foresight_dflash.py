"""
What the target will draw: drafts that take the noise of its next samples into account.

`torch.multinomial` takes the token with the largest `p / e`, where `e ~ Exp(1)` is its generator's noise: the
Gumbel-max trick. A drafter that takes the token with the largest `q / e`, with the same noise, drafts what the target
will draw wherever `q` is near `p`, in trees too. And the text stays the one that the generator gives without a
drafter, whatever was drafted (Daliri et al., arXiv 2408.07978). Nothing is drawn from the generator itself.
"""

import functools

import torch


class Foresight:
    """
    The noise of the next samples, added to draft logits.

    Args:
        generators (`list[torch.Generator]`): The generator of each row; each token takes one draw.
        vocab_size (`int`): Of the target.
        target_ids (`callable`): The target's ids for ids of the drafter's vocabulary.
        temperature (`float`): At which the target samples.
    """

    LEAST = 0.85  # temperature below which the noise decides little: at 0.7 it paid for itself, and no more

    def __init__(self, generators: list[torch.Generator], vocab_size: int, target_ids, temperature: float):
        self.rows = [Upcoming(generator, vocab_size) for generator in generators]
        self.last, self.target_ids, self.temperature = vocab_size - 1, target_ids, temperature
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
            self.ids = ids.clamp(max=self.last).to(self.rows[0].generator.device)
        noise = torch.stack([row.noise(logits.shape[1], self.ids) for row in self.rows])  # [R, n, V]
        return logits.float() / self.temperature + noise.to(logits.device)


class Upcoming:
    """The noise of one generator's next draws from distributions over `vocab_size` tokens."""

    def __init__(self, generator: torch.Generator, vocab_size: int):
        self.generator, self.ahead = generator, torch.Generator(generator.device)
        self.vocab_size = vocab_size
        self.known: list[tuple[torch.Tensor, torch.Tensor]] = []  # a state, and the noise that is drawn in it

    def noise(self, draws: int, ids: torch.LongTensor) -> torch.Tensor:
        """Standard Gumbel noise of some tokens `[draws, len(ids)]`: what is added to their log-probabilities."""
        state = self.generator.get_state()
        while self.known and not torch.equal(self.known[0][0], state):
            self.known.pop(0)
        if not self.known:
            self.ahead.set_state(state)
        while len(self.known) < draws:
            state = self.ahead.get_state()
            noise = torch.empty(self.vocab_size, device=self.ahead.device).exponential_(generator=self.ahead)
            self.known.append((state, noise[ids].log_().neg_()))
        return torch.stack([noise for _, noise in self.known[:draws]])


def generator_of(device: torch.device) -> torch.Generator:
    """Torch's own generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return torch.get_device_module(device).default_generators[index]


@functools.cache
def foreseeable(device: torch.device) -> bool:
    """Whether `torch.multinomial` draws on a device as described above."""
    try:
        generator = torch.Generator(device).manual_seed(0)
        upcoming, ids = Upcoming(generator, 4096), torch.arange(4096, device=device)
        weights = torch.arange(1.0, 4097.0, device=device)
        expected = (weights.log() + upcoming.noise(8, ids)).argmax(dim=-1).tolist()
        return expected == [int(torch.multinomial(weights[None], 1, generator=generator)) for _ in range(8)]
    except (AttributeError, RuntimeError):  # generators of some devices cannot be copied
        return False
