"""
Rounds on a pretend accelerator: the text is that of the CPU, in every mode and on one to three devices; and a round
asks for no more kernels, copies and waits than the tables here say.
"""

import copy
import dataclasses
import functools
from unittest import mock

import accelerate
import pytest
import torch
from device_rounds import MODES, Shape, measure
from support.heads import EVERY
from support.pairs import make_draft, make_target
from support.pretend import PretendAccelerator
from support.recurrent_head import RecurrentHead, use_heads
from support.scripted_draft import scripted
from torch.nn.attention.bias import CausalBias

from dflash_hf import DFlashDecodingConfig
from dflash_hf.decoding import attention


SHAPE = Shape(layers=2, draft_layers=1, block_size=8, prompt=12, tokens=56)
ALONE = {"target alone", "target alone, sampled"}
# Per round of this shape, at most: waits, copies from the host, copies to the host, kernels.
LIMITS = {
    "plain call": (1, 0, 2, 433),
    "block": (1, 0, 1, 284),
    "tree of 63": (1, 0, 1, 425),
    "block, sampled": (1, 0, 1, 310),
    "plain call, sampled": (1, 0, 2, 461),
    "plain call, four rows": (1.2, 0.2, 1.9, 396),  # a copy of earlier text is a draft of the host's
    "block, selector head": (1, 0, 1, 370),
    "block, Markov head": (1, 0, 1, 328),
    "block, Domino head": (1, 0, 1, 469),
    "block, streamer": (1, 0, 1, 284),
    "plain call, CUDA graphs": (1, 0, 2, 129),  # what remains is acceptance, and the copies of inputs and results
    "block, CUDA graphs": (1, 0, 1, 56),
    "tree of 63, CUDA graphs": (1, 0, 1, 90),
    "block, sampled, CUDA graphs": (1, 0, 1, 85),
    # Not this package's loop: a later version of transformers may ask for more.
    "transformers' loop, `DFlashCandidateGenerator`": (3, 0, 2, 237),
}


@pytest.mark.parametrize("name", LIMITS)
def test_round_asks_no_more_of_a_device(name):
    result = measure(MODES[name], SHAPE)
    kinds = ("waits", "from_host", "to_host", "kernels")
    counts = {kind: result.per_round(kind) for kind in kinds}
    above = [kind for kind, limit in zip(kinds, LIMITS[name]) if counts[kind] > limit]
    assert result.is_same_text
    assert result.counts.between_devices.total() == 0
    assert not above, f"{counts}; waits by line: {result.counts.waits}"


def test_block_of_one_row_in_half_precision_has_no_mask(monkeypatch):
    """Torch's kernels without a mask let all processors of a GPU share a long text."""
    attend = mock.Mock(wraps=attention.scaled_dot_product_attention)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", attend)
    result = measure(MODES["block"], dataclasses.replace(SHAPE, dtype="bfloat16"))
    biases = {type(call.args[3]) for call in attend.call_args_list}
    assert result.is_same_text
    assert {CausalBias, type(None)} <= biases  # the target's blocks, and the drafter's, each slot of which sees all


@pytest.mark.parametrize("name", sorted(MODES.keys() - LIMITS.keys() - ALONE))
def test_compared_loops_write_the_same_text(name):
    assert measure(MODES[name], SHAPE).is_same_text


# -------------------------------------------------------------------------------------------------- several devices

# Devices of the target, in the order of its layers, and that of the drafter.
PLACEMENTS = {
    "one device": (["cuda:0"], "cuda:0"),
    "drafter on another": (["cuda:0"], "cuda:1"),
    "drafter on the host": (["cuda:0"], "cpu"),
    "target on the host": (["cpu"], "cuda:0"),
    "two devices": (["cuda:0", "cuda:1"], "cuda:1"),
    "three devices": (["cuda:0", "cuda:1", "cuda:2"], "cuda:1"),
}
FAMILIES = {"qwen3": PLACEMENTS}
FAMILIES |= {"gemma3": ("drafter on another", "three devices")}  # sliding attention
FAMILIES |= {"lfm2": ("drafter on another", "three devices"), "qwen3_5_text": ("three devices",)}  # recurrent states
PROMPTS = torch.tensor([[5, 9, 17, 33, 5, 9, 17], [0, 0, 17, 33, 5, 9, 18]])
NEW_TOKENS = 8


@functools.cache
def expected_text(family: str) -> torch.LongTensor:
    """What the target writes alone on the CPU."""
    mask = (PROMPTS > 0).long()
    return make_target(family, attn=None).generate(
        PROMPTS, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False
    )


@functools.cache
def split_target(family: str, devices: tuple[str, ...]):
    """A target on devices, by accelerate's hooks if there are several. Called inside of a pretend accelerator."""
    target = make_target(family, attn=None)
    if len(devices) == 1:
        return target.to(devices[0])
    device_map = {"lm_head": devices[-1]}
    for name, module in target.model.named_children():
        if name != "layers":
            is_first = name.startswith(("embed", "rotary")) and not name.endswith("norm")
            device_map[f"model.{name}"] = devices[0] if is_first else devices[-1]
            continue
        for i in range(len(module)):
            device_map[f"model.layers.{i}"] = devices[i * len(devices) // len(module)]
    skipped = target._skip_keys_device_placement
    return accelerate.dispatch_model(target, device_map, main_device=devices[0], skip_keys=skipped)


def assert_same_text(family: str, placement: str, make, **decoding):
    """Two rows, one with padding, on these devices; drafts are accepted and rejected."""
    devices, draft_device = PLACEMENTS[placement]
    expected = expected_text(family)
    with PretendAccelerator(devices=3):
        target = split_target(family, tuple(devices))
        inputs = {"input_ids": PROMPTS, "attention_mask": (PROMPTS > 0).long()}
        inputs = {name: value.to(devices[0]) for name, value in inputs.items()}
        draft = make(make_target(family, attn=None)).to(draft_device)
        draft = scripted(draft, expected.to(devices[0]), error_rate=0.2, ranks=2)
        draft.decoding_config = DFlashDecodingConfig(**decoding)
        output = target.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            assistant_model=draft,
            return_dict_in_generate=True,
        )
        assert output.sequences.device == torch.device(devices[0])
        assert torch.equal(output.sequences.cpu(), expected)
    assert max(length for row in output.acceptance_lengths for length in row) > 1


@pytest.mark.parametrize(
    ("family", "placement"), [(family, placement) for family, names in FAMILIES.items() for placement in names]
)
def test_target_writes_the_same_on_devices(family, placement):
    assert_same_text(family, placement, make_draft, tree_nodes=9)


@pytest.mark.parametrize("decoding", [{"block_size": 4}, {"tree_nodes": 9}], ids=["block", "tree"])
@pytest.mark.parametrize("head", EVERY)
def test_heads_draft_on_other_devices(head, decoding, monkeypatch):
    use_heads(monkeypatch, RecurrentHead)
    assert_same_text("qwen3", "three devices", EVERY[head], **decoding)


def test_sampling_is_the_same_on_devices():
    """Drafts, target and noise on three devices: a seed gives what it gives the target alone."""
    with PretendAccelerator(devices=3):
        target = split_target("qwen3", ("cuda:0", "cuda:1", "cuda:2"))
        draft = make_draft(make_target()).to("cuda:1")
        ids = PROMPTS[:1].to("cuda:0")
        texts = []
        for assistant in (None, draft, copy.copy(draft)):
            torch.manual_seed(3)
            text = target.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=True, assistant_model=assistant)
            texts.append(text.tolist())
    assert texts[0] == texts[1] == texts[2]
