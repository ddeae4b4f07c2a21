"""
CUDA graphs, captured and replayed on a pretend accelerator, whose replays run the captured operators again, on the
memory that they were captured with.
"""

import copy
import gc
import weakref
from typing import ClassVar

import pytest
import torch
from support.calls import Collected
from support.heads import EVERY
from support.pairs import make_draft, make_target
from support.pretend import PretendAccelerator
from support.rows import ragged_prompts
from support.scripted_draft import scripted
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from dflash_hf import DFlashDecodingConfig
from dflash_hf.decoding import cuda_graphs
from dflash_hf.decoding.session import SlotSession


UNCOUNTED = ("scripted_draft.py",)
BLOCK = {"block_size": 4}


class Watched(cuda_graphs.CudaGraph):
    """Counts captures and replays."""

    captures = 0
    replays = 0
    living: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(self, *args):
        super().__init__(*args)
        Watched.captures += 1
        Watched.living.add(self)

    def replay(self, inputs):
        Watched.replays += 1
        return super().replay(inputs)


@pytest.fixture(autouse=True)
def failures(monkeypatch):
    """Why parts of the calls that have ended were not captured."""
    failures = []

    def log_failures(graphs):
        failures.extend(failure for failure in (graphs.target.failure, graphs.drafter.failure) if failure)
        original(graphs)

    original = cuda_graphs.CallCudaGraphs.log_failures
    monkeypatch.setattr(cuda_graphs.CallCudaGraphs, "log_failures", log_failures)
    monkeypatch.setattr(cuda_graphs, "CudaGraph", Watched)
    return failures


def to_device(values: dict) -> dict:
    return {name: value.to("cuda") if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def assert_same_text(decoding=None, family="qwen3", rows=1, head=make_draft, new_tokens=40, **options):
    """The text of the target alone, with drafts that are accepted and rejected, and graphs that are replayed."""
    target = make_target(family, attn=None)
    inputs = ragged_prompts(rows)[0]
    limits = {"max_new_tokens": new_tokens, "do_sample": False, **options}
    torch.manual_seed(5)
    expected = target.generate(**inputs, **limits)
    with PretendAccelerator(uncounted=UNCOUNTED):
        draft = scripted(head(target).to("cuda"), expected.to("cuda"), error_rate=0.2)
        draft.decoding_config = DFlashDecodingConfig(**(decoding or {}), cuda_graphs=True)
        target = target.to("cuda")
        # The first call tries what the target supports, which draws no random numbers, but replaces forwards.
        target.generate(**to_device(inputs), max_new_tokens=2, assistant_model=copy.copy(draft), pad_token_id=0)
        Watched.captures = Watched.replays = 0
        torch.manual_seed(5)
        output = target.generate(**to_device(inputs), **limits, assistant_model=draft, return_dict_in_generate=True)
        assert torch.equal(output.sequences.cpu(), expected)
    lengths = [length for row in output.acceptance_lengths for length in row]
    assert max(lengths) > 1 and min(lengths) < 4
    assert Watched.captures >= 2 and Watched.replays > Watched.captures
    return lengths


SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20}
SITUATIONS = {
    "block": {"decoding": BLOCK},
    "tree": {"decoding": {"tree_nodes": 9}},
    "plain call": {},
    "sampled": {"decoding": BLOCK, **SAMPLED},
    "sampled, tree": {"decoding": {"tree_nodes": 9}, **SAMPLED},
    "penalty": {"decoding": BLOCK, "repetition_penalty": 1.1},
    "three rows": {"decoding": BLOCK, "rows": 3},
    "three rows, tree": {"decoding": {"tree_nodes": 9}, "rows": 3},
    "sliding layers": {"decoding": BLOCK, "family": "gemma3", "new_tokens": 60},
    "all layers sliding": {"decoding": BLOCK, "family": "mistral_sliding", "new_tokens": 60},
    "attention with softcap": {"decoding": BLOCK, "family": "gemma2"},
    "text longer than a bucket": {"decoding": BLOCK, "new_tokens": 260},
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_replayed_rounds_write_the_same_text(name, failures):
    assert_same_text(**SITUATIONS[name])
    assert not failures


@pytest.mark.parametrize("decoding", [BLOCK, {"tree_nodes": 9}], ids=["block", "tree"])
@pytest.mark.parametrize("head", EVERY)
def test_every_head_drafts_with_graphs(head, decoding, failures):
    assert_same_text(decoding, head=EVERY[head])
    assert not failures


def test_streamed_rounds_are_replayed():
    assert_same_text(BLOCK, streamer=Collected())


def test_model_that_reads_the_host_decodes_without_graphs(monkeypatch, caplog):
    """A tensor that a layer makes from numbers of the host is a copy, which no graph can hold."""

    def forward(mlp, hidden):
        return original(mlp, hidden) + torch.tensor([0.0], device=hidden.device)

    original = Qwen3MLP.forward
    monkeypatch.setattr(Qwen3MLP, "forward", forward)
    with pytest.raises(AssertionError, match="captures"):
        assert_same_text(BLOCK)
    assert "without CUDA graphs: operation not permitted when stream is capturing" in caplog.text


def test_length_that_is_not_passed_to_the_graph_is_noticed(monkeypatch):
    """The pretend accelerator replays what was captured, with the lengths of that round."""

    def verify(session, candidates, start, omits_masks=False):
        if len(start) == 1:
            start = torch.full_like(start, session.lengths.longest)
        return original(session, candidates, start, omits_masks)

    original = SlotSession._verify
    monkeypatch.setattr(SlotSession, "_verify", verify)
    with pytest.raises(AssertionError, match="torch.equal"):
        assert_same_text(BLOCK)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_call_without_a_gpu_decodes_without_graphs(family, caplog):
    target = make_target(family, attn=None)
    prompt = ragged_prompts(1)[0]
    expected = target.generate(**prompt, max_new_tokens=12, do_sample=False)
    draft = make_draft(target)
    draft.decoding_config.cuda_graphs = True
    assert torch.equal(target.generate(**prompt, max_new_tokens=12, do_sample=False, assistant_model=draft), expected)
    assert "Decoding without CUDA graphs" in caplog.text


def test_graphs_end_with_their_call(monkeypatch):
    """They hold memory, and addresses of the call's slots."""
    assert_same_text(BLOCK)
    gc.collect()
    assert not Watched.living


def test_graphs_of_slots_that_have_moved_are_dropped():
    """Nothing would replay them, and they hold memory."""
    with PretendAccelerator(uncounted=UNCOUNTED):
        value = torch.ones(3).to("cuda")
        graphs = cuda_graphs.CallCudaGraphs().target
        for num_slots in (256, 512, 1024):
            for size in (1, 4):
                for _ in range(graphs.MIN_ROUNDS + 1):
                    result = graphs.run(num_slots, (size,), torch.add, value, value)
                    assert result.cpu().tolist() == [2.0] * 3
        gc.collect()
        assert len(Watched.living) == len(graphs.graphs) == 2


def test_compiled_forwards_have_no_graphs_of_ours():
    target = make_target()
    draft = make_draft(target)
    draft.decoding_config = DFlashDecodingConfig(cuda_graphs=True, compile=True)
    with pytest.raises(ValueError, match=r"decoding_config.cuda_graphs=True needs compile=False, and compile=True"):
        target.generate(torch.tensor([[5, 6, 7]]), assistant_model=draft)
