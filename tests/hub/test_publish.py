"""Publishing, against a stand-in of the Hub: one commit that touches nothing of others, or a clear error."""

import json
import os

import pytest
import torch
from huggingface_hub import ModelCard
from support.hub_stand_in import stand_in
from support.llama_cpp import write_target
from support.pairs import make_draft, make_target

from dflash_hf import __version__
from dflash_hf.cli import main
from dflash_hf.evaluation.report import EvalReport, MethodReport
from dflash_hf.hub.card import CardFacts
from dflash_hf.hub.check import check
from dflash_hf.hub.code_only import publish_code
from dflash_hf.hub.code_version import with_version
from dflash_hf.hub.commits import PublishError
from dflash_hf.hub.publish import publish
from dflash_hf.targets.digests import digest_of_parameters


REPO = "someone/my-DFlash"
FACTS = CardFacts("someone/target", license="mit")
BY_HAND = "---\nlanguage: en\nbase_model: someone/target\n---\n# Mine\n\nBy hand.\n"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with stand_in(monkeypatch) as hub:
        yield hub


@pytest.fixture
def draft(target):
    return make_draft(target, target_layer_ids=[0, 1, 2])


@pytest.fixture
def folder(draft, tmp_path):
    folder = tmp_path / "draft"
    draft.save_pretrained(folder)
    (folder / "checkpoint-10").mkdir()
    for name in ("training_args.bin", "notes.txt", "checkpoint-10/model.safetensors", "stale-model.safetensors"):
        (folder / name).write_bytes(b"private")
    return folder


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


def test_publish_makes_one_commit(folder, hub):
    before = contents(folder)
    result = publish(folder, REPO, facts=FACTS)
    assert contents(folder) == before, "nothing is written locally"
    (commit,) = hub.commits
    assert (commit["repo"], commit["message"], commit["deleted"]) == (REPO, "Upload DFlash drafter", [])
    assert commit["added"] == sorted(result.files) == sorted(result.changes.added)
    assert result.url.endswith(f"/{REPO}/commit/{hub.sha()}")
    published = hub.files[REPO]
    code = {path.name for path in folder.glob("*_dflash.py")}
    names = {"README.md", "config.json", "custom_generate/generate.py", "model.safetensors", *code}
    assert set(published) - {".gitattributes"} == names and set(result.left_out) == set(before) - names
    assert {name: published[name] for name in names - {"README.md"}} == {
        name: before[name] for name in names - {"README.md"}
    }
    assert {name: len(published[name]) for name in result.files} == result.files
    card = ModelCard(published["README.md"].decode())
    assert card.data.base_model == "someone/target" and f'from_pretrained("{REPO}"' in card.text
    assert hub.private == {REPO: False}
    with pytest.raises(PublishError, match="exists and is public"):  # it does not become private by itself
        publish(folder, REPO, private=True, facts=FACTS)


def test_publish_uploads_current_code(folder):
    """A folder of 0.1 was published with code that fails in transformers 5.24."""
    contents = publish(folder, REPO, dry_run=True, facts=FACTS).contents
    code = {name: contents[name].read_bytes() for name in contents if name.endswith(".py")}
    for path in (*folder.glob("*_dflash.py"), folder / "custom_generate" / "generate.py"):
        path.unlink()
    assert any(finding.key.endswith(".py") for finding in check(folder))
    (folder / "plan_dflash.py").write_text("class Plan: ...\n", encoding="utf-8")
    edit(folder, dflash_hf_version="0.1.0")
    former = "from .plan_dflash import Plan\n\n\nclass DFlashDraftModel: ...\n"
    for text, findings in ((None, []), (former, ["modeling_dflash.py"])):  # one of another version is said
        if text is not None:
            (folder / "modeling_dflash.py").write_text(text, encoding="utf-8")
        result = publish(folder, REPO, dry_run=True, facts=FACTS)
        assert {name: path.read_bytes() for name, path in result.contents.items() if name.endswith(".py")} == code
        assert "plan_dflash.py" in result.left_out and "trust_remote_code" in result.card.text
        assert [finding.key for finding in result.findings] == findings
        assert json.loads(result.contents["config.json"])["dflash_hf_version"] == __version__
    edit(folder, dflash_hf_version="99.0")
    with pytest.raises(PublishError, match=f"has code of 99.0; this is {__version__}: install the newer version"):
        publish(folder, REPO, dry_run=True, facts=FACTS)


def test_publish_uploads_imports_of_own_code(folder):
    """Any `*_dflash.py` was published, and a module of another name was not."""
    for name, text in {
        "plots_dflash.py": "import matplotlib\n",
        "layers.py": "from .head_dflash import TokenHead\n",
        "mine.py": "from .layers import TokenHead\nfrom .not_there import Nothing\n\n\nclass MyDraft: ...\n",
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    before = json.loads((folder / "config.json").read_text())["auto_map"]
    edit(folder, auto_map={**before, "AutoModel": "mine.MyDraft"})
    result = publish(folder, REPO, dry_run=True, facts=FACTS)
    for name in ("mine.py", "layers.py", "head_dflash.py", "configuration_dflash.py"):
        assert result.contents[name] == folder / name
    assert "plots_dflash.py" in result.left_out


def test_second_commit_holds_changes_only(folder, hub, draft, target, capsys):
    """Engines would read a file of before together with the new weights, and the card its picture."""
    old = ("eval_report.png", "mask_embedding.pt")
    torch.save({"embedding": torch.ones(target.config.hidden_size)}, folder / old[1])
    (folder / old[0]).write_bytes(b"png")
    publish(folder, REPO, private=True, facts=FACTS)
    assert hub.private == {REPO: True} and {*old} <= set(hub.files[REPO])
    uploads = hub.uploads
    assert publish(folder, REPO, facts=FACTS).url is None
    assert len(hub.commits) == 1 and hub.uploads == uploads
    # Now in shards; and files that somebody else has put there.
    foreign_files = {"images/one.png": b"1", "eval_report.json.bak": b"2", "model.gguf": b"3", "own.py": b"4"}
    foreign_files["old/plan_dflash.py"] = b"of 0.1"
    hub.files[REPO].update({**foreign_files, "plan_dflash.py": b"of 0.1"})
    for name in (*old, "model.safetensors"):
        (folder / name).unlink()
    draft.save_pretrained(folder, max_shard_size="40KB")
    words = ["publish", str(folder), REPO, "--base-model", "someone/target"]
    deleted = sorted((*old, "model.safetensors", "plan_dflash.py"))
    printed = []
    for more in (["--dry-run"], []):  # which say the same, before anything is sent
        assert main([*words, *more]) == 0
        printed.append([line for line in capsys.readouterr().out.splitlines() if line.startswith(FATES)])
    assert printed[0] == printed[1] and [line.split()[-1] for line in printed[0] if "deletes" in line] == deleted
    fates = {line.split()[-1]: line.split()[0] for line in printed[0]}
    assert fates["config.json"] == "same" and fates["README.md"] == "replaces"
    assert fates["model.safetensors.index.json"] == "new" and not fates.keys() & foreign_files.keys()
    assert hub.commits[1]["deleted"] == deleted and foreign_files.items() <= hub.files[REPO].items()
    assert hub.commits[1]["added"] == sorted(name for name, fate in fates.items() if fate in ("new", "replaces"))


FATES = ("new ", "same ", "replaces ", "deletes ")


def test_rerun_finishes_interrupted_upload(folder, hub):
    before = contents(folder)
    hub.drop = 100
    with pytest.raises(PublishError, match="interrupted .* run the same command again"):
        publish(folder, REPO, facts=FACTS)
    assert hub.commits == [] and contents(folder) == before
    # huggingface_hub itself gets over a short interruption; what arrived before is not sent again.
    hub.drop = 1
    hub.uploads = 0
    publish(folder, REPO, facts=FACTS)
    assert hub.uploads == 2 and len(hub.commits) == 1
    assert hub.files[REPO]["model.safetensors"] == before["model.safetensors"]


@pytest.mark.parametrize("exists", [False, True])
def test_branch_is_created_for_a_drafter(exists, folder, hub, capsys):
    words = ["publish", str(folder), REPO, "--base-model", "someone/target"]
    if exists:
        hub.files[REPO] = {"notes.txt": b"mine"}
    assert main([*words, "--revision", "next"]) == 0
    branch = hub.files[f"{REPO}@next"]
    assert hub.files[REPO] == ({"notes.txt": b"mine"} if exists else {".gitattributes": b""})
    assert hub.files[REPO].items() <= branch.items() and "model.safetensors" in branch
    assert main([*words, "--revision", "next"]) == 0 and "no new commit" in capsys.readouterr().out
    edit(folder, note="mine")
    publish(folder, REPO, facts=FACTS, revision="next")
    assert len(hub.commits) == 2 and b"mine" in branch["config.json"]


def offline(hub, patch):
    patch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


def invalid(self, repo_type=None):
    raise ValueError("invalid license")


REFUSALS = {
    "wrong token": (lambda hub, patch: patch.setenv("HF_TOKEN", "hf_wrong"), "hf auth login"),
    "reader": (
        lambda hub, patch: setattr(hub, "reader", True),
        "answered 403 .*rights to write.* its token must have access",
    ),
    "no token": (
        lambda hub, patch: patch.delenv("HF_TOKEN"),
        "the Hub answered 401 .Invalid credentials .* Log in with `hf auth login`",
    ),
    "no network": (offline, "interrupted"),
    "card": (lambda hub, patch: patch.setattr(ModelCard, "validate", invalid), "the Hub rejected it .invalid license"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_publish_explains_refusal_of_hub(case, folder, hub, monkeypatch):
    before = contents(folder)
    change, message = REFUSALS[case]
    change(hub, monkeypatch)
    for dry_run in (False, case == "card"):  # without the Hub, a dry run says what it could not compare
        with pytest.raises(PublishError, match=message):
            publish(folder, REPO, dry_run=dry_run, facts=FACTS)
    assert hub.commits == [] and hub.files == {} and contents(folder) == before


OTHERS = {
    # what is in the repository: what the error names
    "another model": ({"config.json": b'{"architectures": ["LlamaForCausalLM"]}'}, "another model, whose config.json"),
    "weights alone": ({"model-00001-of-00002.safetensors": b""}, "another model, whose model-00001-of-00002"),
    "damaged": ({"config.json": b"{", "model.safetensors": b""}, "another model, whose config.json"),
    "card": ({"README.md": b"---\nlicense: mit\n---\nBy hand"}, "README.md that was written .* --replace-card"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_publish_keeps_files_of_others(case, folder, hub):
    hub.files[REPO] = {**OTHERS[case][0]}
    message = OTHERS[case][1]
    for dry_run in (True, False):
        with pytest.raises(PublishError, match=message):
            publish(folder, REPO, dry_run=dry_run, facts=FACTS)
    assert hub.commits == []
    if case == "card":
        assert publish(folder, REPO, facts=FACTS, replace_card=True).changes.replaced == ["README.md"]


def test_publish_keeps_commit_in_between(folder, hub):
    def meddle(result):
        hub.files.setdefault(REPO, {})["config.json"] = b"{}"

    publish(folder, REPO, facts=FACTS)
    edit(folder, note="mine")
    with pytest.raises(PublishError, match="A commit has happened since.* run the same"):
        publish(folder, REPO, facts=FACTS, announce=meddle)
    assert len(hub.commits) == 1 and hub.files[REPO]["config.json"] == b"{}"
    hub.files.clear()
    with pytest.raises(PublishError, match="409 .You already created this model repo"):
        publish(folder, REPO, facts=FACTS, announce=meddle)
    assert len(hub.commits) == 1


def test_dry_run_needs_no_network(folder, hub, monkeypatch, capsys):
    offline(hub, monkeypatch)
    result = publish(folder, REPO, dry_run=True, facts=FACTS)
    assert result.url is None and result.changes is None and result.comparison_error
    assert result.files["model.safetensors"] == (folder / "model.safetensors").stat().st_size
    assert main(["publish", str(folder), REPO, "--dry-run", "--base-model", "someone/target"]) == 0
    assert "not compared with what is there, and the card is not checked: " in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- the folder, and its card


FOLDERS = {
    # keys of config.json: what the error names
    "block": ({"block_size": 9}, "cannot be published as it is:.*block_size"),
    "foreign code": ({"auto_map": {"AutoModel": "evil/code--modeling.Model"}}, "'evil/code--modeling.Model' is not a"),
    "code elsewhere": ({"auto_map": {"AutoModel": "../x.Model"}}, "is not a file beside"),
    "quantisation": ({"quantization_config": {"quant_method": "magic"}}, "is quantised with quant_method='magic'"),
    "no quantised weights": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "bitsandbytes",
    ),
    "rate": ({"attention_dropout": float("nan")}, "attention_dropout"),
    "long": ({"target_layer_ids": list(range(100_000))}, "target_layer_ids"),
    "two": ({"block_size": 9, "mask_token_id": 10**9}, "and .* more: `dflash check"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_publish_refuses_unreadable_folder(case, folder):
    keys, message = FOLDERS[case]
    edit(folder, **keys)
    with pytest.raises(PublishError, match=message) as refused:
        publish(folder, REPO, dry_run=True, facts=FACTS)
    assert len(str(refused.value)) < 500 and "\n" not in str(refused.value)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_publish_names_a_damaged_configuration(content, folder):
    """This was another error, which callers of `publish` did not expect."""
    (folder / "config.json").write_text(content)
    with pytest.raises(PublishError, match="cannot be published as it is: .*config.json .* JSON"):
        publish(folder, REPO, facts=FACTS, dry_run=True)


def test_publish_refuses_bad_weights_and_links(folder, draft, tmp_path):
    with pytest.raises(PublishError, match="repo='a/b--c' is not a repository id.* no '--'"):
        publish(folder, "a/b--c", dry_run=True, facts=FACTS)
    with pytest.raises(PublishError, match="write base_model into"):
        publish(folder, REPO, dry_run=True)
    (tmp_path / "secret").write_text("secret")
    (folder / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(PublishError, match="LICENSE of .* is a link to .*secret, outside the folder"):
        publish(folder, REPO, dry_run=True, facts=FACTS)
    (folder / "LICENSE").unlink()
    draft.fc.weight.data[0, 0] = float("nan")
    draft.save_pretrained(folder)
    with pytest.raises(PublishError, match="as it is: 1 of [0-9,]+ weights are not finite .* in fc.weight"):
        publish(folder, REPO, dry_run=True)


def test_publish_leaves_out_other_code(folder):
    """`auto_map` named any file, and it was uploaded."""
    (folder / "secret.py").write_text("TOKEN = 1\n")
    (folder / "own.py").write_text("class Own:\n    pass\n")
    before = json.loads((folder / "config.json").read_text())["auto_map"]
    edit(folder, auto_map={**before, "AutoTokenizer": "secret.TOKEN", "AutoProcessor": "own.Own"})
    result = publish(folder, REPO, dry_run=True, facts=FACTS)
    assert "secret.py" in result.left_out and "own.py" in result.files


CARDS = {
    "---\nbase_model: [a\n---\n": "is not valid",
    "# no metadata\n": "names no base_model",
}


@pytest.mark.parametrize("card", CARDS)
def test_publish_refuses_wrong_metadata(card, folder):
    (folder / "README.md").write_text(card)
    with pytest.raises(PublishError, match=CARDS[card]):
        publish(folder, REPO, dry_run=True)
    assert "# my-DFlash" in str(publish(folder, REPO, dry_run=True, facts=FACTS).card)


def test_publish_keeps_card_written_by_hand(folder, capsys):
    """Any option of the card replaced the whole of it with the template, without a word."""
    (folder / "README.md").write_text(BY_HAND)
    words = ["publish", str(folder), REPO, "--dry-run"]
    target = ["--base-model", "someone/target"]
    assert main(words) == 0 and BY_HAND in capsys.readouterr().out
    assert main([*words, "--license", "mit"]) == 2
    assert "written by hand and is taken as it is: instead of --license, change its" in capsys.readouterr().err
    (folder / "README.md").write_text(BY_HAND.replace("language: en", "license: [mit, apache-2.0]"))
    assert publish(folder, REPO, dry_run=True).card.data.license == ["mit", "apache-2.0"]
    # A rendered card is rendered anew, until it is edited.
    FACTS.save(folder)
    rendered = str(publish(folder, "someone/before", dry_run=True, facts=FACTS).card)
    (folder / "README.md").write_text(rendered)
    assert "# my-DFlash" in str(publish(folder, REPO, dry_run=True).card)
    (folder / "README.md").write_text(rendered.replace("# before", "# Edited"))
    assert "# Edited" in str(publish(folder, REPO, dry_run=True).card) and main([*words, *target]) == 2


def test_publish_refuses_report_of_other_weights(folder, draft):
    """It stood on the card of a drafter that it was not measured with."""
    speed = MethodReport(5.0, 0.56, [5.0], 9, 9, 1)
    report = EvalReport({"target": speed, "dflash": speed}, [[1]], [[1]], 8, {"draft_dtype": "bfloat16"})
    report.setting["weights"] = digest_of_parameters(draft.to(torch.bfloat16).named_parameters())
    report.save(folder / "eval_report.json")
    assert "| tau" in str(publish(folder, REPO, dry_run=True, facts=CardFacts.from_folder(folder, **vars(FACTS))).card)
    (folder / "README.md").write_text(BY_HAND)
    for setting, message in (
        ({"target": "other/target"}, "was measured with target other/target, not someone/target: run `dflash eval"),
        ({"weights": "of others"}, f"was not measured with these weights: run `dflash eval .* --output {folder}`"),
        ({"weights": None}, "was not measured with these weights"),
    ):
        EvalReport(report.methods, [[1]], [[1]], 8, {**report.setting, **setting}).save(folder / "eval_report.json")
        with pytest.raises(PublishError, match=message):
            publish(folder, REPO, dry_run=True)
    report.setting["target"] = "someone/target"
    report.save(folder / "eval_report.json")
    assert publish(folder, REPO, dry_run=True).files["eval_report.json"]


def test_command_publishes(folder, hub, draft, capsys):
    def call(*words):
        code = main(["publish", str(folder), *words])
        return code, capsys.readouterr()

    code, printed = call(REPO, "--dry-run")
    assert code == 1 and printed.err.startswith("dflash publish: error: ") and "base_model" in printed.err
    (folder / "LICENSE").write_text("Mine.")
    for step in range(60):  # it was 73 kB
        (folder / f"checkpoint-{1000 + step}").mkdir()
        (folder / f"checkpoint-{1000 + step}" / "file").touch()
    license = ("--license", "other", "--license-name", "mine-1.0", "--license-link", "LICENSE")
    code, printed = call(REPO, "--dry-run", "--base-model", "someone/target", "--dataset", "someone/data", *license)
    assert code == 0 and "base_model: someone/target" in printed.out and "- someone/data" in printed.out
    assert "license: other\nlicense_name: mine-1.0\nlicense_link: LICENSE\n" in printed.out
    assert "[mine-1.0](LICENSE)" in printed.out and printed.out.endswith(f"nothing was sent to {REPO}.\n")
    (line,) = [line for line in printed.out.splitlines() if line.startswith("not uploaded: ")]
    assert len(line) <= 300 and line.endswith(" (64 files)") and hub.commits == []
    speed = MethodReport(5.0, 0.56, [5.0], 9, 9, 1)
    setting = {"weights": digest_of_parameters(draft.named_parameters())}
    EvalReport({"target": speed, "dflash": speed}, [[1]], [[1]], 8, setting).save(folder / "eval_report.json")
    assert (
        "slows the target down: 0.56x of the target alone in"
        in call(REPO, "--dry-run", "--base-model", "someone/target")[1].err
    )
    code, printed = call(REPO, "--private", "--base-model", "someone/target")
    assert code == 0
    assert printed.out.splitlines()[-1].endswith(f"/commit/{hub.sha()}") and hub.private == {REPO: True}
    code, printed = call(REPO, "--base-model", "someone/target")
    assert code == 0 and "no new commit" in printed.out


def test_push_to_hub_uploads_code(target, hub, tmp_path):
    """`push_to_hub=True` uploads what is newer than the call; the code is copied just before."""
    draft = make_draft(target)
    for _ in range(2):
        draft.save_pretrained(tmp_path / "draft", push_to_hub=True, repo_id=REPO)
        assert {"modeling_dflash.py", "custom_generate/generate.py", "model.safetensors"} <= set(hub.files[REPO])
        hub.files[REPO].clear()
    draft.push_to_hub(REPO)
    assert {"modeling_dflash.py", "custom_generate/generate.py", "model.safetensors"} <= set(hub.files[REPO])


# ---------------------------------------------------------------------------------------------------------- code alone


OLD = {"modeling_dflash.py": b"class DFlashDraftModel: ...", "plan_dflash.py": b"old"}


def test_code_only_replaces_code_alone(folder, hub, capsys):
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


@pytest.mark.parametrize(
    "text",
    ["{}", "{ }", '{"dflash_hf_version": 1}', '{"a": {"dflash_hf_version": "0.1.0"}, "dflash_hf_version": "0.2.0"}'],
)
def test_version_is_written_into_any_object(text):
    config = json.loads(with_version(text))
    assert config == {**json.loads(text), "dflash_hf_version": __version__}


@pytest.mark.parametrize("before", ["", '"dflash_hf_version": null, ', '"dflash_hf_version": "0.1.0", '])
def test_version_alone_changes(before):
    config = with_version(f'{{{before}"block_size": 4}}')
    assert json.loads(config) == {"dflash_hf_version": __version__, "block_size": 4}


def _edit(files, **keys):
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), **keys}).encode()


CODE_ERRORS = {
    "no drafter": (lambda files: files.clear(), "names no code of this package"),
    "other code": (lambda files: _edit(files, auto_map={"AutoModel": "x.Y"}), "names no code"),
    "newer code": (lambda files: _edit(files, dflash_hf_version="99.1"), "has code of 99.1; this is"),
    "damaged": (
        lambda files: files.update({"config.json": b'{"block_size": 4,'}),
        "config.json cannot be read: .* JSON",
    ),
    "no object": (lambda files: files.update({"config.json": b"[]"}), "config.json cannot be read: .* JSON object"),
    "unreadable": (
        lambda files: _edit(files, num_attention_heads=0),
        "an invalid config.json, with which new code would not load",
    ),
}


@pytest.mark.parametrize("case", CODE_ERRORS)
def test_code_only_refuses_other_repositories(case, folder, hub):
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
    assert main(["publish", "folder"]) == 2 and "name a folder and a repository" in capsys.readouterr().err


def test_publish_adds_file_for_llama_cpp(hub, tmp_path):
    """llama.cpp looks for `dflash-*.gguf` in a repository; the card has its command, with the whole block."""
    pytest.importorskip("gguf")
    target = make_target(vocab_size=16)
    file = write_target(target, tmp_path / "target.gguf")
    folder = tmp_path / "draft"
    draft = make_draft(target, target_layer_ids=[0, 1, 2])
    draft.save_pretrained(folder)
    publish(folder, REPO, facts=FACTS)
    assert "llama" not in hub.files[REPO]["README.md"].decode()
    publish(folder, REPO, facts=FACTS, gguf_target=file)
    name = "dflash-my-dflash.gguf"
    assert hub.files[REPO][name] == (folder / name).read_bytes()
    line = f"llama-server -m target.gguf -hfd {REPO} --spec-type draft-dflash --spec-draft-n-max 3"
    assert line in hub.files[REPO]["README.md"].decode()
    # Once there it goes along, whatever the times of files say, as long as it was made of these weights.
    os.utime(folder / "model.safetensors", (2e9, 2e9))
    assert publish(folder, REPO, facts=FACTS).url is None
    made = (folder / name).read_bytes()
    (folder / name).write_bytes(made.replace(b"dflash_hf.weights", b"dflash_hf.wejghts"))  # of 0.2 or others
    (finding,) = publish(folder, REPO, facts=FACTS, dry_run=True).findings
    assert finding.key == name and "does not say of which weights it was made" in finding.message
    (folder / name).write_bytes(made)
    edit(folder, rms_norm_eps=1e-3)
    with pytest.raises(PublishError, match=f"{name} was made before config.json changed .rms_norm_eps"):
        publish(folder, REPO, facts=FACTS)
    draft.fc.weight.data[0, 0] += 1
    draft.save_pretrained(folder)
    for repo in (REPO, "someone/second"):  # also under another name
        with pytest.raises(PublishError, match=f"{name} was made of other weights"):
            publish(folder, repo, facts=FACTS)
    (folder / name).write_bytes(b"GGUF")
    with pytest.raises(PublishError, match="not a complete GGUF file"):
        publish(folder, REPO, facts=FACTS)
    (folder / name).unlink()
    assert publish(folder, REPO, facts=FACTS).url is not None and name not in hub.files[REPO]
    edit(folder, num_target_layers=9)
    with pytest.raises(PublishError, match="belongs to another target"):
        publish(folder, REPO, facts=FACTS, gguf_target=file)
    assert not (folder / name).exists()
