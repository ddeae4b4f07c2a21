"""What a body may ask for: settings by list, values that mean what clients mean by them."""

import json

import pytest
from transformers import GenerationConfig
from transformers.utils.import_utils import is_serve_available


if not is_serve_available():
    pytest.skip("serving needs `pip install '.[serving]'`", allow_module_level=True)

from dflash_hf.serving.options import GenerationSettings


REFUSED = {
    "num_beams": 1000,
    "num_return_sequences": 9,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "low_memory": True,
}
REFUSED |= {
    "custom_generate": "me/code",
    "trust_remote_code": True,
    "cache_implementation": "static",
    "cache_config": {},
}
REFUSED |= {"compile_config": {"fullgraph": True}, "prompt_lookup_num_tokens": 5, "assistant_early_exit": 2}
REFUSED |= {
    "num_assistant_tokens": 10**6,
    "guidance_scale": 2.0,
    "watermarking_config": {"bias": 2},
    "num_beam_groups": 4,
}
REFUSED |= {
    "output_scores": True,
    "output_attentions": True,
    "return_dict_in_generate": True,
    "anything": "/etc/passwd",
}
REFUSED |= {"sequence_bias": [[[1], 2.0]], "stop_criteria": "x", "early_stopping": True, "forced_eos_token_id": 1}
ODD = {"temperature": "hot", "max_new_tokens": 0, "top_k": -5, "top_p": 2, "bad_words_ids": [[]], "eos_token_id": -1}
ODD |= {"repetition_penalty": 0, "min_p": 7, "max_time": 0, "do_sample": "yes", "bad_words_ids ": 1, "stop_strings": 5}


@pytest.mark.parametrize("name", REFUSED)
def test_unlisted_settings_are_refused(name):
    """`num_beams=1000` took the memory of a thousand answers."""
    with pytest.raises(
        ValueError, match=f"{name}=.*, which a request may not set; .*leave it out. It may set do_sample"
    ):
        GenerationSettings.from_json(json.dumps({"max_new_tokens": 5, name: REFUSED[name]}))


@pytest.mark.parametrize("name", ODD)
def test_settings_with_wrong_values_are_refused(name):
    with pytest.raises(ValueError, match=f"generation_config has {name}="):
        GenerationSettings.from_json(json.dumps({name: ODD[name]}))


def test_settings_of_transformers_chat_are_read():
    """`transformers chat` sends all that differ from the defaults, and older versions all."""
    config = GenerationConfig(max_new_tokens=5, temperature=0.5, do_sample=True, eos_token_id=[1, 2])
    for diff in (True, False):
        changed = GenerationSettings.from_json(config.to_json_string(use_diff=diff))
        assert {
            **changed,
            "max_new_tokens": 5,
            "eos_token_id": [1, 2],
            "temperature": 0.5,
            "do_sample": True,
        } == changed
    assert GenerationSettings.from_json('{"num_beams": 1, "num_return_sequences": 1, "penalty_alpha": null}') == {}
    for text, words in (("{", "is not JSON"), ("[]", "must be a JSON object"), ('"x"', "must be a JSON object")):
        with pytest.raises(ValueError, match=f"generation_config {words}"):
            GenerationSettings.from_json(text)
