"""Where the tokens of a left-padded batch stand: as in the prompt's forward, whatever a target's `forward` names."""

import pytest
import torch
from support.pairs import COMMON, make_draft, make_target
from support.scripted_draft import scripted
from support.tiny_models import prompts, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_hf import DFlashDecodingConfig


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


@pytest.mark.parametrize("decoding", [{"block_size": 6}, {"tree_nodes": 12}, {"block_size": 6, "compile": "eager"}])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.1}], ids=["at once", "token by token"])
@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen3"])
def test_no_draft_reaches_past_the_last_position_before_the_text_does(family, options, decoding):
    """A block reached past GPT-2's table of positions though the text ended in time: an IndexError, on a GPU worse."""
    size = {"n_positions": 40} if family == "gpt2" else {"max_position_embeddings": 40}
    target = make_target(family, attn=None, **size)
    ids = torch.tensor([[5, 9, 17, 33, 6, 11, 62, 48, 70, 21, 3, 90]])
    full = {"do_sample": False, "max_new_tokens": 28, **options}
    whole = target.generate(ids, **full)
    draft = scripted(make_draft(target, 6), torch.nn.functional.pad(whole, (0, 20), value=7), error_rate=0.1)
    draft.decoding_config = DFlashDecodingConfig(**decoding)
    full["max_new_tokens"] = 60
    for length in range(34, 41):

        def ends(input_ids, scores, length=length):
            return torch.tensor([input_ids.shape[1] == length])

        output = target.generate(
            ids, **full, stopping_criteria=[ends], assistant_model=draft, return_dict_in_generate=True
        )
        assert output.sequences.tolist() == whole[:, :length].tolist()
        assert max(output.acceptance_lengths[0]) > 2
    if family == "qwen3":  # whose rotary positions have no end
        expected = target.generate(ids, **full)
        assert torch.equal(target.generate(ids, **full, assistant_model=draft), expected)
    else:
        with pytest.raises(IndexError):
            target.generate(ids, **full, assistant_model=draft)


@pytest.mark.parametrize("seed", [13, 102])
def test_rows_come_to_the_last_position_in_different_rounds(seed):
    """Each row ends by itself near the end of the table."""
    target = make_target("gpt2", n_positions=40)
    ids = torch.randint(2, 90, (3, 12), generator=torch.Generator().manual_seed(seed))
    whole = target.generate(ids, do_sample=False, max_new_tokens=28)
    ends = set(whole[:, 35:].flatten().tolist()) - set(whole[:, 12:35].flatten().tolist())
    draft = scripted(make_draft(target, 6), torch.nn.functional.pad(whole, (0, 20), value=7), error_rate=0.1)
    options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": [*ends]}
    expected = target.generate(ids, **options)
    assert expected.shape[1] <= 40
    assert torch.equal(target.generate(ids, **options, assistant_model=draft), expected)
