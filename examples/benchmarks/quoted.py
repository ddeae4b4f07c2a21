"""
The figures that documents quote, and the measurements that they come from.

A *measurement* is a file of `results/figures`: its date, commit, versions, processor and command, and its figures by
name. Below a paragraph, a list or a table, a comment names its figures in their order:

    | plain call, packed weights | 2.49x | 1.56x |

    <!-- figures: bundled.plain avx2.plain -->

A figure is a speedup (`1.23x`), a share (`12 %`), a time, rate or size (`30 s`, `4 minutes`, `90 MB/s`, `2 GB`), the
lower end of a range of those (`10 to 12 %`), any other number with decimals, and a date (`27 November 2026`). Code,
addresses and versions behind a program's name are none. What was not measured here is named `paper`, `setting`
(chosen, or a version) or `computed` (from shapes or counts, without measuring); one such name may stand for all
figures of the block.

Below a fence of output with speedups, shares or times, `<!-- output: NAME -->` names the measurement that printed it.

`faults` says what is wrong with a document, `renewed` replaces figures by those of the measurements.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "examples" / "benchmarks" / "results"
DOCUMENTS = ("README.md", "examples/guides/*.md", "examples/*-dflash/README.md")
# Names of figures that are no measurements of ours.
NOT_MEASURED = ("paper", "setting", "computed")
REMEDY = (
    "name its measurement in `<!-- figures: NAME.FIGURE ... -->` below the paragraph (results/figures/NAME.json), or "
    "remove it; CONTRIBUTING.md says how under *Quote a figure*"
)
ORDER = "a comment names each figure above it, in their order"

MONTHS = "January February March April May June July August September October November December".split()
NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNIT = r"(?:tokens/s|tokens\sper\ssecond|[kMGT]i?B(?:/s)?|[mµ]s|s|seconds?|min|minutes?|h|hours?|days?)\b"
FIGURE = re.compile(
    rf"(?P<date>\b\d{{1,2}}\s(?:{'|'.join(MONTHS)})(?:\s\d{{4}})?\b)"
    rf"|(?<![\w.,])(?<![A-Za-z]-)(?:(?P<speedup>{NUMBER})[x×](?!\w)|(?P<share>{NUMBER})(?=\s?(?:%|percent))"
    rf"|(?P<time>{NUMBER})(?=\s?(?:[CG]PU\s)?{UNIT})|(?P<decimal>\d[\d,]*\.\d+)(?!\w|\.\d)"
    rf"|(?P<lower>{NUMBER})(?=(?: to |–|-){NUMBER}(?:[x×](?!\w)|\s?(?:%|percent|(?:[CG]PU\s)?{UNIT}))))"
)
COMMENT = re.compile(r"<!-- figures: (.*?)-->", re.DOTALL)
# Lines up to an empty one, and the comment behind it.
BLOCK = re.compile(rf"(?:.*\S.*(?:\n|\Z))+(?:\s*{COMMENT.pattern.replace('.', '[^>]')})?")
OUTPUT = re.compile(r"\s*<!-- output: (\S*) -->")
FENCE = re.compile(r"^ *(`{3,})(\w*)\n(.*?)^ *\1 *$", re.MULTILINE | re.DOTALL)
PROGRAM = (
    r"(?:torch|transformers|Python|vLLM|SGLang|dflash-hf|lm-eval|datasets|accelerate|mlx-vlm|optimum-intel|dflash|"
    r"lucebench|peft|safetensors|versions?|sections?|CC BY|arXiv|tested up to|T =)"
)
NO_FIGURES = (
    re.compile(r"(?<!`)`(?![\d.]+[x×]`)[^`]+`(?!`)"),
    re.compile(r"\]\([^)]*\)"),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(rf"{PROGRAM}(?: >=| or| of)?\s\d+\.\d[\d.]*(?!x)"),
    re.compile(r"\b\d+\.\d+\.\d+\b"),
)
VERSION = re.compile(r"\b(torch|transformers|dflash-hf)\s(\d+(?:\.\w+)+)")


@dataclass(frozen=True)
class Measurement:
    """
    A file of `results/figures`.

    Attributes:
        date (`str`): Year, month and day, `2026-11-27`.
        commit (`str`): The commit that was measured; for figures from before this file, the one that brought them.
        dflash_hf (`str`): The package's version there.
        torch (`str`): torch's version.
        transformers (`str`): transformers' version.
        processor (`str`): What it ran on, with its threads.
        command (`str`): What measured it.
        figures (`dict[str, float]`): The figures, by name.
        file (`str | None`): The file in `results` with all of the run. Each figure stands in it that is not computed.
        computed (`dict[str, str]`): How figures follow from those of the run.
    """

    date: str
    commit: str
    dflash_hf: str
    torch: str
    transformers: str
    processor: str
    command: str
    figures: dict[str, float]
    file: str | None = None
    computed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Measurement":
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @property
    def minor(self) -> tuple[int, int]:
        major, minor = self.dflash_hf.split(".")[:2]
        return int(major), int(minor)


@dataclass(frozen=True)
class Quote:
    """
    A figure in a document.

    Attributes:
        start (`int`): Where its number or date begins in the text.
        text (`str`): The number without its unit, or the date.
        is_date (`bool`): Whether it is a date.
        name (`str | None`): `NAME.FIGURE`, or one of `NOT_MEASURED`; `None` if no comment names it.
    """

    start: int
    text: str
    is_date: bool
    name: str | None


@dataclass(frozen=True)
class Block:
    """
    A paragraph, list or table with its comments.

    Attributes:
        start (`int`): Where it begins in the document.
        text (`str`): What it says.
        quotes (`tuple[Quote, ...]`): Its figures.
        miscounted (`tuple[str, ...]`): Comments that name more or fewer figures than stand there.
    """

    start: int
    text: str
    quotes: tuple[Quote, ...]
    miscounted: tuple[str, ...]


def measurements() -> dict[str, Measurement]:
    """All measurements, by the names of their files."""
    return {path.stem: Measurement.read(path) for path in sorted((RESULTS / "figures").glob("*.json"))}


def documents() -> list[Path]:
    """What quotes figures."""
    return sorted(path for pattern in DOCUMENTS for path in ROOT.glob(pattern))


def previous_minor(version: str) -> tuple[int, int]:
    """The minor version before that of `version`: figures of older ones are quoted with their version."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return major, minor - 1


def blocks_of(text: str) -> Iterator[Block]:
    """The blocks of a document, with its figures and their names."""
    prose = FENCE.sub(_blank, text)
    figures_only = prose
    for pattern in NO_FIGURES:
        figures_only = pattern.sub(_blank, figures_only)
    for block in BLOCK.finditer(prose):
        quotes: list[Quote] = []
        miscounted = []
        begin = block.start()
        for comment in COMMENT.finditer(prose, *block.span()):
            matches = list(FIGURE.finditer(figures_only, begin, comment.start()))
            names = comment[1].split()
            if matches and len(names) == 1 and names[0] in NOT_MEASURED:
                names *= len(matches)
            if len(names) == len(matches):
                quotes += [_quote(match, name) for match, name in zip(matches, names, strict=True)]
            else:
                stated = ", ".join(match[0] for match in matches)
                miscounted.append(
                    f"a comment names {len(names)} figures, above it stand {len(matches)}: {stated}; {ORDER}"
                )
            begin = comment.end()
        quotes += [_quote(match, None) for match in FIGURE.finditer(figures_only, begin, block.end())]
        yield Block(block.start(), block[0], tuple(quotes), tuple(miscounted))


def _blank(match: re.Match) -> str:
    """Spaces in place of a match, so that what follows stays where it is."""
    return re.sub(r"[^\n]", " ", match[0])


def _quote(match: re.Match, name: str | None) -> Quote:
    kind = match.lastgroup
    return Quote(match.start(kind), match[kind], kind == "date", name)


def faults(name: str, text: str, measured: Mapping[str, Measurement], version: str) -> list[str]:
    """
    What is wrong with the figures of a document.

    Args:
        name (`str`): The document, for the messages.
        text (`str`): What it says.
        measured (`Mapping[str, Measurement]`): All measurements.
        version (`str`): The package's version. Figures from before its previous minor version must say so.

    Returns:
        `list[str]`: A line for each fault, with document, line and remedy.
    """
    messages = []
    blocks = list(blocks_of(text))
    for number, block in enumerate(blocks):
        neighbours = "\n".join(neighbour.text for neighbour in blocks[max(number - 1, 0) : number + 2])
        line = line_of(text, block.start)
        messages += [f"{name}:{line}: {message}" for message in block.miscounted]
        for quote in block.quotes:
            fault = _fault(quote, neighbours, measured, version)
            if fault:
                messages.append(f"{name}:{line_of(text, quote.start)}: {quote.text}: {fault}")
        messages += [f"{name}:{line}: {fault}" for fault in _faults_of_versions(block, measured)]
        if any(quote.name == "paper" for quote in block.quotes) and "paper" not in _section(text, block):
            messages.append(f"{name}:{line}: the paper's figures are not called the paper's")
    return messages + [f"{name}:{fault}" for fault in _faults_of_outputs(text, measured, version)]


def _fault(quote: Quote, said: str, measured: Mapping[str, Measurement], version: str) -> str | None:
    """What is wrong with a figure; `said` is its block with the ones before and after."""
    if quote.name is None:
        return f"no measurement is named; {REMEDY}"
    if quote.name in NOT_MEASURED:
        return None
    value = _value(quote.name, measured)
    source = quote.name.partition(".")[0]
    if value is None:
        return f"there is no {quote.name}: results/figures/{source}.json has no such figure"
    if quote.is_date != isinstance(value, str):
        return f"{quote.name} is {value}, and this is {'a date' if quote.is_date else 'a number'}; {ORDER}"
    expected = written(value, quote)
    if expected != " ".join(quote.text.split()):
        return f"{quote.name} is {expected}; `python examples/benchmarks/figures.py --renew` rewrites documents"
    return _fault_of_age(source, said, measured, version)


def _fault_of_age(source: str, said: str, measured: Mapping[str, Measurement], version: str) -> str | None:
    """A measurement from before the last minor version, of which a text does not say so."""
    minor = measured[source].minor
    if minor < previous_minor(version):
        older = f"dflash-hf {minor[0]}.{minor[1]}"
        if older not in " ".join(said.split()):
            return (
                f"{source} was measured with {older}, which is older than the last minor version: measure it anew "
                f'(`make figures`), or say "{older}" in this paragraph or in a neighbouring one'
            )
    return None


def _faults_of_outputs(text: str, measured: Mapping[str, Measurement], version: str) -> list[str]:
    """Outputs in fences that name no measurement, with their lines."""
    messages = []
    for fence in FENCE.finditer(text):
        shown = fence[3]
        for pattern in NO_FIGURES:
            shown = pattern.sub(_blank, shown)
        kinds = {match.lastgroup for match in FIGURE.finditer(shown)}
        if fence[2] != "text" or not kinds & {"speedup", "share", "time"}:
            continue
        line = line_of(text, fence.start())
        comment = OUTPUT.match(text, fence.end())
        if comment is None:
            messages.append(
                f"{line}: the output has figures; name its measurement in `<!-- output: NAME -->` below it"
            )
        elif comment[1] not in measured:
            messages.append(f"{line}: there is no results/figures/{comment[1]}.json")
        else:
            fault = _fault_of_age(comment[1], _paragraph_before(text, fence.start()), measured, version)
            messages += [f"{line}: {fault}"] if fault else []
    return messages


def _faults_of_versions(block: Block, measured: Mapping[str, Measurement]) -> list[str]:
    """Versions of torch, transformers and the package beside figures of other versions; `0.1` stands for `0.1.0`."""
    sources = [measured[source] for source in sources_of(block) if source in measured]
    messages = []
    for program, stated in VERSION.findall(block.text):
        versions = {getattr(source, program.replace("-", "_")) for source in sources}
        if versions and not any(f"{version}.".startswith(f"{stated}.") for version in versions):
            messages.append(f"{program} {stated}, but the figures were measured with {', '.join(sorted(versions))}")
    return messages


def sources_of(block: Block) -> list[str]:
    """The measurements whose figures a block quotes."""
    names = [quote.name for quote in block.quotes if quote.name and quote.name not in NOT_MEASURED]
    return sorted({name.partition(".")[0] for name in names})


def _value(name: str, measured: Mapping[str, Measurement]) -> float | str | None:
    """A figure of a measurement, or its date."""
    source, _, figure = name.partition(".")
    if source not in measured:
        return None
    if figure == "date":
        return measured[source].date
    return measured[source].figures.get(figure)


def written(value: float | str, quote: Quote) -> str:
    """A value as the document writes this figure: with as many decimals, or with or without a year."""
    if quote.is_date:
        day = date.fromisoformat(str(value))
        year = f" {day.year}" if quote.text[-1].isdigit() else ""
        return f"{day.day} {MONTHS[day.month - 1]}{year}"
    decimals = len(quote.text.partition(".")[2])
    rounded = Decimal(str(value)).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    return f"{rounded:,f}"


def renewed(text: str, measured: Mapping[str, Measurement]) -> str:
    """A document whose named figures are those of the measurements."""
    quotes = [quote for block in blocks_of(text) for quote in block.quotes]
    for quote in reversed(quotes):
        value = None if quote.name is None else _value(quote.name, measured)
        if value is not None and quote.is_date == isinstance(value, str):
            text = text[: quote.start] + written(value, quote) + text[quote.start + len(quote.text) :]
    return text


def line_of(text: str, position: int) -> int:
    """The line of a position, from 1."""
    return text.count("\n", 0, position) + 1


def _paragraph_before(text: str, position: int) -> str:
    """The block that ends before a position."""
    return text[:position].rstrip().rpartition("\n\n")[2]


def _section(text: str, block: Block) -> str:
    """The introduction of a document, and the block's section up to its end, without comments."""
    end = block.start + len(block.text)
    headings = [match.start() for match in re.finditer(r"^#+ ", text[:end], re.MULTILINE)]
    introduction = text.partition("\n## ")[0]
    return COMMENT.sub("", introduction[:end] + text[headings[-1] if headings else 0 : end])
