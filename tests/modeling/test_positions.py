"""Where the tokens of a left-padded batch stand: as in the prompt's forward, whatever a target's `forward` names."""

import pytest
import torch
from support.pairs import COMMON, make_draft
from support.scripted_draft import scripted
from support.tiny_models import prompts, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM


class NamesNoPositions(LlamaForCausalLM):
    """As wrappers of others' models are written: what it does not name it hands on."""

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **kwargs):
        return super().forward(input_ids, attention_mask, past_key_values=past_key_values, **kwargs)


class PassesNoPositions(LlamaForCausalLM):
    """Names positions, and makes its own: columns."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return {name: value for name, value in inputs.items() if name != "position_ids"}


def tiny_llama(model_class):
    torch.manual_seed(0)
    target = model_class(LlamaConfig(**COMMON)).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20.0)
    target.generation_config.eos_token_id = None
    return target


def check_padded_rows(target):
    inputs, _ = prompts(4)
    options = {**inputs, "max_new_tokens": 40, "do_sample": False}
    expected = target.generate(**options)
    assert len(set(expected[:, -40:].flatten().tolist())) > 12, "a constant text proves nothing"
    draft = scripted(make_draft(target, 8), expected, error_rate=0.15)
    assert torch.equal(target.generate(**options, assistant_model=draft), expected)


@pytest.mark.parametrize("model_class", [LlamaForCausalLM, NamesNoPositions, PassesNoPositions])
def test_padded_rows_of_a_llama_that_hands_positions_on(model_class):
    """Plain decoding of the latter two counts columns, padding included; a rotary embedding sees only differences."""
    check_padded_rows(tiny_llama(model_class))


@pytest.mark.parametrize("model_type", ["whisper", "moss_transcribe_diarize", "git"])
def test_padded_rows_of_families_with_positions_of_their_own(model_type):
    """A text-only GIT widens the mask by columns of an image that is not there."""
    check_padded_rows(tiny_model(model_type))


@pytest.mark.parametrize("rows", [1, 4])
def test_positions_that_a_target_moves_before_its_forward(rows):
    """A PaliGemma counts from one: `prepare_inputs_for_generation` adds it to what `generate` made."""
    target = tiny_model("paligemma", wrapper=True)
    inputs, _ = prompts(rows)
    options = {**inputs, "max_new_tokens": 40, "do_sample": False}
    expected = target.generate(**options)
    draft = scripted(make_draft(target, 8), expected, error_rate=0.15)
    assert torch.equal(target.generate(**options, assistant_model=draft), expected)
