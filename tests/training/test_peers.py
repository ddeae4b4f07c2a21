"""
Drafters that other projects' own classes made and saved: here they have the same hidden states, and one step of
training the same loss and the same gradients.
"""

import importlib.util
from dataclasses import replace

import pytest
import torch
from support import peers
from support.pairs import VOCAB, make_target
from support.runs import make_trainer

from dflash_hf import DFlashDraftModel
from dflash_hf.layouts.all_layouts import SOURCE_LAYOUTS
from dflash_hf.layouts.tensor_names import published_name, tensor_names


pytestmark = pytest.mark.slow

MARKOV = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
SURE = {**MARKOV, "confidence_head_with_markov": True}
DOMINO = {"projector_type": "domino", "emb_dim": 7, "gru_hidden_dim": 9, "pure_draft_prefix_len": 1}
CONV2 = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": VOCAB}
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 5,
    "use_sliding_window": True,
}
CE, KL, DSPARK = ({"loss_type": loss_type} for loss_type in ("ce", "kl", "dspark"))
UNIFORM = {"loss_type": "kl", "loss_decay_gamma": float("inf")}
WEIGHED = {"loss": '{"ce": 0.1, "tv": 1.8}', **SURE}
ALONE = {"use_confidence_head": True, "loss": {"dflash_confidence_head_alpha": 1.0}}
CAUSAL = "dflash_draft_attention"
SINKS = {"dflash_swa_window_size": 5, "dflash_attention_sink": True}
# What makes the drafter, its kind, with which arguments of the trainer its loss is ours, and its other settings.
CASES = {
    "speculators, DFlash": (peers.speculators, "dflash", KL, {}),
    "speculators, DSpark": (peers.speculators, "dspark", DSPARK, WEIGHED),
    "speculators, DSpark, 1+N, gated": (
        peers.speculators,
        "dspark",
        DSPARK,
        {**WEIGHED, "sample_from_anchor": False, "markov_head_type": "gated"},
    ),
    "speculators, DSpark, rnn": (peers.speculators, "dspark", DSPARK, {**WEIGHED, "markov_head_type": "rnn"}),
    # Its training cuts the window at the anchor, which nobody serves: here it is wide, and says what is causal.
    "speculators, windows": (peers.speculators, "dflash", KL, {"layers": {**WINDOWS, "sliding_window": 40}}),
    "SpecForge, windows": (peers.specforge, "dflash", CE, {"layers": WINDOWS}),
    "SpecForge, DFlash": (peers.specforge, "dflash", CE, {}),
    "SpecForge, D-PACE": (peers.specforge, "dflash", {"loss_type": "dpace"}, {"loss_type": "dpace"}),
    "Automodel, DFlash": (peers.automodel, "dflash", CE, {}),
    "Automodel, JetSpec": (peers.automodel, "jetspec", UNIFORM, {"causal": True}),
    "ModelOpt, DFlash": (peers.modelopt, "dflash", CE, {}),
    "ModelOpt, causal": (peers.modelopt, "dflash", CE, {"loss": {CAUSAL: "causal"}}),
    "ModelOpt, windows and sinks": (peers.modelopt, "dflash", CE, {"loss": SINKS}),
    "ModelOpt, Domino": (peers.modelopt, "domino", CE, {**DOMINO, "loss": {"dflash_lambda_base_start": 0.75}}),
}
for selector in (1.0, 0.0):  # theirs learns through the backbone, too: compared alone, and then the rest
    CASES[f"speculators, DFlash 2, {selector}"] = (
        peers.speculators,
        "dflash2",
        CE,
        {"loss": "ce", "selector": selector, **CONV2},
    )
    CASES[f"Automodel, DFlash 2, {selector}"] = (peers.automodel, "dflash2", CE, {"selector": selector, **CONV2})
for shift in (True, False):
    CASES[f"SpecForge, Domino, {shift}"] = (peers.specforge, "domino", CE, {**DOMINO, "shift_label": shift})
    CASES[f"Automodel, Domino, {shift}"] = (peers.automodel, "domino", CE, {**DOMINO, "shift_label": shift})
for form in ("vanilla", "gated", "rnn"):
    named = {**SURE, "projector_type": "dspark", "markov_head_type": form}
    CASES[f"SpecForge, DSpark, {form}"] = (peers.specforge, "dspark", DSPARK, named)
    CASES[f"Automodel, DSpark, {form}"] = (peers.automodel_dspark, "dspark", DSPARK, {"markov_head_type": form})
    CASES[f"ModelOpt, DSpark, {form}"] = (
        peers.modelopt,
        "dspark",
        DSPARK,
        {"markov_rank": 6, "markov_head_type": form, **ALONE},
    )
MODULES = {
    "speculators": "speculators",
    "SpecForge": "specforge",
    "Automodel": "nemo_automodel",
    "ModelOpt": "modelopt",
}


def watched(monkeypatch, owner, name):
    """The last answer of a function, as a list that is empty until it is called."""
    last_result = []
    original = getattr(owner, name)

    def watch(*args, **kwargs):
        last_result[:] = [original(*args, **kwargs)]
        return last_result[0]

    monkeypatch.setattr(owner, name, watch)
    return last_result


def states_of(draft):
    """What the final norm gives in the last forward."""
    states = []
    draft.norm.register_forward_hook(lambda module, args, output: states.append(output))
    return states


def with_labels(blocks, labels):
    """Blocks that learn these tokens, `[1, S]`, in place of the text's."""
    positions = (blocks.previous_index + 1).clamp(max=labels.shape[1] - 1)
    return replace(blocks, labels=labels[0, positions])


@pytest.mark.parametrize("name", CASES)
def test_training_step_equals_other_projects(name, tmp_path, monkeypatch):
    project = MODULES[name.split(",")[0]]
    if importlib.util.find_spec(project) is None:
        pytest.skip(f"{project} is not installed")
    make, kind, arguments, fields = CASES[name]
    target = make_target(dtype=torch.float64)
    batch = peers.make_batch(target)
    torch.manual_seed(0)
    step = make(target, batch, tmp_path, kind, **fields)
    drawn = watched(monkeypatch, *step.anchors)
    their_states = states_of(step.draft)
    their_loss = step.run()
    their_loss.backward()
    anchors, valid = (tensor.reshape(1, -1) for tensor in drawn[0])

    draft = DFlashDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float64)
    rows = [{"input_ids": batch.ids[0].tolist(), "loss_mask": batch.mask[0].int().tolist()}]
    arguments = {"loss_decay_gamma": peers.GAMMA, **arguments}
    trainer = make_trainer(tmp_path, target, rows, draft.train(), max_steps=4, **arguments)
    trainer.state.max_steps = 4
    trainer.state.global_step = 1
    our_states = states_of(draft)
    inputs = {**trainer.data_collator(rows), "anchors": anchors, "valid": valid}
    build = trainer.objective.build_blocks
    if name.startswith("speculators"):  # its labels are the target's own next tokens
        labels = target(batch.ids).logits.argmax(-1).roll(1, dims=1)
        trainer.objective.build_blocks = lambda batch: with_labels(build(batch), labels)
    blocks = trainer.objective.build_blocks(inputs)
    divisor = None if step.divisor is None else step.divisor(blocks.counted, trainer.objective.weights)
    loss = trainer.compute_loss(draft, inputs, num_items_in_batch=divisor)
    loss.backward()

    shape = (-1, peers.BLOCK, 32)
    states = (hidden[-1].double().reshape(shape)[valid[0]] for hidden in (our_states, their_states))
    torch.testing.assert_close(*states, atol=1e-5, rtol=1e-5)
    selector = fields.get("selector")
    if selector != 0.0:
        torch.testing.assert_close(loss.double(), their_loss.double(), atol=1e-5, rtol=1e-5)
    renamings = tensor_names(draft.config)
    for layout in SOURCE_LAYOUTS:
        renamings |= layout.tensor_names
    gradients = {published_name(name, renamings): parameter.grad for name, parameter in step.draft.named_parameters()}
    for name, parameter in draft.named_parameters():
        assert parameter.grad.abs().max() > 1e-6, name
        if selector is not None and name.startswith("candidate_selector") != (selector == 1.0):
            continue
        torch.testing.assert_close(
            parameter.grad,
            gradients[name],
            atol=1e-5,
            rtol=1e-4,
            msg=lambda difference, name=name: f"{name}: {difference}",
        )
