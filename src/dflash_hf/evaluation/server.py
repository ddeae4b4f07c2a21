"""
`dflash eval --server`: acceptance and speed of a running server, from the counts that it reports.

llama.cpp's server sends its counts with every token (`timings.draft_n`, `draft_n_accepted`), which give the
tokens that each verification commits, so the report is the usual one. With a second server for the target alone,
answers are compared and the speed-up is measured as well.
"""

import json
import urllib.error
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http.client import HTTPException

from dflash_hf.data.chat_client import Server, ServerError, detail_of
from dflash_hf.data.prompts import prompt_of
from dflash_hf.evaluation.measure import EvalReport, MethodReport
from dflash_hf.evaluation.methods import DFLASH, TARGET
from dflash_hf.evaluation.report import REPORT_FILE
from dflash_hf.evaluation.sets import NAMED, NEW_TOKENS, dataset_name, eval_rows
from dflash_hf.files import digest_of
from dflash_hf.terminal import Outcome, UsageError, bar, one_line, template_arguments


@dataclass
class Answer:
    """
    An answer of a server.

    Args:
        text (`str`): The answer.
        tokens (`int`): Its length.
        seconds (`float`): Time by the server's clock, prompt included.
        lengths (`list[int]`): Tokens committed by each verification.
        drafted (`int`): Tokens of the longest draft.
    """

    text: str
    tokens: int
    seconds: float
    lengths: list[int]
    drafted: int


def ask(server: Server, messages: list[dict], options: dict) -> Answer:
    """
    Stream one greedy answer.

    Raises:
        `ServerError`: the server does not answer, rejects the request, or reports no timings.
    """
    body = {"messages": messages, "stream": True, "temperature": 0, "timings_per_token": True, **options}
    # If llama.cpp reuses part of a prompt from its cache, it rounds differently and its own texts differ.
    body["cache_prompt"] = False
    text, timings, accepted = "", {}, {0: 0}  # tokens drafted so far -> tokens accepted so far
    for event in _events(server, body):
        if event.get("error"):
            raise ServerError(f"{server} gave up: {one_line(event['error'], 200)}")
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text += (delta.get("reasoning_content") or "") + (delta.get("content") or "")
        if event.get("timings"):
            timings = event["timings"]
            accepted[timings.get("draft_n", 0)] = timings.get("draft_n_accepted", 0)
    if not {"predicted_n", "predicted_ms", "prompt_ms"} <= timings.keys():
        raise ServerError(f"{server} reports no timings: only llama.cpp's server does; others have their own metrics.")
    drafted = sorted(accepted)
    steps = list(zip(drafted, drafted[1:]))
    lengths = [1 + accepted[after] - accepted[before] for before, after in steps]
    seconds = (timings["prompt_ms"] + timings["predicted_ms"]) / 1000
    return Answer(text, timings["predicted_n"], seconds, lengths, max((b - a for a, b in steps), default=0))


def _events(server: Server, body: dict) -> Iterable[dict]:
    try:
        with server.post(body) as stream:
            for line in stream:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
    except urllib.error.HTTPError as error:
        raise ServerError(f"{server} answers {error.code}: {detail_of(error)}.") from error
    except (OSError, ValueError, HTTPException) as error:  # refused, reset, timed out, cut off, or not JSON
        raise ServerError(f"{server} gave no usable answer ({error}); is the server running?") from error


def measure(
    server: Server, alone: Server | None, said: Sequence[Sequence[dict]], options: dict, progress=iter
) -> EvalReport:
    """
    Ask a server and, in turn, one that serves the target alone.

    Args:
        server, alone (`Server`): The second may be `None`.
        said (`Sequence[Sequence[dict]]`): The messages of each conversation; every user message without an answer gets
            one.
        options (`dict`): Further fields of each request, such as `max_tokens`.

    Raises:
        `ServerError`: a server cannot be reached, or does not draft.
    """
    found: list[tuple[Answer, Answer | None]] = []
    for messages in progress(said):
        asked: list[dict] = []
        for message, after in zip(messages, [*messages[1:], None]):
            asked.append(message)
            if message["role"] == "user" and (after is None or after["role"] == "user"):
                one = ask(server, asked, options), None if alone is None else ask(alone, asked, options)
                found.append(one)
                asked.append({"role": "assistant", "content": one[0].text})
    drafted, others = [one for one, _ in found], [other for _, other in found if other is not None]
    if not any(one.drafted for one in drafted):
        raise ServerError(f"{server} does not draft: start it with a drafter, as `dflash serve --engine` does.")

    def method(answers: list[Answer], speedup: float | None, equal: int | None) -> MethodReport:
        speed, tokens = _speed(answers), sum(one.tokens for one in answers)
        # Every forward gives one token besides the accepted ones, also where nothing was drafted. Accepted tokens
        # beyond the end of an answer may be missing in `tokens`.
        forwards = sum(max(len(n) + 1, one.tokens - sum(n) + len(n)) for one in answers for n in [one.lengths])
        return MethodReport(speed, speedup, [speed], tokens, forwards, equal)

    equal = sum(one.text == other.text for one, other in found) if others else None
    speedup = _speed(drafted) / _speed(others) if others else None
    methods = {TARGET: method(others, 1.0, len(others))} if others else {}
    return EvalReport(
        methods={**methods, DFLASH: method(drafted, speedup, equal)},
        acceptance_lengths=[one.lengths for one in drafted],
        responses=[[] for _ in drafted],  # servers send texts
        block_size=1 + max(one.drafted for one in drafted),
        setting={
            "server": str(server),
            "alone": None if alone is None else str(alone),
            "prompts_digest": digest_of([list(messages) for messages in said]),
            **options,
        },
    )


def _speed(answers: list[Answer]) -> float:
    return sum(one.tokens for one in answers) / sum(one.seconds for one in answers)


def run(arguments, echo) -> Outcome:
    """`dflash eval --server`: `echo` the figures, write the report."""
    if arguments.data is None:
        raise UsageError("--server needs --data, the prompts to measure it with.")
    said = [_messages(row) for row in eval_rows(arguments.data, arguments.prompts, arguments.split)]
    servers = [None if url is None else Server(url) for url in (arguments.server, arguments.alone)]
    options = {"max_tokens": arguments.max_new_tokens or (NEW_TOKENS if arguments.data in NAMED else 256)}
    if template := template_arguments(arguments.template_args):
        options["chat_template_kwargs"] = template
    report = measure(*servers, said, options, bar("asking"))
    report.setting["dataset"] = dataset_name(arguments.data)
    ours = report.methods[DFLASH]
    verifications = len(report.verifications)
    echo(f"tau               {report.tau:.2f} tokens per verification over {verifications} verifications")
    echo("slot accepted, %  " + " ".join(f"{100 * share:.0f}" for share in report.acceptance_by_position))
    echo(f"tokens/s          {ours.tokens_per_second:.1f}, {report.num_prompts} answers, prompts included in the time")
    if ours.speedup is not None:
        echo(f"alone             {report.methods[TARGET].tokens_per_second:.1f} tokens/s: {ours.speedup:.2f}x")
        echo(f"equal             {ours.equal} of {report.num_prompts} texts equal the target's own")
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        echo(f"written           {report.save(arguments.output / REPORT_FILE)}")
    return Outcome(0, json.loads(report.to_json()))


def _messages(row: dict) -> list[dict]:
    if row.get("turns"):
        return [{"role": "user", "content": one} for one in row["turns"]]
    return list(prompt_of(row, as_chat=True))
