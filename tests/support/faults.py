"""Faults that are put into a good pair, one by one, each a function that changes a `Case`; and what is to be found."""

import copy
import json
from dataclasses import replace

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedTokenizerFast

from dflash_hf import DFlashTrainer
from dflash_hf.doctor import changed_draft
from dflash_hf.training.objective import Objective
from support.chat_pair import train_chat_draft


class AnchorFirst(Objective):
    """Slot k learns the token at a + 1 + k."""

    def build_blocks(self, batch):
        blocks = super().build_blocks(batch)
        blocks.labels = nn.functional.pad(blocks.labels[..., 1:], (0, 1))
        blocks.counted = nn.functional.pad(blocks.counted[..., 1:], (0, 1))
        return blocks


class AnchorFirstTrainer(DFlashTrainer):
    """Trains with [`AnchorFirst`] as its objective."""

    objective_class = AnchorFirst


def other_target(case, change) -> None:
    """The case with a changed copy of its target, and the target itself as its base."""
    case.base = case.target
    case.target = copy.deepcopy(case.target)
    with torch.no_grad():
        change(case.target)


def other_encoder(case, **fields) -> None:
    """The case with an encoder whose chat template has other `fields`."""
    case.encoder = replace(case.encoder, template=replace(case.encoder.template, **fields))


def thinking(case, **_):
    """Used in a mode that it was not trained in."""
    other_encoder(case, chat_template_kwargs={})


def ids_one_up(case, **_):
    """Reads the features one layer above those of its training."""
    case.draft = changed_draft(case.draft, {"target_layer_ids": [i + 1 for i in case.draft.config.target_layer_ids]})


def ids_one_down(case, **_):
    """Reads the features one layer below those of its training."""
    case.draft = changed_draft(case.draft, {"target_layer_ids": [i - 1 for i in case.draft.config.target_layer_ids]})


def wrong_mask(case, **_):
    """Masks slots by another token than in training."""
    case.draft = changed_draft(case.draft, {"mask_token_id": case.encoder.template.tokenizer.eos_token_id})


def causal(case, **_):
    """Slots see none after them, though they did in training."""
    case.draft = changed_draft(case.draft, {"is_causal": True})


def blocks_twice_as_long(case, **_):
    """Drafts blocks of twice the trained size."""
    case.draft = changed_draft(case.draft, {"block_size": 2 * case.draft.config.block_size})


def untrained(case, **_):
    """As good as a drafter of another target of the same shape."""
    case.draft = type(case.draft)(copy.deepcopy(case.draft.config)).eval()


def anchor_first(case, folder):
    """Weights of another layout; only a drafter that can be trained in seconds."""
    case.draft = train_chat_draft(case.target, case.encoder.template.tokenizer, folder, AnchorFirstTrainer)


def scaled_embedding(case, **_):
    """Embeddings are multiplied as Gemma's are, though they were not in training."""
    case.draft = changed_draft(case.draft, {"input_embedding_scale": case.draft.config.hidden_size**0.5})


def replaced_head(case, **_):
    """As some quantisers do: the final norm's weight is multiplied into the head, and the text stays what it was."""

    def fold(target):
        scale = torch.rand(target.config.hidden_size, generator=torch.Generator().manual_seed(0)) * 3 + 0.2
        scale = scale.to(target.dtype)
        target.lm_head.weight = nn.Parameter(target.lm_head.weight * scale, requires_grad=False)
        target.model.norm.weight.data = target.model.norm.weight / scale

    other_target(case, fold)
    case.base = None


def other_tokenizer(case, **_):
    """The same tokens under other ids."""
    tokenizer = case.encoder.template.tokenizer
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    order = torch.randperm(len(state["model"]["vocab"]), generator=torch.Generator().manual_seed(0)).tolist()
    state["model"]["vocab"] = {token: order[i] for token, i in state["model"]["vocab"].items()}
    for token in state["added_tokens"]:
        token["id"] = state["model"]["vocab"][token["content"]]
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
        bos_token=tokenizer.bos_token,
    )
    other.chat_template = tokenizer.chat_template
    other_encoder(case, tokenizer=other)


def quantised(case, levels: float = 2.5, **_):
    """Every row of the layers' matrices rounded to `2 * int(levels) + 1` values; by default to five."""

    def rounded(target):
        for parameter in target.model.layers.parameters():
            if parameter.dim() == 2:
                step = parameter.abs().amax(1, keepdim=True) / levels
                parameter.data = (parameter / step).round() * step

    other_target(case, rounded)


def quantised_drafter(case, **_):
    """Its codes are unpacked in another order: random weights, and a configuration that says how it is quantised."""
    untrained(case)
    case.draft.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def sliding_target(case, **_):
    """A target whose window was not used when its features were computed for training."""

    def slide(target):
        target.config.layer_types = ["sliding_attention"] * target.config.num_hidden_layers
        target.config.sliding_window = 4
        target.model.has_sliding_layers = True
        for layer in target.model.layers:
            layer.attention_type = "sliding_attention"

    other_target(case, slide)
    case.base = None


FAULTS = {
    thinking: "thinking",
    ids_one_up: "layers_down",
    ids_one_down: "layers_up",
    wrong_mask: "mask",
    causal: "causal",
    blocks_twice_as_long: "block_size",
    untrained: "target",
    anchor_first: "anchor_first",
    scaled_embedding: "embedding",
    replaced_head: "head",
    other_tokenizer: "tokenizer",
    quantised: "base",
    quantised_drafter: "quantised",
    sliding_target: "target_window",
}
