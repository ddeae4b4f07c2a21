"""Limits of engines by their versions: which version is asked about, and which limits it has."""

import json
import shutil

import pytest
from support import layouts
from support.engine_variants import CONVOLUTION, SELECTOR, SLIDING
from support.pairs import make_draft

from dflash_hf.cli import main
from dflash_hf.hub import engines
from dflash_hf.hub.check import check
from dflash_hf.hub.conditions import Comparison
from dflash_hf.hub.drafter_folder import DrafterFolder
from dflash_hf.hub.engines import EngineVersion, engine_versions
from dflash_hf.hub.limits import (
    ANY_SERVER,
    CHECKED_VERSIONS,
    LIMITS,
    RECOMMENDED_SINCE,
    Limit,
    first_version,
    holds_for,
)


@pytest.fixture
def folder(target, tmp_path):
    make_draft(target, target_layer_ids=[0, 1, 2]).save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def install(monkeypatch, **versions):
    """As if these versions of engines were installed, and no others."""
    monkeypatch.setattr(engines, "_installed_version", versions.get)


@pytest.mark.parametrize(
    ("installed", "version", "checked_as", "warning"),
    [
        (None, "0.33.0", "0.33.0", None),
        ("0.26.0", "0.26.0", "0.26.0", None),
        ("0.33.0+cu130", "0.33.0+cu130", "0.33.0", None),
        ("0.33.0rc1", "0.33.0rc1", "0.33.0rc1", None),
        ("0.34.0", "0.34.0", "0.33.0", "newer than 0.20.2 to 0.33.0"),
        ("0.34.0.dev7+g1", "0.34.0.dev7+g1", "0.33.0", "newer than 0.20.2 to 0.33.0"),
        ("0.11.0", "0.11.0", "0.11.0", "older than 0.20.2 to 0.33.0"),
    ],
)
def test_installed_version_is_checked(installed, version, checked_as, warning, monkeypatch):
    install(monkeypatch, **({} if installed is None else {"vllm": installed}))
    (engine,) = engine_versions(["vllm"])
    assert (engine.version, engine.checked_as) == (version, checked_as)
    assert engine.source == ("newest checked" if installed is None else "installed")
    if warning is None:
        assert engine.warning is None
    else:
        assert warning in engine.warning and version in engine.warning


def test_named_version_goes_before_installed(monkeypatch):
    install(monkeypatch, vllm="0.33.0")
    assert engine_versions(["vllm==0.26.0", "llama.cpp"]) == [EngineVersion("vllm", "0.26.0", "named")]


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        (["tensorrt"], "'tensorrt' is unknown"),
        (["vllm==new"], "'new' is not a version"),
        (["llama.cpp==b11549"], "have no versions"),
        (["vllm==0.26", "vllm==0.33"], "two versions of vllm"),
    ],
)
def test_wrong_engine_is_named(engines, message, folder):
    with pytest.raises(ValueError, match=message):
        check(folder, engines)


VARIANTS = {
    # of drafters, the field of the error and the first version of an engine without it
    "sliding": (SLIDING, "layer_types", {"vllm": ("0.24.0", "0.28.0"), "sglang": ("0.5.12", "0.5.18")}),
    "own mask embedding": (
        {"own_mask_embedding": True},
        "mask_embedding.pt",
        {"vllm": ("0.24.0", "0.25.1"), "sglang": ("0.5.19", "0.5.20")},
    ),
    "DFlash 2": (
        {**CONVOLUTION, **SELECTOR},
        "architectures",
        {"vllm": ("0.27.1", "0.28.0"), "sglang": ("0.5.18", "0.5.19")},
    ),
    "DSpark": (
        {"markov_rank": 6, "sample_from_anchor": True},
        "architectures",
        {"vllm": ("0.24.0", "0.25.1"), "sglang": ("0.5.15", "0.5.16")},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_older_engine_does_not_serve_variant(name, target, tmp_path):
    fields, key, versions = VARIANTS[name]
    make_draft(target, target_layer_ids=[0, 1, 2], **fields).save_pretrained(tmp_path)
    for engine, (before, since) in versions.items():
        findings = check(tmp_path, [f"{engine}=={before}"])
        assert key in {finding.key for finding in findings if finding.severity == "error"}, (engine, findings)
        findings = check(tmp_path, [f"{engine}=={since}"])
        assert not [finding for finding in findings if finding.severity == "error"], (engine, findings)


def test_is_causal_is_read_since_its_version():
    config = {"layer_types": ["sliding_attention"], "num_hidden_layers": 1, "is_causal": False}
    is_causal_limits = [limit for limit in LIMITS if limit.field == "is_causal" and limit.engines != ANY_SERVER]

    def engines_with_errors(**versions):
        findings = [limit.finding(DrafterFolder(config), versions) for limit in is_causal_limits]
        return [finding.engines for finding in findings if finding]

    assert engines_with_errors(vllm="0.27.1", sglang="0.5.17") == [("vllm",), ("sglang",)]
    assert engines_with_errors(vllm="0.28.0", sglang="0.5.18") == []
    config["dflash_config"] = {"causal": False}  # vLLM has read this one for longer
    assert engines_with_errors(vllm="0.27.1") == []
    del config["is_causal"]
    assert engines_with_errors(sglang="0.5.17") == []


def test_limit_of_old_engine_is_lifted(folder, target):
    longer = {**target.config.to_dict(), "max_position_embeddings": 4096}
    assert [finding.key for finding in check(folder, ["vllm==0.32.0"], longer)] == ["max_position_embeddings"]
    assert check(folder, ["vllm==0.33.0"], longer) == []


@pytest.mark.parametrize("layout", RECOMMENDED_SINCE)
def test_card_names_versions_that_serve(layout):
    for engine, version in RECOMMENDED_SINCE[layout].items():
        for limit in LIMITS:
            if "is unknown before" in limit.reason and layout in limit.layouts:
                assert not limit.affected_engines({engine: version}), (layout, engine, version, limit.reason)


def test_card_passes_over_versions_with_errors():
    config = {"layer_types": ["sliding_attention"], "num_hidden_layers": 1, "use_sliding_window": True}
    config["architectures"] = ["DFlashDraftModel"]
    config |= {"sliding_window": 8, "model_type": "qwen3", "vocab_size": 96, "max_position_embeddings": 512}
    config |= {"block_size": 4, "mask_token_id": 95, "target_layer_ids": [0], "rope_theta": 1e4}
    assert first_version("vllm", DrafterFolder(config), since="0.26") == "0.26"
    config["is_causal"] = False
    assert first_version("vllm", DrafterFolder(config), since="0.26") == "0.28.0"
    assert first_version("sglang", DrafterFolder(config), since="0.5.14") == "0.5.18"
    config["hidden_act"] = "gelu"  # in no version
    assert first_version("vllm", DrafterFolder(config), since="0.26") is None


# ----------------------------------------------------------------------------------------------- the table's examples

# Right drafters of each layout, which the examples change: fields, or a layout's fixture.
RIGHT_DRAFTERS = {
    "DFlash": {},
    "DFlash 2": {**CONVOLUTION, **SELECTOR},
    "Muse": "muse assistant",
    "DSpark": {"markov_rank": 6, "sample_from_anchor": True},
    "Domino": {"gru_hidden_dim": 9, "emb_dim": 7, "pure_draft_prefix_len": 1},
    "speculators": "speculators, sliding",
}
# Fields and files of the limits without an example: they depend on weights, on other files or on the target, and
# tests/hub/test_check.py has a test of each.
WITHOUT_EXAMPLE = {
    "draft_vocab_size",
    "vocab_size",
    "mask_embedding.pt",
    "dflash_hf_version",
    "max_position_embeddings",
    "weights",
    "{head_field}",
}
WITH_EXAMPLE = [limit for limit in LIMITS if limit.example is not None]


@pytest.fixture(scope="module")
def right_drafters(target, tmp_path_factory):
    """A folder for each layout."""
    folders = {}
    for layout, source in RIGHT_DRAFTERS.items():
        folders[layout] = tmp_path_factory.mktemp("right") / layout
        if isinstance(source, str):
            layouts.write(folders[layout], source)
        else:
            make_draft(target, target_layer_ids=[0, 1, 2], **source).save_pretrained(folders[layout])
    return folders


def changed_by(config: dict, example) -> dict:
    """A config.json with the changes of a limit's example."""
    changed = {**config, **example}
    if "dflash_config" in example:
        nested = {**config.get("dflash_config", {}), **example["dflash_config"]}
        changed["dflash_config"] = {key: value for key, value in nested.items() if value is not None}
    return {key: value for key, value in changed.items() if value is not None}


def versions_beside(engine: str, specifier: str) -> list[str]:
    """The last version before a range and the first one after it, as far as there are such versions."""
    versions = CHECKED_VERSIONS[engine]
    inside = [holds_for(version, specifier) for version in versions]
    beside = []
    for i, version in enumerate(versions):
        neighbours = inside[max(i - 1, 0) : i + 2]
        if not inside[i] and any(neighbours):
            beside.append(version)
    return beside


def reported_engines(limit: Limit, folder, engines: list[str]) -> set[str]:
    """The engines for which `check` reports a limit's field, with a message that begins as its reason."""
    reported = set()
    beginning = limit.reason.partition("{")[0]
    for finding in check(folder, engines):
        is_field = limit.field in ("{file}", finding.key)
        if is_field and finding.severity == limit.severity and finding.message.startswith(beginning):
            reported |= {*finding.engines}
    return reported


@pytest.mark.parametrize("limit", WITH_EXAMPLE, ids=lambda limit: f"{limit.field}-{limit.reason[:30]}")
def test_example_is_reported_in_its_range(limit, right_drafters, tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(right_drafters[limit.layouts[0]], folder)
    path = folder / "config.json"
    path.write_text(json.dumps(changed_by(json.loads(path.read_text()), limit.example)))
    in_range = []
    for engine, specifier in limit.engines.items():
        newest = [version for version in CHECKED_VERSIONS[engine] if holds_for(version, specifier)][-1]
        in_range.append(f"{engine}=={newest}")
    assert reported_engines(limit, folder, in_range) == {*limit.engines}, f"not reported for {in_range}"
    for engine, specifier in limit.engines.items():
        for version in versions_beside(engine, specifier):
            assert not reported_engines(limit, folder, [f"{engine}=={version}"]), f"reported for {engine} {version}"


@pytest.mark.parametrize("layout", RIGHT_DRAFTERS)
def test_no_limit_applies_to_a_right_drafter(layout, right_drafters):
    """Otherwise an example would prove nothing."""
    expected = {
        "DFlash 2": {"architectures"},
        "Muse": {"rope_theta"},
        "Domino": {"gru_hidden_dim", "projector_type"},
        "speculators": {"transformer_layer_config", "sliding_window"},
    }
    assert {finding.key for finding in check(right_drafters[layout])} == expected.get(layout, set())


def test_limits_have_examples():
    missing = [limit for limit in LIMITS if limit.example is None and limit.field not in WITHOUT_EXAMPLE]
    assert not missing, "write an `example` into these records: the changes to config.json that meet the limit"


WRONG_RECORDS = {
    # what is changed in a right record, and what the error names
    "engine": ({"engines": {"tensorrt": ">=1"}}, "is of 'tensorrt'; choose from vllm"),
    "range": ({"engines": {"vllm": "0.25 on"}}, "has the range '0.25 on'; write it as pip does"),
    "version not read": ({"engines": {"vllm": ">=0.34"}}, "Add the version whose source you read; there are 0.20.2, "),
    "source": ({"sources": ("sglang/srt/models/dflash.py",)}, "has no source in vllm: write the file"),
    "severity": ({"severity": "info"}, "severity='info'; choose 'error' or 'warning'"),
    "layout": ({"layouts": ("EAGLE",)}, "choose from DFlash"),
    "sentence": ({"reason": "is wrong"}, "'is wrong'; end it with a full stop"),
}


@pytest.mark.parametrize("name", WRONG_RECORDS)
def test_wrong_record_names_its_remedy(name):
    changes, message = WRONG_RECORDS[name]
    record = {"engines": {"vllm": ">=0.25"}, "field": "a", "condition": Comparison("a", "set"), "reason": "is wrong."}
    record["sources"] = ("vllm/config/speculative.py",)
    Limit(**record)
    with pytest.raises(ValueError, match=message):
        Limit(**(record | changes))


@pytest.mark.parametrize(
    ("comparison", "config", "met"),
    [
        (Comparison("a", "in", (1, 2)), {"a": 2}, True),
        (Comparison("a", "not in", (None, 1)), {}, False),
        (Comparison("a", "above", (64,)), {"dflash_config": {"a": 65}, "a": 1}, True),
        (Comparison("a", "above", (64,), "top level"), {"dflash_config": {"a": 65}, "a": 1}, False),
        (Comparison("a", "above", (64,)), {"a": "many"}, False),
        (Comparison("a", "absent", location="dflash_config"), {"a": 1}, True),
        (Comparison("a", "set"), {"a": 0}, False),
        (Comparison("a", "not set"), {"a": 0}, True),
    ],
)
def test_comparison_reads_its_place(comparison, config, met):
    assert comparison(DrafterFolder(config)) is met


@pytest.mark.parametrize("arguments", [("a", "like"), ("a", "in", (1,), "bottom")])
def test_comparison_rejects_unknown_words(arguments):
    with pytest.raises(ValueError, match="choose from"):
        Comparison(*arguments)


def test_limit_has_details_in_its_message():
    options = {"sources": ("vllm/config/speculative.py",), "severity": "warning"}
    limit = Limit({"vllm": "<1"}, "a", Comparison("a", "set"), "{value!r} is wrong.", "Write 2.", **options)
    finding = limit.finding(DrafterFolder({"a": "x"}), {"vllm": "0.9", "sglang": "0.5"})
    assert (finding.severity, finding.engines, finding.key) == ("warning", ("vllm",), "a")
    assert finding.message == "'x' is wrong. Write 2."
    assert limit.finding(DrafterFolder({"a": "x"}), {"vllm": "1.0"}) is None
    assert limit.finding(DrafterFolder({"a": "x", "transformer_layer_config": {}}), {"vllm": "0.9"}) is None


def test_unknown_layout_has_no_other_finding(folder):
    """Which fields engines would read of it is not known."""
    path = folder / "config.json"
    changes = {"architectures": ["DFlashForCausalLM"], "hidden_act": "gelu"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert [finding.key for finding in check(folder)] == ["architectures"]
    assert DrafterFolder(json.loads(path.read_text())).layout == "unknown"


def test_check_warns_once_of_newer_engine(folder, capsys, monkeypatch):
    install(monkeypatch, vllm="0.34.0", transformers="5.23.0")
    assert main(["check", str(folder), "--json"]) == 0
    output = capsys.readouterr()
    assert output.err.count("warning: vllm 0.34.0 (installed) is newer than 0.20.2 to 0.33.0") == 1
    assert json.loads(output.out)["versions"]["vllm"] == "0.34.0"
    assert main(["check", str(folder), "--engine", "vllm==0.26.0"]) == 0
    output = capsys.readouterr()
    assert "Checked for vllm 0.26.0 (named)." in output.out and "warning" not in output.err
    with pytest.raises(SystemExit):
        main(["check", str(folder), "--engine", "tensorrt"])
    assert "'tensorrt' is not an engine" in capsys.readouterr().err
