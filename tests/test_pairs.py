"""What is known of a target before it is loaded."""

import pytest
from support.pairs import make_target

from dflash_hf.configs import positions_of
from dflash_hf.serving.conversation import room_for_answer


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 40960, "rope_parameters": YARN}, 131072),  # Qwen3, as its card stretches it
        ({"max_position_embeddings": 131072, "rope_parameters": LLAMA3}, 131072),  # Llama 3.1: stretched already
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"vision_config": {}, "text_config": {"max_position_embeddings": 512}}, 512),
        ({"max_position_embeddings": -1}, None),
        ({}, None),
    ],
)
def test_positions_of_a_configuration(config, positions):
    assert positions_of(config) == positions


def test_an_answer_has_room_as_far_as_a_stretched_rope_goes():
    target = make_target(max_position_embeddings=64)
    assert room_for_answer(target, 60, 100) == 4 and room_for_answer(target, 60, None) == 4
    with pytest.raises(ValueError, match="The prompt has 64 tokens; prompt and answer together may have at most 64"):
        room_for_answer(target, 64, 1)
    stretched = {**YARN, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    target = make_target(max_position_embeddings=64, rope_parameters=stretched)
    assert room_for_answer(target, 64, 100) == 100 and room_for_answer(target, 250, 100) == 6
