"""
vLLM's and SGLang's own configuration, loading and model code over folders that we write, on a CPU: with and without
`--trust-remote-code` they read the same, and their hidden states are ours.
"""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from itertools import product
from pathlib import Path

import pytest
import torch
from support.engine_variants import SLIDING, VARIANTS
from support.pairs import make_draft

from dflash_hf.hub.check import check
from dflash_hf.hub.drafter_folder import DrafterFolder
from dflash_hf.hub.limits import CHECKED_VERSIONS


pytestmark = pytest.mark.slow

# With the version of transformers that both accept and a later one, and what their drafter's code needs besides ours.
VERSIONS = {engine: f"{engine}=={CHECKED_VERSIONS[engine][-1]}" for engine in ("vllm", "sglang")}
TRANSFORMERS = ("5.19.0", "5.23.0")
BESIDE = ("msgspec", "cachetools")


def pip(*words: str) -> None:
    python = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip")]
    if python[0] is None:
        pytest.skip("there is no pip to install the engines with")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [*python, *words, "--no-deps", "--only-binary", ":all:", "--python-version", version]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        pytest.skip(f"pip {words[0]} {' '.join(words[3:])}: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def beside(tmp_path_factory) -> list[Path]:
    """What engines need besides, for both. The packages are large: this takes minutes and half a gigabyte."""
    folders = [tmp_path_factory.mktemp("beside") for _ in TRANSFORMERS]
    for folder, version in zip(folders, TRANSFORMERS):
        pip("install", "--target", str(folder), f"transformers=={version}", *BESIDE)
    return folders


@pytest.fixture(scope="module", params=VERSIONS)
def engine(request, beside, tmp_path_factory):
    """The name of an engine, and functions that run `engine_code.py` with its sources, for each transformers."""
    scratch = tmp_path_factory.mktemp(request.param)
    pip("download", "--dest", str(scratch), VERSIONS[request.param])
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch / "code", [n for n in archive.namelist() if not n.endswith((".so", ".a"))])
    wheel.unlink()
    yield request.param, [functools.partial(run, request.param, [path, scratch / "code"]) for path in beside]
    shutil.rmtree(scratch)


def run(name: str, paths: list[Path], trust: str, work: Path, folders: list[str]) -> dict:
    script = Path(__file__).parents[1] / "support" / "engine_code.py"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HOME": str(work / "home"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    command = [sys.executable, str(script), name, trust, str(work), *folders]
    done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return {line.pop("name"): line for line in lines}


def layers_in(engine: str, config: dict) -> list[tuple[int | None, bool]]:
    """How `check` says that an engine reads the layers."""
    drafter = DrafterFolder(config)
    return drafter.layers_in_vllm() if engine == "vllm" else drafter.layers_in_sglang()


def edit(folder: Path, nested: dict, **changes) -> None:
    """Change keys of a folder's `config.json`, as others write it."""
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"].update(nested)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@torch.no_grad()
def test_engines_draft_as_package(engine, target, tmp_path):
    name, run_engines = engine
    target.save_pretrained(tmp_path / "target")
    random = torch.Generator().manual_seed(0)
    ids = torch.tensor([17, 95, 95, 95])
    inputs = {"features": torch.randn(21, 96, generator=random), "table": torch.randn(96, 32, generator=random)}
    torch.save({**inputs, "ids": ids}, tmp_path / "inputs.pt")
    # 1. Folders as we write them, of drafters in which every tensor matters.
    expected = {}
    for variant, changes in VARIANTS.items():
        folder = variant.replace(" ", "_").replace(",", "")
        draft = make_draft(target, target_layer_ids=[0, 1, 2], **changes)
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random) / 10)
        draft.save_pretrained(tmp_path / folder)
        expected[folder] = draft(inputs["table"][ids][None], inputs["features"][None]).last_hidden_state[0]
    # 2. And as others do, of which `check` says that engines differ.
    for folder, nested in (("nested", {"causal": True}), ("forced", {"use_swa": True, "swa_window_size": 5})):
        make_draft(target, target_layer_ids=[0, 1, 2]).save_pretrained(tmp_path / folder)
        edit(tmp_path / folder, nested)
    make_draft(target, target_layer_ids=[0, 1, 2], **SLIDING).save_pretrained(tmp_path / "dropped")
    edit(tmp_path / "dropped", {}, use_sliding_window=False)
    cases_without_reference = ["nested", "forced", "dropped"]

    for run_engine, trust in product(run_engines, ("plain", "trust")):
        results = run_engine(trust, tmp_path, [*expected, *cases_without_reference])
        for folder, hidden in expected.items():
            result = results[folder]
            assert "error" not in result, (folder, trust, result)
            assert result["class"].startswith("transformers_modules.") is (trust == "trust")
            config = json.loads((tmp_path / folder / "config.json").read_text())
            assert result["architecture"] == config["architectures"][0] and result["ids"] == [0, 1, 2]
            engine_hidden = torch.load(tmp_path / f"{folder}.{name}.{trust}.pt")
            torch.testing.assert_close(engine_hidden, hidden, atol=1e-5, rtol=1e-5, msg=f"{folder}, {trust}")
            # What `check` says of it.
            assert [tuple(layer) for layer in result["layers"]] == layers_in(name, config), folder
            v2_findings = [finding for finding in check(tmp_path / folder, [name]) if "V2" in finding.message]
            assert bool(v2_findings) is result.get("needs_v2", False), folder
        for folder in cases_without_reference if trust == "plain" else ():
            assert [f for f in check(tmp_path / folder, [name]) if f.severity == "error"]
            config = json.loads((tmp_path / folder / "config.json").read_text())
            if folder == "dropped":
                assert "sliding_window" in results[folder]["error"]
            else:
                read = [tuple(layer) for layer in results[folder]["layers"]]
                assert read == layers_in(name, config), folder
