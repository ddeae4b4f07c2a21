"""`dflash train` in a folder that has been used: refused, gone on with, or begun anew; never mixed."""

import json
from types import SimpleNamespace

import pytest
from support.runs import save_states
from support.tiny_chat import CHATML, THINKING, save_target

from dflash_hf import DFlashDraftConfig
from dflash_hf.cli import main
from dflash_hf.files import locked
from dflash_hf.training import run_file
from dflash_hf.training.run_file import RUN_FILE, checkpoint_to_resume


pytest.importorskip("yaml")
datasets = pytest.importorskip("datasets")
TINY = (
    *("target_layer_ids=[0, 2]", "num_draft_layers=1", "block_size=4", "max_length=64", "num_anchors=4"),
    *("draft_config.intermediate_size=32", "max_steps=2", "logging_steps=1", "disable_tqdm=true", "report_to=none"),
    *(
        "learning_rate=6e-4",
        "loss_type=ce",
        "per_device_train_batch_size=2",
        "use_cpu=true",
        "target_dtype=float32",
        "save_steps=1",
        "save_strategy=steps",
    ),
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"), THINKING)


def write(path, count=8, answer="as you wish"):
    rows = [{"prompt": f"Say {i}: ", "completion": f"{i}, {answer}."} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def used(target, tmp_path, capsys):
    """A folder with a finished drafter and its checkpoints, and the command that made them."""
    data, output = write(tmp_path / "data.jsonl"), tmp_path / "drafter"
    command = ["train", f"target={target}", f"data={data}", f"output_dir={output}", *TINY]
    assert main(command) == 0
    capsys.readouterr()
    return output, command, data


def contents(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(capsys, command, *more):
    code = main([*command, *more])
    printed = capsys.readouterr()
    print(printed.err)
    return code, printed.out, (printed.err.strip().splitlines() or [""])[-1]


def test_a_used_folder_is_not_overwritten(used, capsys):
    """The finished drafter was replaced without a word."""
    output, command, _ = used
    before = contents(output)
    code, _, error = run(capsys, command)
    assert code == 1 and "holds a finished drafter and checkpoint-2. Resume with resume_from_checkpoint=auto" in error
    assert "overwrite_output_dir=true" in error and "another output_dir" in error
    code, _, error = run(capsys, command, "resume_from_checkpoint=auto", "overwrite_output_dir=true")
    assert code == 1 and "contradict each other" in error
    assert contents(output) == before


def test_overwriting_leaves_no_checkpoint_of_the_other_run(used, capsys):
    """`auto` later took the last checkpoint of the other run."""
    output, command, _ = used
    code, _, error = run(capsys, command, "overwrite_output_dir=true", "max_steps=1", "block_size=8")
    assert code == 0, error
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-1"]
    assert DFlashDraftConfig.from_pretrained(output).block_size == 8
    assert json.loads((output / RUN_FILE).read_text(encoding="utf-8"))["settings"]["block_size"] == 8
    assert not (output / ".lock").exists()


def test_going_on_with_other_settings_is_refused_and_each_is_named(used, target, tmp_path, capsys):
    output, command, data = used
    before = contents(output)
    resume = "resume_from_checkpoint=auto"
    changed = ("learning_rate=1e-3", "num_anchors=5", "gradient_accumulation_steps=2", "loss_type=dpace", "seed=1")
    code, _, error = run(capsys, command, resume, *changed)
    assert code == 1 and "checkpoint-2 was trained with " in error
    for text in (
        "learning_rate=0.0006, not 0.001",
        "num_anchors=4, not 5",
        "loss_type='ce', not 'dpace'",
        "seed=42, not 1",
        "gradient_accumulation_steps * processes)=2, not 4",
    ):
        assert text in error
    template = tmp_path / "other.jinja"
    template.write_text(CHATML, encoding="utf-8")
    other = save_target(tmp_path / "other", THINKING, seed=5)
    for option, named in (
        (f"chat_template={template}", "template='"),
        (f"data={write(tmp_path / 'other.jsonl', answer='no')}", "data='"),
        (f"target={other}", "target_weights={'ends': '"),
        ("mask_token_id=270", "mask_token_id=259, not 270"),
        ("chat_template_kwargs.enable_thinking=false", "chat_template_kwargs={}, not {'enable_thinking': False}"),
        ("max_length=32", "max_length=64, not 32"),
    ):
        code, _, error = run(capsys, command, resume, option)
        assert code == 1 and named in error and "Resume with the same settings" in error, option
        assert "overwrite_output_dir=true" in error
    assert contents(output) == before


def test_an_infinite_setting_is_compared_too(used, capsys):
    """`Infinity` in `run.json` is not JSON, and null would be the default."""
    output, command, _ = used
    gamma, resume = "loss_decay_gamma=inf", "resume_from_checkpoint=auto"
    assert run(capsys, command, "overwrite_output_dir=true", gamma)[0] == 0
    settings = json.loads((output / RUN_FILE).read_text(encoding="utf-8"), parse_constant=pytest.fail)["settings"]
    assert settings["loss_decay_gamma"] == "Infinity"
    assert run(capsys, command, resume, gamma)[0] == 0
    text = (output / RUN_FILE).read_text(encoding="utf-8")
    (output / RUN_FILE).write_text(text.replace('"Infinity"', "Infinity"), encoding="utf-8")  # of earlier versions
    assert run(capsys, command, resume, gamma)[0] == 0
    assert "loss_decay_gamma='Infinity', not None" in run(capsys, command, resume)[2]


def test_what_does_not_matter_may_differ(used, target, tmp_path, capsys):
    """The same files elsewhere, more steps, other logging."""
    output, command, data = used
    more = ("resume_from_checkpoint=auto", "max_steps=3", "logging_steps=3", "save_steps=3")
    code, out, error = run(capsys, command, *more)
    assert code == 0 and "resuming from" in out, error
    moved = data.rename(tmp_path / "moved.jsonl")
    again = save_target(tmp_path / "again", THINKING)
    more = (f"data={moved}", f"target={again}", f"resume_from_checkpoint={output / 'checkpoint-3'}", "max_steps=4")
    code, out, error = run(capsys, command, *more)
    assert code == 0 and "checkpoint-3" in out, error


def test_the_rows_trained_on_are_compared_and_not_their_files(target, tmp_path, capsys):
    """`datasets` keeps its cache in the folder of a saved dataset, which then counted as other data."""
    rows = [{"prompt": f"Say {i}: ", "completion": f"{i}."} for i in range(8)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "data")
    command = ["train", f"target={target}", f"data={tmp_path / 'data'}", f"output_dir={tmp_path / 'o'}", *TINY]
    assert run(capsys, command)[0] == 0 and list((tmp_path / "data").glob("cache-*.arrow"))
    again = [*command, "resume_from_checkpoint=auto"]
    assert run(capsys, again, "max_steps=3")[0] == 0
    path = tmp_path / "o" / RUN_FILE
    run_now = json.loads(path.read_text(encoding="utf-8"))
    before = {**run_now["settings"], "data": "of files"}  # as earlier versions described it
    del before["digest of data"]
    path.write_text(json.dumps({**run_now, "settings": before, "files": {}}), encoding="utf-8")
    assert run(capsys, again, "max_steps=4")[0] == 0
    datasets.Dataset.from_list(rows[::-1]).save_to_disk(tmp_path / "data")
    assert "digest of data='" in run(capsys, again, "max_steps=5")[2]


def test_features_named_twice_are_other_data_than_once(target, tmp_path, capsys):
    data, features = write(tmp_path / "data.jsonl"), tmp_path / "features"
    command = ["features", f"--target={target}", f"--data={data}", f"--output={features}", "--store-dtype=float32"]
    assert run(capsys, [*command, "--target-layer-ids", "0", "2"])[0] == 0
    command = ["train", f"target={target}", f"output_dir={tmp_path / 'o'}", *TINY]
    assert run(capsys, command, f"features=[{features}, {features}]")[0] == 0
    again = [*command, "resume_from_checkpoint=auto", "max_steps=3"]
    assert "digest of data='" in run(capsys, again, f"features={features}")[2]
    assert run(capsys, again, f"features=[{features}, {features}]")[0] == 0


@pytest.mark.parametrize("adapter", [(), ("peft_config={peft_type: LORA, r: 2}",)], ids=["whole", "adapter"])
def test_a_finished_drafter_keeps_its_report(adapter, target, tmp_path, capsys):
    """Resuming a complete run removed what `dflash eval` had measured since, although the weights stay the same."""
    data, output = write(tmp_path / "data.jsonl"), tmp_path / "drafter"
    command = ["train", f"target={target}", f"data={data}", f"output_dir={output}", *TINY, *adapter]
    assert run(capsys, command)[0] == 0
    reports = [output / "eval_report.json", output / "eval_report.png"]
    for path in reports:
        path.write_text(path.suffix)
    assert run(capsys, command, "resume_from_checkpoint=auto")[0] == 0
    assert [path.read_text() for path in reports] == [".json", ".png"]
    assert run(capsys, command, "resume_from_checkpoint=auto", "max_steps=5")[0] == 0
    assert not list(output.glob("eval_report.*"))  # of the weights before


def test_resuming_looks_where_the_checkpoint_lies(tmp_path):
    for name in ("a/checkpoint-2", "b/checkpoint-4"):
        save_states(tmp_path / name)
    a, b = tmp_path / "a", tmp_path / "b"
    assert checkpoint_to_resume(a, "auto", False) == str(a / "checkpoint-2")
    assert checkpoint_to_resume(tmp_path / "new", "auto", False) is None
    assert checkpoint_to_resume(tmp_path / "new", str(a / "checkpoint-2"), False) == str(a / "checkpoint-2")
    assert checkpoint_to_resume(a, None, True) is None
    with pytest.raises(ValueError, match="holds checkpoint-4. Resume with"):
        checkpoint_to_resume(b, str(a / "checkpoint-2"), False)
    with pytest.raises(ValueError, match="there is no such folder"):
        checkpoint_to_resume(a, str(a / "checkpoint-3"), False)
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "model.safetensors").touch()
    with pytest.raises(ValueError, match="holds no checkpoint to resume from, but a finished drafter"):
        checkpoint_to_resume(tmp_path / "done", "auto", False)


def test_two_runs_do_not_train_into_one_folder(target, tmp_path, capsys):
    command = [
        "train",
        f"target={target}",
        f"data={write(tmp_path / 'd.jsonl')}",
        f"output_dir={tmp_path / 'o'}",
        *TINY,
    ]
    (tmp_path / "o" / ".features").mkdir(parents=True)  # of the first run, which has no checkpoint yet
    with locked(tmp_path / "o"):
        code, _, error = run(capsys, command)
    assert code == 1 and "is being written by another process" in error
    assert (tmp_path / "o" / ".features").is_dir()


def test_features_of_the_same_run_are_kept_until_it_is_done(tmp_path):
    """A run that was interrupted before its first checkpoint begins again, but its features are there."""
    args, run = SimpleNamespace(output_dir=str(tmp_path)), {"settings": {"seed": 1}, "files": {}}
    for now, kept in ((run, False), (run, True), ({**run, "settings": {"seed": 2}}, False)):
        (tmp_path / ".features").mkdir(exist_ok=True)
        with run_file.run_in(args, lambda now=now: now, None):
            assert (tmp_path / ".features").is_dir() == kept
    (tmp_path / ".features").mkdir()
    (tmp_path / "run.json").write_text("{")
    with run_file.run_in(args, lambda: run, None):
        assert not (tmp_path / ".features").exists()


def test_a_run_keeps_its_choices_whoever_resumes_it(tmp_path):
    """Resumed with them given, by a recipe file, it forgot that they were its own: the first command was refused."""
    args, run = SimpleNamespace(output_dir=str(tmp_path)), {"settings": {"seed": 1}, "chosen": {"seed": 1}}
    with run_file.run_in(args, lambda: run, None):
        pass
    with run_file.run_in(args, lambda: run | {"chosen": {}}, str(tmp_path / "checkpoint-2")):
        assert run_file.read_run(tmp_path) == run


def test_a_run_that_ends_at_a_number_that_is_none_keeps_the_drafter_before(used, capsys, monkeypatch):
    from dflash_hf.training import trainer

    output, command, _ = used
    good = (output / "model.safetensors").read_bytes()
    forward = trainer.target_forward

    def broken(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.features *= float("inf")
        return output

    monkeypatch.setattr(trainer, "target_forward", broken)
    code, _, error = run(capsys, command, "resume_from_checkpoint=auto", "max_steps=4")
    assert code == 1 and error.startswith(
        "dflash train: error: Step 3: the loss is nan. The target's features of layer 0"
    )
    assert f"The last good checkpoint is {output / 'checkpoint-2'}" in error
    assert (output / "model.safetensors").read_bytes() == good
