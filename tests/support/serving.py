"""
A tiny target whose texts can be read, and a drafter that knows them, behind a server, in a terminal or on a page: in a
process of their own.

    python -m support.serving serve|chat|page FOLDER PROMPT ...
"""

import asyncio
import importlib.util
import json
import sys
import threading
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.scripted_draft import recognising
from support.tiny_chat import CHATML, END, save_target


MAX_TOKENS = 40  # of the texts that a drafter knows


def save_readable_target(folder: Path, template: str | None = CHATML, **overrides) -> Path:
    """It writes ASCII letters alone, and now and then ends."""
    save_target(folder, template, family="llama", **overrides)
    target = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    written = {END, *(tokenizer.convert_tokens_to_ids(chr(code)) for code in range(ord("A"), ord("z") + 1))}
    with torch.no_grad():
        for row in set(range(target.config.vocab_size)) - written:
            target.lm_head.weight[row] = 0.0  # a logit of 0: never the largest of many
    target.save_pretrained(folder)
    return folder


def chat_ids(tokenizer, messages: list[dict]):
    """What a target is given of a conversation."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def scripted(folder: Path, prompts: list[str], max_tokens: int):
    """A drafter that knows the target's greedy answers to these prompts."""
    target = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [chat_ids(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    texts = [target.generate(**ids, max_new_tokens=max_tokens, do_sample=False)[0] for ids in asked]
    return recognising(target, texts)


def serve(folder: Path, prompts: list[str]) -> None:
    """A server at some port, until it is ended."""
    from dflash_hf.serving.server import Server, listen

    target = AutoModelForCausalLM.from_pretrained(folder)
    processor = AutoTokenizer.from_pretrained(folder)
    draft = scripted(folder, prompts, MAX_TOKENS)
    draft.decoding_config.block_size = draft.config.max_block_tokens  # in every round, whatever the clock says
    server = Server(target, processor, draft, "readable", say)
    server.run(listen("127.0.0.1", 0), server.app())


def chat(folder: Path, prompts: list[str]) -> None:
    """A chat in this terminal, where every piece takes a while; at its end the messages."""
    from dflash_hf._io.terminal import Echo

    class Slow(Echo):
        def write(self, text):
            super().write(text)
            time.sleep(0.05)

    turns = make_chat(folder, prompts, Slow(), True).run()
    say(f"messages: {[turn['prompt'] for turn in turns]}")


def make_chat(folder: Path, prompts: list[str], echo, color: bool = False, **options):
    """A chat with the target and its drafter."""
    from dflash_hf.serving.chat import Chat
    from dflash_hf.serving.decoder import Decoder

    target = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"max_new_tokens": MAX_TOKENS, "do_sample": False, **options}

    def encode(messages):
        return chat_ids(tokenizer, messages)["input_ids"][0].tolist()

    decoder = Decoder(target, tokenizer, scripted(folder, prompts, MAX_TOKENS))
    return Chat(decoder, encode, options, echo, color)


def page(folder: Path, prompts: list[str]) -> None:
    """The page of `examples/space` for this pair."""
    path = Path(__file__).parents[2] / "examples" / "space" / "app.py"
    spec = importlib.util.spec_from_file_location("space_app", path)
    app = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(app)
    target = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    app.TOKENS = MAX_TOKENS
    draft = scripted(folder, prompts, MAX_TOKENS)
    _, url, _ = app.page(target, tokenizer, draft).launch(css=app.STYLE, quiet=True, prevent_thread_lock=True)
    say(f"serving {folder} at {url}")
    threading.Event().wait()


def answer_of(app, path: str, body, leave: threading.Event | None = None) -> tuple[int, str]:
    """
    Status and text of what an ASGI application answers, without a connection; the client is gone once `leave` is set.
    """

    async def asked() -> tuple[int, str]:
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        sent: list[dict] = []

        async def receive() -> dict:
            if messages:
                return messages.pop()
            while leave is None or not leave.is_set():
                await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "GET" if body is None else "POST", "path": path, "headers": headers}
        scope |= {"query_string": b"", "asgi": {"version": "3.0", "spec_version": "2.4"}}
        await app(scope, receive, send)
        text = b"".join(message.get("body", b"") for message in sent[1:])
        return (sent[0]["status"], text.decode()) if sent else (0, "")

    return asyncio.run(asyncio.wait_for(asked(), 60))


def say(line: str) -> None:
    """Print a line to standard error at once."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    {"serve": serve, "chat": chat, "page": page}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3:])
