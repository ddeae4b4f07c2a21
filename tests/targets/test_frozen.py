"""The frozen target: features of the right layers, its own labels and responses, and drafters that do not fit."""

import pytest
import torch
from support.pairs import VOCAB, make_target
from support.tiny_models import tiny_model
from transformers import GenerationConfig

from dflash_hf import DFlashDraftConfig
from dflash_hf.modeling.target_dflash import check_pair, decoder_layers
from dflash_hf.synthetic.responses import generate_responses
from dflash_hf.targets.frozen import check_fit, freeze, target_features, target_forward


MASK = VOCAB - 1


@pytest.fixture(scope="module")
def input_ids():
    return torch.randint(1, 90, (2, 12), generator=torch.Generator().manual_seed(0))


def captured(target, layer_ids, **inputs):
    """Outputs of decoder layers by plain hooks on a plain forward."""
    outputs = {}
    layers = decoder_layers(target)
    handles = [
        layers[i].register_forward_hook(
            lambda module, args, output, i=i: outputs.update({i: output if torch.is_tensor(output) else output[0]})
        )
        for i in layer_ids
    ]
    with torch.no_grad():
        target(**inputs)
    for handle in handles:
        handle.remove()
    return torch.cat([outputs[i] for i in layer_ids], dim=-1)


# ----------------------------------------------------------------------------------------------------------- features


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("layer_ids", [[0, 2], [3], [2, 1, 3]])
def test_features_are_outputs_of_decoder_layers(family, layer_ids, input_ids):
    target = make_target(family)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, 9:] = 0
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    expected = captured(target, layer_ids, **inputs)
    assert torch.equal(target_features(target, layer_ids, **inputs), expected)
    output = target_forward(target, layer_ids, **inputs)
    assert torch.equal(output.features, expected)
    assert not output.features.requires_grad
    with torch.no_grad():
        logits = target.get_output_embeddings()(output.last_hidden_state)
        torch.testing.assert_close(logits, target(**inputs).logits)
    shifted = target_features(target, layer_ids, input_ids, position_ids=torch.arange(12).expand(2, -1) * 2)
    assert not torch.allclose(shifted[0], expected[0])


def test_feature_of_layer_i_is_hidden_state_i_plus_1(target, input_ids):
    """Entry 0 of the tuple is the embedding, and its last entry is taken after the final norm."""
    with torch.no_grad():
        states = target(input_ids, output_hidden_states=True).hidden_states
    for layer_id in range(3):
        assert torch.equal(target_features(target, [layer_id], input_ids), states[layer_id + 1])
    last = target_features(target, [3], input_ids)
    assert not torch.allclose(last, states[4])
    torch.testing.assert_close(target.model.norm(last), states[4])


def test_layers_above_the_highest_do_not_run(target, input_ids):
    """The forward still ends: sharding and offloading put a module back in hooks after it."""
    ran = []
    layers = decoder_layers(target)
    hooks = [len(layer._forward_hooks) for layer in layers]
    handles = [layer.register_forward_hook(lambda *args, i=i: ran.append(i)) for i, layer in enumerate(layers)]
    handles.append(target.get_decoder().register_forward_hook(lambda *args: ran.append("end")))
    target_features(target, [2, 0], input_ids)
    for handle in handles:
        handle.remove()
    assert ran == [0, 1, 2, "end"] and [len(layer._forward_hooks) for layer in layers] == hooks


def test_compiled_target_has_the_same_features(input_ids):
    """Its graph knows nothing of a hook that came later."""
    target = make_target()
    expected = target_forward(target, [1, 2], input_ids)
    target.get_decoder().compile(backend="eager")
    with torch.no_grad():
        target.get_decoder()(input_ids=input_ids, attention_mask=None, position_ids=None, use_cache=False)
    assert torch.equal(target_forward(target, [1, 2], input_ids).features, expected.features)


def test_frozen_target_has_no_gradients():
    target = make_target().train().requires_grad_(True)
    assert freeze(target) is target
    assert not target.training
    assert not any(parameter.requires_grad for parameter in target.parameters())


# --------------------------------------------------------------------------------------------------------- responses


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


@pytest.fixture(scope="module")
def precise_target():
    return make_target(dtype=torch.float64)


def test_responses_keep_the_order_of_prompts(precise_target):
    responses = generate_responses(precise_target, PROMPTS, 12, mask_token_id=MASK, batch_size=3)
    for prompt, response in zip(PROMPTS, responses, strict=True):
        alone = precise_target.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, suppress_tokens=[MASK]
        )
        assert response == alone[0, len(prompt) :].tolist()
    assert len({token for response in responses for token in response}) > 8


def test_responses_never_hold_the_mask_token(precise_target):
    """The mask token is chosen among the tokens that the target would write."""
    free = generate_responses(precise_target, PROMPTS, 12, mask_token_id=MASK)
    spoken = free[0][3]
    config = GenerationConfig(pad_token_id=0, suppress_tokens=[free[0][4]])
    responses = generate_responses(precise_target, PROMPTS, 12, mask_token_id=spoken, generation_config=config)
    assert all(not {spoken, free[0][4]} & set(response) for response in responses)
    assert config.suppress_tokens == [free[0][4]]


def test_unusable_prompts_are_named(target):
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
        generate_responses(target, [[1], []], 4, mask_token_id=MASK)
    with pytest.raises(ValueError, match="text 'Hello'; pass its ids"):  # was "too many dimensions 'str'"
        generate_responses(target, [[1], "Hello"], 4, mask_token_id=MASK)
    with pytest.raises(ValueError, match="The prompt has 256 tokens"):
        generate_responses(target, [[1], [1] * 256], 4, mask_token_id=MASK)


# ---------------------------------------------------------------------------------------------------------------- fit


def test_target_that_cannot_be_trained_for_is_refused(draft):
    target = make_target()
    check_fit(draft.config, target)
    with pytest.raises(ValueError, match="cannot have a drafter.* and None. Load the target"):
        check_fit(draft.config, target.model)
    target.generation_config.eos_token_id = [2, MASK]
    with pytest.raises(ValueError, match=f"mask_token_id={MASK} is also an end-of-sequence id"):
        check_fit(draft.config, target)


# -------------------------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize(
    "model_type, kind",
    [("modernbert-decoder", "ModernBertDecoderLayer"), ("longcat_flash", "LongcatFlashDecoderLayer")],
)
def test_layers_are_found_in_odd_models(model_type, kind, input_ids):
    """`get_decoder()` of a ModernBERT is a part of its head; LongCat counts each layer twice, for two attentions."""
    target = tiny_model(model_type)
    layers = decoder_layers(target)
    assert [type(layer).__name__ for layer in layers] == [kind] * 4
    config = DFlashDraftConfig.for_target(target.config, MASK, num_hidden_layers=2, target_layer_ids=[0, 3])
    assert config.num_target_layers == 4
    check_pair(target, config)
