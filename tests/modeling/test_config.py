"""The configuration: published spellings, defaults, and errors that name key, value and remedy."""

import copy
import json
import operator
import pickle

import pytest
import torch
from support.pairs import DRAFT_CONFIG, make_draft, make_target
from support.tiny_models import tiny_config
from transformers import CONFIG_MAPPING, modeling_rope_utils

from dflash_hf import DFlashDraftConfig
from dflash_hf.layouts.target_layers import default_target_layer_ids
from dflash_hf.modeling import configuration_dflash


PUBLISHED = configuration_dflash.DFlashDraftConfig
BOTH_CLASSES = pytest.mark.parametrize("config_class", [DFlashDraftConfig, PUBLISHED], ids=["package", "published"])
DOMINO = {"gru_hidden_dim": 8, "emb_dim": 4, "pure_draft_prefix_len": 1}


def test_default_target_layers_are_evenly_spaced():
    assert default_target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_target_layer_ids(64, 5) == [1, 16, 31, 46, 61]
    assert default_target_layer_ids(12, 1) == [6]
    with pytest.raises(ValueError, match="target_layer_ids"):
        default_target_layer_ids(4, 3)  # the rule gives [1, 1, 1]


def test_nested_keys_win_and_all_keys_are_saved():
    config = DFlashDraftConfig(**{**DRAFT_CONFIG, "mask_token_id": 7, "loss_decay_gamma": 4.0})
    assert config.mask_token_id == 95 and config.target_layer_ids == [1, 3]
    written = json.loads(config.to_json_string())
    assert written["mask_token_id"] == written["dflash_config"]["mask_token_id"] == 95
    assert written["loss_decay_gamma"] == 4.0
    assert DFlashDraftConfig.from_dict(written).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("nested", "changes"),
    [
        ({}, {"target_layer_ids": [0, 2]}),
        ({}, {"mask_token_id": 7}),
        ({"block_size": 4}, {"block_size": 8}),
        ({"swa_window_size": 5, "use_swa": True}, {"sliding_window": 9}),
        ({"swa_window_size": 5, "use_swa": True}, {"layer_types": ["full_attention"] * 2}),
        ({"causal_head": True}, {"is_causal": False}),
        ({"output_multiplier": 2.0}, {"output_multiplier": 3.0}),
    ],
    ids=str,
)
def test_keyword_overrides_the_file(nested, changes, tmp_path):
    """`dflash_config` of the file silently overruled the keyword."""
    content = {**DRAFT_CONFIG, "dflash_config": {**DRAFT_CONFIG["dflash_config"], **nested, "of_another": 1}}
    (tmp_path / "config.json").write_text(json.dumps({**content, "model_type": "qwen3"}))
    before = DFlashDraftConfig.from_pretrained(tmp_path)
    config = DFlashDraftConfig.from_pretrained(tmp_path, **changes)
    ((name, value),) = changes.items()
    assert getattr(before, name) != value == getattr(config, name)
    assert config.dflash_config.get(name, value) == value and config.dflash_config["of_another"] == 1


@BOTH_CLASSES
@pytest.mark.parametrize("in_file", [True, False])
def test_keyword_overrides_nested_shift_label(config_class, in_file):
    """The code beside the weights set the field to what the file nests, under a name that it did not compare."""
    file = DFlashDraftConfig(**DRAFT_CONFIG, **DOMINO, sample_from_anchor=in_file).to_dict()
    assert file["dflash_config"]["shift_label"] is in_file and "sample_from_anchor" not in file
    assert config_class.from_dict(file).sample_from_anchor is in_file
    assert config_class.from_dict(file, sample_from_anchor=not in_file).sample_from_anchor is not in_file


@BOTH_CLASSES
def test_assigned_nested_keys_set_their_fields(config_class):
    """Keys with a field were ignored, although the error for a change in place advises to assign them."""
    config = config_class(**DRAFT_CONFIG, **DOMINO)
    changes = {"block_size": 8, "emb_dim": 6, "shift_label": True, "swa_window_size": 9, "mask_token_id": None}
    nested = {**config.dflash_config, **changes, "of_another": [1]}
    config.dflash_config = nested
    nested["of_another"].append(2)
    assert (config.block_size, config.emb_dim, config.sliding_window) == (8, 6, 9)
    assert config.sample_from_anchor is True and config.mask_token_id == 95  # null: not set
    assert config.dflash_config["of_another"] == [1]
    again = config_class.from_dict(json.loads(config.to_json_string()))
    assert again.to_dict() == config.to_dict() and again.dflash_config["block_size"] == 8
    before = config.to_dict()
    config.dflash_config = config.dflash_config
    assert config.to_dict() == before
    config.dflash_config = None
    assert config.block_size == 8 and "of_another" not in config.dflash_config


@BOTH_CLASSES
def test_nested_keys_that_are_no_dictionary_are_named(config_class):
    with pytest.raises(ValueError, match=r"dflash_config=\[1\] must be a dictionary such as"):
        config_class.from_dict({**DRAFT_CONFIG, "dflash_config": [1]})
    config = config_class(**DRAFT_CONFIG)
    with pytest.raises(ValueError, match=r"dflash_config=\[1\] must be a dictionary such as"):
        config.dflash_config = [1]
    assert config.dflash_config["mask_token_id"] == 95


@pytest.mark.parametrize("field", ["mask_token_id", "target_layer_ids"])
def test_published_configuration_names_a_missing_field(field):
    """It was created with `None`, and comparing it with a target was a TypeError."""
    file = {**DRAFT_CONFIG, "dflash_config": {**DRAFT_CONFIG["dflash_config"], field: None}, "num_target_layers": 36}
    with pytest.raises(ValueError, match=f"{field}=None must be set"):
        PUBLISHED.from_dict(file)


@BOTH_CLASSES
@pytest.mark.parametrize("trained_length", [None, 0, 24])
def test_trained_length_is_saved(config_class, trained_length):
    """0, not trained yet, was read back as `None`, unknown."""
    config = config_class(**DRAFT_CONFIG, trained_length=trained_length)
    written = json.loads(config.to_json_string())
    assert ("trained_length" in written) == (trained_length is not None)
    assert config_class.from_dict(written).trained_length == trained_length


def test_reading_nested_keys_changes_nothing():
    """The getter wrote into the stored dictionary, and threads that read one configuration disturbed each other."""
    config = DFlashDraftConfig(**{**DRAFT_CONFIG, "dflash_config": {**DRAFT_CONFIG["dflash_config"], "loss": "kl"}})
    config.output_multiplier = 2.0
    before = copy.deepcopy(vars(config))
    for copied in (
        config.dflash_config,
        copy.copy(config.dflash_config),
        copy.deepcopy(config.dflash_config),
        config.dflash_config.copy(),
        pickle.loads(pickle.dumps(config.dflash_config)),
    ):
        assert isinstance(copied, dict) and copied["loss"] == "kl"
    copied["loss"] = "ce"  # a copy is a dictionary of its own
    config.to_dict()
    assert config.dflash_config["output_multiplier"] == 2.0 and config.dflash_config["loss"] == "kl"
    assert vars(config) == before


CHANGES_IN_PLACE = {
    "item": lambda nested: operator.setitem(nested, "loss", "ce"),
    "update": lambda nested: nested.update(loss="ce"),
    "or": lambda nested: operator.ior(nested, {"loss": "ce"}),
    "setdefault": lambda nested: nested.setdefault("new", 1),
    "pop": lambda nested: nested.pop("loss"),
    "popitem": lambda nested: nested.popitem(),
    "del": lambda nested: operator.delitem(nested, "loss"),
    "clear": lambda nested: nested.clear(),
}


@pytest.mark.parametrize("change", CHANGES_IN_PLACE)
def test_nested_keys_refuse_changes_in_place(change):
    """All but a set item were lost without an error, since each access makes a new dictionary."""
    config = DFlashDraftConfig(**{**DRAFT_CONFIG, "dflash_config": {**DRAFT_CONFIG["dflash_config"], "loss": "kl"}})
    before = dict(config.dflash_config)
    with pytest.raises(TypeError, match=r"config.dflash_config = \{\*\*config.dflash_config, key: value\}"):
        CHANGES_IN_PLACE[change](config.dflash_config)
    assert config.dflash_config == before


@pytest.mark.parametrize(
    "spelling",
    [{"partial_rotary_factor": 0.5}, {"rope_dim": 4}, {"rope_dim": 4, "rope_type": "linear", "factor": 2.0}],
)
def test_partial_rotary_width_is_saved_both_ways(spelling, monkeypatch):
    """SGLang under transformers 5.23 lost the factor alone, and rotated whole heads."""
    warned = []
    monkeypatch.setattr(modeling_rope_utils.logger, "warning", warned.append)
    rope = {"rope_type": "default", "rope_theta": 1e4, **spelling}
    config = DFlashDraftConfig(**DRAFT_CONFIG, rope_parameters=rope)
    written = json.loads(config.to_json_string())
    for read in (config, DFlashDraftConfig.from_dict(written)):
        assert read.rope_parameters["partial_rotary_factor"] == 0.5 and read.rope_parameters["rope_dim"] == 4
    assert written["partial_rotary_factor"] == 0.5 and written["rope_parameters"]["rope_dim"] == 4
    config.validate()  # as saving does
    assert not warned
    whole = DFlashDraftConfig(**DRAFT_CONFIG, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert "rope_dim" not in whole.rope_parameters


def test_block_size_nested_alone_is_honoured():
    nested = {**DRAFT_CONFIG["dflash_config"], "block_size": 8}
    fields = {k: v for k, v in DRAFT_CONFIG.items() if k != "block_size"}
    assert DFlashDraftConfig(**{**fields, "dflash_config": nested}).block_size == 8


def test_causality_follows_layer_types_and_keys():
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    config = DFlashDraftConfig(**DRAFT_CONFIG, **mixed)
    assert [config.layer_is_causal(i) for i in (0, 1)] == [True, False]
    assert "is_causal" not in json.loads(config.to_json_string())
    assert not DFlashDraftConfig(**DRAFT_CONFIG, **mixed, is_causal=False).layer_is_causal(0)
    nested = {**DRAFT_CONFIG["dflash_config"], "causal": True}
    assert DFlashDraftConfig(**{**DRAFT_CONFIG, "dflash_config": nested}).layer_is_causal(1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": "32"}, "hidden_size='32'"),
        ({"hidden_size": 30}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"block_size": 1}, "block_size=1"),
        ({"block_size": True}, "block_size=True"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window=None"),
        ({"dflash_config": {"mask_token_id": 96, "target_layer_ids": [1]}}, "mask_token_id=96"),
        ({"dflash_config": {"mask_token_id": -1, "target_layer_ids": [1]}}, "mask_token_id=-1"),
        (
            {"dflash_config": {"target_layer_ids": [1]}},
            "mask_token_id=None must be an id inside the target's embedding (vocab_size=96)",
        ),
        ({"dflash_config": {"mask_token_id": 95}}, "target_layer_ids=None must be set, or num_target_layers"),
        ({"dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 1]}}, "distinct"),
        ({"dflash_config": {"mask_token_id": 95, "target_layer_ids": [-2, 1]}}, "-1 is the embedding"),
        (
            {"dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 4]}, "num_target_layers": 4},
            "target_layer_ids=[1, 4] must be below num_target_layers=4",
        ),
        ({"dflash_config": {"mask_token_id": 95, "target_layer_ids": [1024]}}, "must be below 1024"),
        ({"dflash_config": [1]}, "dflash_config"),
        ({"tie_word_embeddings": "x"}, "tie_word_embeddings='x' must be true or false"),
        ({"interleaved_rotary": 1}, "interleaved_rotary=1 must be true or false"),
        ({"attention_bias": None}, "attention_bias=None must be true or false"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None must be a positive number"),
        ({"intermediate_size": None}, "intermediate_size=None must be a positive integer"),
        ({"num_target_layers": 1025}, "num_target_layers=1025 must be at most 1024"),
        ({"trained_length": -1}, "trained_length=-1 must be an integer of at least 0"),
        ({"hidden_act": ["silu"]}, "hidden_act=['silu'] must be an activation"),
        ({"conv_kernel_size": 9, "conv_group_size": 8}, "conv_kernel_size=9 must be at most block_size=4"),
        ({"conv_kernel_size": 2, "conv_group_size": 5}, "conv_group_size=5 must be a divisor of hidden_size=32"),
        ({"has_embed_tokens": True, "vocab_size": None}, "vocab_size=None must be set for has_embed_tokens=True"),
        ({"draft_vocab_size": 97}, "draft_vocab_size=97 must be at most vocab_size=96"),
        ({"rope_parameters": 3}, "rope_parameters=3 must be one dictionary"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters={'full_attention': 3} must be one dictionary"),
        ({"rope_scaling": "x"}, "rope_scaling='x' must be one dictionary"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "rope_dim": "x"}}, "rope_dim='x' must be"),
        ({"rope_parameters": {"rope_theta": -1, "rope_type": "default"}}, "rope_theta=-1 must be a positive number"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "no"}}, "rope_type='no' must be one of ['default'"),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": "x"}, "max_window_layers='x' must be"),
        (
            {"dflash_config": {**DRAFT_CONFIG["dflash_config"], "use_swa": True}, "layer_types": 7},
            "layer_types=7 must be a list that names",
        ),
        ({"torch_dtype": "no such"}, "dtype='no such' must be one of"),
        ({"torch_dtype": []}, "dtype=[] must be one of"),
        ({"attention_dropout": -3}, "attention_dropout=-3 must be a rate"),
        ({"attention_dropout": "x"}, "attention_dropout='x' must be a rate"),
        ({"attention_dropout": False}, "attention_dropout=False must be a rate"),
        ({"markov_rank": 4, "markov_head_type": "x"}, "markov_head_type='x' must be one of vanilla, gated, rnn"),
        (
            {"enable_confidence_head": True, "confidence_head_with_markov": True, "markov_rank": 0},
            "markov_rank=None must be set for confidence_head_with_markov=True",
        ),
        ({"selector_rank": 4, "selector_top_k": 97}, "selector_top_k=97 must be at most vocab_size=96"),
    ],
    ids=str,
)
def test_errors_name_key_value_and_remedy(changes, named):
    """Wrong kinds ended in a TypeError, AttributeError or IndexError, or were taken."""
    with pytest.raises(ValueError) as error:
        DFlashDraftConfig(**{**DRAFT_CONFIG, **changes})
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("block_size", 5, "a number of tokens from 1 to 4, the trained block size, or None to choose in each round"),
        ("block_size", True, "a number of tokens"),
        ("tree_nodes", 0, "a positive number of tokens, or None to choose in each round"),
        ("compile", 1, "True, False, or a mode or backend of torch.compile"),
        ("cuda_graphs", "reduce-overhead", "True or False"),
        ("window", 2.5, 'a positive number of tokens, "trained", or None for all'),
        ("window", "all", "a positive number of tokens"),
    ],
)
def test_decoding_settings_are_checked_by_a_call(field, value, remedy):
    target = make_target()
    draft = make_draft(target)
    setattr(draft.decoding_config, field, value)
    with pytest.raises(ValueError, match=f"decoding_config.{field}={value!r} must be {remedy}"):
        target.generate(torch.tensor([[5, 9]]), max_new_tokens=4, assistant_model=draft)
    draft.decoding_config = {field: value}
    with pytest.raises(ValueError, match="must be a DFlashDecodingConfig"):
        target.generate(torch.tensor([[5, 9]]), max_new_tokens=4, assistant_model=draft)


def test_null_is_taken_where_a_field_allows_it():
    nulls = ("tie_word_embeddings", "use_sliding_window", "head_dim", "attention_dropout")
    config = DFlashDraftConfig(**DRAFT_CONFIG, **dict.fromkeys(nulls), rope_scaling=[])
    assert config.tie_word_embeddings is None and (config.head_dim, config.attention_dropout) == (8, 0.0)


@pytest.mark.parametrize(
    ("depth", "expected"), [(1, [0]), (4, [2]), (6, [1, 2, 3]), (8, [1, 2, 3, 4, 5]), (36, [1, 9, 17, 25, 33])]
)
def test_a_fresh_drafter_reads_as_many_layers_as_fit(depth, expected, caplog):
    """README's ten lines failed on a target of six layers: five features do not fit."""
    from transformers.utils import logging

    target = CONFIG_MAPPING["qwen3"](hidden_size=32, num_hidden_layers=depth, vocab_size=96)
    logging.enable_propagation()
    try:
        config = DFlashDraftConfig.for_target(target, mask_token_id=95)
    finally:
        logging.disable_propagation()
    assert config.target_layer_ids == expected and config.num_hidden_layers == 5
    assert (f"the drafter reads target_layer_ids={expected}" in caplog.text) == (len(expected) < 5)
    assert DFlashDraftConfig.for_target(target, 95, target_layer_ids=[0]).target_layer_ids == [0]


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma4_text", {"head_dim": 8, "global_head_dim": 16, "num_attention_heads": 4}),  # layers of two shapes
        ("mamba", {}),  # no attention at all
        ("cohere2_moe", {"rms_norm_eps": None, "head_dim": 8, "num_attention_heads": 4, "eos_token_id": 1}),
    ],
)
def test_targets_lacking_common_fields_are_read(model_type, fields):
    target = CONFIG_MAPPING[model_type](hidden_size=32, num_hidden_layers=6, vocab_size=96, **fields)
    config = DFlashDraftConfig.for_target(target, mask_token_id=95, num_hidden_layers=2)
    assert config.head_dim == (8 if fields else 32)
    assert config.num_attention_heads == (4 if fields else 1)
    assert config.rms_norm_eps == 1e-6


@pytest.mark.parametrize("model_type", ["beam", "gemma3n_text", "codegen", "cpmant", "pegasus", "roc_bert", "rwkv"])
def test_unusual_target_configurations_are_read(model_type):
    """A rotary table that is `None` for some layers, a width for each layer, and ids that a class does not have."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    text = tiny_config(model_type)
    config = DFlashDraftConfig.for_target(text, 95, num_hidden_layers=2, target_layer_ids=[0, 3])
    assert config.hidden_size == config.target_hidden_size == 32 and config.num_target_layers == 4
    if model_type == "beam":
        assert config.rope_parameters["rope_theta"] == text.rope_parameters["sliding_attention"]["rope_theta"]
    if model_type == "gemma3n_text":
        assert config.intermediate_size == text.intermediate_size[0]


def test_token_ids_are_read_from_a_wrapper():
    wrapper = tiny_config("qwen3_vl", bos_token_id=3, eos_token_id=[4, 5])
    config = DFlashDraftConfig.for_target(wrapper, 95, num_hidden_layers=2, target_layer_ids=[0, 3])
    assert (config.bos_token_id, config.eos_token_id) == (3, [4, 5])


@pytest.mark.parametrize("model_type, field", [("electra", "embedding_size"), ("opt", "word_embed_proj_dim")])
def test_drafter_is_as_wide_as_the_shared_embedding(model_type, field):
    text = tiny_config(model_type, **{field: 16})
    config = DFlashDraftConfig.for_target(text, 95, num_hidden_layers=2, target_layer_ids=[0, 3])
    assert (config.hidden_size, config.target_hidden_size) == (16, 32)


def test_unequal_embedding_and_head_widths_are_refused():
    with pytest.raises(ValueError, match="input_embedding_size=16 and output_embedding_size=24"):
        DFlashDraftConfig.for_target(tiny_config("rembert"), 95)
