"""Which value is used where a file gives several: the rules of the table in `layouts.precedence`, one by one."""

import pytest
from support.pairs import DRAFT_CONFIG

from dflash_hf import DFlashDraftConfig
from dflash_hf.layouts.precedence import first_not_none, merge_keys
from dflash_hf.modeling import configuration_dflash


NESTED = DRAFT_CONFIG["dflash_config"]
FILE = {"architectures": ["DFlashDraftModel"], **DRAFT_CONFIG}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
# The rule: what the file has at the top level, and in `dflash_config`, the caller's arguments, and the fields' values.
RULES = {
    "the caller's": ({}, {"block_size": 8}, {"block_size": 6}, {"block_size": 6}),
    "the caller's causality": ({}, {"causal_head": True}, {"is_causal": False}, {"is_causal": False}),
    "nested": ({"block_size": 4}, {"block_size": 8}, {}, {"block_size": 8}),
    "top level, as null is not set": ({"block_size": 4}, {"block_size": None}, {}, {"block_size": 4}),
    "vLLM's name of the window": (SLIDING, {"swa_window_size": 16}, {}, {"sliding_window": 16}),
    "first name": ({}, {"shift_label": True, "query_zero_predicts_next": False}, {}, {"sample_from_anchor": True}),
    "nested, under any name": ({"sample_from_anchor": False}, {"shift_label": True}, {}, {"sample_from_anchor": True}),
    "top-level causality": ({"is_causal": False}, {"causal": True}, {}, {"is_causal": False}),
    "nested causality alone": ({}, {"causal": True}, {}, {"is_causal": True}),
    "own layer ids": ({"aux_hidden_state_layer_ids": [1, 2]}, {}, {}, {"target_layer_ids": [1, 3]}),
    "layer ids that count the embedding": (
        {"aux_hidden_state_layer_ids": [1, 2]},
        {"target_layer_ids": None},
        {},
        {"target_layer_ids": [0, 1]},
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_value_is_chosen_by_the_rule(rule):
    top_level, nested, arguments, expected = RULES[rule]
    file = {**FILE, **top_level, "dflash_config": {**NESTED, **nested}}
    config = DFlashDraftConfig.from_dict(file, **arguments)
    assert {field: getattr(config, field) for field in expected} == expected


PUBLISHED_RULES = ("the caller's", "nested", "top level, as null is not set", "vLLM's name of the window")


@pytest.mark.parametrize("rule", PUBLISHED_RULES)
def test_code_beside_the_weights_has_the_same_rule(rule):
    top_level, nested, arguments, expected = RULES[rule]
    file = {**FILE, **top_level, "dflash_config": {**NESTED, **nested}}
    config = configuration_dflash.DFlashDraftConfig.from_dict(file, **arguments)
    assert {field: getattr(config, field) for field in expected} == expected


def test_first_not_none_skips_none_only():
    assert first_not_none(None, 0, 1) == 0
    assert first_not_none(False, None) is False
    assert first_not_none(None) is None


def test_merging_leaves_the_file_unchanged():
    nested = {**NESTED, "causal": True, "shift_label": None}
    file = {**FILE, "projector_type": None, "dflash_config": nested}
    before = {**file, "dflash_config": {**nested}}
    merged = merge_keys(file)
    assert file == before
    assert merged["mask_token_id"] == 95
    assert merged["dflash_config"] == {"causal": True}
    assert not {"projector_type", "sample_from_anchor"} & merged.keys()
