"""Two processes train as one: the configurations of `examples/accelerate`, on CPUs."""

import functools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import ranks as scenarios
from support.pairs import make_draft, make_target
from support.runs import BLOCK

from dflash_hf import DFlashDraftModel
from dflash_hf.training.checkpoints import last_checkpoint


TESTS = Path(__file__).parents[1]
CONFIGURATIONS = TESTS.parent / "examples" / "accelerate"


def launch(scenario, folder):
    """Start two ranks with `accelerate launch`; the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "OMP_NUM_THREADS": "1"}
    env |= {"ACCELERATE_USE_CPU": "true", "PYTHONFAULTHANDLER": "1"}
    options = ["--config_file", str(CONFIGURATIONS / f"{scenario}.yaml"), "--num_processes", "2"]
    options += ["--mixed_precision", "no", "--main_process_port", port]
    script = [str(TESTS / "support" / "ranks.py"), scenario, str(folder)]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, *script]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=env, start_new_session=True, **streams)


def results_of(process, folder):
    try:
        output, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # each rank tells where it hangs
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """What one process gets."""
    folder = tmp_path_factory.mktemp("alone")
    results = {loss_type: scenarios.train_and_evaluate(folder, 1, loss_type) for loss_type in scenarios.ROWS}
    return {**results, "resumed": scenarios.save_and_resume(folder, 1)}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Folder and results of each rank, of each configuration; launched when first asked for."""

    @functools.cache
    def get(scenario):
        folder = tmp_path_factory.mktemp(scenario)
        return folder, results_of(launch(scenario, folder), folder)

    return get


@pytest.mark.parametrize(
    "scenario, loss_type", [(name, loss) for name, losses in scenarios.LOSSES.items() for loss in losses]
)
def test_two_ranks_train_as_one(scenario, loss_type, launched, one_process):
    """Also where one of them has no anchors: it takes part in every reduction, and its zeros are right."""
    expected_figures, expected = one_process[loss_type]
    for results in launched(scenario)[1]:
        figures, parameters = results[loss_type]
        assert figures == pytest.approx(expected_figures, rel=1e-6)
        for name, parameter in expected.items():
            torch.testing.assert_close(parameters[name], parameter, rtol=0, atol=1e-7)


def test_selector_alone_learns_on_two_ranks(launched, tmp_path):
    """Sharded it got no gradient, and a whole run passed without a word."""
    expected = scenarios.train_selector_alone(tmp_path, 1)
    assert expected["successor_codebook"].abs().max() > 0
    for results in launched("ddp")[1]:
        torch.testing.assert_close(results["selector alone"], expected, rtol=0, atol=1e-7)
    for results in launched("fsdp2")[1]:
        assert results["selector alone"].startswith("head_only=True would train nothing under FSDP")


@pytest.mark.parametrize("scenario", scenarios.LOSSES)
def test_two_ranks_save_one_drafter_and_resume(scenario, launched, one_process):
    folder, ranks = launched(scenario)
    for (uninterrupted, resumed), parameters, kinds in (results["resumed"] for results in ranks):
        assert kinds == {"DTensor" if scenario == "fsdp2" else "Parameter"}
        assert uninterrupted == pytest.approx(one_process["resumed"][0][0], abs=1e-5)
        assert resumed == pytest.approx(uninterrupted, abs=1e-6)
        saved = DFlashDraftModel.from_pretrained(folder / "checkpoint-2").state_dict()
        for name, parameter in parameters.items():
            assert torch.equal(saved[name], parameter), name
    assert {path.name for path in folder.glob("*point*")} == {"checkpoint-1", "checkpoint-2"}
    assert last_checkpoint(folder) == folder / "checkpoint-2"


@pytest.mark.parametrize("scenario", scenarios.LOSSES)
def test_two_ranks_save_an_adapter_merged(scenario, launched, tmp_path):
    """Sharded, its matrices were copied by one rank alone."""
    pytest.importorskip("peft")
    scenarios.save_adapter(tmp_path, 1)
    folder, _ = launched(scenario)
    expected, saved = (load_file(output / "adapted" / "model.safetensors") for output in (tmp_path, folder))
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-6)
    assert (folder / "adapted" / "adapter" / "adapter_model.safetensors").is_file()
    before = make_draft(make_target(dtype=torch.float64), block_size=BLOCK).state_dict()
    name = "layers.0.mlp.up_proj.weight"
    assert not torch.equal(saved[name], before[name])


@pytest.mark.parametrize("scenario", scenarios.LOSSES)
def test_first_rank_alone_publishes(scenario, launched):
    """The others cannot even reach the Hub."""
    first, second = launched(scenario)[1]
    messages, card = first["published"]
    assert messages == ["Training in progress, step 1", "Training in progress, step 2", "End of training"]
    assert "license: mit" in card and second["published"] is None


def test_ranks_of_a_sharded_target_generate_in_step(launched):
    """`synced_gpus`: the rank with the shorter text runs as many forwards as the other, also with a drafter."""
    counts = []
    for rank, results in enumerate(launched("ddp")[1]):
        texts, forwards = results["texts"]
        for text in texts:
            assert torch.equal(text, scenarios.generate_in_step(rank)[0][0])
        counts.append(forwards)
    assert counts == [[11, 11], [11, 11]]
