"""What is found out on a machine is kept for the next process, and never in the way."""

import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from support.pairs import make_draft, make_target
from support.scripted_draft import scripted

from dflash_hf.cli import main
from dflash_hf.modeling import cost_dflash, planner_dflash, probe_dflash
from dflash_hf.modeling.cost_dflash import table_of
from dflash_hf.modeling.probe_dflash import facts_of
from dflash_hf.modeling.remembered_dflash import recall, remember, remembered


PROMPT = torch.tensor([[5, 9, 17, 33]])
OPTIONS = {"max_new_tokens": 40, "do_sample": False}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_HF_REMEMBER", "1")
    monkeypatch.setenv("DFLASH_HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def new_process() -> None:
    """As far as memory goes."""
    cost_dflash._tables.clear()
    planner_dflash._paces.clear()


@pytest.fixture
def pair(target):
    draft = make_draft(target, block_size=6)
    draft.decoding_config.block_size = None
    return target, draft


def decode(target, draft):
    output = target.generate(PROMPT, **OPTIONS, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, target.generate(PROMPT, **OPTIONS))
    return output


def costs_of(target, draft, compiled: str | bool = False, ahead: int = 1):
    """The table of a call whose target is not packed."""
    return table_of(target, draft, compiled, ahead, target)


def test_costs_are_there_for_the_next_process(home, pair, capsys):
    for _ in range(3):
        decode(*pair)
    (file,) = remembered("costs")
    assert file.is_relative_to(home)
    known = costs_of(*pair)
    new_process()
    table = costs_of(*pair)
    assert table is not known and table.samples[1, 9].keys() <= known.samples[1, 9].keys() and table.total > 10
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert "Qwen3ForCausalLM of" in shown and str(file) in shown and "1 row(s), up to 512 tokens" in shown
    assert main(["env", "--forget"]) == 0 and not remembered("costs")
    new_process()
    assert not costs_of(*pair).samples


def test_another_pair_dtype_or_number_of_threads_has_costs_of_its_own(home, pair):
    target, draft = pair
    costs_of(target, draft).note([(1, 100, (0, True), 0.5)])
    twin = make_target()
    for other in (
        lambda: costs_of(make_target(num_hidden_layers=5), draft),
        lambda: costs_of(target, make_draft(target, block_size=5)),
        lambda: costs_of(target, draft, "default"),
        lambda: costs_of(target, draft, False, 4),
        lambda: costs_of(twin.to(torch.bfloat16), draft),
    ):
        assert not other().samples
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert not costs_of(target, draft).samples
    finally:
        torch.set_num_threads(threads)
    assert costs_of(target, draft).samples


NEVER_COSTS = ["[]", "{", "", '{"key": 1}', '{"key": 1, "found": [[3]]}', "[" * 100_000, '{"key": 1, "found": null}']
INSIDE = [
    {"1 9": {"0 drafted": [-1.0]}},
    {"1 9": {"0 drafted": ["x"]}},
    {"1 9": {"0 drafted": [float("nan")]}},
    {"1": {"0 drafted": [0.1]}},
    {"1 9": {"x drafted": [0.1]}},
    {"1 9": {"4": [0.1]}},
    {"1 9": {"4 guessed": [0.1]}},
    {"1 9": [0.1]},
    7,
]


@pytest.mark.parametrize("text", [*NEVER_COSTS, *INSIDE], ids=lambda text: str(text)[:20])
def test_a_damaged_file_is_as_good_as_none_unless_it_was_named(text, home, pair, monkeypatch):
    table = costs_of(*pair)
    for _ in range(20):
        table.note([(1, 100, (0, True), 0.5)])
    table.keep()
    (file,) = remembered("costs")
    if not isinstance(text, str):
        text = json.dumps({**json.loads(file.read_text()), "found": text})
    file.write_text(text)
    new_process()
    assert not costs_of(*pair).samples
    assert main(["env"]) == 0
    monkeypatch.setenv("DFLASH_HF_COSTS", str(file))
    with pytest.raises(ValueError, match="DFLASH_HF_COSTS.* does not hold costs of rounds"):
        costs_of(*pair)


def test_where_nothing_can_be_written_nothing_is_said(home, pair, monkeypatch):
    home.write_text("a file in the way")
    decode(*pair)
    monkeypatch.setenv("DFLASH_HF_HOME", "/proc/nowhere")
    remember("costs", {"a": 1}, 2)
    assert recall("costs", {"a": 1}) is None
    monkeypatch.delenv("DFLASH_HF_HOME")
    monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("no home")))
    decode(*pair)


def test_readers_see_a_file_whole_while_it_is_written(home):
    stop, wrong = threading.Event(), []

    def write():
        while not stop.is_set():
            remember("costs", {"of": "this"}, list(range(5000)))

    threads = [threading.Thread(target=write) for _ in range(2)]
    remember("costs", {"of": "this"}, list(range(5000)))
    for thread in threads:
        thread.start()
    for _ in range(100):
        if recall("costs", {"of": "this"}) != list(range(5000)):
            wrong.append(1)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and [path.suffix for path in (home / "costs").iterdir()] == [".json"]


def test_pinned_costs_stay_as_they_are_and_nothing_is_tried(home, pair, tmp_path):
    target, draft = pair
    expected = target.generate(PROMPT, **OPTIONS)
    draft = scripted(draft, expected, error_rate=0.2)
    for _ in range(3):
        decode(target, draft)
    (file,) = remembered("costs")
    kept = tmp_path / "costs.json"
    kept.write_bytes(file.read_bytes())
    draft.decoding_config.costs = str(kept)
    sizes = []
    for _ in range(3):
        new_process()
        sizes.append(decode(target, draft).draft_sizes)
    assert sizes[0] == sizes[1] == sizes[2]
    assert kept.read_bytes() == file.read_bytes() and costs_of(target, draft).new == 0
    new_process()
    without = scripted(make_draft(target, block_size=6), expected, error_rate=0.2)
    without.decoding_config.block_size = None
    decode(target, without)  # the table decides sizes, never fp32 texts


PROGRAM = """
import sys, torch
from support.pairs import make_draft, make_target
from support.scripted_draft import scripted
target = make_target(dtype=torch.bfloat16)
prompt = torch.tensor([[5, 9, 17, 33]])
text = target.generate(prompt, max_new_tokens=60, do_sample=False)
draft = scripted(make_draft(target, block_size=6), text, error_rate=0.3, ranks=2)
draft.decoding_config.block_size = None
for options in ({"do_sample": False}, {"do_sample": True, "temperature": 1.0}):
    torch.manual_seed(0)
    output = target.generate(prompt, max_new_tokens=60, assistant_model=draft, return_dict_in_generate=True, **options)
    print(output.sequences.tolist(), output.draft_sizes)
"""


@pytest.mark.slow
def test_processes_with_one_table_write_one_text(home, pair, tmp_path):
    """In half precision, greedy and seeded, while another process keeps the machine busy."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

    def run():
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run()
    (file,) = remembered("costs")
    kept = tmp_path / "costs.json"
    kept.write_bytes(file.read_bytes())
    env["DFLASH_HF_COSTS"] = str(kept)
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: sum(range(10**6))"])
    try:
        assert len({run() for _ in range(20)}) == 1
    finally:
        neighbour.kill()
        neighbour.wait()


# ------------------------------------------------------------------------------------------------------------- targets


@pytest.fixture
def probes(home, monkeypatch):
    """How often something was found out by trying, in what would be processes of their own."""
    made, original = [], probe_dflash._Trial.found

    def found(trial):
        made.append(trial.target)
        return original(trial)

    monkeypatch.setattr(probe_dflash._Trial, "found", found)
    return made


def facts_in_a_new_process(target):
    probe_dflash._known.clear()
    probe_dflash._alike.clear()
    return facts_of(target)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "lfm2"])
def test_what_a_target_can_do_is_found_out_once_on_a_machine(family, probes):
    first = facts_in_a_new_process(make_target(family, attn=None))
    again = facts_in_a_new_process(make_target(family, attn=None, seed=3))
    assert again == first and len(probes) == 1 and first.features
    if family == "lfm2":
        assert first.moving and first.session_class is not probe_dflash.SlotSession


def patched(target):
    def forward(self, *args, **kwargs):
        return torch.nn.Linear.forward(self, *args, **kwargs)

    kind = type("Patched", (torch.nn.Linear,), {"forward": forward})
    target.lm_head.__class__ = kind


def hooked(target):
    target.register_forward_pre_hook(lambda module, args: None)


def adapted(target):
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), target)
    target.eval()


def from_no_file(target):
    scope = {"torch": torch}
    exec("class Nowhere(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x)", scope)
    target.lm_head.__class__ = scope["Nowhere"]


@pytest.mark.parametrize("change", [patched, hooked, adapted, from_no_file])
def test_another_target_is_found_out_about_anew(change, probes):
    facts_in_a_new_process(make_target())
    for _ in range(2):
        target = make_target()
        change(target)
        facts_in_a_new_process(target)
    # What comes from files is remembered too; what a hook or a notebook does is not.
    assert len(probes) == (2 if change in (patched, adapted) else 3)
    facts_in_a_new_process(make_target())
    facts_in_a_new_process(make_target(num_hidden_layers=5))
    assert probes[-1].config.num_hidden_layers == 5


@pytest.mark.parametrize(
    "found", [None, [], {}, {"name": "x", "session_class": "Other", "features": {}}, "SlotSession"]
)
def test_damaged_facts_are_found_out_anew(found, probes):
    facts = facts_in_a_new_process(make_target())
    (file,) = remembered("targets")
    file.write_text(json.dumps({**json.loads(file.read_text()), "found": found}))
    assert facts_in_a_new_process(make_target()) == facts and len(probes) == 2
    assert facts_in_a_new_process(make_target()) == facts and len(probes) == 2


def test_a_target_that_was_remembered_drafts(probes):
    target = make_target()
    facts_in_a_new_process(target)
    probe_dflash._known.clear()
    probe_dflash._alike.clear()
    decode(target, make_draft(target))
    assert len(probes) == 1


# ----------------------------------------------------------------------------------------------------- in one process


@pytest.fixture
def tries(probes, monkeypatch):
    """The same without files."""
    monkeypatch.setenv("DFLASH_HF_REMEMBER", "0")
    probe_dflash._alike.clear()
    return probes


def scaled_by(factor: float):
    """Classes of one place in a file, whose forwards differ only in what they enclose."""

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * factor

    return Scaled


def test_targets_alike_are_found_out_about_once_in_a_process(tries):
    first = facts_of(make_target())
    assert facts_of(make_target(seed=3)) == first and len(tries) == 1
    kinds = [scaled_by(1.0), scaled_by(2.0)]
    for kind in (*kinds, *kinds):
        target = make_target()
        target.lm_head.__class__ = kind
        facts_of(target)
    assert len(tries) == 3


@pytest.mark.parametrize("change", ["whole", "part", "replaced", "class", "dtype", "attention", "depth", "training"])
def test_a_target_that_differs_is_found_out_about_in_the_same_process(change, tries, monkeypatch):
    """The facts of the one before it are not used: they were, for a forward that was replaced by another."""
    facts_of(make_target())
    fields = {"dtype": {"dtype": torch.float64}, "attention": {"attn": "eager"}, "depth": {"num_hidden_layers": 5}}
    target = make_target(**fields.get(change, {})).train(change == "training")
    layer = target.model.layers[1]
    if change == "whole":
        target.register_forward_pre_hook(lambda module, args: None)
    elif change == "part":
        layer.register_forward_hook(lambda module, args, output: None)
    elif change == "replaced":
        layer.forward = functools.partial(layer.forward)
    elif change == "class":
        forward = type(layer).forward
        monkeypatch.setattr(type(layer), "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs))
    facts_of(target)
    assert len(tries) == 2 and tries[1] is target
    facts_of(target)
    assert len(tries) == 2
