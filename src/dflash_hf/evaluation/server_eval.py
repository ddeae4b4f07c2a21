"""
Acceptance and speed of a running server, by its own counters.

Servers count drafts in different places, and do not mean the same by an acceptance length. Nothing is converted: a
report has the figure that the server's own project would state, says which counter it was read from, and how it is
defined. `ENGINES` is the table of what is read from whom.

- vLLM has counters for the whole server, at `/metrics` (docs.vllm.ai, "Production Metrics"). They are read before and
  after, so requests of others in between are counted, too.
- SGLang sends `meta_info` with an answer if `return_meta_info` asks for it (`ChatCompletionRequest` in
  `sglang/srt/entrypoints/openai/protocol.py`). Without it, `avg_spec_accept_length` of `/server_info` is a mean over
  all requests since the server's start.
- llama.cpp sends `timings` with every answer (`tools/server/README.md`). They have no number of verifications: every
  forward pass gives one token beside the accepted ones, so that their number follows.
- `dflash serve` sends its counts in `usage`.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path

from dflash_hf._io.files import atomic, json_text
from dflash_hf.data.messages import UnusableRow
from dflash_hf.data.row_layouts import conversation_of
from dflash_hf.synthetic.chat_client import ChatClient, ServerError


SERVER_REPORT_FILE = "server_report.json"
WARMUP_TOKENS = 16
_WARMUP = [{"role": "user", "content": "Hello"}]  # short, so that any server takes it
_VLLM = "vllm:spec_decode_num_"
_SAMPLE = re.compile(r"^(?P<name>[\w:]+?)(_total)?(\{(?P<labels>[^}]*)\})? (?P<value>\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_START = re.compile(rf"^(?:process_start_time_seconds|{_VLLM}drafts_created)(?:{{[^}}]*}})? \S+", re.MULTILINE)


@dataclass
class Counts:
    """
    What a server has counted: of an answer, or since its start.

    Args:
        tokens (`int`): Tokens of answers.
        verifications (`int`): Forward passes of the target that verified a draft; of llama.cpp, all that gave tokens.
        drafted, accepted (`int`): Drafted tokens, and those of them that were accepted.
        accepted_at (`dict[int, int]`): By position in the draft, from 0: how often the token there was accepted.
        verified_tokens (`int`): Tokens of answers that verifications committed.
    """

    tokens: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: dict[int, int] = field(default_factory=dict)
    verified_tokens: int = 0

    def plus(self, other: "Counts", sign: int = 1) -> "Counts":
        """The sum of two counts, or with `sign=-1` their difference."""
        positions = sorted(self.accepted_at.keys() | other.accepted_at.keys())
        return Counts(
            tokens=self.tokens + sign * other.tokens,
            verifications=self.verifications + sign * other.verifications,
            drafted=self.drafted + sign * other.drafted,
            accepted=self.accepted + sign * other.accepted,
            accepted_at={at: self.accepted_at.get(at, 0) + sign * other.accepted_at.get(at, 0) for at in positions},
            verified_tokens=self.verified_tokens + sign * other.verified_tokens,
        )


@dataclass(frozen=True)
class Engine:
    """
    What is read from a kind of server.

    Args:
        name (`str`): Its name.
        counter (`str`): What is read, for readers of a report.
        definition (`str`): How `tau` is computed from it.
        tau (`Callable`): Computes it; `None` if nothing was drafted.
        pages (`tuple[str, ...]`): Addresses of which one, with `sign` in it, tells that this is the server.
        sign (`str`): A text in that page.
        request_fields (`dict`): What a request needs so that the server counts.
        of_answer (`Callable`): Reads the counts of a chat completion.
        of_page (`Callable`, *optional*): Reads the counts since the server's start from the page, instead.
        start_of_page (`Callable`): With `of_page`: reads from the page what another start of the server would change.
        mean_of_page (`Callable`, *optional*): Reads an acceptance length since the server's start from the page, for
            versions that count nothing else.
        remedy (`str`): What to do if it counted no drafts.
    """

    name: str
    counter: str
    definition: str
    tau: Callable[[Counts], float | None]
    remedy: str
    pages: tuple[str, ...] = ()
    sign: str = ""
    request_fields: dict = field(default_factory=dict)
    of_answer: Callable[[dict], Counts] = lambda completion: Counts()
    of_page: Callable[[str], Counts] | None = None
    start_of_page: Callable[[str], object] = lambda page: None
    mean_of_page: Callable[[str], float | None] | None = None


def _ratio(numerator: float, denominator: float) -> float | None:
    """A ratio; `None` if its denominator is 0."""
    return numerator / denominator if denominator else None


def _vllm_counts(page: str) -> Counts:
    """Of Prometheus' text format; several engines behind one address, and their labels, are summed."""
    counts = Counts()
    for sample in _SAMPLE.finditer(page):
        name = sample["name"]
        value = int(float(sample["value"]))
        if name == f"{_VLLM}drafts":
            counts.verifications += value
        elif name == f"{_VLLM}draft_tokens":
            counts.drafted += value
        elif name == f"{_VLLM}accepted_tokens":
            counts.accepted += value
        elif name == f"{_VLLM}accepted_tokens_per_pos":
            position = _POSITION.search(sample["labels"] or "")
            if position:
                at = int(position[1])
                counts.accepted_at[at] = counts.accepted_at.get(at, 0) + value
    return counts


def _vllm_start(page: str) -> list[str]:
    """The lines that say since when is counted; none of a server that does not export them."""
    return sorted(_START.findall(page))


def _sglang_counts(completion: dict) -> Counts:
    """Of `meta_info`, which a choice has."""
    meta = completion["choices"][0].get("meta_info") or {}
    return Counts(
        tokens=meta.get("completion_tokens", 0),
        verifications=meta.get("spec_verify_ct", 0),
        drafted=meta.get("spec_draft_token_num", 0),
        accepted=meta.get("spec_accept_token_num", 0),
    )


def _sglang_mean(page: str) -> float | None:
    """Of `/server_info`: the mean over the processes that decode."""
    states = json.loads(page).get("internal_states") or []
    means = [state["avg_spec_accept_length"] for state in states if state.get("avg_spec_accept_length")]
    return _ratio(sum(means), len(means))


def _llama_cpp_tau(counts: Counts) -> float | None:
    """Every forward pass gives one token beside the accepted ones."""
    return _ratio(counts.tokens, counts.verifications) if counts.drafted else None


def _llama_cpp_counts(completion: dict) -> Counts:
    """Of `timings`, in which counts of drafts are missing if there were none."""
    timings = completion.get("timings") or {}
    tokens = timings.get("predicted_n", 0)
    accepted = timings.get("draft_n_accepted", 0)
    return Counts(tokens, tokens - accepted, timings.get("draft_n", 0), accepted)


def _dflash_counts(completion: dict) -> Counts:
    """Of `usage`."""
    usage = completion.get("usage") or {}
    details = usage.get("completion_tokens_details") or {}
    accepted = details.get("accepted_prediction_tokens", 0)
    return Counts(
        tokens=usage.get("completion_tokens", 0),
        verifications=details.get("verifications", 0),
        drafted=accepted + details.get("rejected_prediction_tokens", 0),
        accepted=accepted,
        verified_tokens=details.get("verified_tokens", 0),
    )


# Asked in this order; the last one has no page of its own, and is taken for any other server.
ENGINES = (
    Engine(
        name="vLLM",
        counter="vllm:spec_decode_num_drafts, _draft_tokens, _accepted_tokens and _accepted_tokens_per_pos of "
        "/metrics, after minus before: requests of others in between are counted, too",
        definition="1 + accepted tokens / drafts",
        tau=lambda counts: _ratio(counts.verifications + counts.accepted, counts.verifications),
        remedy="start vLLM with a speculative configuration, and with its statistics",
        pages=("/metrics",),
        sign="vllm:",
        of_page=_vllm_counts,
        start_of_page=_vllm_start,
    ),
    Engine(
        name="SGLang",
        counter="spec_verify_ct and completion_tokens in the meta_info of each answer",
        definition="tokens of the answers / verifications",
        tau=lambda counts: _ratio(counts.tokens, counts.verifications),
        remedy="start SGLang with a speculative algorithm",
        pages=("/server_info", "/get_server_info"),
        sign='"internal_states"',
        request_fields={"return_meta_info": True},
        of_answer=_sglang_counts,
        mean_of_page=_sglang_mean,
    ),
    Engine(
        name="llama.cpp",
        counter="predicted_n, draft_n and draft_n_accepted in the timings of each answer",
        definition="tokens of the answers / (tokens - accepted tokens), which counts forwards without a draft as well",
        tau=_llama_cpp_tau,
        remedy="start llama-server with a drafter",
        pages=("/props",),
        sign='"build_info"',
        of_answer=_llama_cpp_counts,
    ),
    Engine(
        name="dflash serve",
        counter="verifications and verified_tokens in usage.completion_tokens_details of each answer",
        definition="tokens that verifications committed / verifications",
        tau=lambda counts: _ratio(counts.verified_tokens, counts.verifications),
        remedy="this is the counter of `dflash serve`, to be started with a drafter; of other servers those of vLLM, "
        "SGLang and llama.cpp are known",
        of_answer=_dflash_counts,
    ),
)
_MEAN_OF_PAGE = "avg_spec_accept_length of {}, the mean of all requests since the server's start"


@dataclass
class ServerReport:
    """
    The result of [`evaluate_server`]; the schema of `server_report.json`.

    Args:
        engine (`str`): The kind of server.
        counter (`str`): The counter that was read.
        definition (`str`): How `tau` is computed from it.
        tau (`float`): The acceptance length, as the server defines it.
        acceptance_rate (`float`, *optional*): Share of the drafted tokens that were accepted, if these are counted.
        acceptance_by_position (`list[float]`): Share of the drafts of which the token at each position was accepted;
            empty if this is not counted.
        tokens_per_second (`float`, *optional*): New tokens of all answers by the time from the first request to the
            last answer; prompts and waiting count in the time.
        tokens (`int`, *optional*), seconds (`float`): The same, apart. The tokens are those of `usage`; `None` if an
            answer has none.
        answers (`int`): Number of answers.
        models (`list[str]`): The names by which the answers call their model.
        rejected (`dict[str, int]`): How many conversations the server rejected, by reason.
        counts (`Counts`): The counters.
        setting (`dict`): The server's address, model, number of parallel requests, prompts, limits, temperature.
    """

    engine: str
    counter: str
    definition: str
    tau: float
    acceptance_rate: float | None
    acceptance_by_position: list[float]
    tokens_per_second: float | None
    tokens: int | None
    seconds: float
    answers: int
    models: list[str]
    rejected: dict[str, int]
    counts: Counts
    setting: dict = field(default_factory=dict)

    def to_json(self) -> str:
        """The report as JSON."""
        return json_text(asdict(self))

    def save(self, folder: Path) -> Path:
        """Write `server_report.json` into a folder; returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        with atomic(folder / SERVER_REPORT_FILE) as half:
            half.write_text(self.to_json() + "\n", encoding="utf-8")
        return folder / SERVER_REPORT_FILE


def conversations_of(rows: Sequence[dict], data: str) -> list[list[list[dict]]]:
    """
    What is sent to a server: for each row, the messages that are added before each answer is requested.

    Args:
        rows (`Sequence[dict]`): See [`~dflash_hf.evaluation.sets.eval_rows`].
        data (`str`): Name of the dataset, for errors.

    Raises:
        `ValueError`: a row without a conversation; names it.
    """
    conversations = []
    for index, row in enumerate(rows):
        if row.get("turns"):
            conversations.append([[{"role": "user", "content": turn}] for turn in row["turns"]])
            continue
        try:
            conversation = conversation_of(row, answers=False)
        except ValueError as error:
            raise ValueError(f"Row {index} of {data}: {error}") from error
        messages = conversation.prompt(as_chat=True)
        if conversation.tokens is not None or not isinstance(messages, list) or not messages:
            raise ValueError(f"Row {index} of {data} has no messages, which a server is sent; it takes no ids.")
        conversations.append([messages])
    return conversations


def evaluate_server(
    client: ChatClient,
    conversations: Sequence[list[list[dict]]],
    concurrency: int = 1,
    progress: Callable[[Iterable], Iterable] = iter,
) -> ServerReport:
    """
    Send conversations to a server, and read what it counts.

    One short request goes ahead and is not counted. Turns of a conversation follow the server's own answers.

    Args:
        client (`ChatClient`): The server, with the options of each request.
        conversations (`Sequence`): See [`conversations_of`].
        concurrency (`int`): Number of conversations at a time.
        progress: Wraps the iteration over the conversations.

    Raises:
        `ServerError`: the server cannot be reached, rejects every request, has counted no drafts, or its counters were
            reset meanwhile.
    """
    engine = engine_of(client)
    fields = {**engine.request_fields}
    if client.template_kwargs:
        fields["chat_template_kwargs"] = client.template_kwargs
    client.completion(_WARMUP, {**fields, "max_tokens": WARMUP_TOKENS})
    page_before = _counter_page(client, engine)
    completions: list[dict] = []
    rejected: dict[str, int] = {}
    start = time.perf_counter()
    # Its threads are daemons: a slow server must not keep an interrupted process alive.
    with ThreadPool(concurrency) as pool:
        outcomes = pool.imap(lambda row: _answers_of(client, *row, fields), enumerate(conversations))
        for answers, reason in progress(_Sized(outcomes, len(conversations))):
            completions.extend(answers)
            if reason is not None:
                rejected[reason] = rejected.get(reason, 0) + 1
    seconds = time.perf_counter() - start
    if not completions:
        raise ServerError(f"{client.address} rejects all conversations: {'; '.join(rejected)}.")
    counts = _counts_between(client, engine, page_before)
    for completion in completions:
        counts = counts.plus(engine.of_answer(completion))
    tau = engine.tau(counts)
    counter = engine.counter
    definition = engine.definition
    if tau is None and engine.mean_of_page is not None:
        path, page = _page_of(client, engine)
        tau = engine.mean_of_page(page)
        counter = _MEAN_OF_PAGE.format(path)
        definition = "as the server computes it"
    if tau is None:
        raise ServerError(f"{client.address} ({engine.name}) has counted no drafts: {engine.remedy}.")
    shares = [accepted / counts.verifications for _, accepted in sorted(counts.accepted_at.items())]
    tokens = _tokens_of(completions)
    return ServerReport(
        engine=engine.name,
        counter=counter,
        definition=definition,
        tau=tau,
        acceptance_rate=counts.accepted / counts.drafted if counts.drafted else None,
        acceptance_by_position=shares,
        tokens_per_second=None if tokens is None else tokens / seconds,
        tokens=tokens,
        seconds=seconds,
        answers=len(completions),
        models=sorted({str(completion.get("model")) for completion in completions}),
        rejected=rejected,
        counts=counts,
    )


def engine_of(client: ChatClient) -> Engine:
    """
    The kind of a server, by its pages.

    Raises:
        `ServerError`: it cannot be reached, or requires a key.
    """
    for engine in ENGINES:
        if _find_page(client, engine) is not None:
            return engine
    return ENGINES[-1]


def _find_page(client: ChatClient, engine: Engine) -> tuple[str, str] | None:
    """The address and the text of the page by which an engine is known, if the server has it."""
    for path in engine.pages:
        page = client.page(path) or ""
        if engine.sign in page:
            return path, page
    return None


def _page_of(client: ChatClient, engine: Engine) -> tuple[str, str]:
    """
    The same page of a server that had it before.

    Raises:
        `ServerError`: it has it no longer.
    """
    page = _find_page(client, engine)
    if page is None:
        paths = " or ".join(engine.pages)
        raise ServerError(f"{client.address} ({engine.name}) no longer shows its counters at {paths}; see its log.")
    return page


def _tokens_of(completions: Sequence[dict]) -> int | None:
    """New tokens of answers; `None` if one of them does not say."""
    tokens = 0
    for completion in completions:
        tokens_of_answer = (completion.get("usage") or {}).get("completion_tokens")
        if tokens_of_answer is None:
            return None
        tokens += tokens_of_answer
    return tokens


class _Sized:
    """An iterator of a known length, for a progress bar."""

    def __init__(self, items: Iterable, length: int):
        self.items = items
        self.length = length

    def __iter__(self):
        return iter(self.items)

    def __len__(self) -> int:
        return self.length


def _answers_of(client: ChatClient, row: int, turns: list[list[dict]], fields: dict) -> tuple[list[dict], str | None]:
    """
    The completions of a conversation's turns, and why the server rejected the next one if it did.

    Raises:
        `ServerError`: it failed instead; names the row, of which the server's log may say more.
    """
    messages: list[dict] = []
    completions: list[dict] = []
    for turn in turns:
        messages = [*messages, *turn]
        try:
            completion = client.completion(messages, fields)
        except UnusableRow as error:
            return completions, str(error)
        except ServerError as error:
            raise ServerError(f"Row {row} of the data: {error}") from error
        completions.append(completion)
        content = completion["choices"][0]["message"].get("content") or ""
        messages = [*messages, {"role": "assistant", "content": content}]
    return completions, None


def _counter_page(client: ChatClient, engine: Engine) -> str | None:
    """The page that shows what a server has counted since its start; `None` if its answers say what they are about."""
    return None if engine.of_page is None else _page_of(client, engine)[1]


def _counts_between(client: ChatClient, engine: Engine, page_before: str | None) -> Counts:
    """
    What a server has counted on its page since it showed `page_before`; nothing for one that counts in its answers.

    Raises:
        `ServerError`: it was started anew since then.
    """
    page = _counter_page(client, engine)
    if engine.of_page is None or page is None or page_before is None:
        return Counts()
    counts = engine.of_page(page).plus(engine.of_page(page_before), -1)
    is_same = engine.start_of_page(page) == engine.start_of_page(page_before)
    if not is_same or min(counts.verifications, counts.drafted, counts.accepted) < 0:
        raise ServerError(
            f"The counters of {client.address} were set back during the measurement: the server was started anew, or "
            "there are several behind this address. Measure again, one server by its own address."
        )
    return counts


def report_lines(report: ServerReport) -> list[str]:
    """A report for a terminal."""
    setting = report.setting
    if report.tokens_per_second is None:
        speed = "not measured: answers have no usage.completion_tokens"
    else:
        speed = f"{report.tokens_per_second:.1f}"
    lines = [
        f"tau               {report.tau:.2f}: {report.definition}",
        f"counter           {report.engine}: {report.counter}",
        f"tokens/s          {speed}, {setting['concurrency']} at a time, {report.answers} answers; "
        "prompts are in the time",
    ]
    if report.models != [setting["model"]]:
        lines.append(f"model             {setting['model']} was requested, {', '.join(report.models)} answered")
    if report.acceptance_rate is not None:
        counts = report.counts
        lines.append(f"drafted tokens    {counts.drafted}, {100 * report.acceptance_rate:.1f} % of them accepted")
    if report.counts.verified_tokens:  # a server may decode without its drafter, such as while it has many requests
        share = f"{report.counts.verified_tokens} of {report.tokens} tokens"
        lines.append(f"with drafts       {share} come from verifications; the others were decoded without a draft")
    if report.acceptance_by_position:
        shares = " ".join(f"{100 * share:.0f}" for share in report.acceptance_by_position)
        lines.append(f"slot accepted, %  {shares}")
    for reason, number in report.rejected.items():
        lines.append(f"rejected          {number} conversations: {reason}")
    return lines
