"""The loop of `dflash chat`."""

import contextlib
import sys

from dflash_hf.evaluation.text import chosen_line, shade
from dflash_hf.failures import explain
from dflash_hf.responses import cut_at
from dflash_hf.serving.conversation import Conversation
from dflash_hf.serving.pieces import PieceStreamer
from dflash_hf.serving.word_wrap import WordWrap
from dflash_hf.terminal import Echo, stdin_lines


HELP = """/draft off  answer without the drafter; /draft on uses it again
/reset      start a new conversation
/help       show this list
Ctrl-C stops an answer, Ctrl-D exits."""
# Print to the right of the text without wrapping, and return to where the text continues; clear the rest of the line.
_ASIDE, _BACK, _CLEAR = "\x1b7\x1b[?7l  \x1b[0;2m", "\x1b[0m\x1b[?7h\x1b8", "\x1b[K"


class Chat:
    """
    Args:
        conversation (`Conversation`): Holds both models.
        echo ([`~dflash_hf.terminal.Echo`]): Prints answers, and separately figures and errors.
        color (`bool`): Colour accepted tokens and, on a terminal, show the figures next to the text.
    """

    def __init__(self, conversation: Conversation, echo: Echo, color: bool):
        self.conversation, self.color, self.note, self._write = conversation, color, echo.note, echo.write
        self.draft = conversation.draft
        self.terminal = echo.stream.isatty()
        self.live = color and self.terminal
        self.person, self.lines = sys.stdin.isatty(), stdin_lines()
        self.previous = 0  # source of the previous piece
        self.wrap = WordWrap()
        self.turns: list[dict] = []

    def run(self) -> list[dict]:
        """Chat until the end of the input; returns the turns with their figures."""
        if self.person:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  enables line editing and history
            if self.color and self.draft is not None:
                self.note("Green tokens were drafted and accepted; the others are the target's own.")
            self.note("Ctrl-C stops an answer, Ctrl-D exits, /help lists the commands.")
        while (line := self._read()) is not None:
            if line.startswith("/"):
                self._command(line.split())
            elif line:
                self._turn(line)
        return self.turns

    def _read(self) -> str | None:
        if not self.person:
            line = next(self.lines, None)
            return None if line is None else line.strip()
        try:
            return input("\n> ").strip()
        except EOFError:
            self._write("\n")
            return None
        except KeyboardInterrupt:
            self._write("\n")
            return ""

    def _command(self, words: list[str]) -> None:
        if words == ["/reset"]:
            self.conversation.reset()
            self.note("a new conversation")
        elif words[0] == "/draft" and words[1:] in ([], ["on"], ["off"]):
            if self.draft is None:
                self.note("there is no drafter; choose one with --draft")
                return
            if words[1:]:
                self.conversation.draft = self.draft if words[1] == "on" else None
            self.note(self._who())
        else:
            self.note(HELP if words == ["/help"] else f"{' '.join(words)} is not a command\n{HELP}")

    def _turn(self, text: str) -> None:
        streamer = PieceStreamer(
            self.conversation.tokenizer, lambda *piece: self._show(streamer, *piece), self._end_line
        )
        output = error = None
        self.wrap = WordWrap()
        try:
            output = self.conversation.answer(text, streamer)
        except (KeyboardInterrupt, Exception) as raised:
            if not self.person:
                raise
            error = raised
            self._end_line()
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self.note(f"error: {explain(error)}")
            return
        written = [] if output is None else output.sequences[0, -streamer.tokens :].tolist()
        limit = self.conversation.options.get("max_new_tokens")
        where = cut_at(written, limit, self.conversation.target.generation_config)
        stopped = "; stopped" if error is not None else f"; cut off at {where}" if where else ""
        self.note(f"{self._who()}: {streamer.tokens} tokens in {streamer.seconds:.2f} s, {streamer.status()}{stopped}")
        if sizes := getattr(output, "draft_sizes", None):  # if our drafter chose them
            self.note(chosen_line(sizes, output.estimated_speedup))
        figures = {"tokens": streamer.tokens, "seconds": streamer.seconds, "tau": streamer.tau}
        self.turns.append({"prompt": text, "text": streamer.text, **figures})

    def _end_line(self) -> None:
        self._write((_CLEAR if self.live else "") + ("\x1b[0m" if self.color else "") + "\n")
        self.previous = 0

    def _show(self, streamer: PieceStreamer, piece: str, source: int) -> None:
        color = f"\x1b[{shade(source)}m" if self.color and (self.live or source != self.previous) else ""
        self.previous = source
        shown = self.wrap(piece, color) if self.terminal else color + piece
        self._write(f"{_CLEAR}{shown}{_ASIDE}{streamer.status()}{_BACK}" if self.live else shown)

    def _who(self) -> str:
        return "target alone" if self.conversation.draft is None else "with the drafter"
