"""What a fresh drafter takes from its target: layers to begin as, and the tokens that it drafts."""

import math
from dataclasses import replace

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import counting_rows
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dflash_hf import DFlashDraftModel
from dflash_hf.pairs.draft_vocabulary import draft_ids, set_draft_vocabulary
from dflash_hf.training.losses import LogitsHead, block_loss, dpace_weights, slot_weights, token_losses
from dflash_hf.training.rows import validate_and_count
from dflash_hf.training.start import _copy_weight, initialize_from_target


WIDTH = 8
VOCAB = 40


def test_layers_norm_and_one_feature_are_the_targets():
    target = make_target()
    draft = make_draft(target, num_hidden_layers=2, target_layer_ids=[0, 1, 3])
    copied_names = initialize_from_target(draft, target, [2, 3])
    for draft_layer, target_layer in zip(draft.layers, target.model.layers[2:], strict=True):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm"):
            assert torch.allclose(draft_layer.get_submodule(name).weight, target_layer.get_submodule(name).weight), (
                name
            )
    assert torch.allclose(draft.norm.weight, target.model.norm.weight)
    assert {"layers.0.mlp.up_proj.weight", "norm.weight", "fc.weight"} <= set(copied_names)
    # The context is what layer 2 of the target reads: the output of layer 1, the second of the features.
    features = torch.randn(1, 5, 3 * target.config.hidden_size)
    own = features.chunk(3, dim=-1)[1]
    assert torch.allclose(draft.fc(features), own)
    assert torch.allclose(draft.project_context(features), draft.hidden_norm(own))


def test_target_without_head_norms_keeps_score_size():
    target = make_target("llama")
    draft = make_draft(target, num_hidden_layers=1, target_layer_ids=[0, 1])
    initialize_from_target(draft, target, [2])
    attention = draft.layers[0].self_attn
    norm = draft.layers[0].input_layernorm
    states = norm(torch.randn(4000, target.config.hidden_size, generator=torch.Generator().manual_seed(0)))
    for projection, scale in ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm)):
        lengths = projection(states).square().mean().sqrt()
        assert scale.weight.unique().numel() == 1 and scale.weight[0].item() == pytest.approx(lengths.item(), rel=0.05)


@torch.no_grad()
def test_copied_gemma_norm_scales_alike():
    draft_norm = Qwen3RMSNorm(WIDTH)
    target_norm = GemmaRMSNorm(WIDTH)
    with torch.no_grad():
        target_norm.weight.copy_(torch.linspace(-0.5, 0.5, WIDTH))
    assert _copy_weight(draft_norm, target_norm)
    states = torch.randn(3, WIDTH)
    assert torch.allclose(draft_norm(states), target_norm(states), atol=1e-4)


@torch.no_grad()
def test_norms_of_outputs_become_part_of_projections():
    """Gemma 3: the first loss of a drafter was ten times that of random weights."""
    target = make_target("gemma3")
    generator = torch.Generator().manual_seed(0)
    for layer in target.model.layers:
        for name in ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
            weight = layer.get_submodule(name).weight
            weight.copy_(8 * torch.rand(weight.shape, generator=generator))
    draft = make_draft(target, num_hidden_layers=1)
    initialize_from_target(draft, target, [3])
    draft_layer = draft.layers[0]
    target_layer = target.model.layers[3]
    states = torch.randn(50, target.config.hidden_size, generator=generator)
    drafted = draft_layer.mlp(draft_layer.post_attention_layernorm(states))
    expected = target_layer.post_feedforward_layernorm(
        target_layer.mlp(target_layer.pre_feedforward_layernorm(states))
    )
    assert torch.nn.functional.cosine_similarity(drafted, expected).min() > 0.999  # the same up to a factor
    sizes = drafted.norm(dim=-1) / expected.norm(dim=-1)
    assert 0.3 < sizes.min()
    assert sizes.max() < 3


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([3], "init_layers=.3. must name a layer of the target, 0 to 3, for each of the drafter's 2"),
        ([3, 4], "init_layers=.3, 4. must name a layer of the target, 0 to 3"),
    ],
)
def test_layers_that_are_not_there_are_refused(layers, message):
    target = make_target()
    with pytest.raises(ValueError, match=message):
        initialize_from_target(make_draft(target, num_hidden_layers=2), target, layers)


def test_vocabulary_is_the_most_frequent_tokens():
    target = make_target()
    draft = make_draft(target, draft_vocab_size=4)
    rows = [{"input_ids": [9, 9, 9, 5, 7, 7, 3], "loss_mask": [0, 0, 0, 1, 1, 1, 1]}]  # the prompt does not count
    counts = validate_and_count(rows)
    assert counts.tolist() == [0, 0, 0, 1, 0, 1, 0, 2]
    assert set_draft_vocabulary(draft, target, counts) == 1.0
    assert draft.target_ids(torch.arange(4)).tolist() == [0, 3, 5, 7]  # 0 fills up: it is the lowest
    assert torch.equal(draft.lm_head.weight, target.get_output_embeddings().weight[[0, 3, 5, 7]])
    ids = draft_ids(draft)
    assert ids[[0, 3, 5, 7]].tolist() == [0, 1, 2, 3] and (ids >= 0).sum() == 4
    assert set_draft_vocabulary(draft, target, torch.arange(target.config.vocab_size)) < 1.0
    assert draft_ids(make_draft(target)) is None


def test_vocabulary_that_nobody_chose_is_refused():
    target = make_target()
    draft = DFlashDraftModel(make_draft(target, draft_vocab_size=4).config)
    with pytest.raises(ValueError, match="draft_vocab_size=4, but the drafter's tokens were not chosen"):
        draft_ids(draft)
    # Nor is the default one that was chosen: the first tokens are those of a byte-level tokenizer.
    set_draft_vocabulary(draft, target, torch.arange(target.config.vocab_size).flip(0))
    assert not draft.d2t.any() and draft_ids(draft)[:6].tolist() == [0, 1, 2, 3, -1, -1]


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_undraftable_token_is_a_mistake_without_loss(kind):
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 1, 4, WIDTH, generator=random).requires_grad_()
    head = torch.nn.Linear(WIDTH, VOCAB, bias=False).requires_grad_(False)
    counted = torch.tensor([[[False, True, True, True]]])
    labels = torch.tensor([[[0, 3, -1, 5]]])
    losses = token_losses(hidden, LogitsHead(head), labels, counted)
    assert losses.draftable.tolist() == [[[False, True, False, True]]]
    assert losses.loss[0, 0, 2] == 0 and not losses.correct[0, 0, 2]
    weights = dpace_weights if kind == "dpace" else slot_weights(4)
    loss = block_loss(losses, counted, weights)
    loss.sum().backward()
    assert hidden.grad[0, 0, 2].abs().max() == 0 and hidden.grad[0, 0, [1, 3]].abs().min() > 0
    # The block is worth what one with a hopeless guess at that slot is worth.
    nll = losses.loss.detach().clone()
    nll[0, 0, 2] = 1e9
    hopeless = replace(losses, nll=nll, draftable=counted)
    expected = dpace_weights(hopeless, counted) if kind == "dpace" else counted * weights
    assert loss.item() == pytest.approx((nll * expected)[0, 0, [1, 3]].sum().item())
    assert math.isfinite(loss.item())


def test_reduced_vocabulary_trains_without_its_head(tmp_path):
    from support.runs import make_trainer

    target = make_target()
    rows = counting_rows(4)
    for loss_type in ("dpace", "kl", "dpace_kl"):
        draft = make_draft(target, draft_vocab_size=24)
        set_draft_vocabulary(draft, target, validate_and_count(rows))
        head = draft.lm_head.weight.detach().clone()
        before = draft.fc.weight.detach().clone()
        options = {"warmup_steps": 0, "max_steps": 2, "loss_type": loss_type}
        trainer = make_trainer(tmp_path / loss_type, target, rows, draft, **options)
        trainer.train()
        assert torch.equal(draft.lm_head.weight, head) and not torch.equal(draft.fc.weight, before)
        assert trainer.state.log_history[-1]["train_loss"] > 0
