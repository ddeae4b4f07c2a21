"""The contract of a head, held by heads that the package does not have, each of one file, and by those it has."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.guides import ROOT, blocks_of
from support.heads import (
    EVERY,
    SURE,
    after_random_text,
    domino,
    gated,
    late,
    log_probs_after,
    recurrent,
    reduced,
    rnn,
    vanilla,
    with_head,
)
from support.pairs import SWITCHES, make_draft, make_draft2, make_target
from support.recurrent_head import SIZES, RecurrentHead, use_heads
from support.rows import counting_rows, ragged_prompts
from support.runs import make_trainer
from support.scripted_draft import scripted
from support.trees import best_first, paths_of

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.conversion.convert import convert
from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.decoding.trees import draft_tree
from dflash_hf.hub.check import check
from dflash_hf.layouts.head_schemas import HEAD_SCHEMAS, HeadSchema
from dflash_hf.layouts.read import is_drafter_config
from dflash_hf.modeling.heads_dflash import DominoHead, TokenHead
from dflash_hf.training.objective import forced_queries
from dflash_hf.training.start import with_parts


@pytest.fixture(autouse=True)
def heads(monkeypatch):
    use_heads(monkeypatch, RecurrentHead)


# ------------------------------------------------------------------------------------------------------------ drafting


@pytest.mark.parametrize("make", EVERY)
@torch.no_grad()
def test_drafted_token_depends_on_all_before(make):
    target = make_target(dtype=torch.float64)
    draft = EVERY[make](target)
    drafter, anchors = after_random_text(draft, target, rows=3)
    hidden = drafter.hidden_states(anchors)
    block = drafter.decode_block(anchors, hidden)
    assert torch.equal(block, drafter.draft_block(anchors).tokens)
    for row in range(3):
        path = ()
        for _ in range(hidden.shape[1]):
            path = (*path, int(log_probs_after(draft, target, int(anchors[row]), hidden[row], path).argmax()))
        assert tuple(block[row, 1:].tolist()) == path
        alone = drafter.decode_block(anchors[row : row + 1], hidden[row : row + 1])
        assert torch.equal(alone[0], block[row])
    plain = draft.target_ids(draft.draft_logits(hidden, target.lm_head).argmax(-1))
    assert draft.config.token_head_class is TokenHead or not torch.equal(block[:, 1:], plain), (
        "the head changes nothing"
    )


@pytest.mark.parametrize("make", [vanilla, late, partial(with_head, sample_from_anchor=True)])
def test_anchor_first_block_drafts_every_slot(make):
    """A whole block is accepted: its tokens, and one of the target's own; Domino's last slot is left out."""
    target = make_target()
    draft = make(target, trained=False)
    draft.decoding_config.block_size = draft.config.max_block_tokens
    options = {"max_new_tokens": 25, "do_sample": False, "return_dict_in_generate": True}
    prompt = torch.tensor([[5, 7, 9, 11]])
    expected = target.generate(prompt, **options).sequences
    output = target.generate(prompt, **options, assistant_model=scripted(draft, expected, error_rate=0.0))
    drafts = draft.config.block_size - (draft.config.token_head_class is DominoHead)
    assert torch.equal(output.sequences, expected)
    assert set(output.acceptance_lengths[0][:-1]) == {drafts + 1}


FRESH = {
    "recurrent": SIZES,
    "selector": {"selector_rank": 6, "selector_top_k": 5},
    "vanilla": {"markov_rank": 6, **SURE},
    "gated": {"markov_rank": 6, "markov_head_type": "gated"},
    "rnn": {"markov_rank": 6, "markov_head_type": "rnn"},
    "confidence alone": {"enable_confidence_head": True},
    "Domino": {"gru_hidden_dim": 9, "emb_dim": 7, "pure_draft_prefix_len": 1},
}


@pytest.mark.parametrize("fields", FRESH.values(), ids=FRESH)
@torch.no_grad()
def test_fresh_head_changes_no_draft(fields):
    """Of what is drafted: the hidden states, the scores of tokens, and what is accepted."""
    target = make_target()
    plain = make_draft(target)
    fresh = with_parts(plain, fields)
    assert fresh.config.token_head_class is not plain.config.token_head_class
    inputs = torch.randn(2, 4, 32), torch.randn(2, 9, 96)
    states = [draft.eval()(*inputs).last_hidden_state for draft in (plain, fresh)]
    assert torch.equal(*states)
    anchors = torch.tensor([5, 9])
    drafted = [DraftSession(draft, target).decode_block(anchors, states[0]) for draft in (plain, fresh)]
    assert torch.equal(*drafted)
    prompts, _ = ragged_prompts(3)
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    of_fresh, of_plain = (target.generate(**prompts, **options, assistant_model=draft) for draft in (fresh, plain))
    assert of_fresh.acceptance_lengths == of_plain.acceptance_lengths


@torch.no_grad()
def test_forced_queries_equal_single_steps():
    """A head without a state is asked about all slots at once, another slot by slot."""
    target = make_target(dtype=torch.float64)
    before = torch.randint(2, 90, (2, 3, 4))
    hidden = torch.randn(2, 3, 4, 32, dtype=torch.float64)
    embed = partial(torch.nn.functional.embedding, weight=target.get_input_embeddings().weight)
    in_context = torch.rand(2, 3, 4) < 0.7
    in_context[..., 0] = False
    for draft in (recurrent(target), make_draft2(target), gated(target), rnn(target), domino(target)):
        head = draft.config.token_head_class(draft, embed)
        queries = forced_queries(head, before, hidden, in_context)
        rows = iter(range(int(in_context.sum())))
        for i in range(2):
            for j in range(3):
                state = head.start(before[i, j, 1:2])
                for slot in range(1, 4):
                    query, state = head.step(state, before[i, j, slot : slot + 1], hidden[i, j, slot : slot + 1])
                    if in_context[i, j, slot]:
                        torch.testing.assert_close(queries[next(rows)], query[0])


# ----------------------------------------------------------------------------------------------------- files, engines


def test_head_loads_under_other_names(tmp_path):
    target = make_target()
    draft = recurrent(target, memory_share=0.25)
    draft.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["RecurrentDraftModel"] and is_drafter_config(
        {"architectures": ["RecurrentDraftModel"]}
    )
    assert written["dflash_config"].items() >= {**SIZES, "memory_share": 0.25}.items() and "memory_rank" not in written
    again = DFlashDraftModel.from_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name for name in tensors if name.startswith("memory.")} == {
        f"memory.{name}" for name in draft.memory.state_dict()
    }
    # Another's spelling of a field, and of tensors.
    written["memories"] = written["dflash_config"].pop("memory_width")
    (tmp_path / "config.json").write_text(json.dumps(written))
    renamed = {name.replace("memory.", "memories."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for loaded in (again, DFlashDraftModel.from_pretrained(tmp_path)):
        assert loaded.config.token_head_class is RecurrentHead and loaded.config.memory_share == 0.25
        for name, tensor in draft.state_dict().items():
            assert torch.equal(tensor, loaded.state_dict()[name]), name
    smaller = DFlashDraftConfig.from_pretrained(tmp_path, memory_rank=3)
    assert smaller.memory_rank == 3 and smaller.dflash_config["memory_rank"] == 3


def test_engines_without_a_head_are_named(tmp_path):
    recurrent(make_target()).save_pretrained(tmp_path)
    findings = check(tmp_path)
    errors = {(finding.engines, finding.key) for finding in findings if finding.severity == "error"}
    assert errors == {(("vllm", "sglang"), "memory_width")}
    (finding,) = (finding for finding in findings if finding.key == "memory_width")
    assert finding.message == "8: no engine has a recurrent head; decode with transformers' generate()."
    with pytest.raises(ValueError, match="memory_width=8, which the native model does not have"):
        convert(tmp_path, tmp_path / "native", to="native")


def test_reduced_head_cannot_share_the_targets(tmp_path):
    """It ended in torch's own list of sizes."""
    reduced(make_target()).save_pretrained(tmp_path / "few")
    with pytest.raises(ValueError, match="memory.tokens.weight only covers the 48 tokens of the drafter"):
        convert(tmp_path / "few", tmp_path / "whole", share_head=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_rank": None}, "memory_width=8 and memory_rank=None must be set together"),
        ({"memory_rank": -1}, "memory_rank=-1 must be a positive integer"),
        ({"memory_share": 2.0}, "memory_share=2.0 must lie between 0 and 1"),
        (SWITCHES, "selector_rank and memory_width are set, but a drafter has one head: path selector or recurrent"),
    ],
)
def test_errors_name_field_and_value(fields, message):
    with pytest.raises(ValueError, match=message):
        recurrent(make_target(), **fields)


def test_drafter_without_head_fields_has_no_head():
    target = make_target()
    draft = make_draft(target, memory_width=0, memory_rank=0)
    assert draft.config.token_head_class is TokenHead and not hasattr(draft, "memory")
    assert set(draft.config.to_dict()["dflash_config"]) == {"block_size", "mask_token_id", "target_layer_ids"}
    assert make_draft2(target).config.token_head_class.name == "path selector"


def test_architecture_is_named_after_the_head():
    """Of a convolution alone it is DFlash 2's."""
    target = make_target()
    convolution = {"conv_kernel_size": 2, "conv_group_size": 4}
    for fields, name in (({}, "DFlashDraftModel"), (SIZES, "RecurrentDraftModel")):
        assert make_draft(target, **fields).config.to_dict()["architectures"] == [name]
    for fields, name in (({}, "DFlash2DraftModel"), (SIZES, "RecurrentDraftModel")):
        assert make_draft(target, **fields, **convolution).config.to_dict()["architectures"] == [name]


def test_registered_head_is_no_longer_refused(monkeypatch):
    config = make_draft(make_target()).config.to_dict()
    files = [
        {**config, "architectures": ["LiLiCorrDraftModel"]},
        {**config, "dflash_config": {**config["dflash_config"], "projector_type": "lilicorr"}},
    ]
    for file in files:
        with pytest.raises(ValueError, match="lilicorr|LiLiCorrDraftModel"):
            DFlashDraftConfig.from_dict(file)
    monkeypatch.setitem(HEAD_SCHEMAS, RecurrentHead, HeadSchema("LiLiCorr"))
    for file in files:
        DFlashDraftConfig.from_dict(file)


# ------------------------------------------------------------------------------------------------------ as documented


def python_blocks_of_guide() -> list[str]:
    """The Python of `add_a_head.md`: the bigram head, what the page tries, the position head."""
    blocks = blocks_of(ROOT / "examples" / "guides" / "add_a_head.md")
    return [block.text for block in blocks if block.language == "python"]


def head_of_guide(source: str, name: str):
    """A class of the guide, as if its source were a file of `modeling`."""
    namespace = {"__name__": "dflash_hf.modeling.head_of_guide_dflash", "__package__": "dflash_hf.modeling"}
    exec(compile(source, "head_of_guide_dflash.py", "exec"), namespace)
    return namespace[name]


def test_head_of_the_guide_drafts_trains_and_saves(monkeypatch, tmp_path):
    """The file of `add_a_head.md` as it stands: drafts, trees, training, files, and the code of the page."""
    file, tried, _ = python_blocks_of_guide()
    use_heads(monkeypatch, head_of_guide(file, "BigramHead"))
    target = make_target()
    draft = make_draft(target, bigram_rank=4, block_size=5)
    with torch.no_grad():
        draft.bigram.next.weight.normal_(std=30.0, generator=torch.Generator().manual_seed(0))

    # 1. A block, and a tree that needs no more paths than the beam holds.
    drafter, anchors = after_random_text(draft, target)
    hidden = drafter.hidden_states(anchors)
    block = drafter.decode_block(anchors, hidden)
    nodes = draft_tree(drafter, anchors, 12)
    changed = 0
    for row in range(2):

        def scores(prefix, row=row):
            before = (int(anchors[row]), *prefix)[-1]
            h = hidden[row, len(prefix)]
            bias = draft.bigram.next.weight @ draft.bigram.previous.weight[before]
            return (target.lm_head.weight @ h + bias).detach()

        def likely(prefix, scores=scores):
            best, ids = scores(prefix).log_softmax(-1).sort(descending=True)
            return list(zip(ids.tolist(), best.tolist(), strict=True))

        path = ()
        for slot in range(4):
            path = (*path, int(scores(path).argmax()))
            changed += path[-1] != int((target.lm_head.weight @ hidden[row, slot]).argmax())
        assert tuple(block[row, 1:].tolist()) == path
        assert paths_of(nodes, row) == best_first(likely, 12, 4)
    assert changed, "the head changed nothing: nothing was tested"

    # 2. It learns, all of it, and is found again in a file that engines do not read.
    draft = make_draft(target, bigram_rank=4)
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    make_trainer(tmp_path / "run", target, counting_rows(4), draft, warmup_steps=0, max_steps=2).train()
    assert not [name for name, parameter in draft.named_parameters() if torch.equal(parameter, before[name])]
    draft.save_pretrained(tmp_path / "saved")
    again = DFlashDraftModel.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in again.state_dict().items())
    errors = {finding.key for finding in check(tmp_path / "saved") if finding.severity == "error"}
    assert errors == {"bigram_rank"}

    # 3. What the page tries.
    target.save_pretrained(tmp_path / "target")
    make_draft(target).save_pretrained(tmp_path / "my-drafter")
    monkeypatch.chdir(tmp_path)
    exec(compile(tried, "add_a_head.md", "exec"), {})
    written = json.loads((tmp_path / "my-bigram-drafter" / "config.json").read_text())
    assert written["architectures"] == ["BigramDraftModel"] and written["dflash_config"]["bigram_rank"] == 8


@torch.no_grad()
def test_head_of_the_guide_counts_slots(monkeypatch):
    use_heads(monkeypatch, head_of_guide(python_blocks_of_guide()[2], "SlotHead"))
    target = make_target()
    draft = make_draft(target, slot_rank=4, block_size=5)
    draft.slot_bias.next.weight.normal_(std=30.0, generator=torch.Generator().manual_seed(0))
    drafter, anchors = after_random_text(draft, target)
    hidden = drafter.hidden_states(anchors)
    block = drafter.decode_block(anchors, hidden)
    bias = draft.slot_bias.slot.weight @ draft.slot_bias.next.weight.T  # [block_size, V]
    logits = hidden @ target.lm_head.weight.T  # [R, 4, V]
    assert torch.equal(block[:, 1:], (logits + bias[:4]).argmax(-1))
    assert not torch.equal(block[:, 1:], logits.argmax(-1)), "the head changed nothing: nothing was tested"
    prompt = torch.tensor([[5, 7, 9, 11]])
    options = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(target.generate(prompt, **options, assistant_model=draft), target.generate(prompt, **options))
