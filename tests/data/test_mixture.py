"""Mixtures: so many rows of each source, in the same order every time."""

from collections import Counter
from pathlib import Path

import pytest
from support.mixtures import save_sources, write_mixture

from dflash_hf.data.mixture import Mixture, Source, is_mixture, mixed_rows, read_mixture
from dflash_hf.data.row_layouts import conversation_of
from dflash_hf.data.sources import check_files, load_rows


pytest.importorskip("datasets")
MIXTURES = sorted((Path(__file__).parents[2] / "examples" / "recipes" / "mixtures").glob("*.yaml"))
COUNTS = {"chat": 7, "math": 5, "alpaca": 11, "ultrachat": 3}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return save_sources(tmp_path_factory.mktemp("sources"))


def prompts_of(path, passed_over=None) -> list[str]:
    """The last user's message of each row, and whether nothing precedes it."""
    prompts = []
    for row in mixed_rows(read_mixture(path), passed_over):
        messages = conversation_of(row, answers=False, ids=False).prompt(as_chat=True)
        assert messages[0]["role"] == "user"  # the system prompt was blank
        prompts.append(messages[0]["content"])
    return prompts


def kinds_of(prompts) -> Counter:
    return Counter(prompt.split()[0] for prompt in prompts)


def test_mixture_has_its_rows_in_the_same_order(sources, tmp_path):
    path = write_mixture(tmp_path / "m.yaml", sources, COUNTS)
    passed_over = Counter()
    prompts = prompts_of(path, passed_over)
    assert kinds_of(prompts) == COUNTS and len(set(prompts)) == len(prompts) == sum(COUNTS.values())
    assert prompts_of(path) == prompts
    # All eleven usable rows of CodeAlpaca are drawn, in the place of the unusable one.
    assert any("alpaca" in prompt and "\n\nx = 1" in prompt for prompt in prompts)
    assert passed_over[f"{sources['alpaca']['data']}: its `instruction` is empty"] <= 1
    kinds = [prompt.split()[0] for prompt in prompts]
    assert kinds != sorted(kinds, key=list(COUNTS).index)  # interleaved
    assert prompts_of(write_mixture(tmp_path / "other.yaml", sources, COUNTS, seed=1)) != prompts


def test_source_does_not_depend_on_the_others(sources, tmp_path):
    """More rows of one source gave other rows of all: a larger mixture shared nothing with a smaller one."""

    def drawn(counts, kind):
        prompts = prompts_of(write_mixture(tmp_path / "m.yaml", sources, counts))
        return [prompt for prompt in prompts if prompt.startswith(kind)]

    few = drawn({"chat": 3, "math": 4}, "chat")
    assert drawn({"math": 2, "ultrachat": 2, "chat": 8}, "chat")[:3] == few
    assert drawn({"chat": 5}, "chat")[:3] == few
    numbers = {}
    for kind in ("chat", "math"):
        numbers[kind] = [int(prompt.split()[1].strip("?")) for prompt in drawn({kind: 11}, kind)]
        assert sorted(numbers[kind]) == [number for number in range(12) if number != 1]
        assert numbers[kind] != sorted(numbers[kind])
    assert numbers["chat"] != numbers["math"]  # each is shuffled by itself


def test_too_few_rows_name_the_source(sources, tmp_path):
    with pytest.raises(ValueError, match=r"The source .*nemotron:chat has 12 rows, not rows=13; ask for fewer"):
        prompts_of(write_mixture(tmp_path / "m.yaml", sources, {"chat": 13}))
    with pytest.raises(ValueError, match=r"The source .*nemotron:chat has 11 rows with a prompt, not rows=12"):
        prompts_of(write_mixture(tmp_path / "m.yaml", sources, {"chat": 12}))
    with pytest.raises(ValueError, match=r"split='code' is not in .*nemotron"):
        prompts_of(write_mixture(tmp_path / "m.yaml", {"code": {**sources["chat"], "split": "code"}}, {"code": 1}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sources: [", "is not YAML"),
        ("- a", r"\['a'\] must have the keys sources, seed"),
        ("seed: 1", "the key 'sources' is missing"),
        ("sources: []", "sources is empty; name at least one"),
        ("sources: 3", "sources=3 must be a list"),
        ("sources: [{data: d, rows: 3}]\nseeds: 1", "unknown key 'seeds'; it may have sources, seed"),
        ("sources: [{data: d, rows: 3}]\nseed: x", "seed='x' must be a whole number"),
        ("sources: [{data: d}]", "source 1: the key 'rows' is missing"),
        ("sources: [{data: d, rows: 3}, {data: d, rows: 0}]", "source 2: rows=0 must be a whole number of at least 1"),
        ("sources: [{data: d, rows: 1e3}]", "source 1: rows='1e3' must be a whole number"),
        ("sources: [{data: d, rows: 3, split: 1}]", "source 1: split=1 must be text"),
        ("sources: [{data: d, rows: 3, splits: a}]", "source 1: unknown key 'splits'; it may have data, rows, split"),
        ("sources: [{data: d, rows: 3}, {data: d, rows: 4}]", "sources names d 2 times; a row would come twice"),
    ],
)
def test_wrong_mixture_is_named(text, message, tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"m.yaml.*{message}"):
        read_mixture(path)


def test_mixture_is_no_training_data(tmp_path):
    (tmp_path / "m.yml").write_text("sources: [{data: d, rows: 3}]")
    with pytest.raises(ValueError, match=r"is a mixture, whose rows have prompts and no answers.*dflash regenerate"):
        load_rows(tmp_path / "m.yml")
    with pytest.raises(FileNotFoundError, match=r"data='absent.yaml': there is no such file"):
        check_files("data", "absent.yaml")
    with pytest.raises(FileNotFoundError, match="The mixture absent.yaml does not exist; its path is relative"):
        read_mixture("absent.yaml")
    assert is_mixture("a.yaml") and not is_mixture(["a.yaml"]) and not is_mixture("a.jsonl") and not is_mixture(None)


@pytest.mark.parametrize("path", MIXTURES, ids=lambda path: path.stem)
def test_mixture_of_recipes_says_its_terms(path):
    mixture = read_mixture(path)
    assert mixture.num_rows == {"nemotron_codealpaca": 800_000, "ultrachat": 207_865}[path.stem]
    for source in mixture.sources:
        assert source.license and source.access and source.split
        assert f"https://huggingface.co/datasets/{source.data}" in path.read_text(encoding="utf-8")


def test_sources_are_told_apart_by_name_and_split():
    parts = {"data": "d", "rows": 1}
    Mixture(
        (Source(**parts), Source(**parts, split="a"), Source(**parts, name="b"), Source(**parts, name="b", split="a"))
    )
