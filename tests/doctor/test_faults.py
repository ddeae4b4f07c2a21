"""Faults put into a good pair one by one: the doctor names each, and nothing on the good pair."""

import copy
import json

import pytest
import torch
from support.chat_pair import OFF, requests, train_chat_draft
from support.tiny_chat import END, SPECIAL
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedTokenizerFast

from dflash_hf import DFlashTrainer
from dflash_hf.data.encode import RowEncoder
from dflash_hf.doctor.diagnosis import diagnose
from dflash_hf.doctor.experiments import Case
from dflash_hf.doctor.measure import changed_draft


class AnchorFirstTrainer(DFlashTrainer):
    """Slot k learns the token at a + 1 + k."""

    def build_blocks(self, inputs, label_ids=None):
        blocks = super().build_blocks(inputs, inputs["input_ids"].roll(-1, dims=1))
        blocks.counted = nn.functional.pad(blocks.counted[..., 1:], (0, 1))
        return blocks


@pytest.fixture
def case(chat_pair):
    """The good pair; faults change it."""
    target, draft, tokenizer, writer = chat_pair
    return Case(
        target,
        draft,
        writer,
        [{"prompt": said} for said in requests(40, seed=9)],
        RowEncoder(tokenizer, chat_template_kwargs=OFF),
        names={"target": "T", "draft": "D", "base": "B"},
    )


def other_target(case, change) -> None:
    """The case with a changed copy of its target."""
    case.base, case.target = case.target, copy.deepcopy(case.target)
    change(case.target)
    case.writer = case.writer.of(case.target)


def thinking(case, **_):
    case.encoder = RowEncoder(case.encoder.tokenizer)


def ids_one_up(case, **_):
    case.draft = changed_draft(case.draft, {"target_layer_ids": [2, 3, 4]})


def ids_one_down(case, **_):
    case.draft = changed_draft(case.draft, {"target_layer_ids": [0, 1, 2]})


def wrong_mask(case, **_):
    case.draft = changed_draft(case.draft, {"mask_token_id": END})


def causal(case, **_):
    case.draft = changed_draft(case.draft, {"is_causal": True})


def anchor_first(case, folder):
    case.draft = train_chat_draft(case.target, case.encoder.tokenizer, folder, AnchorFirstTrainer)


def scaled_embedding(case, **_):
    case.draft = changed_draft(case.draft, {"input_embedding_scale": 8.0})


def replaced_head(case, **_):
    """As some quantisers do: the final norm's weight is multiplied into the head, and the text stays what it was."""

    def fold(target):
        scale = torch.rand(target.config.hidden_size, generator=torch.Generator().manual_seed(0)) * 3 + 0.2
        target.lm_head.weight = nn.Parameter(target.lm_head.weight * scale, requires_grad=False)
        target.model.norm.weight.data = target.model.norm.weight / scale

    other_target(case, fold)
    case.base = None


def other_tokenizer(case, **_):
    state = json.loads(case.encoder.tokenizer.backend_tokenizer.to_str())
    order = torch.randperm(len(state["model"]["vocab"]), generator=torch.Generator().manual_seed(0)).tolist()
    state["model"]["vocab"] = {token: order[i] for token, i in state["model"]["vocab"].items()}
    for token in state["added_tokens"]:
        token["id"] = state["model"]["vocab"][token["content"]]
    special = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[END]}
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **special)
    other.chat_template = case.encoder.tokenizer.chat_template
    case.encoder = RowEncoder(other, chat_template_kwargs=OFF)


def quantised(case, **_):
    """Layers rounded to five values."""

    def rounded(target):
        for parameter in target.model.layers.parameters():
            if parameter.dim() == 2:
                step = parameter.abs().amax(1, keepdim=True) / 2.5
                parameter.data = (parameter / step).round() * step

    other_target(case, rounded)


FAULTS = {
    thinking: "thinking",
    ids_one_up: "layers_down",
    ids_one_down: "layers_up",
    wrong_mask: "mask",
    causal: "causal",
    anchor_first: "anchor_first",
    scaled_embedding: "embedding",
    replaced_head: "head",
    other_tokenizer: "tokenizer",
    quantised: "base",
}


def test_on_the_good_pair_nothing_is_named(case):
    found = diagnose(case)

    assert found.cause is None and found.as_given.tau > 2.5
    # Decoding is the same drafts: in fp32 block by block.
    assert found.decoded.accepted == found.forced.accepted and sum(found.decoded.blocks) > 30
    assert "none of these" in "\n".join(found.lines())
    assert found.facts()["cause"] is None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_is_named(fault, case, tmp_path):
    fault(case, folder=tmp_path)
    found = diagnose(case)

    assert found.cause is not None and found.cause.key == FAULTS[fault]
    assert found.lines()[-1].endswith(found.cause.remedy)
