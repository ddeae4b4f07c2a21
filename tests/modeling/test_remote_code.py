"""A saved drafter's folder works without the package: its code lies beside the weights."""

import json
import subprocess
import sys
import textwrap

import torch
from support.pairs import make_draft, make_target


SCRIPT = """
import json, sys
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
prompt = torch.tensor([[5, 9, 17, 33, 2]])
plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
draft = AutoModel.from_pretrained({draft!r}, trust_remote_code=True)
assert type(draft).__module__.startswith("transformers_modules."), type(draft)
ours = target.generate(
    prompt, max_new_tokens=20, do_sample=False, assistant_model=draft, return_dict_in_generate=True
)
native = target.generate(
    prompt, max_new_tokens=20, do_sample=False, assistant_model=draft, speculation_type="dflash"
)
draft.save_pretrained({again!r})
print("RESULT " + json.dumps([
    plain.tolist(), ours.sequences.tolist(), native.tolist(), ours.acceptance_lengths,
    sorted(type(p).__module__.split(".")[0] for p in [draft]),
]))
"""


def run_without_the_package(tmp_path, draft_folder, again):
    script = textwrap.dedent(SCRIPT).format(
        blocked=["", str(tmp_path)], target=str(tmp_path / "target"), draft=str(draft_folder), again=str(again)
    )
    environment = {
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
        "DFLASH_HF_REMEMBER": "0",
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith("RESULT "))[7:])


def test_remote_code_alone(tmp_path):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    draft = make_draft(target)
    draft.save_pretrained(tmp_path / "draft")
    draft.decoding_config.block_size = None  # as loaded
    expected = target.generate(
        torch.tensor([[5, 9, 17, 33, 2]]),
        max_new_tokens=20,
        do_sample=False,
        assistant_model=draft,
        return_dict_in_generate=True,
    )
    plain, ours, native, trace, _ = run_without_the_package(tmp_path, tmp_path / "draft", tmp_path / "again")
    assert plain == ours == native == expected.sequences.tolist()
    assert trace == expected.acceptance_lengths

    # What remote code saves again is whole: it works in its turn.
    names = {path.name for path in (tmp_path / "draft").iterdir()}
    assert names == {path.name for path in (tmp_path / "again").iterdir()}
    assert run_without_the_package(tmp_path, tmp_path / "again", tmp_path / "third")[1] == ours
