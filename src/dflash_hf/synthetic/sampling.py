"""Choosing the next tokens of a batch, each row with a random generator of its own."""

import random
from collections.abc import Sequence

import torch
from transformers import GenerationConfig

from dflash_hf.decoding.acceptance import argmax_token


# Generation settings that a `TokenSampler` supports, and those that do not change which token is chosen.
_SUPPORTED_SETTINGS = {
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "suppress_tokens",
    "max_new_tokens",
    "use_cache",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "max_length",
    "transformers_version",
}
_NUM_TOP_TOKENS = 1024  # sorted first; the whole vocabulary is sorted only if these do not suffice


def sampler_supports(config: GenerationConfig) -> bool:
    """Whether a [`TokenSampler`] chooses the tokens that `generate` would choose with these settings."""
    for name, value in config.to_diff_dict().items():
        if value not in (None, False) and not name.startswith("_") and name not in _SUPPORTED_SETTINGS:
            return False
    return True


class TokenSampler:
    """
    Chooses the next token of each row: the likeliest, or a sample. Each prompt has its own random generator, so that
    its response depends on the seed and the prompt's key, not on what else is in the batch.

    Args:
        config (`GenerationConfig`): `do_sample`, `temperature`, `top_k`, `top_p` and `suppress_tokens`.
        seed (`int`): Seed of all prompts.
    """

    def __init__(self, config: GenerationConfig, seed: int):
        self.do_sample = bool(config.do_sample)
        self.seed = seed
        self.temperature = 1.0 if config.temperature is None else config.temperature
        self.top_k = config.top_k or 0
        self.top_p = 1.0 if config.top_p is None else config.top_p
        self.suppressed_ids = list(config.suppress_tokens or [])

    def generator(self, key: object) -> random.Random:
        """The random generator of the prompt with this key."""
        return random.Random(f"{self.seed} {key}")

    def __call__(self, logits: torch.Tensor, generators: Sequence[random.Random]) -> torch.LongTensor:
        """The next token `[R]` of each row, from logits `[R, V]` and the rows' generators."""
        scores = logits.float()
        if self.suppressed_ids:
            scores[:, self.suppressed_ids] = -torch.inf
        if not self.do_sample:
            return argmax_token(scores)
        draws = [generator.random() for generator in generators]
        uniforms = torch.tensor(draws, dtype=torch.double, device=scores.device)
        return sample_tokens(scores / self.temperature, uniforms, self.top_k, self.top_p)


def sample_tokens(
    scores: torch.Tensor, uniforms: torch.Tensor, top_k: int = 0, top_p: float = 1.0
) -> torch.LongTensor:
    """
    Inverse-transform sampling: the token of each row `[R]` at which the cumulative distribution, likeliest tokens
    first, reaches the row's uniform number.

    Args:
        scores (`torch.Tensor`): `[R, V]`.
        uniforms (`torch.Tensor`): `[R]`, uniform in [0, 1).
        top_k, top_p: Restrict the distribution to the `top_k` likeliest tokens (0: all), then to the nucleus `top_p`.
    """
    # 1. Probabilities of the likeliest tokens. Sorting a whole vocabulary takes longer than a small forward.
    size = min(top_k or _NUM_TOP_TOKENS, scores.shape[1])
    top_scores, top_ids = scores.topk(size)  # [R, K], descending
    normalized_over = top_scores if top_k else scores
    probabilities = (top_scores.double() - normalized_over.double().logsumexp(-1, keepdim=True)).exp()  # [R, K]
    # 2. The nucleus: all tokens before which less than `top_p` has accumulated.
    likelier = probabilities.cumsum(-1) - probabilities  # probability of all likelier tokens
    nucleus = probabilities.where(likelier < top_p, 0.0)
    cumulative = nucleus.cumsum(-1)
    if top_p < 1 or top_k:
        total = nucleus.sum(-1, keepdim=True)
    else:
        total = torch.ones_like(cumulative[:, :1])
    # 3. The token at which the cumulative distribution reaches the uniform number.
    indices = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True).clamp(max=size - 1)
    tokens = top_ids.gather(1, indices)[:, 0]
    # 4. The top tokens may cover less than the nucleus, or less than the uniform number: then all tokens are sorted.
    is_insufficient = (likelier[:, -1] < top_p) & ((top_p < 1) | (cumulative[:, -1] <= uniforms))
    if not top_k and size < scores.shape[1] and is_insufficient.any():
        every_token = scores.shape[1]
        tokens[is_insufficient] = sample_tokens(scores[is_insufficient], uniforms[is_insufficient], every_token, top_p)
    return tokens
