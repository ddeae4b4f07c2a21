"""
A saved drafter's folder works without the package: every head decodes losslessly in a process that cannot import it,
with the code beside the weights, as an assistant and by the name of a folder or a repository.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from support.heads import EVERY
from support.pairs import make_draft, make_draft2, make_target


COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "someone/a-draft.2"
SCRIPT = """
import copy, functools, importlib.util, json, os, pickle, sys, threading
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
    return target.generate(**inputs, max_new_tokens=14, **KINDS[kind], **more).tolist()

plain = functools.cache(call)
result = {{}}
for name, folder in {folders!r}.items():
    draft = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(draft).__module__.startswith("transformers_modules."), type(draft)
    os.rename(folder, folder + " gone")  # what is saved is whole, although the folder that it came from is not there
    draft.save_pretrained(folder + " again")
    os.rename(folder + " gone", folder)
    beside = sys.modules[type(draft).dflash_decode.__globals__["generate_with_candidates"].__module__]
    matches = result[name] = []
    update = lambda generator, ids, scores, number: matches.append(int(number))
    beside.DFlashCandidateGenerator.update_candidate_strategy = update
    assert call(1, "greedy", assistant_model=draft) == plain(1, "greedy"), name
    assert len(call(1, "sampled", assistant_model=draft)[0]) == 19, name
    for number in range(10):  # a random drafter is right by chance, so that many texts are needed
        own = dict(inputs=torch.tensor([[7, number, 33, 5 * number + 2]]), max_new_tokens=24, do_sample=False)
        assert target.generate(**own, assistant_model=draft).tolist() == target.generate(**own).tolist(), name
    drafted = len(matches)
    for kind in KINDS:  # several rows are decoded without the drafter
        assert call(3, kind, assistant_model=draft) == plain(3, kind), (name, kind)
    assert len(matches) == drafted > 2, name

texts = {{}}
def in_thread(number):
    texts[number] = call(1, "greedy", assistant_model=draft)

threads = [threading.Thread(target=in_thread, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert list(texts.values()) == [plain(1, "greedy")] * 4

# The reference implementation's call.
own = target.generate(prompt[1:2], attention_mask=mask[1:2], max_new_tokens=14, do_sample=False)
stop = int(own[0, 9])
expected = own[:, : 1 + 5 + own[0, 5:].tolist().index(stop)].tolist()
call_of_reference = dict(input_ids=prompt[1:2], max_new_tokens=14, temperature=0.0, stop_token_ids=[stop])
assert draft.spec_generate(target=target, **call_of_reference).tolist() == expected

# Loading, copying and saving, with one drafter.
draft = AutoModel.from_pretrained({folders!r}["argmax"], trust_remote_code=True).eval()
copies = {{"deepcopy": copy.deepcopy(draft), "pickle": pickle.loads(pickle.dumps(draft))}}
if importlib.util.find_spec("peft"):
    import peft
    copies["peft"] = peft.get_peft_model(draft, peft.LoraConfig(target_modules=["q_proj"])).eval()
for name, copied in copies.items():
    assert call(1, "greedy", assistant_model=copied) == plain(1, "greedy"), name
for name in ({folders!r}["argmax"], {repository!r}):
    before = len(matches)
    assert call(1, "greedy", custom_generate=name, trust_remote_code=True) == plain(1, "greedy")
own, native = dict(inputs=prompt[1:2], max_new_tokens=14, do_sample=False), dict(speculation_type="dflash")
assert target.generate(**own, assistant_model=draft, **native).tolist() == target.generate(**own).tolist()

class Words(TextStreamer):
    def __init__(self): self.tokens = []
    def put(self, value): self.tokens += value.flatten().tolist()
    def end(self): self.tokens.append(None)

streams = [Words(), Words()]
expected = call(1, "greedy", streamer=streams[0])
assert call(1, "greedy", assistant_model=draft, streamer=streams[1]) == expected
assert streams[0].tokens == streams[1].tokens and streams[0].tokens[-1] is None

def turns(**more):
    first = target.generate(prompt[1:2], max_new_tokens=9, do_sample=False, return_dict_in_generate=True, **more)
    cache = {{name: first[name] for name in ("past_key_values", "cache") if first.get(name) is not None}}
    longer = torch.cat([first.sequences, prompt[:1, 2:]], dim=1)
    second = target.generate(longer, max_new_tokens=9, do_sample=False, **cache, **more)
    return second.tolist(), next(iter(cache.values())).get_seq_length()

assert turns(assistant_model=draft) == turns()
assert not any(module.partition(".")[0] == "dflash_hf" for module in sys.modules), "the package was imported"
result["copies"] = sorted(copies)
print("RESULT " + json.dumps(result))
"""


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    """Drafted tokens that each verification accepted, for each head; its texts are the target's own."""
    folder = tmp_path_factory.mktemp("core")
    target = make_target()
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
            {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
            for root in (folder / name, folder / f"{name} again")
        )
        assert again == saved, name
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:])
    assert {"deepcopy", "pickle"} <= set(result.pop("copies"))
    return result


def test_drafter_alone_writes_the_targets_text(rounds):
    assert len(rounds) == 13 and all(len(matches) > 2 for matches in rounds.values())


def test_drafter_alone_has_drafts_accepted(rounds):
    """Drafts that are never accepted would prove nothing; random drafters share the target's head, so a few are."""
    assert sum(any(matches) for matches in rounds.values()) >= 8, rounds
