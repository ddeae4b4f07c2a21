"""A saved drafter's folder works without the package: its code lies beside the weights."""

import json
import shutil
import subprocess
import sys

import torch
from support.pairs import make_draft, make_target


PROMPT = [[5, 9, 17, 33, 2]]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
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

folder, repository = {names!r}
target = AutoModelForCausalLM.from_pretrained({target!r}).eval()
draft = AutoModel.from_pretrained(folder, trust_remote_code=True)
assert type(draft).__module__.startswith("transformers_modules."), type(draft)
calls = [{{"assistant_model": draft}}, {{"assistant_model": draft, "speculation_type": "dflash"}}]
calls += [{{"custom_generate": name, "trust_remote_code": True}} for name in (folder, repository)]
outputs = []
for call in calls:
    arguments = {{"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, **call}}
    output = target.generate(torch.tensor({prompt!r}), **arguments)
    outputs.append([output.sequences.tolist(), getattr(output, "acceptance_lengths", None)])
shutil.rmtree(folder)  # what it was loaded from is gone
draft.save_pretrained({again!r})
print("RESULT " + json.dumps(outputs))
"""


def contents(folder):
    """Every file of a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_remote_code_alone(tmp_path):
    """As an assistant, in upstream's own loop, and by the names of a folder and of a repository in the cache."""
    target = make_target()
    draft = make_draft(target)
    target.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "my-draft.1")
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(torch.tensor(PROMPT), **options, assistant_model=draft)
    assert torch.equal(expected.sequences, target.generate(torch.tensor(PROMPT), **options).sequences)
    assert len(set(expected.sequences[0].tolist())) > 8
    cached = tmp_path / "home" / "hub" / "models--someone--a-draft.2"
    shutil.copytree(tmp_path / "my-draft.1", cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    before = contents(tmp_path / "my-draft.1")

    script = SCRIPT.format(
        blocked=["", str(tmp_path)],
        target=str(tmp_path / "target"),
        names=[str(tmp_path / "my-draft.1"), "someone/a-draft.2"],
        prompt=PROMPT,
        again=str(tmp_path / "again"),
    )
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    environment["OMP_NUM_THREADS"] = "1"
    arguments = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    result = subprocess.run([sys.executable, "-c", script], **arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    line = next(line for line in result.stdout.splitlines() if line.startswith("RESULT "))
    ours, native, *named = json.loads(line[7:])
    assert [ours, *named] == [[expected.sequences.tolist(), expected.acceptance_lengths]] * 3
    assert native[0] == expected.sequences.tolist()
    # What remote code saved is whole, although the folder it came from was gone.
    assert contents(tmp_path / "again") == before
