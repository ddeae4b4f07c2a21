"""Publishing, against a stand-in of the Hub: one commit, or a clear error and a rerun that completes it."""

import json
import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from support.hub_stand_in import stand_in
from support.llama_cpp import write_target
from support.pairs import make_draft, make_target

from dflash_hf import __version__
from dflash_hf.cli import main
from dflash_hf.evaluation.measure import EvalReport, MethodReport
from dflash_hf.hub.card import CardFacts
from dflash_hf.hub.check import check
from dflash_hf.hub.code_only import publish_code
from dflash_hf.hub.publish import PublishError, publish


REPO = "someone/my-DFlash"
FACTS = CardFacts("someone/target", license="mit")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
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


def test_code_that_is_named_but_not_there_is_added(folder, tmp_path):
    publish(folder, REPO, dry_run=True, facts=FACTS, write_to=tmp_path / "with")
    for path in (*folder.glob("*_dflash.py"), folder / "custom_generate" / "generate.py"):
        path.unlink()
    assert any(finding.key.endswith(".py") for finding in check(folder))
    result = publish(folder, REPO, dry_run=True, facts=FACTS, write_to=tmp_path / "without")
    assert contents(tmp_path / "without") == contents(tmp_path / "with") and result.findings == []
    # Code of another version is not mixed with today's.
    (folder / "modeling_dflash.py").write_text("class DFlashDraftModel: ...\n", encoding="utf-8")
    result = publish(folder, REPO, dry_run=True, facts=FACTS)
    assert "configuration_dflash.py" not in result.files and "trust_remote_code" not in result.card.text
    assert [finding.key for finding in result.findings] == ["configuration_dflash.py"]


def test_a_public_repository_does_not_become_private_by_itself(folder, hub):
    """`--private` uploaded to an existing public repository, in public and without a word."""
    publish(folder, REPO, facts=FACTS)
    with pytest.raises(PublishError, match="exists and is public"):
        publish(folder, REPO, private=True, facts=FACTS)
    assert len(hub.commits) == 1


def test_a_second_time_changes_only_what_changed(folder, hub, target):
    """Engines would read an old file together with the new weights, and the card an old picture."""
    old = ("mask_embedding.pt", "eval_report.png")
    torch.save({"embedding": torch.ones(target.config.hidden_size)}, folder / old[0])
    (folder / old[1]).write_bytes(b"png")
    publish(folder, REPO, private=True, facts=FACTS)
    assert hub.private == {REPO: True} and {*old} <= set(hub.files[REPO])
    uploads = hub.uploads
    assert publish(folder, REPO, facts=FACTS).url is None
    assert len(hub.commits) == 1 and hub.uploads == uploads
    # Now in shards: the single file of before would be read instead of them.
    for name in (*old, "model.safetensors"):
        (folder / name).unlink()
    make_draft(target, target_layer_ids=[0, 1, 2]).save_pretrained(folder, max_shard_size="40KB")
    assert publish(folder, REPO, facts=FACTS).url is not None
    assert hub.commits[1]["deleted"] == sorted((*old, "model.safetensors"))
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


REFUSALS = {
    "wrong token": (lambda hub, patch: patch.setenv("HF_TOKEN", "hf_wrong"), "hf auth login"),
    "reader": (lambda hub, patch: setattr(hub, "reader", True), "may not write there"),
    "no token": (lambda hub, patch: patch.setattr("dflash_hf.hub.publish.get_token", lambda: None), "no Hub token"),
    "no network": (
        lambda hub, patch: patch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9"),
        "interrupted",
    ),
    "card": (lambda hub, patch: patch.setattr(ModelCard, "validate", refuse), "the Hub rejected it .invalid license"),
}


def refuse(self, repo_type=None):
    raise ValueError("invalid license")


@pytest.mark.parametrize("case", REFUSALS)
def test_the_hub_s_refusals_are_explained(case, folder, hub, monkeypatch):
    before, (change, message) = contents(folder), REFUSALS[case]
    change(hub, monkeypatch)
    with pytest.raises(PublishError, match=message):
        publish(folder, REPO, facts=FACTS)
    assert hub.commits == [] and hub.files == {} and contents(folder) == before


def test_a_dry_run_needs_no_network(folder, monkeypatch):
    monkeypatch.setattr("dflash_hf.hub.publish.HfApi", None)
    monkeypatch.setattr("dflash_hf.hub.publish.get_token", lambda: None)
    result = publish(folder, REPO, dry_run=True, facts=FACTS)
    assert result.url is None and "README.md" in result.files and "training_args.bin" in result.left_out
    assert result.files["model.safetensors"] == (folder / "model.safetensors").stat().st_size


def test_a_folder_gets_what_the_hub_would(folder, tmp_path):
    there = tmp_path / "mirror"
    (there / "data").mkdir(parents=True)
    (there / "data" / "mine").touch()
    result = publish(folder, REPO, dry_run=True, facts=FACTS, write_to=there)
    written = {path.relative_to(there).as_posix(): path.stat().st_size for path in there.rglob("*") if path.is_file()}
    assert written == {**result.files, "data/mine": 0}
    assert (there / "README.md").read_text(encoding="utf-8") == str(result.card)
    assert publish(there, REPO, dry_run=True).files == result.files  # it can be published itself


def test_what_must_not_be_published(folder, target):
    with pytest.raises(PublishError, match="repo='a/b--c' is not a repository id.* no '--'"):
        publish(folder, "a/b--c", dry_run=True, facts=FACTS)
    with pytest.raises(PublishError, match="write base_model into"):
        publish(folder, REPO, dry_run=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "block_size": 9}))
    with pytest.raises(PublishError, match="cannot be published as it is:(.|\n)*block_size"):
        publish(folder, REPO, dry_run=True, facts=FACTS)
    draft = make_draft(target, target_layer_ids=[0, 1, 2])
    draft.fc.weight.data[0, 0] = float("nan")
    draft.save_pretrained(folder)
    with pytest.raises(PublishError, match="weights: 1 of [0-9,]+ weights are not finite .* in fc.weight"):
        publish(folder, REPO, dry_run=True)
    make_draft(target, target_layer_ids=[0, 1, 2]).save_pretrained(folder)
    # What one engine alone refuses is said, and its launch line left out.
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    result = publish(folder, REPO, dry_run=True, facts=FACTS)
    assert [finding.key for finding in result.findings] == ["hidden_act"]
    assert "SGLang" not in str(result.card)


WRONG_CARDS = {
    "---\nbase_model: [a\n---\n": "is not valid",
    "---\nbase_model: a b\n---\n": "is not valid",
    "# no metadata\n": "names no base_model",
    "---\nbase_model: a/b\nlicense: xyz\n---\n": "license='xyz' is not an identifier",
}


def test_a_card_may_have_several_licenses(folder):
    (folder / "README.md").write_text("---\nbase_model: someone/target\nlicense: [mit, apache-2.0]\n---\n# Mine\n")
    assert publish(folder, REPO, dry_run=True).card.data.license == ["mit", "apache-2.0"]


@pytest.mark.parametrize("card", WRONG_CARDS)
def test_a_card_with_wrong_metadata_is_refused(card, folder):
    (folder / "README.md").write_text(card)
    with pytest.raises(PublishError, match=WRONG_CARDS[card]):
        publish(folder, REPO, dry_run=True)
    assert "# my-DFlash" in str(publish(folder, REPO, dry_run=True, facts=FACTS).card)


def test_a_card_written_by_hand_is_kept(folder, tmp_path, capsys):
    """Any option of the card replaced the whole of it with the template, without a word."""
    own = "---\nlanguage: en\nbase_model: someone/target\n---\n# Mine\n\nBy hand.\n"
    (folder / "README.md").write_text(own)
    words, target = ["publish", str(folder), REPO, "--dry-run"], ["--base-model", "someone/target"]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "README.md").read_text() == own
    assert main([*words, "--license", "mit"]) == 2
    assert "written by hand and is taken as it is: instead of --license, change its" in capsys.readouterr().err
    # A rendered card is rendered anew, until it is edited.
    (folder / "README.md").unlink()
    for license in ("mit", "apache-2.0"):
        assert main([*words, *target, "--license", license, "--output", str(folder)]) == 0
        assert f"license: {license}" in (folder / "README.md").read_text()
    (folder / "README.md").write_text((folder / "README.md").read_text().replace("# my-DFlash", "# Edited"))
    assert main([*words, *target]) == 2


def test_another_models_files_are_not_replaced(folder, target, tmp_path):
    """`--output` of another model's folder replaced its configuration and weights."""
    there = tmp_path / "other"
    make_draft(target, target_layer_ids=[0, 1]).save_pretrained(there)
    before = contents(there)
    with pytest.raises(PublishError, match="config.json exists, and would be replaced; remove it, or name a new"):
        publish(folder, REPO, dry_run=True, facts=FACTS, write_to=there)
    assert contents(there) == before
    # What an earlier dry run wrote may be written again, with another card.
    for facts in (FACTS, CardFacts("someone/target")):
        publish(folder, REPO, dry_run=True, facts=facts, write_to=tmp_path / "mirror")
    assert "mit" not in (tmp_path / "mirror" / "README.md").read_text()


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
    slower = {"target": MethodReport(9.0, 1.0, [9.0], 9, 9, 1), "dflash": MethodReport(5.0, 0.56, [5.0], 9, 9, 1)}
    EvalReport(slower, [[1]], [[1]], 8).save(folder / "eval_report.json")
    main(["publish", str(folder), REPO, "--dry-run", "--base-model", "someone/target"])
    assert "this drafter slows the target down: 0.56x" in capsys.readouterr().err
    (folder / "eval_report.json").unlink()
    code, text = call(REPO, "--private", "--base-model", "someone/target")
    assert code == 0 and text.splitlines()[-1].endswith(f"/commit/{hub.sha()}") and hub.private == {REPO: True}
    code, text = call(REPO, "--base-model", "someone/target")
    assert code == 0 and "no new commit" in text


# ------------------------------------------------------------------------------------------------------------- careful


def change(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


def test_a_link_out_of_the_folder_is_not_followed(folder, tmp_path):
    """`LICENSE -> /etc/passwd` was listed among the files to upload."""
    (tmp_path / "secret").write_text("secret")
    (folder / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(PublishError, match="LICENSE of .* is a link to .*secret, outside the folder"):
        publish(folder, REPO, dry_run=True, facts=FACTS)
    (folder / "LICENSE").unlink()
    (folder / "custom_generate" / "generate.py").rename(tmp_path / "generate.py")
    (folder / "custom_generate").rmdir()
    (folder / "custom_generate").symlink_to(tmp_path)
    result = publish(folder, REPO, dry_run=True, facts=FACTS)
    assert "custom_generate/generate.py" not in result.files
    (folder / "LICENSE.txt").write_text("MIT")
    (folder / "LICENSE").symlink_to("LICENSE.txt")  # inside: what it leads to would be uploaded anyway
    assert "LICENSE" in publish(folder, REPO, dry_run=True, facts=FACTS).files


def test_only_code_that_is_the_drafters_is_uploaded(folder):
    """`auto_map` named any file, and it was uploaded."""
    (folder / "secret.py").write_text("TOKEN = 1\n")
    (folder / "own.py").write_text("class Own:\n    pass\n")
    before = json.loads((folder / "config.json").read_text())["auto_map"]
    change(folder, auto_map={**before, "AutoTokenizer": "secret.TOKEN", "AutoProcessor": "own.Own"})
    result = publish(folder, REPO, dry_run=True, facts=FACTS)
    assert "secret.py" in result.left_out and "own.py" in result.files


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"auto_map": {"AutoModel": "evil/code--modeling.Model"}},
            "'evil/code--modeling.Model' is not a file beside the weights",
        ),
        ({"auto_map": {"AutoModel": "../x.Model"}}, "is not a file beside"),
        ({"quantization_config": {"quant_method": "magic"}}, "quantization_config: quant_method 'magic' is unknown"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
        ({"attention_dropout": 5.0}, "attention_dropout"),
        ({"attention_dropout": float("nan")}, "attention_dropout"),
        ({"target_layer_ids": list(range(100_000))}, "target_layer_ids"),
        ({"block_size": 9, "mask_token_id": 10**9}, "and .* more: `dflash check"),
    ],
)
def test_a_folder_that_no_reader_should_be_given_is_refused(keys, message, folder):
    change(folder, **keys)
    with pytest.raises(PublishError, match=message) as refused:
        publish(folder, REPO, dry_run=True, facts=FACTS)
    assert len(str(refused.value)) < 500 and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--license Apache_2.0", "license='Apache 2.0' is not an identifier of the Hub; the nearest are apache-2.0,"),
        ("--license MIT", "license='MIT' is not an identifier of the Hub; the nearest are mit. For any"),
        ("--license xyz", "license='xyz' is not an identifier of the Hub. For any other license: --license other"),
        ("--license other", "license=other needs a name: --license-name NAME"),
        ("--license-name mine", "license_name='mine' with license_link=None needs a license: --license other"),
        ("--license other --license-name mine --license-link LICENSE", "license_link='LICENSE' must be a URL"),
    ],
)
def test_a_license_the_hub_rejects_is_refused(options, message, folder, capsys):
    """A dry run passed, and the Hub rejected the card."""
    words = ["publish", str(folder), REPO, "--dry-run", "--base-model", "someone/target"]
    assert main([*words, *(word.replace("_", " ") for word in options.split())]) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1


def test_a_license_of_its_own_is_named_and_linked(folder, capsys):
    (folder / "LICENSE").write_text("Mine.")
    license = ("--license", "other", "--license-name", "mine-1.0", "--license-link", "LICENSE")
    words = ["publish", str(folder), REPO, "--dry-run", "--base-model", "someone/target", "--output", str(folder)]
    assert main([*words, *license]) == 0
    assert "license: other\nlicense_name: mine-1.0\nlicense_link: LICENSE\n" in capsys.readouterr().out
    assert "## Licence\n\n[mine-1.0](LICENSE)\n" in (folder / "README.md").read_text()


def test_an_interrupted_copy_keeps_the_weights(folder, monkeypatch):
    """`--output` may be the folder itself."""
    before = (folder / "model.safetensors").read_bytes()

    def interrupted(source, path):
        Path(path).write_bytes(Path(source).read_bytes()[:9])
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copy2", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publish(folder, REPO, dry_run=True, facts=FACTS, write_to=folder)
    assert (folder / "model.safetensors").read_bytes() == before


def test_what_stays_at_home_is_one_line(folder, capsys):
    """It was 73 kB for a folder with 60 checkpoints."""
    for step in range(60):
        checkpoint = folder / f"checkpoint-{1000 + step}"
        checkpoint.mkdir()
        for i in range(9):
            (checkpoint / f"file-{i}").touch()
    assert main(["publish", str(folder), REPO, "--dry-run", "--base-model", "someone/target"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "checkpoint-10" in line]
    assert line.startswith("not uploaded: ") and len(line) <= 300
    assert "checkpoint-1000/ (9 files)" in line and "more, 544 files in all" in line


OLD = {"modeling_dflash.py": b"class DFlashDraftModel: ...", "plan_dflash.py": b"old"}


def test_code_only_replaces_the_code_alone(folder, hub, capsys):
    """A file beside the weights cannot be mended: transformers 5.24 broke every drafter published before it."""
    publish(folder, REPO, facts=FACTS)
    config = json.loads(hub.files[REPO]["config.json"])
    del config["dflash_hf_version"]  # as 0.1 wrote it
    hub.files[REPO].update({**OLD, "config.json": json.dumps(config, indent=2).encode()})
    before = dict(hub.files[REPO])
    assert main(["check", REPO]) == 0 and "transformers 5.24 fails" in capsys.readouterr().out
    assert main(["publish", "--code-only", REPO, "--dry-run"]) == 0 and hub.pulls == []
    dry = capsys.readouterr().out
    assert main(["publish", "--code-only", REPO]) == 0
    printed = capsys.readouterr().out
    assert "+ modeling_dflash.py" in dry and "- plan_dflash.py" in dry and printed.endswith("/discussions/1\n")
    (pull,) = hub.pulls
    assert hub.files[REPO] == before and len(hub.commits) == 1
    assert pull["added"] == ["config.json", "modeling_dflash.py"] and pull["deleted"] == ["plan_dflash.py"]
    assert pull["content"]["modeling_dflash.py"] == (folder / "modeling_dflash.py").read_bytes()
    config = json.loads(pull["content"]["config.json"])
    assert config.pop("dflash_hf_version") == __version__ and config == json.loads(before["config.json"])
    # Once it is merged there is nothing to do.
    hub.files[REPO] = {name: data for name, data in before.items() if name not in pull["deleted"]} | pull["content"]
    assert main(["check", REPO]) == 0 and "No findings" in capsys.readouterr().out
    assert main(["publish", "--code-only", REPO]) == 0 and "no pull request" in capsys.readouterr().out
    assert len(hub.pulls) == 1


CODE_ERRORS = {
    "no repository": (lambda files: files.clear(), "names no code of this package"),
    "other code": (
        lambda files: files.update({"config.json": b'{"auto_map": {"AutoModel": "x.Y"}}'}),
        "names no code",
    ),
    "newer code": (lambda files: _edit(files, dflash_hf_version="99.1"), "has code of 99.1; this is"),
    "unreadable": (lambda files: _edit(files, num_attention_heads=0), "other code does not mend: config.json"),
}


def _edit(files, **keys):
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), **keys}).encode()


@pytest.mark.parametrize("case", CODE_ERRORS)
def test_code_only_refuses_what_it_cannot_mend(case, folder, hub):
    change, message = CODE_ERRORS[case]
    publish(folder, REPO, facts=FACTS)
    change(hub.files[REPO])
    with pytest.raises(PublishError, match=message):
        publish_code(REPO)
    with pytest.raises(PublishError, match="someone/nothing was not published"):
        publish_code("someone/nothing")
    assert hub.pulls == []


def test_code_only_takes_no_other_option(capsys):
    for words in (["--private"], ["folder"], ["--license", "mit"]):
        assert main(["publish", "--code-only", REPO, *words]) == 2
        assert f"leave out {words[0]}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["publish", "folder"])


def test_llama_cpp_s_file_lies_beside_the_weights(hub, tmp_path):
    """llama.cpp looks for `dflash-*.gguf` in a repository; the card has its command, with the whole block."""
    pytest.importorskip("gguf")
    target = make_target(vocab_size=16)
    file = write_target(target, tmp_path / "target.gguf")
    folder = tmp_path / "draft"
    make_draft(target, target_layer_ids=[0, 1, 2]).save_pretrained(folder)
    publish(folder, REPO, facts=FACTS)
    assert "llama" not in hub.files[REPO]["README.md"].decode()
    publish(folder, REPO, facts=FACTS, gguf_target=file)
    name = "dflash-my-dflash.gguf"
    assert hub.files[REPO][name] == (folder / name).read_bytes()
    line = f"llama-server -m target.gguf -hfd {REPO} --spec-type draft-dflash --spec-draft-n-max 3"
    assert line in hub.files[REPO]["README.md"].decode()
    # Once there it goes along, as long as it is not older than the weights.
    assert publish(folder, REPO, facts=FACTS, write_to=tmp_path / "copy").url is None
    publish(tmp_path / "copy", REPO, dry_run=True, facts=FACTS)
    os.utime(folder / "model.safetensors", (2e9, 2e9))
    with pytest.raises(PublishError, match=f"{name} is older than the weights"):
        publish(folder, REPO, facts=FACTS)
    # Also under another name: the file of the first one was uploaded with the weights of before.
    os.utime(folder / "model.safetensors", ((folder / name).stat().st_mtime + 0.001,) * 2)
    with pytest.raises(PublishError, match=f"{name} is older than the weights"):
        publish(folder, "someone/second", facts=FACTS, gguf_target=file)
    (folder / "dflash-second.gguf").unlink()
    (folder / name).write_bytes(b"GGUF")
    with pytest.raises(PublishError, match="not a complete GGUF file"):
        publish(folder, REPO, facts=FACTS)
    (folder / name).unlink()
    assert publish(folder, REPO, facts=FACTS).url is not None and name not in hub.files[REPO]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_target_layers": 9}))
    with pytest.raises(PublishError, match="belongs to another target"):
        publish(folder, REPO, facts=FACTS, gguf_target=file)
    assert not (folder / name).exists()
