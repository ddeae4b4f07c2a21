"""Devices, dtypes, attention and recomputation: none of them changes what is learned."""

import math

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import counting_rows, uneven_rows
from support.runs import BLOCK, CHECKPOINTING, PLAIN_SGD, history, make_trainer
from torch.nn.attention.flex_attention import BlockMask
from transformers import AutoModelForCausalLM

from dflash_hf.modeling.modeling_dflash import additive_mask
from dflash_hf.modeling.target_dflash import decoder_layers
from dflash_hf.targets.frozen import check_fit, target_features
from dflash_hf.training import objective
from dflash_hf.training.block_attention import groups_as_masks
from dflash_hf.training.block_mask import BlockGroups, block_groups, block_mask


LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def gradients_of(trainer):
    """Loss and gradients of the first step."""
    batch = trainer.data_collator(uneven_rows())
    trainer.objective.draw_anchors(batch, step=0)
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model.train(), batch)
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in trainer.model.parameters()]


def test_regular_anchors_are_the_same_in_each_step(tmp_path):
    trainer = make_trainer(tmp_path, make_target(), uneven_rows(), num_anchors=24, anchor_sampling="regular")
    for step in (0, 1):
        batch = trainer.data_collator(uneven_rows())
        trainer.objective.draw_anchors(batch, step)
        for row, anchors, valid in zip(uneven_rows(), batch["anchors"], batch["valid"], strict=True):
            first = row["loss_mask"].index(1)
            assert anchors[valid].tolist() == list(range(first, len(row["loss_mask"]) - 1, BLOCK))


@pytest.mark.parametrize("dflash2", [False, True])
def test_recomputed_activations_give_equal_gradients(dflash2, tmp_path):
    target = make_target()
    extra = {"conv_kernel_size": 2, "conv_group_size": 8} if dflash2 else {}
    results = []
    for recompute in (False, True):
        draft = make_draft(target, block_size=BLOCK, **LAYERS, **extra)
        trainer = make_trainer(tmp_path, target, uneven_rows(), draft, loss_type="dpace")
        passes = []
        draft.layers[0].self_attn.register_forward_hook(lambda *args, passes=passes: passes.append(1))
        if recompute:
            getattr(draft, f"{CHECKPOINTING}_enable")()
        results.append(gradients_of(trainer))
        assert len(passes) == 1 + recompute
    assert results[0][0] == results[1][0]
    for expected, gradient in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(expected, gradient, rtol=1e-6, atol=1e-9)


def test_half_precision_keeps_single_precision_weights(tmp_path):
    """At this rate a step is far below the resolution of bf16: weights kept in it would stand still."""
    target = make_target(dtype=torch.bfloat16)
    draft = make_draft(target, block_size=BLOCK)
    assert draft.dtype == torch.bfloat16
    trainer = make_trainer(
        tmp_path, target, counting_rows(4), draft, bf16=True, learning_rate=1e-7, warmup_steps=0, max_steps=2
    )
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    trainer.train()
    assert target.dtype == torch.bfloat16
    for name, parameter in draft.named_parameters():
        assert parameter.dtype == torch.float32
        moved = (parameter - before[name]).abs().max().item()
        assert 0 < moved < 1e-5, name
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    assert all(moment.dtype == torch.float32 for moment in moments)


def test_half_precision_target_trains_fp32_drafter(tmp_path):
    """Its features and head are bf16; losses and gradients are those of the same rounded weights in fp32."""
    half = make_target(dtype=torch.bfloat16)
    single = make_target()
    single.load_state_dict(half.state_dict())
    results = []
    for target in (half, single):
        draft = make_draft(single, block_size=BLOCK)
        results.append(gradients_of(make_trainer(tmp_path, target, uneven_rows(), draft)))
    assert results[0][0] == pytest.approx(results[1][0], rel=0.03)
    half_gradient, single_gradient = (
        torch.cat([gradient.flatten() for gradient in gradients]) for _, gradients in results
    )
    assert half_gradient.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(half_gradient, single_gradient, dim=0) > 0.98


def test_own_head_computes_in_the_runs_precision(tmp_path):
    """Its rows are kept in fp32 with the drafter: products by them took five times as long as in bf16."""
    target = make_target()
    hidden = torch.randn(3, 32)
    for half in (False, True):
        draft = make_draft(target, block_size=BLOCK, draft_vocab_size=16)
        trainer = make_trainer(tmp_path, target, uneven_rows(), draft, bf16=half)
        assert trainer.objective.draft_head(hidden).dtype == (torch.bfloat16 if half else torch.float32)


# ------------------------------------------------------------------------------------------------------------- devices


@pytest.fixture(scope="module")
def scattered_target(tmp_path_factory):
    """A target loaded with a `device_map`; some of its layers wait on a disk."""
    folder = tmp_path_factory.mktemp("target")
    make_target().save_pretrained(folder)
    devices = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    devices |= {f"model.layers.{i}": "disk" if i in (1, 2, 3) else "cpu" for i in range(4)}
    target = AutoModelForCausalLM.from_pretrained(folder, device_map=devices, offload_folder=folder / "disk")
    assert decoder_layers(target)[1].mlp.up_proj.weight.is_meta
    return target


@pytest.mark.parametrize("loss_type", ["ce", "kl"])
def test_target_with_a_device_map_is_read_in_place(loss_type, scattered_target, tmp_path):
    losses = []
    for target in (make_target(), scattered_target):
        draft = make_draft(make_target(), block_size=BLOCK, target_layer_ids=[0, 2])
        trainer = make_trainer(tmp_path, target, uneven_rows(), draft, loss_type=loss_type, max_steps=2, **PLAIN_SGD)
        trainer.train()
        losses.append(history(trainer, "loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert decoder_layers(scattered_target)[1].mlp.up_proj.weight.is_meta  # nothing was left behind in memory
    assert len(decoder_layers(scattered_target)) == 4


def test_embedding_that_cannot_be_read_is_refused(tmp_path):
    make_target().save_pretrained(tmp_path)
    devices = {"model": "cpu", "lm_head": "disk"}
    target = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=devices, offload_folder=tmp_path / "disk")
    with pytest.raises(ValueError, match="output_embeddings of Qwen3ForCausalLM are offloaded.*`device_map`"):
        check_fit(make_draft(make_target()).config, target)


def test_failed_forward_leaves_the_target_whole(target):
    layers = decoder_layers(target)
    with pytest.raises(IndexError):
        target_features(target, [1], torch.tensor([[10**6]]))
    assert decoder_layers(target) is layers and len(layers) == 4


# ----------------------------------------------------------------------------------------------------------- attention


def test_flex_attention_evaluates_to_the_same_figures(tmp_path, uncompiled_flex):
    target = make_target()
    rows = uneven_rows()
    figures = []
    for attention in ("dense", "flex"):
        draft = make_draft(target, block_size=BLOCK, **LAYERS)
        trainer = make_trainer(tmp_path, target, rows, draft, eval_rows=rows, block_attention=attention)
        batch = trainer.data_collator(rows)
        trainer.objective.draw_anchors(batch, step=0)
        with groups_as_masks(draft.config):
            kinds = {type(mask) for mask in trainer.objective.attention_masks(batch).values()}
        assert kinds == {BlockMask if attention == "flex" else BlockGroups}
        figures.append(trainer.evaluate())
    for key in ("eval_loss", "eval_accuracy", "eval_simulated_tau"):
        assert math.isfinite(figures[0][key])
        assert figures[0][key] == pytest.approx(figures[1][key], rel=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_groups_have_the_gradients_of_the_dense_mask(attention, tmp_path, monkeypatch):
    """Also where the activations of the layers are recomputed."""
    target = make_target()
    results = []
    for kind in ("dense", "groups", "recomputed"):
        draft = make_draft(target, block_size=BLOCK, attn_implementation=attention, **LAYERS)
        trainer = make_trainer(tmp_path, target, uneven_rows(), draft, num_anchors=9)
        if kind == "recomputed":
            getattr(draft, f"{CHECKPOINTING}_enable")()

        def mask(anchors, *shape, kind=kind):
            if kind == "dense":
                return additive_mask(block_mask(anchors, *shape), torch.float32)
            return block_groups(anchors, *shape, queries=2 * BLOCK)

        monkeypatch.setattr(objective, "block_groups", mask)
        batch = trainer.data_collator(uneven_rows())
        trainer.objective.draw_anchors(batch, step=0)
        with groups_as_masks(draft.config):
            loss = trainer.compute_loss(trainer.model.train(), batch)
            loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in draft.parameters())])
    for result in results[1:]:
        for gradient, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_drafter_keeps_its_own_attention(tmp_path):
    """A drafter whose attention has a name of this process could not be read in another."""
    trainer = make_trainer(tmp_path, make_target(), counting_rows(4), eval_rows=counting_rows(2))
    before = trainer.draft.config._attn_implementation
    batch = trainer.data_collator(counting_rows(2))
    trainer.objective.draw_anchors(batch, step=0)
    seen = []
    objective = trainer.objective

    def kinds():
        return {type(mask) for mask in objective.attention_masks(batch).values()}

    assert kinds() == {torch.Tensor}  # outside of a run
    trainer.draft.layers[0].register_forward_pre_hook(lambda *_: seen.append(kinds()))
    trainer.evaluate()
    trainer.train()
    assert seen and all(of_layer == {BlockGroups} for of_layer in seen)
    assert trainer.draft.config._attn_implementation == before
    trainer.draft.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    for run in (trainer.evaluate, trainer.train):
        with pytest.raises(ZeroDivisionError):
            run()
        assert trainer.draft.config._attn_implementation == before


def test_flex_attention_is_used_where_it_is_supported(tmp_path):
    target = make_target()
    draft = make_draft(target, block_size=BLOCK)
    assert not make_trainer(tmp_path, target, uneven_rows(), draft).objective.uses_flex
    sinks = make_draft(target, block_size=BLOCK, attention_sink_bias=True)
    assert not make_trainer(tmp_path, target, uneven_rows(), sinks).objective.uses_flex
    with pytest.raises(ValueError, match="block_attention='flex' cannot train .* attention_sink_bias=True"):
        make_trainer(tmp_path, target, uneven_rows(), sinks, block_attention="flex")
