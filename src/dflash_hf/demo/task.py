"""
The demo's task: one line of Python -> its syntax tree, as `ast.dump` writes it.

    return self.x   ->   Return(value=Attribute(value=Name(id='self', ctx=Load()), attr='x', ctx=Load()))

The lines are statements of the standard library of the interpreter that runs the demo, so nothing is downloaded. Whole
files are held out, and of those only lines that no training file contains. Any answer can be checked with `ast`.
"""

import ast
import random
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast


PAD, MASK, END, ANSWER = "<|pad|>", "<|mask|>", "<|end|>", "<|ast|>"
# A prompt is the line and the marker after which the tree begins.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}" + ANSWER
# Letters, single digits, spaces and single signs apart: a name is the same tokens in the line and in the tree.
_WORDS = r"[A-Za-z]+|[0-9]|\s|[^A-Za-z0-9\s]"
_STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.Raise, ast.Assert, ast.Delete)
_MIN_CODE, _MAX_CODE, _MAX_ANSWER = 6, 72, 240  # characters
_HELD_OUT_EVERY = 12  # one file in so many
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_MAX_FILE_BYTES = 150_000


class Pair(NamedTuple):
    """A line of Python and its syntax tree."""

    code: str
    answer: str


@dataclass(frozen=True)
class TaskData:
    """Pairs of disjoint files; no held-out line occurs in a training file."""

    train: list[Pair]
    held_out: list[Pair]
    train_files: int
    held_out_files: int


def answer_for(code: str) -> str:
    """The right answer to a line of Python."""
    return ast.dump(ast.parse(code).body[0])


def is_correct(code: str, answer: str) -> bool:
    """Whether `answer` is exactly the syntax tree of `code`."""
    return answer == answer_for(code)


def pairs_of_source(source: str) -> list[Pair]:
    """The statements of a source text that stand on one line, with their trees, in order of appearance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = ast.parse(source)
    lines = source.encode().split(b"\n")  # ast counts columns in bytes
    pairs = []
    for node in ast.walk(tree):
        if not isinstance(node, _STATEMENTS) or node.lineno != node.end_lineno:
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        code = lines[node.lineno - 1][node.col_offset : node.end_col_offset]
        if not (_MIN_CODE <= len(code) <= _MAX_CODE and code.isascii()):
            continue
        answer = ast.dump(node)
        if len(answer) <= _MAX_ANSWER:
            pairs.append(Pair(code.decode(), answer))
    return pairs


def read_task(
    num_train: int,
    num_held_out: int,
    seed: int = 0,
    root: str | Path | None = None,
    progress: Callable[[Iterable], Iterable] = iter,
) -> TaskData:
    """
    Pairs of the standard library, split by file.

    Args:
        num_train (`int`): Training pairs, all different; fewer if the library has fewer.
        num_held_out (`int`): Held-out pairs, likewise.
        seed (`int`): Order of files and pairs.
        root (`str` or `Path`): Folder of sources. Default: the interpreter's standard library.
        progress: Wraps the iteration over files.

    Raises:
        `ValueError`: nothing to train on, or nothing to hold out.
    """
    root = Path(sysconfig.get_path("stdlib") if root is None else root)
    files = sorted(
        path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )
    order = random.Random(seed)
    order.shuffle(files)
    train: dict[Pair, None] = {}  # a set that keeps its order
    held_out: dict[Pair, None] = {}
    counts = [0, 0]
    for index, path in enumerate(progress(files)):
        if len(train) >= num_train and len(held_out) >= 4 * num_held_out:
            break
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                continue
            pairs = pairs_of_source(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):  # sources that are broken on purpose, or not text
            continue
        is_held_out = index % _HELD_OUT_EVERY == 0
        (held_out if is_held_out else train).update(dict.fromkeys(pairs))
        counts[is_held_out] += 1
    # Every line that was read from a training file counts as seen, also those that are dropped below.
    seen = {pair.code for pair in train}
    fresh = [pair for pair in held_out if pair.code not in seen]
    if not fresh or not train:
        raise ValueError(
            f"{root} gives {len(train)} lines to train on and {len(fresh)} to hold out: it has too few Python files. "
            "Some Pythons come without the sources of their standard library; use another one, or another `source`."
        )
    train_pairs = list(train)
    order.shuffle(train_pairs)
    order.shuffle(fresh)
    return TaskData(train_pairs[:num_train], fresh[:num_held_out], *counts)


def train_tokenizer(pairs: Sequence[Pair], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """
    A byte-level BPE of the pairs' text, with the chat template of the task.

    Args:
        pairs (`Sequence[Pair]`): Training pairs only.
        vocab_size (`int`): Tokens, the four special ones included.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    # Every byte is a token, so that any prompt can be encoded.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, MASK, END, ANSWER],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((text for pair in pairs for text in pair), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        mask_token=MASK,
        eos_token=END,
        additional_special_tokens=[ANSWER],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode_pairs(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair]) -> list[tuple[list[int], list[int]]]:
    """Prompt ids, marker included, and answer ids, end token included, of each pair."""
    marker, end = tokenizer.convert_tokens_to_ids([ANSWER, END])
    codes = tokenizer([pair.code for pair in pairs], add_special_tokens=False)["input_ids"]
    answers = tokenizer([pair.answer for pair in pairs], add_special_tokens=False)["input_ids"]
    return [([*code, marker], [*answer, end]) for code, answer in zip(codes, answers, strict=True)]


def decode_answer(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """The text of answer ids up to the end token."""
    return tokenizer.decode(ids, skip_special_tokens=True)
