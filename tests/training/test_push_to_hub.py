"""`push_to_hub` of a run, against a stand-in of the Hub: what arrives, and what an interruption leaves."""

import json
import threading

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load
from support.hub_stand_in import stand_in
from support.pairs import make_draft, make_target
from support.rows import counting_rows
from support.runs import BLOCK, TINY_RECIPE, as_options, make_trainer

from dflash_hf.cli import main
from dflash_hf.hub.commits import PublishError
from dflash_hf.hub.publish import publish
from dflash_hf.training import publishing
from dflash_hf.training.adapters import add_adapter, merged


REPO = "someone/my-DFlash"
END = "End of training"
PUBLISHED = {".gitattributes", "README.md", "config.json", "custom_generate/generate.py", "model.safetensors"}


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    with stand_in(monkeypatch) as hub:
        yield hub


@pytest.fixture
def warnings(monkeypatch):
    """What the log warns of."""
    lines = []
    monkeypatch.setattr(publishing.logger, "warning", lines.append)
    return lines


def trainer_of(folder, draft=None, name="someone/target", **options):
    """A trainer of two steps, each of which is saved and published."""
    target = make_target()
    target.name_or_path = name
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    pushing = {"push_to_hub": True, "hub_model_id": REPO, "hub_always_push": True}
    return make_trainer(folder, target, counting_rows(4), draft, **{**saving, **pushing, **options})


def messages(hub):
    return [commit["message"] for commit in hub.commits]


def step(number):
    return f"Training in progress, step {number}"


def check_arrived(hub, draft, revision="", steps=2):
    """The repository holds the whole drafter with its card, its weights, and nothing else."""
    files = hub.files[REPO + revision]
    code = {name for name in files if name.endswith("_dflash.py")}
    assert set(files) == PUBLISHED | code and "modeling_dflash.py" in code
    weights = load(files["model.safetensors"])
    assert weights.keys() == draft.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in draft.state_dict().items())
    card = ModelCard(files["README.md"].decode())
    assert card.data.base_model == "someone/target" and f"| optimizer_steps | {steps} |" in card.text
    assert not any(b"hf_right" in content for content in files.values())


def test_each_save_and_the_end_are_published(hub, warnings, tmp_path):
    trainer = trainer_of(tmp_path, save_total_limit=1, hub_token="hf_right", hub_card={"data": "Nine walks."})
    assert set(hub.files[REPO]) == {".gitattributes"} and not (tmp_path / ".hub").exists()
    trainer.train()
    assert messages(hub) == [step(1), step(2)]
    assert hub.commits[1]["added"] == ["README.md", "model.safetensors"]
    check_arrived(hub, trainer.draft)
    publication = trainer.push_to_hub(license="mit")
    assert messages(hub)[2:] == [END] and publication.url.endswith(hub.sha())
    assert hub.commits[2]["added"] == ["README.md"]  # only the licence is new
    card = ModelCard(hub.files[REPO]["README.md"].decode())
    assert card.data.license == "mit" and "Nine walks." in card.text
    assert trainer.push_to_hub(license="mit").url is None and len(hub.commits) == 3  # nothing is sent twice
    assert warnings == [] and not list((tmp_path / ".hub").glob("*"))


@pytest.mark.parametrize("failing", [{1}, {2}])
def test_next_push_brings_what_failed(failing, hub, warnings, tmp_path):
    hub.failing_commits = failing
    trainer = trainer_of(tmp_path)
    trainer.train()
    (number,) = failing
    (line,) = warnings
    assert trainer.state.global_step == 2 and messages(hub) == [step(3 - number)]
    assert f"checkpoint-{number} was not published in {REPO}: the Hub answered 500" in line and "\n" not in line
    assert line.endswith("publishes everything that is missing.")
    trainer.push_to_hub()
    check_arrived(hub, trainer.draft)
    assert hub.uploads == 2  # the weights of each step once


def test_interrupted_last_push_is_finished_by_publish(hub, warnings, tmp_path):
    hub.drop = 1000
    trainer = trainer_of(tmp_path)
    trainer.train()
    assert len(warnings) == 2 and "the connection was interrupted" in warnings[0] and hub.commits == []
    with pytest.raises(PublishError, match="interrupted .*. The drafter is complete: `dflash publish .* uploads"):
        trainer.push_to_hub()
    hub.drop = 0
    publish(tmp_path, REPO)
    check_arrived(hub, trainer.draft)


def test_process_is_changed_in_the_training_thread_only(hub, monkeypatch, tmp_path):
    """Loading weights sets torch's default dtype for the process: a step meanwhile would be another."""
    threads = {}
    for name in ("prepare", "upload"):
        function = getattr(publishing, name)

        def record(*arguments, name=name, function=function):
            threads.setdefault(name, []).append(threading.current_thread() is threading.main_thread())
            return function(*arguments)

        monkeypatch.setattr(publishing, name, record)
    trainer_of(tmp_path).train()
    assert threads == {"prepare": [True] * 3, "upload": [False] * 2}


@pytest.mark.parametrize("always", [False, True])
def test_slow_upload_skips_saves(always, hub, monkeypatch, tmp_path):
    """As upstream: with `hub_always_push` they wait instead."""
    uploading = threading.Event()
    upload = publishing.upload

    def wait(*arguments):
        assert uploading.wait(20)
        return upload(*arguments)

    monkeypatch.setattr(publishing, "upload", wait)
    trainer = trainer_of(tmp_path, hub_always_push=always)
    monkeypatch.setattr(trainer.callback_handler, "on_train_end", lambda *_: uploading.set())
    trainer.train()
    assert messages(hub) == ([step(1), step(2)] if always else [step(1)])


def test_strategy_end_publishes_once(hub, tmp_path):
    trainer = trainer_of(tmp_path, hub_strategy="end")
    trainer.train()
    assert messages(hub) == []
    trainer.save_model()
    assert messages(hub) == ["Model save"]
    check_arrived(hub, trainer.draft)


def test_push_needs_no_argument_of_the_run(hub, tmp_path):
    """The repository of `output_dir`'s name, of the token's user."""
    trainer = trainer_of(tmp_path / "my-DFlash", push_to_hub=False, hub_model_id=None)
    trainer.train()
    assert hub.files == {}
    trainer.push_to_hub(private=True)
    check_arrived(hub, trainer.draft)
    assert hub.private == {REPO: True} and messages(hub) == [END]


def test_branch_is_published(hub, tmp_path):
    trainer = trainer_of(tmp_path, hub_revision="next", max_steps=1)
    trainer.train()
    check_arrived(hub, trainer.draft, "@next", steps=1)
    assert set(hub.files[REPO]) == {".gitattributes"}
    trainer.push_to_hub(revision="release")
    check_arrived(hub, trainer.draft, "@release", steps=1)


def test_adapter_is_published_merged(hub, warnings, tmp_path):
    pytest.importorskip("peft")
    torch.manual_seed(0)
    draft = add_adapter(make_draft(make_target(), block_size=BLOCK), {"r": 2, "init_lora_weights": False})
    trainer = trainer_of(tmp_path, draft, max_steps=1)
    trainer.train()
    assert messages(hub) == [step(1)] and warnings == []
    expected = merged(trainer.model)
    check_arrived(hub, expected, steps=1)
    trainer.push_to_hub(license="mit")
    check_arrived(hub, expected, steps=1)


def test_files_of_the_user_are_published(hub, tmp_path):
    (tmp_path / "LICENSE").write_text("Mine.")
    (tmp_path / "README.md").write_text("---\nbase_model: someone/target\n---\nBy hand.\n")
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.train()
    assert hub.files[REPO]["LICENSE"] == b"Mine." and hub.files[REPO]["README.md"].endswith(b"By hand.\n")
    with pytest.raises(PublishError, match="README.md was written by hand .* change its metadata"):
        trainer.push_to_hub(license="mit")
    with pytest.raises(ValueError, match="README.md was written by hand"):
        trainer.create_model_card()


def test_card_is_written_beside_the_drafter(tmp_path):
    trainer = trainer_of(tmp_path, push_to_hub=False, save_strategy="no")
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(license="mit")
    card = ModelCard((tmp_path / "README.md").read_text())
    assert card.data.license == "mit" and REPO in card.text


def train(capsys, target, output, *words):
    """A run of `dflash train` that publishes; its status and what it prints."""
    rows = [
        {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"{i}, as you wish"}]}
        for i in range(12)
    ]
    data = output.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = (
        *TINY_RECIPE,
        "max_length=64",
        "store_rows=0",
        "save_steps=1",
        "draft_vocab_size=64",
        "share_head=true",
    )
    settings += (f"target={target}", f"data={data}", f"output_dir={output}", "push_to_hub=true")
    options = as_options([*settings, f"hub_model_id={REPO}", "hub_always_push=true", *words])
    code = main(["train", "--preset", "cpu", *options])
    return code, capsys.readouterr()


@pytest.mark.usefixtures("own_cache")
def test_command_publishes_what_it_saves(hub, folder, tmp_path, capsys):
    """Checkpoints have the reduced vocabulary of training; the finished drafter has the target's head."""
    pytest.importorskip("datasets")
    output = tmp_path / "drafter"
    card = ("hub_card.base_model=someone/target", "hub_card.license=mit")
    code, printed = train(capsys, folder, output, *card)
    assert code == 0, printed.err
    assert messages(hub) == [step(1), step(2), END]
    (line,) = [line for line in printed.out.splitlines() if line.startswith("published ")]
    assert line.endswith(f"{REPO}/commit/{hub.sha()}")
    files = hub.files[REPO]
    assert files["model.safetensors"] == (output / "model.safetensors").read_bytes()
    assert "lm_head.weight" not in load(files["model.safetensors"])
    card = ModelCard(files["README.md"].decode())
    assert card.data.license == "mit" and "| optimizer_steps | 2 |" in card.text
    # The same once more, while the Hub is down: the drafter is there, and the error says what to do.
    hub.failing_commits = set(range(4, 9))
    again = ("overwrite_output_dir=true", "max_steps=1", "save_strategy=no")
    code, printed = train(capsys, folder, output, "hub_card.base_model=someone/target", *again)
    assert code == 1 and f"`dflash publish {output} {REPO}` uploads what is missing" in printed.err
    hub.failing_commits = set()
    assert main(["publish", str(output), REPO]) == 0
    assert hub.files[REPO]["model.safetensors"] == (output / "model.safetensors").read_bytes()


def with_files(**files):
    def change(hub, patch):
        hub.files[REPO] = {name.replace("_", "."): content for name, content in files.items()}
        hub.private[REPO] = False

    return change


OTHER_MODEL = with_files(config_json=json.dumps({"model_type": "llama"}).encode(), model_safetensors=b"")
REFUSALS = {
    # what the Hub has, options, what the error names
    "no target": (None, {"name": "tests"}, "this one was loaded from a folder: set hub_card="),
    "name": (None, {"hub_model_id": "a/b--c"}, "hub_model_id='a/b--c' is not a repository id"),
    "public": (with_files(), {"hub_private_repo": True}, "exists and is public"),
    "other model": (OTHER_MODEL, {}, "holds another model"),
    "card": (with_files(README_md=b"By hand"), {}, "README.md that was written or edited by hand"),
    "token": (None, {"hub_token": "hf_wrong"}, "the Hub answered 401"),
    "fact": (None, {"hub_card": {"licence": "mit"}}, "hub_card has an unknown fact 'licence'; a card has base_model,"),
    "type": (None, {"hub_card": {"datasets": "a/b"}}, "hub_card: datasets='a/b' must be of type list"),
    "repository": (None, {"hub_card": {"base_model": "a b"}}, "hub_card: 'a b' is not a repository id"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_comes_before_training(case, hub, tmp_path, monkeypatch):
    change, options, message = REFUSALS[case]
    if case == "no target":
        options = {"name": str(tmp_path)}
    if change is not None:
        change(hub, monkeypatch)
    before = json.dumps({name: sorted(files) for name, files in hub.files.items()})
    with pytest.raises((PublishError, ValueError), match=message):
        trainer_of(tmp_path, **options)
    assert hub.commits == [] and json.dumps({name: sorted(files) for name, files in hub.files.items()}) == before
    assert not any(tmp_path.iterdir())
