"""
What every class of `TOKEN_HEADS` must satisfy: a new head is tested here by being in that table. Its sizes are set to
small numbers, and its parameters are moved away from their initial values.
"""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from support.heads import after_random_text
from support.pairs import make_draft, make_target
from support.rows import counting_rows
from support.runs import make_trainer

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.layouts.head_schemas import schema_of
from dflash_hf.layouts.read import is_drafter_config
from dflash_hf.modeling.heads_dflash import TOKEN_HEADS, TokenHead
from dflash_hf.training.head_presets import head_presets
from dflash_hf.training.objective import forced_queries
from dflash_hf.training.start import with_parts


EVERY_HEAD = pytest.mark.parametrize("head", TOKEN_HEADS, ids=[head.__name__ for head in TOKEN_HEADS])


def tiny_fields(head) -> dict:
    """The fields of a tiny drafter with a head: small sizes, which all differ, and its preset's other values."""
    own_values = {name: value for name, value in head.preset.items() if name in head.fields}
    return {**own_values, **{name: 8 - number for number, name in enumerate(head.sizes)}}


def draft_with(head, target, is_trained: bool = True, **fields):
    """A tiny drafter with a head. Trained: each parameter of the head is moved at random."""
    draft = make_draft(target, **tiny_fields(head), **fields)
    if is_trained:
        random = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name in head.build_modules(draft.config):
                for parameter in draft.get_submodule(name).parameters():
                    noise = 0.5 * torch.randn(parameter.shape, generator=random)
                    parameter += noise.to(parameter.dtype)
    return draft


def view_of(draft, target) -> TokenHead:
    """The head of a drafter, as drafting and training make it."""
    embed = partial(torch.nn.functional.embedding, weight=target.get_input_embeddings().weight)
    return draft.config.token_head_class(draft, embed)


# ------------------------------------------------------------------------------------------------------ configuration


@EVERY_HEAD
def test_fields_of_a_head_select_it(head):
    draft = draft_with(head, make_target())
    assert draft.config.token_head_class is head and draft.config.has_token_head
    modules = head.build_modules(draft.config)
    assert modules and all(draft.get_submodule(name) is not None for name in modules)
    assert make_draft(make_target()).config.token_head_class is TokenHead


@EVERY_HEAD
def test_size_of_a_head_must_be_positive(head):
    """Left out or 0, it is another error, or no head at all."""
    target = make_target()
    for name in head.sizes:
        with pytest.raises(ValueError, match=f"{name}=-1 must be a positive integer"):
            make_draft(target, **{**tiny_fields(head), name: -1})


@EVERY_HEAD
def test_preset_of_a_head_is_complete(head):
    """`--head NAME` sets all sizes of a head, whose default name is that of its architecture."""
    name = schema_of(head).family.lower()
    preset = head_presets()[name]
    assert preset.draft_config.keys() >= set(head.sizes) and preset.draft_config.keys() <= (
        DFlashDraftConfig.field_names()
    )
    config = DFlashDraftConfig.for_target(make_target(hidden_size=64).config, 95, 1, 4, **preset.draft_config)
    assert config.token_head_class is head
    assert not head.needs_teacher(config) or preset.loss_type not in (None, "ce", "dpace", "auf")


@EVERY_HEAD
def test_saved_head_is_read_back(head, tmp_path):
    draft = draft_with(head, make_target(), block_size=5)
    draft.save_pretrained(tmp_path)
    assert is_drafter_config(draft.config.to_dict())
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert loaded.config.token_head_class is head
    for field in head.fields:
        assert getattr(loaded.config, field) == getattr(draft.config, field), field
    names_in_file = {name.partition(".")[0] for name in load_file(tmp_path / "model.safetensors")}
    assert head.build_modules(draft.config).keys() <= names_in_file
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


# ------------------------------------------------------------------------------------------------------------ drafting


@EVERY_HEAD
@torch.no_grad()
def test_block_is_decoded_step_by_step(head):
    """Row by row, by the methods of the contract alone; and without the head another block is drafted."""
    target = make_target(dtype=torch.float64)
    draft = draft_with(head, target)
    drafter, anchors = after_random_text(draft, target, rows=3)
    hidden = torch.randn(3, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = draft.draft_logits(hidden, target.lm_head)
    block = drafter.decode_block(anchors, hidden)
    view = view_of(draft, target)
    for row in range(3):
        ids, draft_logits = view.candidates(logits[row])
        ids = draft.target_ids(ids).expand_as(draft_logits)
        token = anchors[row : row + 1]
        state = view.start(token)
        for slot in range(hidden.shape[1]):
            query, state = view.step(state, token, hidden[row : row + 1, slot])
            scores = view.scores(query, ids[slot : slot + 1], draft_logits[slot : slot + 1])
            token = ids[slot, scores.argmax(-1)]
            assert block[row, 1 + slot] == token
    argmax = draft.target_ids(logits.argmax(-1))
    assert not torch.equal(block[:, 1:], argmax), "the head changes nothing"


@EVERY_HEAD
@torch.no_grad()
def test_untrained_head_returns_the_draft_logits(head):
    """Transformers did not ask for the initial values of a module that has only submodules, such as DSpark's."""
    target = make_target()
    new_draft = draft_with(head, target, is_trained=False)
    extended_draft = with_parts(make_draft(target), tiny_fields(head))
    for draft in (new_draft, extended_draft):
        view = view_of(draft, target)
        tokens = torch.tensor([5, 9, 17])
        state = view.start(tokens)
        for _ in range(3):
            ids, logits = view.candidates(torch.randn(3, 96))
            query, state = view.step(state, tokens, torch.randn(3, 32))
            assert torch.equal(view.scores(query, draft.target_ids(ids).expand_as(logits), logits), logits)


@EVERY_HEAD
@pytest.mark.parametrize("tree_nodes", [None, 12], ids=["block", "tree"])
def test_head_changes_no_generated_token(head, tree_nodes):
    target = make_target()
    draft = draft_with(head, target)
    if tree_nodes is not None:
        draft.decoding_config.tree_nodes = tree_nodes
    prompt = torch.tensor([[5, 7, 9, 11]])
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = target.generate(prompt, **options)
    assert torch.equal(target.generate(prompt, **options, assistant_model=draft), expected)


# ------------------------------------------------------------------------------------------------------------ training


@EVERY_HEAD
@torch.no_grad()
def test_queries_of_whole_blocks_equal_steps(head):
    """In training all slots are computed together where the head has no state."""
    target = make_target(dtype=torch.float64)
    draft = draft_with(head, target)
    view = view_of(draft, target)
    before = torch.randint(2, 90, (2, 3, 4))
    hidden = torch.randn(2, 3, 4, 32, dtype=torch.float64)
    draftable = torch.rand(2, 3, 4) < 0.7
    draftable[..., 0] = False
    queries = iter(forced_queries(view, before, hidden, draftable))
    for row in range(2):
        for block in range(3):
            state = view.start(before[row, block, 1:2])
            for slot in range(1, 4):
                position = (row, block, slice(slot, slot + 1))
                query, state = view.step(state, before[position], hidden[position])
                if draftable[row, block, slot]:
                    torch.testing.assert_close(next(queries), query[0])


@EVERY_HEAD
def test_training_moves_every_parameter(head, tmp_path):
    """Some parameters only from the third step on, since others are 0 before."""
    target = make_target()
    draft = draft_with(head, target, is_trained=False)
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    loss_type = head.preset_loss_type or "ce"
    trainer = make_trainer(tmp_path, target, counting_rows(4), draft, warmup_steps=0, max_steps=4, loss_type=loss_type)
    trainer.train()
    unmoved = [name for name, parameter in draft.named_parameters() if torch.equal(parameter, before[name])]
    assert not unmoved
