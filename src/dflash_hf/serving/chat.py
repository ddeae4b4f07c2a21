"""The loop of `dflash chat`: a client of a [`Decoder`] in this process, which keeps the conversation's cache."""

import contextlib
import copy
import select
import sys
from collections.abc import Callable, Iterator

import torch

from dflash_hf._io.errors import explain, one_line
from dflash_hf._io.terminal import Echo, hold_back_logs, stdin_lines
from dflash_hf.evaluation.text import ansi_color
from dflash_hf.serving.decoder import Decoder
from dflash_hf.serving.pieces import PieceStreamer
from dflash_hf.serving.request import Request, RequestStatus
from dflash_hf.targets.generation import cut_reason


HELP = """/draft off  answer without the drafter; /draft on uses it again
/reset      start a new conversation
/help       show this
Ctrl-C stops an answer, Ctrl-D exits. A pasted block of lines is one message."""
# A terminal passes on a pasted block at once: lines that follow within this time belong to it.
SECONDS_IN_A_PASTE = 0.05


class Chat:
    """
    A conversation in the terminal.

    Args:
        decoder (`Decoder`): Answers.
        encode (`Callable[[list[dict]], list[int]]`): The ids of a conversation that asks for an answer.
        options (`dict`): Generation settings.
        echo ([`~dflash_hf._io.terminal.Echo`]): Prints answers, and separately figures and errors.
        color (`bool`): Colour accepted tokens.
    """

    def __init__(self, decoder: Decoder, encode: Callable, options: dict, echo: Echo, color: bool):
        self.decoder = decoder
        self.encode = encode
        self.options = options
        self.color = color
        self.note = echo.note
        self.write = echo.write
        self.use_drafter = decoder.draft is not None
        self.messages: list[dict] = []
        self.turns: list[dict] = []

    def run(self) -> list[dict]:
        """Chat until the end of the input; returns the turns with their figures."""
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  enables line editing and history
            if self.color and self.use_drafter:
                self.note("Green tokens were drafted and accepted; the others are the target's own.")
            self.note(HELP)
        messages = self._typed_messages() if sys.stdin.isatty() else stdin_lines()
        for message in messages:
            if message.startswith("/"):
                self._run_command(message.strip())
            elif message.strip():
                self._answer(message.strip())
        return self.turns

    def _run_command(self, command: str) -> None:
        """Run a command, a line with a slash, and note what was done."""
        if command == "/reset":
            self.messages = []
            self.note("A new conversation: what was said before is forgotten.")
        elif command in ("/draft on", "/draft off") and self.decoder.draft is None:
            self.note("There is no drafter; --draft names one.")
        elif command in ("/draft on", "/draft off"):
            self.use_drafter = command == "/draft on"
            self.note("From now on with the drafter." if self.use_drafter else "From now on without the drafter.")
        elif command == "/help":
            self.note(HELP)
        else:
            self.note(f"{one_line(command, 60)} is unknown; a message may begin with a space and a slash.\n{HELP}")

    def _typed_messages(self) -> Iterator[str]:
        """Messages from a terminal: a line that is typed, or all lines of a pasted block."""
        while True:
            try:
                message = input("\n> ")
                # Terminals that mark what is pasted have handed over the block; of others its lines come one by one.
                while not message.startswith("/") and _more_is_waiting():
                    message += "\n" + input()
                yield message
            except (KeyboardInterrupt, EOFError) as end:
                self.write("\n")
                if isinstance(end, EOFError):
                    return

    def _answer(self, text: str) -> None:
        """Answer a message. If that fails, the conversation stays as it was, and a terminal is asked for the next."""
        target = self.decoder.target
        messages = [*self.messages, {"role": "user", "content": text}]
        streamer = PieceStreamer(self.decoder.tokenizer, self._show)
        generation_config = copy.deepcopy(target.generation_config)
        generation_config.update(**self.options)
        with hold_back_logs():
            try:
                ids = torch.tensor([self.encode(messages)], device=target.device)
                inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                request = Request(self.decoder, inputs, generation_config, streamer, use_drafter=self.use_drafter)
                self._wait_for(self.decoder.submit(request))
            except Exception as error:
                if not sys.stdin.isatty():
                    raise
                self.note(f"error: {explain(error)}")
                return
            self.write("\x1b[0m\n" if self.color else "\n")
        self.messages = [*messages, {"role": "assistant", "content": streamer.text}]
        ending = ""
        if request.status is RequestStatus.FINISHED_ABORTED:
            ending = "; stopped"
        elif request.status is RequestStatus.FINISHED_LENGTH:
            limit = self.options["max_new_tokens"]
            cut = cut_reason(request.tokens, limit, target.generation_config, f"--max-new-tokens {limit}")
            ending = f"; cut off at {cut}" if cut else ""
        method = "with the drafter" if streamer.rounds else "target alone"
        self.note(f"{method}: {streamer.tokens} tokens in {streamer.seconds:.2f} s, {streamer.status()}{ending}")
        figures = {"tokens": streamer.tokens, "seconds": streamer.seconds, "tau": streamer.tau}
        self.turns.append({"prompt": text, "text": streamer.text, **figures, "cached": request.cached_tokens})

    def _wait_for(self, request: Request) -> None:
        """Wait until the answer is complete; Ctrl-C ends it where it is."""
        try:
            request.future.result()
        except KeyboardInterrupt:
            request.abort()
            if not sys.stdin.isatty():
                raise
            request.future.result()

    def _show(self, piece: str, source: int) -> None:
        self.write(f"\x1b[{ansi_color(source)}m{piece}" if self.color else piece)


def _more_is_waiting() -> bool:
    """Whether a terminal has passed on more than the line just read; false on Windows, whose consoles do not say."""
    try:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], SECONDS_IN_A_PASTE)
    except OSError:
        return False
    return bool(readable)
