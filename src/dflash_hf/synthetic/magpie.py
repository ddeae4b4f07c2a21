"""
User prompts written by the target itself, to train a drafter without a dataset; `dflash prompts`.

Given its chat template up to the start of the user's text, an aligned model continues with a user's text (Magpie,
https://arxiv.org/abs/2406.08464). Samples are numbered. Each has its own seed and is compared, in order, with all
prompts kept before, so that the file is the same after any interruption and for any batch size (except for rounding,
in half precision).

A base model, which has no chat template, writes the beginning of a text instead, after its start token.

In this file a *prompt* is the user's text, which is sampled; what the target reads before it is the *prefix*.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from transformers import GenerationConfig

from dflash_hf.data.distinct import DistinctTexts, quality_issue
from dflash_hf.data.template import decoded
from dflash_hf.synthetic.beginnings import whole_words
from dflash_hf.synthetic.responses import stream_responses
from dflash_hf.targets.generation import eos_ids


# First words of a turn, by kind, without a trailing space, since tokens start with one. Without them, chat models
# seldom ask for code or arithmetic.
KINDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("kinds.json").read_text(encoding="utf-8"))
_MAX_REJECTED_SAMPLES = 512  # give up after this many samples without a new prompt
_MARKER_TEXT = "Xq7 7qX"  # plain letters: a template may trim or escape anything else


@dataclass(frozen=True)
class PromptSettings:
    """
    How prompts are sampled. Equal settings give equal prompts.

    Args:
        kinds (`Sequence[str]`): Kinds of [`KINDS`], in turn; a kind given twice is sampled twice as often.
            Default: `chat`, or none if `begin` is given.
        begin (`Sequence[str]`): First words of further prompts, of the kind `begin`.
        temperature, top_p (`float`): Sampling parameters.
        max_new_tokens (`int`): Maximum number of tokens; unfinished prompts of chat models are left out.
        seed (`int`): Seed of all samples, from which each gets its own.
        chat_template_kwargs (`dict`): Arguments of the chat template.

    Raises:
        `ValueError`: a kind is unknown, or a number is out of range.
    """

    kinds: Sequence[str] = ()
    begin: Sequence[str] = ()
    temperature: float = 1.0
    top_p: float = 0.95
    max_new_tokens: int = 128
    seed: int = 0
    chat_template_kwargs: dict = field(default_factory=dict)

    def __post_init__(self):
        for name in ("kinds", "begin"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r} is a text; give a list of texts.")
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"kinds: {unknown[0]!r} is unknown; choose from {', '.join(KINDS)}, or give `begin`.")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0: greedy decoding gives one prompt.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1.")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1.")

    def kind_and_beginning(self, number: int) -> tuple[str, str]:
        """Kind and first words of a numbered sample: kinds in turn, and within a kind its first words in turn."""
        kinds = list(self.kinds)
        if self.begin:
            kinds.append("begin")
        if not kinds:
            kinds.append("chat")
        kind = kinds[number % len(kinds)]
        beginnings = self.begin if kind == "begin" else KINDS[kind]
        return kind, beginnings[number // len(kinds) % len(beginnings)]


class UserTurn(NamedTuple):
    """
    What the chat template writes before a user's text, and the token that ends it. Of a base model: its start token,
    and no end, since a text may go on where a prompt ends.
    """

    before: str
    stop_id: int | None


def user_turn(tokenizer, settings: PromptSettings) -> UserTurn:
    """
    Find the user's turn by rendering a conversation with a recognisable text.

    Raises:
        `ValueError`: the chat template does not mark the text; or there is none, and `settings` name kinds of users'
            requests, or leave a model without a start token nothing to begin with.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        return _start_of_text(tokenizer, settings)
    messages = [{"role": "user", "content": _MARKER_TEXT}]
    options = {"tokenize": False, "add_generation_prompt": True, **settings.chat_template_kwargs}
    try:
        rendered = tokenizer.apply_chat_template(messages, **options)
    except TemplateError as error:
        raise ValueError(f"The chat template rejects {messages} ({error}); give another chat template.") from error
    before, separator, after = rendered.partition(_MARKER_TEXT)
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    stop_id = next((token for token in ids if token in tokenizer.added_tokens_decoder), None)
    if not separator or stop_id is None or not before.strip() or _MARKER_TEXT in after:
        raise ValueError(
            f"The chat template does not mark a user's text: {_MARKER_TEXT!r} was rendered as {rendered!r}, not once, "
            "after text of the template, and before an added token. Give another chat template, or choose another "
            "target."
        )
    return UserTurn(before, stop_id)


def _start_of_text(tokenizer, settings: PromptSettings) -> UserTurn:
    """What a base model reads before a text."""
    if settings.kinds:
        raise ValueError(
            f"kinds={','.join(settings.kinds)}: these are kinds of users' requests, and the tokenizer has no chat "
            "template. Leave kinds out, or give `begin`, the first words of texts."
        )
    if not tokenizer.bos_token and not settings.begin:
        raise ValueError(
            "The tokenizer has neither a chat template nor a start token, after which a text could begin; give "
            "`begin`, the first words of texts."
        )
    return UserTurn(tokenizer.bos_token or "", None)


def generate_prompts(
    target, tokenizer, count: int, settings: PromptSettings | None = None, batch_size: int | None = None
) -> list[dict]:
    """
    User prompts that a chat model writes itself, or beginnings of texts by a base model, without near-duplicates.

    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): The model and its tokenizer.
        count (`int`): Number of prompts.
        settings (`PromptSettings`): Default: chat, T = 1, top-p 0.95.
        batch_size (`int`, *optional*): Samples that are generated together; affects speed only.

    Returns:
        `list[dict]`: Rows with `kind`, `prompt`, `row`, and `sample`, the number of the sample.

    Raises:
        `ValueError`: the chat template has no recognisable user turn, or too few samples are new prompts.
    """
    samples = sample_prompts(target, tokenizer, count, settings or PromptSettings(), batch_size)
    return [row for row, _ in samples if row]


def sample_prompts(
    target, tokenizer, count: int, settings: PromptSettings, batch_size: int | None = None, before: Sequence[dict] = ()
) -> Iterator[tuple[dict | None, str | None]]:
    """
    The samples of [`generate_prompts`], one by one, continuing after the rows `before` of earlier calls: a row, or
    the reason to leave it out.
    """
    if len(before) >= count:
        return
    turn = user_turn(tokenizer, settings)
    if turn.stop_id is None and not settings.begin:
        settings = replace(settings, begin=[""])
    prompts = DistinctTexts()
    for row in before:
        prompts.add(row["prompt"])
    row_number = before[-1]["row"] + 1 if before else 0
    first_sample = before[-1]["sample"] + 1 if before else 0
    left_out: Counter[str] = Counter()  # since the last new prompt
    for number, response in _sampled(target, tokenizer, turn, settings, first_sample, batch_size):
        kind, begin = settings.kind_and_beginning(number)
        text, reason = _user_prompt(tokenizer, turn, target, begin, response)
        if reason is None:
            reason = quality_issue(text)
        if reason is None and not prompts.add(text):
            reason = "like another"
        if reason is not None:
            left_out[reason] += 1
            yield None, reason
        else:
            yield {"row": row_number, "kind": kind, "prompt": text, "sample": number}, None
            row_number += 1
            left_out.clear()
        if row_number == count:
            return
        if left_out.total() >= _MAX_REJECTED_SAMPLES:
            reasons = ", ".join(f"{times} {reason}" for reason, times in left_out.most_common())
            raise ValueError(
                f"count={count}: after {row_number} prompts the last {_MAX_REJECTED_SAMPLES} samples gave no new one "
                f"({reasons}). Ask for fewer, raise temperature or max_new_tokens, or choose other kinds or `begin`."
            )


def _sampled(target, tokenizer, turn: UserTurn, settings: PromptSettings, first: int, batch_size: int | None):
    """Number and ids of each text that the target writes as the user, in the order of numbers."""
    config = GenerationConfig(
        do_sample=True,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=0,
        eos_token_id=sorted(_ends(turn, target)),
        pad_token_id=target.generation_config.pad_token_id,
    )
    prefixes = _prefixes_from(first, tokenizer, turn, settings)
    max_new_tokens = settings.max_new_tokens
    finished: dict[int, list[int]] = {}  # samples that finished before earlier ones
    expected = first
    for number, ids in stream_responses(target, prefixes, max_new_tokens, config, batch_size, settings.seed):
        finished[number] = ids
        while expected in finished:
            yield expected, finished.pop(expected)
            expected += 1


def _prefixes_from(first: int, tokenizer, turn: UserTurn, settings: PromptSettings) -> Iterator[tuple[int, list[int]]]:
    """Number and prefix of each sample, from the first on without an end."""
    for number in itertools.count(first):
        _, begin = settings.kind_and_beginning(number)
        yield number, prefix_ids(tokenizer, turn, begin)


def prefix_ids(tokenizer, turn: UserTurn, begin: str) -> list[int]:
    """What the target reads before a sample: the chat template up to the user's text, and the text's first words."""
    return tokenizer(turn.before + begin, add_special_tokens=False)["input_ids"]


def _user_prompt(tokenizer, turn: UserTurn, target, begin: str, sampled: list[int]) -> tuple[str, str | None]:
    """The text of a sample, and the reason if it is not a prompt that a user would send."""
    has_ended = sampled[-1] in _ends(turn, target)
    ids = sampled[:-1] if has_ended else sampled
    prefix = prefix_ids(tokenizer, turn, begin)
    # Decoded after the prefix: some tokenizers drop the space before a first word.
    text = decoded(tokenizer, [*prefix, *ids])[len(decoded(tokenizer, prefix)) :]
    special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    reason = None
    if not has_ended and turn.stop_id is None:
        text = whole_words(text)
    elif not has_ended:
        reason = "unfinished"
    if special_ids & set(ids):
        reason = "holds a special token"
    elif reason is None and not text.strip():
        reason = "nothing after its beginning"
    return (begin + text).strip(), reason


def _ends(turn: UserTurn, target) -> set[int]:
    """The tokens that end a sample."""
    ends = set(eos_ids(target.generation_config))
    if turn.stop_id is not None:
        ends.add(turn.stop_id)
    return ends


def checked_row(row: dict) -> dict:
    """
    A row of the output of `dflash prompts`.

    Raises:
        `ValueError`: it has other columns.
    """
    if not {"sample", "prompt"} <= row.keys():
        raise ValueError(f"not a row of `dflash prompts`: it has {sorted(row)}")
    return row
