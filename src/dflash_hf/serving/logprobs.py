"""The log-probabilities of tokens that a request may ask for."""

from collections import deque
from collections.abc import Callable

import torch
from transformers import LogitsProcessor

from dflash_hf.serving.token_bytes import TokenBytes
from dflash_hf.targets.features import cache_argument, empty_cache, input_device


_CHUNK_TOKENS = 512  # prompt tokens scored in one forward
_MIN_LOG_PROB = -9999.0  # OpenAI's value for -inf, which JSON does not have


class LogProbs(LogitsProcessor):
    """
    Records the log-probabilities of an answer's tokens, before the temperature.

    For each token, `generate` calls it with the scores; the [`~dflash_hf.serving.request.Request`] then calls
    `on_token` with the token that was chosen. Entries wait in a queue until `pop_entries`.

    Args:
        token_bytes (`TokenBytes`): The bytes of the target's tokens.
        num_top_logprobs (`int`): Number of the likeliest tokens to list with each token.
    """

    def __init__(self, token_bytes: TokenBytes, num_top_logprobs: int):
        self.token_bytes = token_bytes
        self.num_top_logprobs = num_top_logprobs
        self._log_probs: torch.Tensor | None = None  # [V], of the next token
        self._entries: deque[dict] = deque()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        self._log_probs = scores[0].log_softmax(-1)  # [V]
        return scores

    def on_token(self, token: int) -> None:
        """Record the token that was chosen."""
        count = min(self.num_top_logprobs, len(self._log_probs))
        top = self._log_probs.topk(count).indices.tolist() if count else []
        self._entries.append({**self._entry(token), "top_logprobs": [self._entry(likely) for likely in top]})

    @torch.no_grad()
    def score_prompt(self, target, prompt: list[int], should_stop: Callable[[], bool]) -> None:
        """
        Record the tokens of a prompt, of which the first has no log-probability.

        Args:
            target (`PreTrainedModel`): The target.
            prompt (`list[int]`): Token ids.
            should_stop (`Callable[[], bool]`): Asked before each forward.
        """
        self._entries.append({**self._text_and_bytes(prompt[0]), "logprob": None, "top_logprobs": None})
        ids = torch.tensor([prompt], device=input_device(target))
        options: dict = {"use_cache": False}
        if len(prompt) > _CHUNK_TOKENS:  # logits of all positions at once may not fit into memory
            options = {"use_cache": True, cache_argument(target): empty_cache(target)}
        for start in range(0, len(prompt) - 1, _CHUNK_TOKENS):
            if should_stop():
                return
            logits = target(input_ids=ids[:, start : start + _CHUNK_TOKENS], **options).logits[0]  # [C, V]
            following = prompt[start + 1 : start + _CHUNK_TOKENS + 1]
            for row, token in zip(logits[: len(following)].float().log_softmax(-1), following, strict=True):
                self._log_probs = row
                self.on_token(token)

    def _entry(self, token: int) -> dict:
        log_prob = max(float(self._log_probs[token]), _MIN_LOG_PROB)
        return {**self._text_and_bytes(token), "logprob": log_prob}

    def _text_and_bytes(self, token: int) -> dict:
        return {"token": self.token_bytes.shown(token), "bytes": [*self.token_bytes(token)]}

    def pop_entries(self, is_chat: bool) -> dict | None:
        """The entries since the last call, if any, in the form of chats or in the older one of completions."""
        entries = [self._entries.popleft() for _ in range(len(self._entries))]
        if not entries:
            return None
        if is_chat:
            return {"content": entries}
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [_by_text(entry["top_logprobs"]) for entry in entries],
        }


def _by_text(entries: list[dict] | None) -> dict | None:
    """Log-probabilities by their tokens' texts; of two with the same text, the likelier one's."""
    if entries is None:
        return None
    by_text: dict = {}
    for entry in entries:
        by_text.setdefault(entry["token"], entry["logprob"])
    return by_text
