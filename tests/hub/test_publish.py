"""Publishing, against a stand-in of the Hub: one commit, or a clear error and a rerun that completes it."""

import json

import pytest
from huggingface_hub import ModelCard
from support.hub_stand_in import stand_in
from support.pairs import make_draft

from dflash_hf.cli import main
from dflash_hf.hub.card import CardFacts
from dflash_hf.hub.publish import PublishError, publish


REPO = "someone/my-DFlash"
FACTS = CardFacts("someone/target", license="mit")


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    with stand_in(monkeypatch) as hub:
        yield hub


@pytest.fixture
def folder(target, tmp_path):
    folder = tmp_path / "draft"
    make_draft(target, target_layer_ids=[0, 1, 2]).save_pretrained(folder)
    (folder / "checkpoint-10").mkdir()
    for name in ("training_args.bin", "notes.txt", "checkpoint-10/model.safetensors", "stale-model.safetensors"):
        (folder / name).write_bytes(b"private")
    return folder


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_everything_in_one_commit(folder, hub, target):
    before = contents(folder)
    result = publish(folder, REPO, facts=FACTS)
    assert contents(folder) == before, "nothing is written locally"
    (commit,) = hub.commits
    assert (commit["repo"], commit["message"], commit["deleted"]) == (REPO, "Upload DFlash drafter", [])
    assert commit["added"] == sorted(result.files) and result.url.endswith(f"/{REPO}/commit/{hub.sha()}")
    published = hub.files[REPO]
    code = {path.name for path in folder.glob("*_dflash.py")}
    assert set(published) - {".gitattributes"} == {
        "README.md",
        "config.json",
        "custom_generate/generate.py",
        "model.safetensors",
        *code,
    }
    assert set(result.left_out) == set(before) - set(published)
    for name, content in before.items():
        assert name in result.left_out or published[name] == content
    assert {name: len(published[name]) for name in result.files} == result.files
    card = ModelCard(published["README.md"].decode())
    assert card.data.base_model == "someone/target" and f'from_pretrained("{REPO}"' in card.text
    assert hub.private == {REPO: False}


def test_a_second_time_changes_only_what_changed(folder, hub, target):
    publish(folder, REPO, private=True, facts=FACTS)
    assert hub.private == {REPO: True}
    assert publish(folder, REPO, facts=FACTS).url is None
    assert len(hub.commits) == 1 and hub.uploads == 1
    # Now in shards: the single file of before would be read instead of them.
    (folder / "model.safetensors").unlink()
    make_draft(target, target_layer_ids=[0, 1, 2]).save_pretrained(folder, max_shard_size="40KB")
    assert publish(folder, REPO, facts=FACTS).url is not None
    assert hub.commits[1]["deleted"] == ["model.safetensors"]
    assert "model.safetensors.index.json" in hub.files[REPO] and "config.json" not in hub.commits[1]["added"]


def test_a_connection_that_drops_and_a_rerun(folder, hub):
    before = contents(folder)
    hub.drop = 100
    with pytest.raises(PublishError, match="interrupted .* run the same command again"):
        publish(folder, REPO, facts=FACTS)
    assert hub.commits == [] and contents(folder) == before
    # huggingface_hub itself gets over a short interruption; what arrived before is not sent again.
    hub.drop, hub.uploads = 1, 0
    publish(folder, REPO, facts=FACTS)
    assert hub.uploads == 2 and len(hub.commits) == 1
    assert hub.files[REPO]["model.safetensors"] == before["model.safetensors"]


def test_weights_that_arrived_are_not_sent_twice(folder, hub, monkeypatch):
    commit = "support.hub_stand_in.Handler.commit"
    with monkeypatch.context() as broken:
        broken.setattr(commit, lambda self, repo, lines: self.answer({"error": "Internal Error"}, 500))
        with pytest.raises(PublishError, match="answered 500"):
            publish(folder, REPO, facts=FACTS)
    assert hub.commits == [] and hub.uploads == 1
    publish(folder, REPO, facts=FACTS)
    assert len(hub.commits) == 1 and hub.uploads == 1


def test_refused(folder, hub, monkeypatch, tmp_path):
    before = contents(folder)
    with pytest.raises(PublishError, match="hf auth login"):
        publish(folder, REPO, facts=FACTS, token="hf_wrong")
    hub.reader = True
    with pytest.raises(PublishError, match="may not write there"):
        publish(folder, REPO, facts=FACTS)
    hub.files[REPO] = {}
    with pytest.raises(PublishError, match="may not write there"):
        publish(folder, REPO, facts=FACTS)
    hub.reader = False
    monkeypatch.setattr("dflash_hf.hub.publish.get_token", lambda: None)
    with pytest.raises(PublishError, match="no token of the Hub"):
        publish(folder, REPO, facts=FACTS)
    assert hub.commits == [] and contents(folder) == before


def test_no_network(folder, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # the discard port: closed
    with pytest.raises(PublishError, match="interrupted"):
        publish(folder, REPO, facts=FACTS)


def test_a_dry_run_needs_no_network(folder, monkeypatch):
    monkeypatch.setattr("dflash_hf.hub.publish.HfApi", None)
    monkeypatch.setattr("dflash_hf.hub.publish.get_token", lambda: None)
    result = publish(folder, REPO, dry_run=True, facts=FACTS)
    assert result.url is None and "README.md" in result.files and "training_args.bin" in result.left_out
    assert result.files["model.safetensors"] == (folder / "model.safetensors").stat().st_size


def test_what_must_not_be_published(folder):
    with pytest.raises(PublishError, match="is not the id of a repository"):
        publish(folder, "a/b/c", dry_run=True, facts=FACTS)
    with pytest.raises(PublishError, match="write base_model into"):
        publish(folder, REPO, dry_run=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "block_size": 9}))
    with pytest.raises(PublishError, match="cannot be published as it is:(.|\n)*block_size"):
        publish(folder, REPO, dry_run=True, facts=FACTS)
    # What one engine alone refuses is said, and its launch line left out.
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    result = publish(folder, REPO, dry_run=True, facts=FACTS)
    assert [finding.key for finding in result.findings] == ["hidden_act"]
    assert "SGLang" not in str(result.card)


def test_ones_own_card_is_taken_as_it_is(folder):
    own = "---\nbase_model: someone/target\n---\n# Mine\n"
    (folder / "README.md").write_text(own)
    assert str(publish(folder, REPO, dry_run=True).card) == own
    assert "# my-DFlash" in str(publish(folder, REPO, dry_run=True, facts=FACTS).card)
    for wrong, message in (
        ("---\nbase_model: [a\n---\n", "is not valid"),
        ("---\nbase_model: a b\n---\n", "is not valid"),
        ("# no metadata\n", "names no base_model"),
    ):
        (folder / "README.md").write_text(wrong)
        with pytest.raises(PublishError, match=message):
            publish(folder, REPO, dry_run=True)


def test_the_model_itself_pushes_its_code_too(target, hub, tmp_path):
    """`push_to_hub=True` uploads what is newer than the call; the code is copied just before."""
    draft = make_draft(target)
    for _ in range(2):
        draft.save_pretrained(tmp_path / "draft", push_to_hub=True, repo_id=REPO)
        assert {"modeling_dflash.py", "custom_generate/generate.py", "model.safetensors"} <= set(hub.files[REPO])
        hub.files[REPO].clear()
    draft.push_to_hub(REPO)
    assert {"modeling_dflash.py", "custom_generate/generate.py", "model.safetensors"} <= set(hub.files[REPO])


def test_the_command(folder, hub, capsys):
    def call(*words):
        code = main(["publish", str(folder), *words])
        printed = capsys.readouterr()
        return code, printed.out or printed.err

    code, text = call(REPO, "--dry-run")
    assert code == 1 and text.startswith("dflash publish: error: ") and "base_model" in text
    code, text = call(REPO, "--dry-run", "--base-model", "someone/target", "--dataset", "someone/data")
    assert code == 0 and "base_model: someone/target" in text and "- someone/data" in text
    assert "model.safetensors" in text and "not uploaded: " in text and "Dry run: nothing was sent" in text
    assert hub.commits == []
    code, text = call(REPO, "--private", "--base-model", "someone/target")
    assert code == 0 and text.splitlines()[-1].endswith(f"/commit/{hub.sha()}") and hub.private == {REPO: True}
    code, text = call(REPO, "--base-model", "someone/target")
    assert code == 0 and "no new commit" in text
