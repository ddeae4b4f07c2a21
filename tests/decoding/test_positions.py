"""Where the tokens of a left-padded batch stand: as in the prompt's forward, whatever a target's `forward` names."""

from functools import partial

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


def llama(model_class):
    torch.manual_seed(0)
    target = model_class(LlamaConfig(**COMMON)).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20.0)
    target.generation_config.eos_token_id = None
    return target


# Plain decoding of the wrappers counts columns, padding included; a rotary embedding sees only differences. A GIT
# widens the mask of a text by columns of an image that is not there. A PaliGemma counts from one.
TARGETS = {kind.__name__: partial(llama, kind) for kind in (LlamaForCausalLM, NamesNoPositions, PassesNoPositions)}
TARGETS |= {name: partial(tiny_model, name) for name in ("whisper", "moss_transcribe_diarize", "git")}
TARGETS |= {"paligemma": partial(tiny_model, "paligemma", wrapper=True)}


@pytest.mark.parametrize("name", TARGETS)
def test_own_positions_survive_left_padding(name):
    target = TARGETS[name]()
    for rows in (4, 1) if name == "paligemma" else (4,):
        inputs, _ = prompts(rows)
        options = {**inputs, "max_new_tokens": 40, "do_sample": False}
        expected = target.generate(**options)
        assert len(set(expected[:, -40:].flatten().tolist())) > 12, "a constant text proves nothing"
        draft = scripted(make_draft(target, 8), expected, error_rate=0.15)
        assert torch.equal(target.generate(**options, assistant_model=draft), expected)


BLOCK = {"block_size": 6}
TREE = {"tree_nodes": 12}
PENALTY = {"repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("family", "rows", "options", "decoding"),
    [
        ("gpt2", 1, {}, BLOCK),
        ("gpt2", 1, {}, TREE),
        ("gpt2", 1, PENALTY, BLOCK),
        ("gpt2", 1, PENALTY, TREE),
        ("gpt2", 3, {}, BLOCK),
        ("gpt2", 3, {}, TREE),
        ("opt", 1, {}, TREE),
        ("opt", 3, {}, BLOCK),
        ("qwen3", 1, PENALTY, TREE),
        ("qwen3", 3, {}, BLOCK),
    ],
    ids=str,
)
def test_drafts_end_at_the_last_position(family, rows, options, decoding):
    """A block reached past GPT-2's table of positions: an IndexError, on a GPU worse. Rotary positions have no end."""
    size = {"n_positions": 40} if family == "gpt2" else {"max_position_embeddings": 40}
    target = make_target(family, attn=None, **size)
    ids = torch.randint(2, 90, (rows, 12), generator=torch.Generator().manual_seed(13))
    options = {"do_sample": False, "return_dict_in_generate": True, **options}
    text = target.generate(ids, max_new_tokens=29, **options).sequences  # the last token needs no position
    draft = scripted(make_draft(target, 6), torch.nn.functional.pad(text, (0, 20), value=7), error_rate=0.1)
    draft.decoding_config = DFlashDecodingConfig(**decoding)
    output = target.generate(ids, max_new_tokens=29, assistant_model=draft, **options)
    assert torch.equal(output.sequences, text) and max(output.acceptance_lengths[0]) > 2
    # The text could go on, but ends in time.
    options |= {
        "max_new_tokens": 60,
        "stopping_criteria": [lambda ids, scores: torch.tensor([ids.shape[1] == 41] * rows)],
    }
    output = target.generate(ids, assistant_model=draft, **options)
    assert torch.equal(output.sequences, text)
    assert bool(output.acceptance_lengths[0]) == (rows == 1)
    if rows == 1 and family != "opt":  # nor after a cache that holds the beginning of the ids
        cache = target.generate(ids, **{**options, "max_new_tokens": 9}).past_key_values
        output = target.generate(text[:, :21], past_key_values=cache, assistant_model=draft, **options)
        assert torch.equal(output.sequences, text) and max(output.acceptance_lengths[0]) > 2
