"""`dflash eval --pretend-tau`: scripts have the acceptance of a drafter, and the package's own loop shows it."""

import json
import statistics

import pytest
import torch
from support.pairs import make_draft, make_target
from support.tiny_chat import CHATML, make_tokenizer, saved_with

from dflash_hf.cli import main
from dflash_hf.evaluation import pretended
from dflash_hf.evaluation.pretended import pretend, random_draft
from dflash_hf.evaluation.scripted_draft import ScriptedDraft, script_of, scripted_target, slot_accuracy
from dflash_hf.targets.generation import generate_one


PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13]]


@pytest.fixture(scope="module")
def target():
    return make_target()


def lengths_of(target, draft, script, prompt_length, new_tokens):
    draft = ScriptedDraft.of(draft, [script.text], [script.likely], [script.chances])
    prompt = script.text[:prompt_length].tolist()
    output = generate_one(target, prompt, max_new_tokens=new_tokens, do_sample=False, assistant_model=draft)
    assert torch.equal(output.sequences[0], script.text[: prompt_length + new_tokens])
    return output.acceptance_lengths[0]


@pytest.mark.parametrize("tau", [1.0, 1.4, 3.5, 6.0, 8.0])
def test_script_is_accepted_as_often_as_asked(target, tau):
    """In the package's loop, not by arithmetic; the text stays the target's own."""
    draft = make_draft(target, block_size=8)
    text = generate_one(target, PROMPTS[0], max_new_tokens=88, do_sample=False).sequences[0]
    lengths = lengths_of(target, draft, script_of(text, 5, tau, 8, 96), 5, 80)
    assert statistics.fmean(lengths[:-1]) == pytest.approx(tau, rel=0.05)
    assert tau in (1.0, 8.0) or len(set(lengths)) > 2


def test_scripted_lengths_are_geometric():
    accuracy = slot_accuracy(3.5, 16)
    assert sum(accuracy**k for k in range(16)) == pytest.approx(3.5)
    text = torch.randint(5, 90, (6000,))
    script = script_of(text, 10, 3.5, 16, 96)
    right = (script.likely[10:, 0] == text[10:]).double()
    assert right.mean() == pytest.approx(accuracy, abs=0.02)
    both = (right[1:] * right[:-1]).mean()
    assert both == pytest.approx(
        accuracy**2, abs=0.03
    )  # independent: the next slot is right as often after a right one
    # What the drafter says is what happens, at every rank.
    hits = (script.likely == text[:, None])[10:].double().mean(dim=0)
    assert hits[1:].sum() > 0.1
    assert torch.allclose(hits.float(), script.chances[10:].mean(dim=0), atol=0.02)


def test_scripted_drafter_states_its_chances(target):
    draft = make_draft(target, block_size=8)
    text = torch.randint(5, 90, (40,))
    script = script_of(text, 10, 3.5, 8, 96)
    scripted = ScriptedDraft.of(draft, [script.text], [script.likely], [script.chances])
    scripted.is_certain_in_blocks = False
    scripted.decoding_config.block_size = None
    hidden = torch.zeros(1, 40, draft.config.hidden_size)
    hidden[0, :, : scripted.codes.shape[-1]] = scripted.codes
    chances = scripted.draft_logits(hidden, target.get_output_embeddings()).softmax(dim=-1)[0]
    stated = chances.gather(-1, script.likely)
    assert torch.allclose(stated[10:], script.chances[10:], atol=0.02)


def test_prediction_names_rounds_and_every_tau(target):
    draft = random_draft(target, make_draft(target, block_size=8).config)
    report = pretend(target, draft, PROMPTS, 3.5, max_new_tokens=40, runs=1, contexts=(12, 30))
    assert [context.prompt_lengths for context in report.contexts] == [[12, 12], [30, 30]]
    for context in report.contexts:
        assert [prediction.tau for prediction in context.predictions] == [1.5, 2.0, 3.0, 3.5, 4.0, 6.0, 8.0]
        assert context.reached_tau == pytest.approx(3.5, rel=0.1)
        assert set(context.forwards) == {1, 2, 4, 8, 16, 32}
        assert context.break_even == context.block_round / context.target_round
        speedups = [prediction.whole_blocks for prediction in context.predictions]
        assert speedups == sorted(speedups) and speedups[0] > 0
        assert all(prediction.plain_call > 0 for prediction in context.predictions)
        assert 0 < context.overhead < 1
    facts = json.loads(report.to_json())
    assert facts["contexts"][0]["break_even"] == pytest.approx(report.contexts[0].break_even)


def test_reduced_vocabulary_can_say_the_text(target):
    """A random drafter's vocabulary is the target's first tokens: the right ones could not be drafted."""
    config = make_draft(target, block_size=8, draft_vocab_size=60).config
    draft = random_draft(target, config)
    report = pretend(target, draft, PROMPTS[:1], 6.0, max_new_tokens=30, runs=1)
    assert report.contexts[0].reached_tau == pytest.approx(6.0, rel=0.15)


@pytest.mark.parametrize("family, dtype", [("qwen3", "bfloat16"), ("gemma3", "bfloat16"), ("qwen3_5_text", "float32")])
def test_scripted_target_writes_any_text(family, dtype):
    """In bf16 a near-tie moved the target off the script, of which nothing was accepted from there on."""
    own = make_target(family, dtype=getattr(torch, dtype))
    target = scripted_target(own)
    draft = make_draft(own, block_size=8)
    text = torch.randint(5, 90, (70,), generator=torch.Generator().manual_seed(1))
    script = script_of(text, 5, 4.0, 8, 96)
    target.script = text
    drafted = ScriptedDraft.of(draft, [text], [script.likely], [script.chances])
    for assistant in (None, drafted):
        output = generate_one(target, text[:5].tolist(), max_new_tokens=60, do_sample=False, assistant_model=assistant)
        assert torch.equal(output.sequences[0], text[:65])
    assert statistics.fmean(output.acceptance_lengths[0][:-1]) == pytest.approx(4.0, rel=0.1)
    untouched = generate_one(own, text[:5].tolist(), max_new_tokens=60, do_sample=False)
    assert not torch.equal(untouched.sequences[0], text[:65])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tau": 0.9}, "tau=0.9 must be between 1 and the block size, 8"),
        ({"tau": 8.5}, "tau=8.5 must be between 1 and the block size, 8"),
        ({"prompts": []}, "prompts holds 0 prompts"),
        ({"max_new_tokens": 1}, "max_new_tokens=1 must be at least 2"),
        ({"contexts": (250,)}, "250 tokens.*exceed the target's 256 positions"),
    ],
)
def test_invalid_argument_is_named(target, options, message):
    draft = make_draft(target, block_size=8)
    with pytest.raises(ValueError, match=message):
        pretend(target, draft, **{"prompts": PROMPTS, "tau": 3.0, "max_new_tokens": 20, "runs": 1, **options})


def test_target_that_cannot_draft_says_why(target, monkeypatch):
    handle = target.model.layers[0].register_forward_hook(lambda *_: None)
    try:
        with pytest.raises(ValueError, match="would bring nothing.*a hook of .* would see drafted tokens"):
            random_draft(target)
    finally:
        handle.remove()
    flash = make_target()
    flash.config._attn_implementation = "flash_attention_2"
    monkeypatch.setattr(type(flash), "_can_set_attn_implementation", lambda *_: False)
    with pytest.raises(ValueError, match="takes no mask of a draft.*attn_implementation='flash_attention_2'"):
        random_draft(flash)


def test_undrafted_call_is_no_measurement(target, monkeypatch):
    """The speedup of a call that fell back would be that of the target alone."""
    monkeypatch.setattr("dflash_hf.decoding.loop.fallback_reason", lambda *_: "of a reason")
    draft = make_draft(target, block_size=8)
    with pytest.raises(ValueError, match="a call decoded without it"):
        pretend(target, draft, PROMPTS, 3.0, max_new_tokens=20, runs=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = make_tokenizer(CHATML)
    target = saved_with(tokenizer, folder / "target")
    make_draft(target, block_size=8).config.save_pretrained(folder / "draft")  # no weights
    return folder


def command(folders, *words):
    return main(["eval", "--target", str(folders / "target"), "--device", "cpu", "--runs", "1", *words])


SHORT = ("--max-new-tokens", "16", "--prompts", "1")


def test_command_prints_the_prediction(folders, capsys, monkeypatch):
    monkeypatch.setattr(pretended, "OTHER_TAUS", (2.0,))
    draft = str(folders / "draft")
    assert command(folders, "--pretend-tau", "3.5", "--draft", draft, "--context", "20", "40", *SHORT) == 0
    text = capsys.readouterr().out
    for part in ("blocks of 8 tokens", "packed", "float32", "cpu", "prompts of 20", "prompts of 40", "break-even"):
        assert part in text
    assert "geometric" in text and "random weights" in text and text.count("<- asked") == 2


def test_command_needs_no_drafter(folders, capsys, monkeypatch):
    monkeypatch.setattr(pretended, "OTHER_TAUS", ())
    assert command(folders, "--pretend-tau", "6.5", "--json", *SHORT) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tau"] == 6.5 and facts["setting"]["block_size"] == 16 and facts["setting"]["draft_layers"] == 5
    assert facts["contexts"][0]["predictions"][0]["plain_call"] > 0
    assert facts["setting"]["packed"] in (True, False) and facts["setting"]["device"] == "cpu"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--pretend-tau", "17"], "--pretend-tau 17 must be between 1, nothing accepted, and 16"),
        (["--pretend-tau", "0.5"], "--pretend-tau 0.5 must be between 1"),
        (["--pretend-tau", "3", "--mtp", "--tree-nodes", "9"], "--pretend-tau with --mtp, --tree-nodes"),
        (["--pretend-tau", "3", "--output", "x"], "--pretend-tau with --output"),
        (["--pretend-tau", "3", "--draft-revision", "x"], "--draft-revision x needs --draft"),
        (["--context", "9"], "--context is for --pretend-tau"),
    ],
)
def test_command_rejects_options_that_do_nothing(folders, words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(folders, *words) == 2
    assert message in capsys.readouterr().err
