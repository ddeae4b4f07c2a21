"""
`dflash serve` under load, through OpenAI's own client: every answer against the target's own, the server's memory, a
SIGTERM in the middle; and next to `transformers serve --continuous-batching`, with the servers queried in turn,
tokens/s and CPU seconds, and the time to the first token in each turn of a long conversation.

    python examples/benchmarks/serve_load.py --target smollm2 --draft smollm2 [--requests 0] [--turns 0] [--no-packed]
        [--tree-nodes N] [--output F]
    python examples/benchmarks/serve_load.py --target T --draft D --requests 0 --at-once --words 20   # the turns alone

Half of the requests are streamed; one in ten is abandoned, alternately in the middle of its stream and while it waits.
Texts are compared in fp32.
"""

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf.pairs.packaged_targets import folder_of


REQUESTS = (
    "Write a short poem about {}.",
    "Explain {} to a child in two sentences.",
    "List five facts about {}.",
    "Tell me a story about {} and a fox.",
)
SUBJECTS = "rain,the moon,bread,clocks,rivers,trains,bees,paper,mountains,music".split(",")


@dataclass
class Load:
    """Outcome of the requests."""

    kinds: Counter = field(default_factory=Counter)  # finished, other (not the target's text), abandoned, failed
    memory: list[int] = field(default_factory=list)  # MiB, after each tenth of the requests
    tokens: int = 0
    seconds: float = 0.0


class Server:
    """
    A server in a separate process.

    Args:
        command (`list[str]`): Prints `serving NAME at URL` on standard error.
        api_key (`str`): The key that the server requires.
    """

    def __init__(self, command: list[str], api_key: str = "none"):
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, errors="replace"
        )
        self.log: list[str] = []
        if "--model-timeout" in command:  # upstream's server, which does not print its address
            options = dict(itertools.pairwise(command))
            self.model = options["serve"]
            self.url = f"http://127.0.0.1:{options['--port']}/v1"
        else:
            self._read()
        threading.Thread(target=lambda: self.log.extend(map(str.rstrip, self.process.stderr)), daemon=True).start()
        self.client = openai.OpenAI(base_url=self.url, api_key=api_key, max_retries=0, timeout=600)
        health = self.url.removesuffix("/v1") + "/health"
        for _ in range(600):
            with contextlib.suppress(openai.APIConnectionError):
                self.client.get(health, cast_to=object)
                break
            time.sleep(0.1)

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if line.startswith("serving "):
                _, self.model, _, self.url = line.split()
                return
        raise RuntimeError("\n".join(self.log))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def memory(self) -> int:
        """Resident memory, MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) // 1024

    def cpu(self) -> float:
        """CPU seconds so far."""
        times = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")

    def ask(self, prompt: str, stream: bool, leave: float | None = None, **options) -> tuple[str | None, int]:
        """
        Args:
            prompt (`str`): The user's message.
            stream (`bool`): Whether to stream.
            leave (`float`, *optional*): Disconnect: in a stream after a few pieces, else after this many seconds.
            options: Options of the request.

        Returns:
            `tuple[str, int]`: Text and tokens; `(None, 0)` for an abandoned request.
        """
        messages = [{"role": "user", "content": prompt}]
        if not stream:
            client = self.client if leave is None else self.client.with_options(timeout=leave)
            try:
                answer = client.chat.completions.create(model=self.model, messages=messages, **options)
            except openai.APITimeoutError:
                return None, 0
            return answer.choices[0].message.content, answer.usage.completion_tokens
        text = ""
        tokens = 0
        with self.client.chat.completions.create(
            model=self.model, messages=messages, stream=True, **options
        ) as stream:
            for number, piece in enumerate(stream):
                if leave is not None and number == 3:
                    return None, 0
                text += piece.choices[0].delta.content or ""
                tokens = piece.usage.completion_tokens if piece.usage else tokens
        return text, tokens


def own_texts(folder: str, prompts: list[str], max_tokens: int) -> dict[str, str]:
    """Texts of the target alone in fp32."""
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = {}
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = target.generate(**ids, max_new_tokens=max_tokens, do_sample=False)
        texts[prompt] = tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def load(
    server: Server, texts: dict[str, str], requests: int, clients: int, max_tokens: int, leave: float | None = 0.3
):
    """Request `texts` repeatedly from several concurrent clients; a tenth of them leave after `leave` seconds."""
    result = Load()
    lock = threading.Lock()
    prompts = list(itertools.islice(itertools.cycle(texts), requests))

    def one(number: int) -> None:
        left = leave is not None and number % 10 == 5
        stream = number % 20 == 5 if left else number % 2 == 0
        try:
            text, tokens = server.ask(
                prompts[number], stream, leave if left else None, max_tokens=max_tokens, temperature=0
            )
            if text is None:
                kind = "abandoned"
            else:
                kind = "finished" if text == texts[prompts[number]] else "other"
        except openai.APIError as error:
            print(f"request {number}: {error!r}", file=sys.stderr)
            kind = "failed"
            tokens = 0
        with lock:
            result.kinds[kind] += 1
            result.tokens += tokens
            if sum(result.kinds.values()) % max(requests // 10, 1) == 0:
                result.memory.append(server.memory())

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(requests)))
    result.seconds = time.perf_counter() - start
    return result


def ended(server: Server, texts: dict[str, str], clients: int, max_tokens: int) -> tuple[int, int]:
    """SIGTERM while `clients` requests are in flight: returns the exit status and the number of right answers."""
    start = time.perf_counter()
    server.ask(next(iter(texts)), False, max_tokens=max_tokens, temperature=0)
    alone = time.perf_counter() - start  # by then, a busy machine has accepted all of them, too
    with ThreadPoolExecutor(clients) as pool:
        prompts = list(itertools.islice(texts, clients))
        begun = [
            pool.submit(server.ask, prompt, number % 2 == 0, max_tokens=max_tokens, temperature=0)
            for number, prompt in enumerate(prompts)
        ]
        time.sleep(max(alone, 1.0))
        server.process.send_signal(signal.SIGTERM)
        right = sum(future.result()[0] == texts[prompt] for future, prompt in zip(begun, prompts, strict=True))
    return server.process.wait(timeout=60), right


def under_load(server: Server, texts: dict[str, str], arguments, say: Callable[[str], None]) -> None:
    """Texts and memory under many concurrent requests, and SIGTERM among them."""
    load(server, texts, arguments.clients, arguments.clients, arguments.max_tokens, leave=None)
    done = load(server, texts, arguments.requests, arguments.clients, arguments.max_tokens)
    say(
        f"{arguments.requests} requests from {arguments.clients} concurrent clients, at most {arguments.max_tokens} "
        f"tokens, {done.seconds:.0f} s: {done.kinds['finished']} texts equal to the target's own, "
        f"{done.kinds['other']} others, {done.kinds['abandoned']} abandoned, {done.kinds['failed']} failed\n"
    )
    say(f"resident memory after each tenth of the requests, MiB: {', '.join(map(str, done.memory))}\n")
    code, right = ended(server, texts, arguments.clients, arguments.max_tokens)
    say(f"SIGTERM with {arguments.clients} requests in flight: {right} answered in full, exit status {code}\n")


def paired(servers: dict[str, Server], prompts: list[str], arguments) -> dict[str, list[str]]:
    """
    Several servers queried in turn, so that other load affects all, by different numbers of clients: tokens/s, and the
    first server's time and CPU time for a token over the others' in the same turn, with quartiles.
    """
    cells = {name: [] for name in servers}
    for clients in arguments.at_once:
        times_of = {name: [] for name in servers}  # seconds and CPU seconds for a token
        for turn in range(-1, arguments.timed):  # the first is a warm-up
            count = max(4, clients)
            asked = dict.fromkeys(prompts[(count * turn + i) % len(prompts)] for i in range(count))
            for name, server in servers.items():
                before = server.cpu()
                run = load(server, asked, count, clients, arguments.max_tokens, leave=None)
                times_of[name].append((run.seconds / run.tokens, (server.cpu() - before) / run.tokens))
        first = next(iter(times_of.values()))
        for name, times in times_of.items():
            cells[name].append(f"{1 / statistics.median(wall for wall, _ in times[1:]):.1f}")
            for kind in (0, 1):
                ratios = [alone[kind] / other[kind] for alone, other in zip(first[1:], times[1:], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                cells[name].append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
    return cells


def turns_of(server: Server, arguments) -> list[str]:
    """Seconds and CPU seconds to the first token in each turn of a conversation that begins with many words."""
    requests = [form.format(subject) for subject in SUBJECTS for form in REQUESTS]
    sentences = (f"{request} {n}" for n in itertools.count() for request in requests)
    words = " ".join(itertools.islice((word for sentence in sentences for word in sentence.split()), arguments.words))
    messages: list[dict] = []
    cells = []
    for turn in range(arguments.turns):
        messages.append(
            {"role": "user", "content": f"What is asked here? {words}" if turn == 0 else REQUESTS[turn % 4]}
        )
        begun = time.perf_counter()
        cpu = server.cpu()
        text = ""
        for piece in server.client.chat.completions.create(
            model=server.model, messages=messages, max_tokens=24, temperature=0, stream=True
        ):
            delta = piece.choices[0].delta.content if piece.choices else None
            if delta and not text:
                cells.append(f"{time.perf_counter() - begun:.2f} s, {server.cpu() - cpu:.2f} CPU s")
            text += delta or ""
        messages.append({"role": "assistant", "content": text})
    return cells


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--requests", type=int, default=200, help="default: %(default)s; 0 only measures speeds")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16, help="different prompts among them; default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--timed", type=int, default=4, help="times that each speed is measured; default: %(default)s")
    parser.add_argument("--turns", type=int, default=5, help="of a conversation; default: %(default)s")
    parser.add_argument("--words", type=int, default=2800, help="of its first message; default: %(default)s")
    parser.add_argument("--tree-nodes", type=int, help="a third server for the speeds, with draft trees")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 2, 8, 16], help="clients for each speed")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of timed servers")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-packed", dest="packed", action="store_false", help="as in dflash serve")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # upstream's servers have no option for it
    target = folder_of(arguments.target)
    draft = ["--draft", arguments.draft]
    prompts = [form.format(subject) for subject in SUBJECTS for form in REQUESTS][: arguments.prompts]
    serve = [sys.executable, "-m", "dflash_hf.cli", "serve", "--target", target, "--port", "0", "--device", "cpu"]
    serve += ["--threads", str(arguments.threads), "--packed" if arguments.packed else "--no-packed"]
    lines = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    if arguments.requests:
        texts = own_texts(target, prompts, arguments.max_tokens)
        with Server([*serve, *draft, "--dtype", "float32"]) as server:
            under_load(server, texts, arguments, say)
    upstream = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve"]
    upstream += [target, "--model-timeout", "-1", "--device", "cpu", "--dtype", arguments.dtype]
    commands = {
        "transformers serve --continuous-batching": [*upstream, "--continuous-batching", "--port", "8761"]
        + ["--cb-max-memory-percent", "0.1", "--cb-max-batch-tokens", "512"],  # as in ours; more is no faster
    }
    serve += ["--dtype", arguments.dtype]
    commands["dflash serve"] = [*serve, *draft]
    if arguments.tree_nodes:
        commands[f"dflash serve --tree-nodes {arguments.tree_nodes}"] = [
            *serve,
            *draft,
            "--tree-nodes",
            str(arguments.tree_nodes),
        ]
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(Server(command)) for name, command in commands.items()}
        numbers = [f"{n} client{'s' if n > 1 else ''}, tokens/s | time | CPU time" for n in arguments.at_once]
        if numbers:
            say(f"| {arguments.dtype} | {' | '.join(numbers)} |\n|" + "---|" * (1 + 3 * len(numbers)))
            for name, cells in paired(servers, prompts, arguments).items():
                say(f"| {name} | " + " | ".join(cells) + " |")
        for name, server in servers.items():
            say(f"\n{name}, to the first token of each turn: {'; '.join(turns_of(server, arguments))}")
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
