"""Weights that hold codes: what drafting and training make of them."""

import copy
import importlib

import pytest
import torch
from support.pairs import make_draft, make_target
from support.quantised import Coded4, Coded8, with_codes, with_plain_weights
from torch import nn

from dflash_hf import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.modeling import modeling_dflash as published
from dflash_hf.pairs.draft_vocabulary import set_draft_vocabulary
from dflash_hf.targets.digests import digest_of_parameters
from dflash_hf.targets.logits import target_logits
from dflash_hf.targets.weights import is_plain, plain_weight, quantised_layer
from dflash_hf.training import start
from dflash_hf.training.start import initialize_from_target


conversion = importlib.import_module("dflash_hf.conversion.convert")  # its name is that of a function, too
KINDS = pytest.mark.parametrize("kind", [Coded8, Coded4])
PROMPT = torch.tensor([[5, 9, 11, 60]])


@KINDS
@pytest.mark.parametrize("bias", [True, False])
def test_plain_weight_is_what_codes_stand_for(kind, bias):
    layer = nn.Linear(8, 6, bias=bias)
    assert plain_weight(layer) is layer.weight
    coded = kind(layer)
    assert is_plain(layer) and not is_plain(coded)
    torch.testing.assert_close(plain_weight(coded), coded.plain())


def test_quantised_layer_is_named():
    draft = make_draft(make_target())
    assert quantised_layer(draft) is None
    assert quantised_layer(with_codes(draft, Coded8, skipped=("fc",))) == "layers.0.self_attn.q_proj"


def with_coded_head(kind, **overrides):
    target = make_target(tie_word_embeddings=False, **overrides)
    target.lm_head = kind(target.lm_head)
    return target


@KINDS
def test_coded_head_drafts_as_its_plain_weight(kind):
    """States were cast to the dtype of the codes: nothing but noise was drafted."""
    target = with_coded_head(kind)
    draft = make_draft(target)
    states = torch.randn(2, 3, 32)
    logits = draft.draft_logits(states, target.lm_head)
    torch.testing.assert_close(logits, states @ target.lm_head.plain().T)
    alone = target.generate(PROMPT, max_new_tokens=20, do_sample=False)
    drafted = target.generate(
        PROMPT, max_new_tokens=20, do_sample=False, assistant_model=draft, return_dict_in_generate=True
    )
    plain = with_plain_weights(copy.deepcopy(target)).generate(
        PROMPT, max_new_tokens=20, do_sample=False, assistant_model=draft, return_dict_in_generate=True
    )
    assert torch.equal(drafted.sequences, alone)
    assert drafted.acceptance_lengths == plain.acceptance_lengths


@KINDS
def test_published_drafter_reads_features_in_floats(kind):
    """The features of the target were cast to the dtype of the codes of `fc`."""
    target = make_target()
    draft = published.DFlashDraftModel(make_draft(target).config).eval()
    draft.load_state_dict(make_draft(target).state_dict())
    with_codes(draft, kind)
    blocks = {}
    for name, drafter in (("codes", draft), ("plain", with_plain_weights(copy.deepcopy(draft)))):
        outputs = []
        drafter.register_forward_hook(lambda module, args, output, o=outputs: o.append(output.last_hidden_state))
        target.generate(PROMPT, max_new_tokens=12, do_sample=False, assistant_model=drafter)
        blocks[name] = outputs
    torch.testing.assert_close(blocks["codes"], blocks["plain"])


def test_drafter_without_weights_is_refused():
    """As PyTorch's dynamic quantisation leaves it: `weight` is a method."""

    class Packed(nn.Module):
        def weight(self):
            raise NotImplementedError

    target = make_target()
    draft = make_draft(target)
    draft.fc = Packed()
    with pytest.raises(ValueError, match="assistant_model.fc is a .*Packed, which has no tensor `weight`: quantise"):
        target.generate(PROMPT, max_new_tokens=4, assistant_model=draft)


def test_quantised_embedding_is_refused():
    target = make_target(tie_word_embeddings=False)
    draft = make_draft(target)
    embedding = target.get_input_embeddings()
    embedding.weight = nn.Parameter(embedding.weight.detach().to(torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="embedding is quantised .* load the target with a plain embedding"):
        target.generate(PROMPT, max_new_tokens=4, assistant_model=draft)


@KINDS
def test_fresh_drafter_starts_from_coded_layers(kind):
    """Eight-bit codes were copied as if they were weights; four-bit ones were left out."""
    target = make_target()
    draft = make_draft(target, intermediate_size=48)
    coded = with_codes(copy.deepcopy(target), kind)
    other = copy.deepcopy(draft)
    initialize_from_target(draft, coded, [1, 2])
    initialize_from_target(other, with_plain_weights(coded), [1, 2])
    for (name, parameter), expected in zip(draft.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, msg=name)


@KINDS
def test_reduced_vocabulary_takes_rows_of_coded_head(kind):
    target = with_coded_head(kind)
    draft = make_draft(target, draft_vocab_size=16)
    counts = torch.zeros(len(target.get_input_embeddings().weight), dtype=torch.long)
    counts[8:24] = 1
    set_draft_vocabulary(draft, target, counts)
    torch.testing.assert_close(draft.lm_head.weight.detach(), target.lm_head.plain()[8:24])


@KINDS
def test_logits_of_coded_head(kind):
    target = with_coded_head(kind)
    states = torch.randn(3, 32)
    expected = states @ target.lm_head.plain().T
    torch.testing.assert_close(target_logits(target, states), expected)
    torch.testing.assert_close(target_logits(target, states, torch.tensor([7, 3])), expected[:, [7, 3]])


def test_quantised_drafter_is_not_trained(tmp_path):
    target = make_target()
    draft = with_codes(make_draft(target), Coded8)
    arguments = DFlashTrainingArguments(output_dir=tmp_path, report_to="none")
    rows = [{"input_ids": list(range(3, 23)), "loss_mask": [0] * 4 + [1] * 16}]
    with pytest.raises(ValueError, match="model is a quantised drafter .fc holds codes., which cannot be trained"):
        DFlashTrainer(draft, target, arguments, rows)


@pytest.mark.parametrize("options", [{"to": "native"}, {"dtype": "bfloat16"}, {"share_head": True}, {}])
def test_quantised_drafter_is_not_converted(options, tmp_path, monkeypatch):
    """Its codes would be written as if they were weights."""
    draft = with_codes(make_draft(make_target()), Coded8)
    monkeypatch.setattr(conversion, "_load_source", lambda *arguments: draft)
    with pytest.raises(ValueError, match="mine is quantised .fc holds codes., and only plain weights are converted"):
        conversion.convert("mine", tmp_path / "new", **options)


def test_digest_reads_tensors_of_a_subclass():
    """Those of torchao know hardly any operation: eval and regenerate ended in `unimplemented operator`."""

    class Codes(torch.Tensor):
        def dequantize(self):
            return self.as_subclass(torch.Tensor)

        def reshape(self, *shape):
            raise NotImplementedError

    weight = torch.randn(6, 4)
    assert digest_of_parameters([("w", weight.as_subclass(Codes))]) == digest_of_parameters([("w", weight)])


def test_quantised_drafter_gets_no_parts(monkeypatch):
    draft = with_codes(make_draft(make_target()), Coded8)
    monkeypatch.setattr(start.DFlashDraftModel, "from_pretrained", lambda *arguments, **options: draft)
    script = start.ScriptArguments(target="target", draft="mine", data="rows", draft_config={"selector_rank": 8})
    with pytest.raises(ValueError, match="draft=mine is quantised, and codes cannot be trained"):
        start.make_draft(script, None, None, print)
