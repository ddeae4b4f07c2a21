"""Streams an answer as pieces of text, each with its source: the drafter or the target."""

import time
from collections.abc import Callable

import torch
from transformers.generation.streamers import BaseStreamer

from dflash_hf.serving.token_bytes import TokenBytes


class PieceStreamer(BaseStreamer):
    """
    A streamer that separates accepted tokens from the target's own, as `dflash_hf.evaluation.text.origins` does for a
    finished answer. `generate` passes tokens one by one, and a DFlash drafter calls `next_round` before the tokens of
    each verification; the last of these comes from the target itself.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        write (`Callable[[str, int], None]`): Called with each piece of text and its source: 0 for the target itself,
            else the number of the verification that accepted it, counted from 1.

    Attributes:
        tokens (`int`), rounds (`int`), seconds (`float`): Totals of the answer so far; `seconds` includes the prompt.
    """

    def __init__(self, tokenizer, write: Callable[[str, int], None]):
        self.tokenizer = tokenizer
        self.write = write
        self._bytes_of = TokenBytes(tokenizer)
        self.tokens = 0
        self.rounds = 0
        self.text = ""
        self.seconds = 0.0
        self._start = time.perf_counter()
        self._awaits_prompt = True
        self._round: list[int] = []  # tokens committed by the current verification
        self._line: list[int] = []  # tokens from the last line break on
        self._written = ""  # what has been written of their text

    @property
    def tau(self) -> float | None:
        """Tokens per verification; `None` if there was none."""
        return (self.tokens - 1) / self.rounds if self.rounds else None

    def status(self) -> str:
        """Speed and tau so far."""
        tau = "" if self.tau is None else f", tau {self.tau:.2f}"
        return f"{self.tokens / max(self.seconds, 1e-9):.1f} tokens/s{tau}"

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then each token."""
        if self._awaits_prompt:
            self._awaits_prompt = False
            return
        self._round += value.flatten().tolist()
        self.tokens += value.numel()
        self.seconds = time.perf_counter() - self._start
        if not self.rounds:  # the first token, or no drafter
            self._flush()

    def next_round(self, drafted: int = 0) -> None:
        """The following tokens come from a new verification, of `drafted` drafted tokens."""
        self._flush()
        self.rounds += 1

    def end(self) -> None:
        """The answer is complete."""
        self._flush()
        self._write_piece([], 0, final=True)

    def _flush(self) -> None:
        """Write what the current verification has committed."""
        # The last token of a verification is the target's own.
        accepted = self._round[:-1]
        own = self._round[-1:]
        self._round = []
        if accepted:
            self._write_piece(accepted, self.rounds)
        if own:
            self._write_piece(own, 0)

    def _write_piece(self, tokens: list[int], source: int, final: bool = False) -> None:
        """Write what these tokens add to the text; an incomplete character waits for the next ones."""
        self._line += tokens
        if final:  # without a character that was cut
            text = self._bytes_of.complete_text(self._line)
        else:
            text = self.tokenizer.decode(self._line, skip_special_tokens=True)
            if text.endswith("\ufffd"):  # an incomplete character
                return
        piece = text[len(self._written) :]
        self._written = text
        if text.endswith("\n"):  # keep it: some tokenizers drop the space of the first token
            self._line = self._line[-1:]
            self._written = self.tokenizer.decode(self._line, skip_special_tokens=True)
        if piece:
            self.text += piece
            self.write(piece, source)
