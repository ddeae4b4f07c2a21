"""
Requests written by the target itself, so that a drafter can be trained without a data set; `dflash prompts`.

An aligned model that is given its chat template up to where the user's text begins goes on with a user's text (Magpie,
https://arxiv.org/abs/2406.08464). Samples are taken batch by batch. Each batch has a seed of its own and is judged
against all that was kept before, so that a file grows to the same bytes however often its making is interrupted.
"""

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import GenerationConfig, LogitsProcessor, TopPLogitsWarper
from transformers.utils import logging

from dflash_hf.data.encode import digests_of_tokenizer
from dflash_hf.data.prepare import load_tokenizer
from dflash_hf.data.response_file import ResponseFile
from dflash_hf.pairs import Loading, check_pair, load_target, pack
from dflash_hf.target import digest_of_target, generate_responses
from dflash_hf.terminal import template_arguments


logger = logging.get_logger(__name__)

# First words of a turn, by kind; no space at the end, for tokens begin with theirs. Left alone, chat models seldom ask
# for code or sums.
KINDS = {
    "chat": ("",),
    "code": (
        "Write a Python function that",
        "Write a Python function to",
        "How do I implement",
        "Write a Python class",
        "Explain what this Python code does:\n\n```python\n",
        "Write a SQL query",
        "Complete this Python function:\n\n```python\ndef",
        "Write a JavaScript function",
        "Find the bug in this code:\n\n```python\n",
        "Write a Python program",
    ),
    "math": (
        "Calculate",
        "Solve the equation",
        "What is the sum of",
        "If a train travels at",
        "How many",
        "A store sells",
        "Find the area",
        "What is the value of",
        "Compute",
        "Convert",
    ),
    "rewrite": (
        "Rewrite the following sentence",
        "Summarize the following",
        "Correct the grammar",
        "Rephrase",
        "Edit the following",
        "Make this email",
        "Translate the following",
    ),
    "task": (
        "List",
        "Give me",
        "Write a short",
        "Describe",
        "Compare",
        "Name",
        "Create a",
        "Explain",
        "Suggest",
        "Generate",
    ),
    "json": (
        "Return a JSON object",
        "Write a JSON",
        "Convert the following text into JSON",
        "Extract the names and dates as JSON",
        "Create a table",
    ),
}
_SENTINEL = "Xq7"  # plain letters: a template may trim or escape anything else
_PATIENCE = 512  # samples in a row without a new request, after which there will hardly be one
_NEAR = 7  # tenths


@dataclass(frozen=True)
class PromptSettings:
    """
    How requests are sampled, and which are kept. Equal settings give equal requests.

    Args:
        kinds (`Sequence[str]`): Kinds of [`KINDS`] in turn; one that is named twice is sampled twice as often.
            Default: `chat`, or none if `begin` is given.
        begin (`Sequence[str]`): First words of further requests, of the kind `begin`.
        system (`str`, *optional*): A system prompt, sampled under and kept in the rows. Default: the template's own.
        temperature, top_p (`float`): Of the samples.
        max_new_tokens (`int`): Tokens of the longest request; unfinished ones are left out.
        min_chars, max_chars (`int`): Length of a request that is kept.
        batch_size, seed (`int`): Samples of a batch; of all batches.
        chat_template_kwargs (`dict`): Arguments of the chat template.

    Raises:
        `ValueError`: an unknown kind, or a number out of its range.
    """

    kinds: Sequence[str] = ()
    begin: Sequence[str] = ()
    system: str | None = None
    temperature: float = 1.0
    top_p: float = 0.95
    max_new_tokens: int = 128
    min_chars: int = 16
    max_chars: int = 1000
    batch_size: int = 64
    seed: int = 0
    chat_template_kwargs: dict = field(default_factory=dict)

    def __post_init__(self):
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"kinds: {kind!r} is unknown; choose of {', '.join(KINDS)}, or give `begin`.")
        if any(not text.strip() for text in self.begin):
            raise ValueError("begin: '' is no beginning; leave it out, and kinds=('chat',) begins with nothing.")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0: greedily there is only one request.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie above 0 and be at most 1.")
        for name in ("max_new_tokens", "batch_size", "max_chars"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.min_chars > self.max_chars:
            raise ValueError(f"min_chars={self.min_chars} must not exceed max_chars={self.max_chars}.")

    def of_sample(self, number: int) -> tuple[str, str]:
        """Kind and first words of a sample: the kinds in turn, and of each kind its beginnings in turn."""
        kinds = [*self.kinds, *(["begin"] if self.begin else [])] or ["chat"]
        kind = kinds[number % len(kinds)]
        beginnings = self.begin if kind == "begin" else KINDS[kind]
        return kind, beginnings[number // len(kinds) % len(beginnings)]


@dataclass
class PromptBatch:
    """What became of the samples of one batch: `rows` that are kept, and the others counted by reason."""

    rows: list[dict]
    left_out: Counter


@dataclass(frozen=True)
class UserTurn:
    """What a chat template puts before a user's text, and behind it."""

    before: str
    behind: str

    @classmethod
    def of(cls, tokenizer, system: str | None = None, chat_template_kwargs: dict | None = None) -> "UserTurn":
        """
        Find a user's turn by rendering a conversation with a text that can be recognised.

        Raises:
            `ValueError`: there is no chat template, or none that puts its words around the text as it is.
        """
        from jinja2 import TemplateError

        if not tokenizer.chat_template:
            raise ValueError(
                "The tokenizer has no chat template, so that nothing says where a user's text begins; choose a target "
                "that was trained to chat."
            )
        turns = set()
        for text in (_SENTINEL, f"{_SENTINEL} {_SENTINEL[::-1]}"):
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": text})
            options = {"tokenize": False, "add_generation_prompt": True, **(chat_template_kwargs or {})}
            try:
                rendered = tokenizer.apply_chat_template(messages, **options)
            except TemplateError as error:
                raise ValueError(
                    f"The chat template refuses {messages} ({error}); leave out `system`, or give the "
                    "tokenizer another chat template."
                ) from error
            before, found, behind = rendered.partition(text)
            if not found or text in behind or not before.strip():
                raise ValueError(
                    f"The chat template has no beginning of a user's turn: {text!r} was rendered as {rendered!r}, not "
                    "once and behind words of the template's own. Give the tokenizer another chat template."
                )
            turns.add(cls(before, behind))
        if len(turns) > 1:
            raise ValueError(
                "The chat template's beginning of a user's turn depends on its text: "
                f"{' or '.join(sorted(map(repr, turns)))}. Give the tokenizer another chat template."
            )
        return turns.pop()

    def stop_id(self, tokenizer) -> int | None:
        """The token that ends a user's turn, or `None` where it ends with plain text."""
        ids = tokenizer(self.behind, add_special_tokens=False)["input_ids"]
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        return ids[0] if ids and ids[0] in special else None


class DistinctTexts:
    """
    Texts of which no two are nearly equal: the Jaccard similarity of their word 3-grams (those of both over those of
    either), without case and punctuation, stays below 0.7. Texts of less than three words are compared whole.
    """

    def __init__(self):
        self._grams: list[frozenset] = []
        self._by_gram: dict[tuple, list[int]] = defaultdict(list)

    def add(self, text: str) -> bool:
        """Take a text in, unless one like it is there; whether it was taken."""
        words = re.findall(r"\w+", text.casefold())
        grams = frozenset(zip(words, words[1:], words[2:], strict=False)) or frozenset([tuple(words)])
        # Two sets that share enough share one of these: were all their common ones among the rest, too few would be.
        enough = -(-_NEAR * len(grams) // 10)
        rarest = sorted(grams, key=lambda gram: (len(self._by_gram.get(gram, ())), gram))[: len(grams) - enough + 1]
        for number in {number for gram in rarest for number in self._by_gram.get(gram, ())}:
            other = self._grams[number]
            common = len(grams & other)
            if 10 * common >= _NEAR * (len(grams) + len(other) - common):
                return False
        for gram in grams:
            self._by_gram[gram].append(len(self._grams))
        self._grams.append(grams)
        return True


def flaw(text: str, settings: PromptSettings) -> str | None:
    """Why a text is no request worth an answer, by cheap signs, or `None`."""
    if not settings.min_chars <= len(text) <= settings.max_chars:
        return "too short or too long"
    if not all(char.isprintable() or char in "\n\t" for char in text) or "\ufffd" in text:
        return "not printable"
    if sum(char.isalnum() for char in text) < 0.5 * len(text):
        return "mostly signs"
    words = text.split()
    grams = list(zip(words, words[1:], words[2:], strict=False))
    if len(set(grams)) < 0.6 * len(grams):
        return "repeats itself"
    return None


def generate_prompts(target, tokenizer, count: int, settings: PromptSettings | None = None) -> list[dict]:
    """
    Requests that a chat model writes itself, nearly equal ones once.

    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): A chat model and its tokenizer.
        count (`int`): Requests wanted.
        settings (`PromptSettings`): Default: chat, T = 1, top-p 0.95.

    Returns:
        `list[dict]`: Rows with `kind` and `prompt`, or `messages` where a system prompt was given; also `row`,
        `batch`, and `kept`, how many of the samples of that batch were.

    Raises:
        `ValueError`: the chat template has no beginning of a user's turn, or hardly any sample is a new request.
    """
    batches = prompt_batches(target, tokenizer, count, settings or PromptSettings())
    return [row for batch in batches for row in batch.rows]


def prompt_batches(
    target, tokenizer, count: int, settings: PromptSettings, before: Sequence[dict] = ()
) -> Iterator[PromptBatch]:
    """[`generate_prompts`] batch by batch, going on behind the rows `before` that earlier calls gave."""
    turn = UserTurn.of(tokenizer, settings.system, settings.chat_template_kwargs)
    seen = DistinctTexts()
    written = set(map(_text_of, before))
    # 1. The last batch may be there in part: it is sampled again, and what is missing of it is added.
    first = before[-1]["batch"] if before else 0
    if before and sum(row["batch"] == first for row in before) >= before[-1]["kept"]:
        first += 1
    for row in before:
        if row["batch"] < first:
            seen.add(_text_of(row))
    have, idle = len(before), 0
    for batch in itertools.count(first):
        if have >= count:
            return
        # 2. Sample.
        texts = _sample(target, tokenizer, turn, settings, batch)
        # 3. Judge, in order.
        left_out, kept = Counter(), []
        for kind, text, reason in texts:
            reason = reason or flaw(text, settings) or (None if seen.add(text) else "like another")
            if reason:
                left_out[reason] += 1
            else:
                kept.append((kind, text))
        # 4. Number, and cut to the count; `kept` says that there was more.
        rows = [_row(kind, text, settings, batch, len(kept)) for kind, text in kept if text not in written]
        rows = [{"row": have + i, **row} for i, row in enumerate(rows[: count - have])]
        have += len(rows)
        yield PromptBatch(rows, left_out)
        idle = 0 if rows else idle + settings.batch_size
        if idle >= max(_PATIENCE, 2 * settings.batch_size):
            reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.most_common())
            raise ValueError(
                f"count={count}: after {have} requests the last {idle} samples gave none that is new (the last batch: "
                f"{reasons}). Ask for fewer, raise temperature or max_new_tokens, or give other kinds or `begin`."
            )


@torch.no_grad()
def _sample(target, tokenizer, turn: UserTurn, settings: PromptSettings, batch: int) -> list[tuple]:
    """Kind, text and flaw of each sample of a batch."""
    numbers = range(batch * settings.batch_size, (batch + 1) * settings.batch_size)
    chosen = [settings.of_sample(number) for number in numbers]
    prompts = [tokenizer(turn.before + begin, add_special_tokens=False)["input_ids"] for _, begin in chosen]
    stop = turn.stop_id(tokenizer)
    eos = target.generation_config.eos_token_id
    stops = {*([] if eos is None else [eos] if isinstance(eos, int) else eos), *([] if stop is None else [stop])}
    with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
        torch.manual_seed((settings.seed * 1_000_003 + batch) % 2**63)
        responses = _continue(target, prompts, stops, settings)
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    samples = []
    for (kind, begin), prompt, response in zip(chosen, prompts, responses, strict=True):
        ended = response[-1] in stops
        ids = response[: len(response) - ended]
        # Decoded behind the prompt: some tokenizers drop the space before a first word.
        text = _decode(tokenizer, [*prompt, *ids])[len(_decode(tokenizer, prompt)) :]
        if stop is None and turn.behind.strip():
            text, found, _ = text.partition(turn.behind.strip())
            ended = ended or bool(found)
        reason = None
        if not ended:
            reason = "unfinished"
        elif special & set(ids):
            reason = "holds a special token"
        elif not text.strip():
            reason = "nothing behind its beginning"
        samples.append((kind, (begin + text).strip(), reason))
    return samples


def _continue(target, prompts: list[list[int]], stops: set[int], settings: PromptSettings) -> list[list[int]]:
    """A sample behind each prompt. Finished rows leave the batch, so that many short requests wait for no long one."""
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,  # both are left to the processor
        top_p=1.0,
        top_k=0,
        eos_token_id=sorted(stops) or None,
        pad_token_id=target.generation_config.pad_token_id,
    )
    nucleus = [_Nucleus(settings.temperature, settings.top_p)]
    responses: list[list[int]] = [[] for _ in prompts]
    waiting, done = list(range(len(prompts))), 0
    while waiting and done < settings.max_new_tokens:
        # A quarter of the length, a quarter, a half: reading a row again costs less than padding it.
        tokens = min(max(done, settings.max_new_tokens // 4, 1), settings.max_new_tokens - done)
        begun = [[*prompts[i], *responses[i]] for i in waiting]
        more = generate_responses(target, begun, tokens, None, len(begun), config, logits_processor=nucleus)
        for i, ids in zip(waiting, more, strict=True):
            responses[i] += ids
        waiting = [i for i in waiting if responses[i][-1] not in stops]
        done += tokens
    return responses


class _Nucleus(LogitsProcessor):
    """Temperature and top-p, exactly; sorting a whole vocabulary takes a CPU as long as a small target's forward."""

    def __init__(self, temperature: float, top_p: float, likely: int = 1024):
        self.temperature, self.top_p, self.likely = temperature, top_p, likely

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores / self.temperature  # [N, V]
        if self.top_p == 1.0:
            return scores
        top, ids = scores.topk(min(self.likely, scores.shape[-1]))  # [N, K], falling
        shares = (top - scores.logsumexp(-1, keepdim=True)).exp()
        inside = shares.cumsum(-1) - shares < self.top_p  # what is likelier does not fill the nucleus alone
        kept = torch.full_like(scores, -torch.inf).scatter(-1, ids, top.masked_fill(~inside, -torch.inf))
        wider = inside[:, -1]  # [N]  the nucleus may hold more
        if wider.any():
            kept[wider] = TopPLogitsWarper(self.top_p)(input_ids[wider], scores[wider])
        return kept


def _decode(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _row(kind: str, text: str, settings: PromptSettings, batch: int, kept: int) -> dict:
    if settings.system is None:
        asked = {"prompt": text}
    else:
        system = {"role": "system", "content": settings.system}
        asked = {"messages": [system, {"role": "user", "content": text}]}
    return {"kind": kind, **asked, "batch": batch, "kept": kept}


def _text_of(row: dict) -> str:
    return row["prompt"] if "prompt" in row else row["messages"][-1]["content"]


def _rows_of(path: Path) -> list[dict]:
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    for number, row in enumerate(rows):
        if row["row"] != number or not {"batch", "kept"} <= row.keys() or not {"prompt", "messages"} & row.keys():
            raise ValueError(
                f"Line {number + 1} of {path} is not request {number} of `dflash prompts`; choose another output."
            )
    return rows


def run(arguments, echo) -> int:
    """`dflash prompts`: add what is missing to the output."""
    settings = PromptSettings(
        kinds=[kind.strip() for kind in arguments.kinds.split(",")] if arguments.kinds else [],
        begin=arguments.begin,
        system=arguments.system,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        max_new_tokens=arguments.max_new_tokens,
        min_chars=arguments.min_chars,
        max_chars=arguments.max_chars,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        chat_template_kwargs=template_arguments(arguments.template_args) or {},
    )
    loading = Loading.of(arguments)
    check_pair(arguments.target, None, loading)
    tokenizer = load_tokenizer(arguments.target, arguments.chat_template, loading.revision, loading.trust_remote_code)
    UserTurn.of(tokenizer, settings.system, settings.chat_template_kwargs)  # refuses before anything is written
    with ResponseFile(arguments.output, {**asdict(settings), **digests_of_tokenizer(tokenizer)}) as output:
        if output.repaired:
            echo(f"cut off a half-written line of {output.repaired} bytes at the end of {arguments.output}")
        before = _rows_of(arguments.output)
        echo(f"{len(before)} of {arguments.count} requests are there")
        if len(before) >= arguments.count:
            return 0
        target = load_target(arguments.target, loading)
        output.settle({"weights": digest_of_target(target), "dtype": str(target.dtype)})
        pack(arguments.packed, target)
        left_out, new = Counter(), 0
        with logging.tqdm(total=arguments.count, initial=len(before), unit="request", desc="prompts") as bar:
            for batch in prompt_batches(target, tokenizer, arguments.count, settings, before):
                output.append(batch.rows)
                left_out += batch.left_out
                new += len(batch.rows)
                bar.update(len(batch.rows))
    echo(f"{len(before) + new} requests are in {arguments.output}, {new} of them new")
    for reason, number in left_out.most_common():
        echo(f"  {number} samples left out: {reason}")
    return 0
