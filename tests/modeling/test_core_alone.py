"""
A saved drafter's folder works without the package, whose code lies beside the weights: every head decodes losslessly
in a process that cannot import it, as an assistant and by the name of a folder or a repository.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from support.heads import EVERY
from support.pairs import make_draft, make_draft2, make_target


COMMIT, REPOSITORY = "0123456789abcdef0123456789abcdef01234567", "someone/a-draft.2"
SCRIPT = """
import copy, functools, importlib.util, json, os, pickle, sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in type(f).__module__ and "editable" not in repr(f)]
sys.path = [p for p in sys.path if p not in {blocked!r}]
import torch
from transformers import AutoModel, AutoModelForCausalLM, TextStreamer

target = AutoModelForCausalLM.from_pretrained({target!r}).eval()
prompt = torch.tensor([[0, 0, 5, 9, 17], [7, 2, 33, 5, 11], [0, 4, 4, 8, 3]])
mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
KINDS = {{
    "greedy": {{"do_sample": False}},
    "sampled": {{"do_sample": True, "top_k": 20}},
    "reads the text": {{"do_sample": True, "repetition_penalty": 1.3, "min_new_tokens": 4, "eos_token_id": 7}},
}}

def call(rows, kind, **more):
    torch.manual_seed(5)
    inputs = {{"input_ids": prompt[-rows:], "attention_mask": mask[-rows:]}}
    output = target.generate(**inputs, max_new_tokens=14, return_dict_in_generate=True, **KINDS[kind], **more)
    return output.sequences.tolist(), torch.get_rng_state().sum().item(), getattr(output, "acceptance_lengths", None)

plain = functools.cache(call)
result = {{}}
for name, folder in {folders!r}.items():
    draft = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(draft).__module__.startswith("transformers_modules."), type(draft)
    os.rename(folder, folder + " gone")  # what is saved is whole, although the folder that it came from is not there
    draft.save_pretrained(folder + " again")
    os.rename(folder + " gone", folder)
    result[name] = [0, 0]
    for kind, rows in [(kind, rows) for kind in KINDS for rows in (1, 3)]:
        drafted = call(rows, kind, assistant_model=draft)
        assert drafted[:2] == plain(rows, kind)[:2], (name, kind, rows)
        result[name][0] += sum(map(sum, drafted[2]))
        result[name][1] += sum(map(len, drafted[2]))

# Ways in and out, with one drafter.
draft = AutoModel.from_pretrained({folders!r}["argmax"], trust_remote_code=True).eval()
copies = {{"deepcopy": copy.deepcopy(draft), "pickle": pickle.loads(pickle.dumps(draft))}}
if importlib.util.find_spec("peft"):
    import peft
    copies["peft"] = peft.get_peft_model(draft, peft.LoraConfig(target_modules=["q_proj"])).eval()
for name, one in copies.items():
    for kind in KINDS:
        assert call(3, kind, assistant_model=one)[:2] == plain(3, kind)[:2], (name, kind)
for name in ({folders!r}["argmax"], {repository!r}):
    named = call(3, "greedy", custom_generate=name, trust_remote_code=True)
    assert named[:2] == plain(3, "greedy")[:2] and named[2]
own, native = dict(inputs=prompt[1:2], max_new_tokens=14, do_sample=False), dict(speculation_type="dflash")
assert target.generate(**own, assistant_model=draft, **native).tolist() == target.generate(**own).tolist()

class Words(TextStreamer):
    def __init__(self): self.tokens = []
    def put(self, value): self.tokens += value.flatten().tolist()
    def end(self): self.tokens.append(None)

streams = [Words(), Words()]
expected = call(1, "greedy", streamer=streams[0])[0]
assert call(1, "greedy", assistant_model=draft, streamer=streams[1])[0] == expected
assert streams[0].tokens == streams[1].tokens and streams[0].tokens[-1] is None

def turns(**more):
    first = target.generate(prompt[1:2], max_new_tokens=9, do_sample=False, return_dict_in_generate=True, **more)
    cache = {{name: first[name] for name in ("past_key_values", "cache") if first.get(name) is not None}}
    longer = torch.cat([first.sequences, prompt[:1, 2:]], dim=1)
    second = target.generate(longer, max_new_tokens=9, do_sample=False, **cache, **more)
    return second.tolist(), next(iter(cache.values())).get_seq_length()

assert turns(assistant_model=draft) == turns()
assert not any(one.partition(".")[0] == "dflash_hf" for one in sys.modules), "the package was imported"
result["ways"] = sorted(copies)
print("RESULT " + json.dumps(result))
"""


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    """Committed tokens and rounds of each head; its texts and generator states are the target's own."""
    folder, target = tmp_path_factory.mktemp("core"), make_target()
    target.save_pretrained(folder / "target")
    makers = {**{name: make for name, make in EVERY.items() if "recurrent" not in name}, "dflash 2": make_draft2}
    makers["own mask"] = lambda target: make_draft(target, own_mask_embedding=True)
    makers["own embeddings"] = lambda target: make_draft(target, has_embed_tokens=True)
    makers["window"] = lambda target: make_draft(target, sliding_window=6, layer_types=["sliding_attention"] * 2)
    for name, make in makers.items():
        make(target).save_pretrained(folder / name)
    folders = {name: str(folder / name) for name in makers}
    cached = folder / "home" / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    shutil.copytree(folder / "argmax", cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    paths = {"blocked": ["", str(folder)], "target": str(folder / "target"), "folders": folders}
    script = SCRIPT.format(**paths, repository=REPOSITORY)
    environment = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # for other versions
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in makers:  # read wrongly, a drafter would be written otherwise
        saved, again = (
            {path.relative_to(one): path.read_bytes() for path in one.rglob("*") if path.is_file()}
            for one in (folder / name, folder / f"{name} again")
        )
        assert again == saved, name
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:])
    assert {"deepcopy", "pickle"} <= set(result.pop("ways"))
    return result


def test_core_alone_equals_the_target(rounds):
    assert len(rounds) == 13 and all(count > 20 for _, count in rounds.values())


def test_core_alone_accepts_drafts(rounds):
    """Drafts that are never accepted would prove nothing; random drafters share the target's head, so a few are."""
    assert sum(tokens > count for tokens, count in rounds.values()) >= 8, rounds
