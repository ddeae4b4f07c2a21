"""`dflash chat`: where each piece of an answer comes from, turns and their cache, and the terminal."""

import fcntl
import io
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.serving import chat_ids, make_chat, save_readable_target, scripted
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, set_seed

from dflash_hf._io.terminal import Echo, hold_back_logs
from dflash_hf.cli import main
from dflash_hf.evaluation.text import origins
from dflash_hf.serving.pieces import PieceStreamer


PROMPTS = ["Say 1", "Say 2", "Say 3"]
OPTIONS = {"max_new_tokens": 40, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_readable_target(tmp_path_factory.mktemp("chat") / "target")


@pytest.fixture(scope="module")
def pair(folder):
    draft = scripted(folder, PROMPTS, 40)
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), draft


def pieces_of(pair, prompt, draft, **options):
    """Text, the source of each character, and the output of `generate`."""
    target, tokenizer, _ = pair
    sources = []
    streamer = PieceStreamer(tokenizer, lambda piece, source: sources.extend([source] * len(piece)))
    output = target.generate(
        **chat_ids(tokenizer, [{"role": "user", "content": prompt}]),
        streamer=streamer,
        assistant_model=draft,
        return_dict_in_generate=True,
        **{**OPTIONS, **options},
    )
    return streamer, sources, output


@pytest.mark.parametrize("more", [{}, {"do_sample": True, "temperature": 0.05}, {"tree_nodes": 9}], ids=str)
def test_pieces_have_sources_of_acceptance_lengths(pair, more):
    """Every character is a token here."""
    draft = pair[2]
    more = dict(more)
    draft.decoding_config.tree_nodes = more.pop("tree_nodes", None)
    set_seed(0)
    try:
        streamer, sources, output = pieces_of(pair, PROMPTS[0], draft, **more)
    finally:
        draft.decoding_config.tree_nodes = None
    lengths = output.acceptance_lengths[0]
    assert streamer.tokens == 40 == len(sources) and streamer.rounds == len(lengths) and max(sources) > 3
    assert sources == origins(lengths, 40)
    assert streamer.tau == pytest.approx(sum(lengths) / len(lengths))
    plain, sources, _ = pieces_of(pair, PROMPTS[0], None)
    assert set(sources) == {0} and plain.tau is None
    if not more:
        assert plain.text == streamer.text


def test_concurrent_calls_keep_their_own_rounds(pair):
    expected = [pieces_of(pair, prompt, pair[2])[:2] for prompt in PROMPTS]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda prompt: pieces_of(pair, prompt, pair[2])[:2], PROMPTS * 2))
    for (streamer, sources), (own, same) in zip(results, expected * 2, strict=True):
        assert (streamer.text, streamer.rounds, sources) == (own.text, own.rounds, same)


def test_compiled_rounds_are_streamed(pair):
    draft = pair[2]
    draft.decoding_config.compile = "aot_eager"
    try:
        streamer, sources, output = pieces_of(pair, PROMPTS[0], draft)
    finally:
        draft.decoding_config.compile = False
    assert streamer.text == pieces_of(pair, PROMPTS[0], None)[0].text
    assert sources == origins(output.acceptance_lengths[0], 40) and max(sources) > 3


def test_multi_token_characters_arrive_whole(pair):
    written = []
    streamer = PieceStreamer(pair[1], lambda piece, source: written.append(piece))
    text = "é – ja\nβ"
    streamer.put(torch.tensor([[1]]))
    for token in pair[1](text)["input_ids"]:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(written) == text == streamer.text and not any("\ufffd" in piece for piece in written)


def test_indented_lines_keep_their_spaces():
    """Of tokenizers as Llama 2's, which write no space before the first token of a text."""
    words = ["<unk>", "<0x0A>", "▁def", "▁f", "():", "▁▁▁", "▁return", "▁1"]
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    streamer = PieceStreamer(tokenizer, lambda piece, source: None)
    ids = [2, 3, 4, 1, 5, 6, 7, 1, 1, 5, 6]
    for token in (0, *ids):  # the first is the prompt
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert streamer.text == tokenizer.decode(ids) == "def f():\n    return 1\n\n    return"


def test_python_warnings_come_hold_back_logs(monkeypatch, capsys):
    """As those that are logged."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(sys.stdout)])
    with hold_back_logs():
        Echo().write("a ")
        warnings.warn("of Python", stacklevel=1)
        Echo().write("text\n")
    assert re.match(r"a text\n.*of Python", capsys.readouterr().out)


def chatted(folder, lines: str, monkeypatch, color: bool = True, **options) -> list[dict]:
    """The turns of a chat over a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return make_chat(folder, PROMPTS, Echo(), color, **options).run()


def test_later_turns_equal_a_fresh_prefill(folder, pair, monkeypatch):
    target, tokenizer, _ = pair
    turns = chatted(folder, "Say 1\n/draft off\nSay 2\n/draft on\nSay 3\n", monkeypatch)
    messages = []
    for turn in turns:
        messages.append({"role": "user", "content": turn["prompt"]})
        ids = chat_ids(tokenizer, messages)
        output = target.generate(**ids, **OPTIONS)
        assert tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True) == turn["text"]
        messages.append({"role": "assistant", "content": turn["text"]})
    assert [turn["tau"] is None for turn in turns] == [False, True, False]
    assert turns[0]["cached"] == 0 and turns[1]["cached"] > 50 and turns[2]["cached"] > turns[1]["cached"]


def test_piped_lines_are_answered_one_by_one(folder, pair, monkeypatch, capsys):
    lines = "Say 1\n\n/draft off\n/reset\nSay 1\n/draft on\n/nonsense\n/reset\nSay 2\n"
    turns = chatted(folder, lines, monkeypatch)
    out, err = capsys.readouterr()
    plain = [pieces_of(pair, prompt, None)[0].text for prompt in ("Say 1", "Say 1", "Say 2")]
    assert [turn["text"] for turn in turns] == plain
    assert re.sub(r"\x1b\[\d+m", "", out) == "".join(f"{text}\n" for text in plain)
    first, second, third = out.splitlines()
    assert "\x1b[32m" in first and "\x1b[92m" in first and "\x1b[32m" not in second and "\x1b[32m" in third
    words = ("target alone: 40 tokens in", "with the drafter: 40 tokens", "; cut off at --max-new-tokens 40", "Ctrl-D")
    assert all(word in err for word in words)


def test_answer_that_fills_the_context_is_cut(folder, monkeypatch, capsys):
    (turn,) = chatted(folder, "1" * 220 + "\n", monkeypatch)
    assert turn["tokens"] < 20 and "; cut off at the target's context limit" in capsys.readouterr().err
    with pytest.raises(ValueError, match="The prompt has .* tokens; prompt and answer together may have at most 256"):
        chatted(folder, "1" * 300 + "\n", monkeypatch)


def test_answer_at_a_stop_string_is_not_called_cut(folder, pair, monkeypatch, capsys):
    """It was said to be cut off at the target's context limit."""
    text = pieces_of(pair, PROMPTS[0], None)[0].text
    (turn,) = chatted(folder, f"{PROMPTS[0]}\n", monkeypatch, stop_strings=[text[20:24]])
    assert turn["tokens"] < 40 and "cut off" not in capsys.readouterr().err


def test_refused_message_is_not_in_the_conversation(folder, pair, monkeypatch, capsys):
    """Every message after it would be refused, too."""

    def typed(_):
        if not lines:
            raise EOFError
        return lines.pop(0)

    lines = ["1" * 300, "Say 1"]
    nothing_waits, _ = os.pipe()
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", mock.Mock(isatty=lambda: True, fileno=lambda: nothing_waits))
    (turn,) = make_chat(folder, PROMPTS, Echo(), False).run()
    assert turn["text"] == pieces_of(pair, "Say 1", None)[0].text
    assert "error: The prompt has " in capsys.readouterr().err


def test_every_slash_command_is_answered(folder, monkeypatch, capsys):
    """`/draft off` and `/reset` said nothing, and an unknown command showed the help as if it were none."""
    answers = {
        "/draft off": "without the drafter",
        "/draft on": "with the drafter",
        "/reset": "A new conversation",
        "/help": "/reset      start",
        "/regenerate 3": "/regenerate 3 is unknown; ",
    }
    for line, answer in answers.items():
        assert chatted(folder, f"{line}\n", monkeypatch) == []
        assert answer in capsys.readouterr().err, line
    (turn,) = chatted(folder, " /etc/hosts\n", monkeypatch)
    assert turn["prompt"] == "/etc/hosts"


def test_drafts_without_a_drafter_are_refused(folder, monkeypatch, capsys):
    monkeypatch.setattr("support.serving.scripted", lambda *_: None)
    assert chatted(folder, "/draft on\n", monkeypatch) == []
    assert "There is no drafter; --draft names one" in capsys.readouterr().err


def test_chat_command_names_wrong_options(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say 1\nSay 2\n"))
    command = ["chat", "--target", str(folder), "--max-new-tokens", "8", "--device", "cpu"]
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    assert (
        '"tau": null' in printed.out and printed.out.count('"prompt"') == 2 and "target alone: 8 tokens" in printed.err
    )
    assert main(["chat", "--draft", "x"]) == 2
    assert "--draft needs --target" in capsys.readouterr().err
    assert main([*command, "--top-p", "0.5"]) == 2
    assert "--top-p 0.5 has no effect" in capsys.readouterr().err


def _in_its_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and so would their children


class Terminal:
    """A chat in a terminal of its own."""

    def __init__(self, folder: Path, term: str = "xterm"):
        controller, terminal = pty.openpty()
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TERM": term, "NO_COLOR": ""}
        command = [sys.executable, "-m", "support.serving", "chat", str(folder), *PROMPTS]
        self.process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=env,
            start_new_session=True,
            preexec_fn=_in_its_terminal,
        )
        os.close(terminal)
        self.controller = controller
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.controller, text.encode())

    def until(self, words: str, seconds: float = 120.0) -> str:
        """What is shown until there are these words; the rest is for later."""
        os.set_blocking(self.controller, False)
        end = time.monotonic() + seconds
        while words not in self.seen:
            assert time.monotonic() < end, self.seen
            try:
                self.seen += os.read(self.controller, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # the terminal is closed
                assert words in self.seen, self.seen
        shown, _, self.seen = self.seen.partition(words)
        return shown + words


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(folder):
    terminal = Terminal(folder)
    assert "Green tokens were drafted and accepted" in terminal.until("> ")
    terminal.type("Say 1\n")
    assert "\x1b[32m" in terminal.until("with the drafter: 40 tokens")
    terminal.until("> ")
    terminal.type("Say 2\n")
    terminal.until("\x1b[0m")
    terminal.type("\x03")
    assert "40 tokens" not in terminal.until("stopped")
    terminal.until("> ")
    terminal.type("\x03")  # at the prompt nothing is stopped
    terminal.until("> ")
    terminal.type("Say 3\n")
    terminal.until("with the drafter: ")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=30) == 0


MARKED = ("\x1b[200~", "\x1b[201~\r")
BARE = ("", "\n")


@pytest.mark.parametrize("term, marks", [("xterm", MARKED), ("xterm", BARE), ("dumb", BARE)])
def test_pasted_block_is_one_message(term, marks, folder):
    """Its first line was the message, and each of the others the next."""
    terminal = Terminal(folder, term)
    terminal.until("> ")
    terminal.type(f"{marks[0]}Say 1\n\n  Say 2\nSay 3{marks[1]}")
    terminal.until(" tokens in ")
    terminal.until("> ")
    terminal.type("/reset\n")  # a command stays one, whatever follows
    terminal.until("A new conversation")
    terminal.until("> ")  # before it, the terminal and not the chat would take the key
    terminal.type("\x04")
    assert terminal.process.wait(timeout=30) == 0
    assert " tokens in " not in terminal.until("messages: ")
    assert terminal.until("\n").strip() == repr(["Say 1\n\n  Say 2\nSay 3"])
