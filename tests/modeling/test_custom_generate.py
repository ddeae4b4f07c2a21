"""`generate(custom_generate="<drafter>")`: by a folder's or a repository's name, with and without the package."""

import gc
import json
import shutil
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from support.pairs import make_draft, make_target
from transformers import GenerationMixin

from dflash_hf import DFlashDraftModel
from dflash_hf.modeling import custom_generate_dflash


PROMPT = [[5, 9, 17, 33, 2]]
SIZE = {"num_assistant_tokens": 3}  # sizes that are chosen depend on earlier calls
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ALONE = """
import json, shutil, sys
# The package must not be importable here, not even through an editable install.
sys.meta_path = [f for f in sys.meta_path if "editable" not in type(f).__module__ and "editable" not in repr(f)]
sys.path = [p for p in sys.path if p not in {blocked!r}]
try:
    import dflash_hf
except ImportError:
    pass
else:
    raise SystemExit("dflash_hf is importable: " + str(dflash_hf.__file__))
import torch
from transformers import AutoModel, AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained({target!r}).eval()
arguments = {{"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "trust_remote_code": True}}
arguments["num_assistant_tokens"] = {size!r}
outputs = []
for name in {names!r}:
    output = target.generate(torch.tensor({prompt!r}), custom_generate=name, **arguments)
    outputs.append([output.sequences.tolist(), output.acceptance_lengths])
if {again!r}:
    draft = AutoModel.from_pretrained({names!r}[0], trust_remote_code=True)
    shutil.rmtree({names!r}[0])  # what it was loaded from is gone
    draft.save_pretrained({again!r})
print("RESULT " + json.dumps(outputs))
"""


@pytest.fixture
def target():
    return make_target()


@pytest.fixture
def folder(target, tmp_path):
    make_draft(target).save_pretrained(tmp_path / "my-draft.1")
    return tmp_path / "my-draft.1"


@pytest.fixture
def modules_cache(tmp_path, monkeypatch):
    """Copies of remote code go to a folder of this test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = list(sys.path)
    yield
    sys.path[:] = path


def assisted(target, draft):
    return target.generate(
        torch.tensor(PROMPT),
        max_new_tokens=20,
        do_sample=False,
        return_dict_in_generate=True,
        assistant_model=draft,
        **SIZE,
    )


def by_name(target, name, **kwargs):
    return target.generate(
        torch.tensor(PROMPT),
        max_new_tokens=20,
        do_sample=False,
        return_dict_in_generate=True,
        custom_generate=str(name),
        trust_remote_code=True,
        **SIZE,
        **kwargs,
    )


def alone(tmp_path, names, again=None):
    script = textwrap.dedent(ALONE).format(
        size=SIZE["num_assistant_tokens"],
        blocked=["", str(tmp_path)],
        target=str(tmp_path / "target"),
        names=[str(name) for name in names],
        prompt=PROMPT,
        again=again and str(again),
    )
    environment = {
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith("RESULT "))[7:])


def contents(folder):
    """Every file of a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folders_name_is_enough(target, folder, modules_cache):
    expected = assisted(target, DFlashDraftModel.from_pretrained(folder))
    output = by_name(target, folder)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.acceptance_lengths == expected.acceptance_lengths
    assert len(set(output.sequences[0].tolist())) > 8


def test_without_the_package_by_folder_and_by_repository(target, folder, tmp_path):
    """A repository is one that lies in the cache, so that nothing is asked of a network."""
    expected = assisted(target, DFlashDraftModel.from_pretrained(folder))
    target.save_pretrained(tmp_path / "target")
    cached = tmp_path / "home" / "hub" / "models--someone--a-draft.2"
    shutil.copytree(folder, cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)

    before = contents(folder)
    outputs = alone(tmp_path, [folder, "someone/a-draft.2"], again=tmp_path / "again")
    assert outputs == [[expected.sequences.tolist(), expected.acceptance_lengths]] * 2
    assert not folder.exists()
    # What remote code saved is whole, although the folder it came from was gone.
    assert contents(tmp_path / "again") == before


def test_the_drafter_is_loaded_once_and_again_when_it_changed(target, folder, modules_cache, monkeypatch):
    loads = []
    original = custom_generate_dflash.AutoModel.from_pretrained

    def counted(*args, **kwargs):
        loads.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr("transformers.AutoModel.from_pretrained", counted)
    for _ in range(2):
        by_name(target, folder)
    assert len(loads) == 1
    other = make_draft(target, seed=9)
    other.save_pretrained(folder)
    assert by_name(target, folder).acceptance_lengths == assisted(target, other).acceptance_lengths
    assert len(loads) == 2


def test_a_drafter_can_be_passed_and_is_dropped_with_its_target(folder):
    target = make_target()
    draft = DFlashDraftModel.from_pretrained(folder)
    arguments = {"max_new_tokens": 6, "do_sample": False}
    for assistant in (draft, str(folder)):
        output = custom_generate_dflash.generate(target, assistant, input_ids=torch.tensor(PROMPT), **arguments)
        assert torch.equal(output, target.generate(torch.tensor(PROMPT), **arguments))
    kept = weakref.ref(custom_generate_dflash._loaded[target][1])
    del target
    gc.collect()
    assert kept() is None


def test_names_that_are_unknown_or_no_drafter(target, tmp_path):
    with pytest.raises(ValueError, match="pass it as `assistant_model`"):
        custom_generate_dflash.generate(target, input_ids=torch.tensor(PROMPT))
    target.model.save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="Qwen3Model, not a DFlash drafter"):
        custom_generate_dflash.generate(target, str(tmp_path / "target"), input_ids=torch.tensor(PROMPT))


def test_upstream_still_holds_the_name_where_it_is_read():
    """A canary: `generate` must call the loaded function itself, with the name in a local `custom_generate`."""
    code = GenerationMixin.generate
    while hasattr(code, "__wrapped__"):
        code = code.__wrapped__
    assert code.__name__ == "generate" and "custom_generate" in code.__code__.co_varnames
