"""Every language model that the installed transformers knows: drafted without loss, or decoded plainly."""

import pytest
from support.every_family import examine_all, families
from support.tiny_models import tiny_config
from transformers import CONFIG_MAPPING


# Their embedding and their head have different widths, and a drafter shares both.
NO_DRAFTER = {"rembert"}


def failures(outcomes):
    return [
        f"{outcome.model_type}: {outcome.verdict}: {outcome.detail}"
        for outcome in outcomes
        if outcome.verdict in ("wrong", "leaks", "error")
        or outcome.verdict == "refused"
        and outcome.model_type not in NO_DRAFTER
    ]


@pytest.mark.slow
def test_no_family_is_wrong_or_ends_in_an_error():
    outcomes = examine_all(families())
    assert not failures(outcomes)
    verdicts = [outcome.verdict for outcome in outcomes]
    assert verdicts.count("right") >= 180
    assert verdicts.count("not made") < len(verdicts) / 4, "too few families were examined"


def test_families_are_drafted_or_decode_plainly():
    """With a wrapper for images whose positions begin at 1, and with layers that are not in the decoder."""
    names = [("qwen3_5_text", False), ("modernbert-decoder", False), ("paligemma", True), ("falcon_mamba", False)]
    *drafted, plain = examine_all(names)
    assert [outcome.verdict for outcome in drafted] == ["right"] * 3, failures(drafted)
    assert all(min(outcome.tau) > 3 for outcome in drafted), "drafts that are right are accepted"
    assert [outcome.detail for outcome in drafted] == ["slots, recurrent layers replayed", "slots", "slots"]
    assert plain.verdict == "plain" and "cannot be rolled back" in plain.detail


def test_memory_does_not_grow_with_rounds():
    """
    With parameters that require gradients, as they are loaded: `inference_mode(False)` switches gradients on, and a
    recurrent target kept the graph of every round.
    """
    outcomes = examine_all([("falcon_h1", False), ("lfm2", False), ("gemma3_text", False)])
    assert [outcome.verdict for outcome in outcomes] == ["right"] * 3, failures(outcomes)
    assert all(0 < outcome.growth < 1 << 20 for outcome in outcomes), outcomes


def test_tiny_models_keep_the_layers_of_a_family():
    """Every kind of layer of the defaults is there, in half a dozen shapes of configuration."""
    for model_type in ("gemma3_text", "qwen3_next", "llama4_text", "deepseek_v32", "bamba", "olmo3"):
        kinds = set(CONFIG_MAPPING[model_type]().layer_types)
        config = tiny_config(model_type)
        assert config.num_hidden_layers == 4 and config.hidden_size == 32 and config.vocab_size == 96
        assert kinds <= set(config.layer_types) or model_type == "bamba"


def test_layers_without_features_mean_plain_decoding():
    """Mllama skips cross-attention layers over text, HRM-Text runs two stacks in cycles, Gemma 3n hands on four."""
    outcomes = examine_all([("mllama", False), ("hrm_text", False), ("gemma3n_text", False)])
    assert [outcome.verdict for outcome in outcomes] == ["plain"] * 3, outcomes
    reasons = [outcome.detail for outcome in outcomes]
    assert "decoder layer 3 of MllamaForCausalLM is skipped, or has no output of one vector per token" in reasons[0]
    assert "are in no list" in reasons[1] and "none has an output of one vector per token" in reasons[2]
