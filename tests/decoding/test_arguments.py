"""Every argument of `generate` and field of `GenerationConfig`, alone and together: with a drafter as without."""

import inspect
import random
from collections import Counter

import pytest
import torch
from support.calls import Call, Collected, StopAfter, difference
from support.pairs import make_target
from support.rows import ragged_prompts
from support.scripted_draft import recognising
from support.tiny_chat import make_tokenizer
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

from dflash_hf import DFlashDecodingConfig


VOCAB = 280  # that of the tokenizer
# What a drafter cannot follow, and may say so of; everything else it follows.
REFUSED = {
    "num_beams",
    "num_beam_groups",
    "dola_layers",
    "constraints",
    "force_words_ids",
    "penalty_alpha",
    "assistant_ensemble_weight",
    "use_mtp",
}
# Another loop, a process group, the assistant itself, and what says how upstream runs an assistant.
LEFT_OUT = {"custom_generate", "synced_gpus", "assistant_model", "is_assistant", "continuous_batching_config"}
LEFT_OUT |= {"speculation_type"}  # upstream's own loop, which is left alone
LEFT_OUT |= {"transformers_version", "_from_model_config", "generation_config", "kwargs", "self"}
ASSISTED = {"prompt_lookup_num_tokens", "assistant_early_exit"}


def hidden(start: int, stop: int):
    """A mask that leaves out these columns of the last row."""

    def mask(call):
        columns = torch.ones_like(call.inputs["attention_mask"])
        columns[-1, start:stop] = 0
        return columns

    return mask


# What is made anew for each call is a function of it.
VALUES = {
    # arguments of generate
    "logits_processor": [lambda call: LogitsProcessorList([TemperatureLogitsWarper(0.5)])],
    "stopping_criteria": [lambda call: StoppingCriteriaList([StopAfter(5)])],
    "prefix_allowed_tokens_fn": [lambda call: lambda row, ids: list(range(row + 3, 200, 2))],
    "streamer": [lambda call: Collected()],
    "negative_prompt_ids": [lambda call: call.inputs["input_ids"].flip(1)],
    "negative_prompt_attention_mask": [lambda call: torch.ones_like(call.inputs["attention_mask"])],
    "inputs": [lambda call: call.inputs["input_ids"]],
    # what it hands on to the model
    "attention_mask": [hidden(0, 4), hidden(2, 5), hidden(7, 9)],
    "inputs_embeds": [lambda call: call.target.get_input_embeddings()(call.inputs["input_ids"])],
    "position_ids": [lambda call: torch.arange(9).expand(len(call.pads), -1) + 3],
    "past_key_values": [
        lambda call: DynamicCache(config=call.target.config),
        lambda call: StaticCache(call.target.config, max_cache_len=64),
    ],
    "logits_to_keep": [0, 2],
    "tokenizer": [lambda call: make_tokenizer()],
    # fields of GenerationConfig
    "max_length": [9, 10, 17],
    "max_new_tokens": [1, 2, 12, 30],
    "min_length": [0, 14],
    "min_new_tokens": [0, 6],
    "early_stopping": [True, "never"],
    "max_time": [60.0, 1e-9],
    "stop_strings": [["th", "e"], "a"],
    "do_sample": [True],
    "num_beams": [1, 2],
    "use_mtp": [True, False],
    "use_cache": [False, True],
    "cache_implementation": ["dynamic", "static", "offloaded", "dynamic_full", "hybrid", "quantized", "nonsense"],
    "cache_config": [{"backend": "quanto"}, {}],
    "max_cache_len": [64],
    "temperature": [0.6, 1.7, 0.0],
    "top_k": [0, 1, 5],
    "top_p": [0.3, 1.0],
    "min_p": [0.1],
    "top_h": [0.4],
    "typical_p": [0.5],
    "epsilon_cutoff": [3e-4],
    "eta_cutoff": [2e-3],
    "repetition_penalty": [1.3, 0.8],
    "encoder_repetition_penalty": [1.5],
    "length_penalty": [2.0],
    "no_repeat_ngram_size": [2],
    "encoder_no_repeat_ngram_size": [2],
    "bad_words_ids": [[[7], [8, 9]], []],
    "renormalize_logits": [True],
    "forced_bos_token_id": [5],
    "forced_eos_token_id": [11, [11, 12]],
    "remove_invalid_values": [True],
    "exponential_decay_length_penalty": [(3, 1.2)],
    "suppress_tokens": [[3, 4, 5], []],
    "begin_suppress_tokens": [[30, 40]],
    "sequence_bias": [[[[12], 4.0]], {(13, 14): 2.0}],
    "token_healing": [True],
    "guidance_scale": [1.5, 1.0],
    "watermarking_config": [{"greenlist_ratio": 0.3, "bias": 2.0}],
    "num_return_sequences": [1, 2],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "output_scores": [True],
    "output_logits": [True],
    "return_dict_in_generate": [True, False],
    "pad_token_id": [0, 3],
    "bos_token_id": [1],
    "eos_token_id": [11, [11, 12, 13], list(range(40, 60)), None],
    "decoder_start_token_id": [1],
    "num_assistant_tokens": [1, 3, 50],
    "num_assistant_tokens_schedule": ["heuristic", "heuristic_transient", "constant"],
    "assistant_confidence_threshold": [0.0, 0.9],
    "prompt_lookup_num_tokens": [3],
    "max_matching_ngram_size": [2],
    "assistant_early_exit": [2],
    "assistant_lookbehind": [3],
    "target_lookbehind": [3],
    "assistant_ensemble_weight": [0.5],
    "compile_config": [None],
    "disable_compile": [True],
    "low_memory": [True],
    "penalty_alpha": [0.6],
    "dola_layers": ["low"],
    "diversity_penalty": [0.5],
    "num_beam_groups": [1],
    "constraints": [[]],
    "force_words_ids": [[[3]]],
    "prefill_chunk_size": [1, 4, 64],
}
# Where one says nothing without another.
TOGETHER = {
    "stop_strings": ["tokenizer"],
    "token_healing": ["tokenizer"],
    "output_scores": ["return_dict_in_generate"],
    "output_logits": ["return_dict_in_generate"],
    "output_hidden_states": ["return_dict_in_generate"],
    "output_attentions": ["return_dict_in_generate"],
    "negative_prompt_ids": ["guidance_scale"],
    "top_k": ["do_sample"],
    "temperature": ["do_sample"],
    "top_p": ["do_sample"],
    "num_return_sequences": ["do_sample"],
    "exponential_decay_length_penalty": ["eos_token_id"],
}
BY_TYPE = {bool: [True, False], int: [1, 2], float: [0.5]}


def arguments() -> dict[str, list]:
    """Values for each argument and field that this version of transformers knows."""
    defaults = GenerationConfig._get_default_generation_params()
    fields = {name for name in (*vars(GenerationConfig()), *GenerationConfig().to_dict()) if not name.startswith("_")}
    named = {*inspect.signature(GenerationMixin.generate).parameters, *fields}
    of_model = {"attention_mask", "inputs_embeds", "position_ids", "past_key_values", "logits_to_keep", "tokenizer"}
    values = {name: VALUES.get(name, BY_TYPE.get(type(defaults.get(name)), [])) for name in named | of_model}
    return {name: values[name] for name in sorted(values) if values[name] and name not in LEFT_OUT}


def call_of(target, rows: int, chosen: dict, in_config: bool, seed: int):
    """A call without a drafter, and the options that it has with one."""
    inputs, pads = ragged_prompts(rows, 9, seed=rows)
    options = {"max_new_tokens": 14, **chosen}
    if "max_length" in chosen and "max_new_tokens" not in chosen:
        del options["max_new_tokens"]
    if "inputs" in options:
        options["input_ids"] = None
    with_draft = dict(options)
    options = {name: value for name, value in options.items() if name not in ASSISTED}  # a target alone has none
    if in_config:
        for keywords in (options, with_draft):
            names = [name for name in keywords if name in vars(GenerationConfig())]
            fields = {"pad_token_id": 0, **{name: keywords.pop(name) for name in names}}
            keywords["generation_config"] = lambda call, fields=fields: GenerationConfig(**fields)
    return Call(target, inputs, pads, options, seed), with_draft


# What `generate` refuses without a drafter, too. Any other call that raises compares nothing, and fails the test.
REFUSED_WITHOUT_A_DRAFTER = {
    "bad_words_ids": [[]],
    "cache_implementation": ["offloaded", "dynamic_full", "quantized", "nonsense"],
    "constraints": [[]],
    "dola_layers": ["low"],
    "force_words_ids": [[[3]]],
    "max_length": [9],  # the length of the prompts
    "penalty_alpha": [0.6],
    "temperature": [0.0],
    "token_healing": [True],
    "use_mtp": [True],
}
REFUSED_TOGETHER = [
    {"exponential_decay_length_penalty", "eos_token_id"},  # None
    {"negative_prompt_ids", "num_return_sequences"},
    {"past_key_values", "cache_implementation"},
    {"past_key_values", "use_cache"},  # a static cache then overflows
    {"prefill_chunk_size", "inputs_embeds"},
    {"prefill_chunk_size", "use_cache"},
]
NOT_COMPARED = "raises without a drafter, too"


def may_be_refused(chosen: dict) -> bool:
    """Whether `generate` may raise without a drafter."""
    values = [chosen[name] in values for name, values in REFUSED_WITHOUT_A_DRAFTER.items() if name in chosen]
    return any(values) or any(names <= chosen.keys() for names in REFUSED_TOGETHER)


def problem(call: Call, with_draft: dict, decoding: dict, chosen: dict) -> str | None:
    """What a drafter changes; `None` where nothing, or where it says what it cannot follow."""
    try:
        plain = call()
    except Exception as error:
        if may_be_refused(chosen):
            return NOT_COMPARED
        return f"raises {type(error).__name__} without a drafter: {str(error).splitlines()[0][:160]}"
    draft = recognising(call.target, call.texts(plain.sequences))
    draft.decoding_config = DFlashDecodingConfig(**decoding)
    try:
        drafted = call(draft, **with_draft)
    except Exception as error:
        if isinstance(error, ValueError) and any(name in str(error) for name in REFUSED.intersection(chosen)):
            return None
        return f"raises {type(error).__name__}: {str(error).splitlines()[0][:160]}"
    if chosen.get("max_time", 60.0) < 1:  # a text ends after the round in which time is up
        return None if drafted.sequences.shape[1] <= 9 + 1 + draft.config.block_size else "goes on"
    return difference(plain, drafted, tolerance=5e-3)


def run(draws: random.Random, models, choices: list[dict]) -> None:
    """Call a random one of the models with each choice of arguments."""
    differences = []
    refused = 0
    arguments_refused = Counter()
    for chosen in choices:
        decoding = draws.choice([{}, {}, {"tree_nodes": 10}, {"block_size": 3}, {"window": 6}])
        target = draws.choice(models)
        rows = draws.choice([1, 1, 3])
        in_config = draws.random() < 0.3
        change = problem(*call_of(target, rows, chosen, in_config, draws.randrange(1000)), decoding, chosen)
        if change is NOT_COMPARED:
            refused += 1
            arguments_refused.update(chosen.keys())
        elif change is not None:
            where = ", in a config" if in_config else ""
            differences.append(f"{target.config.model_type}, {rows} rows, {chosen}{where}, {decoding}: {change}")
    print(f"{len(choices)} calls, {len(differences)} differ; {refused} refused without a drafter, too:")
    print(dict(arguments_refused))
    assert not differences, f"{len(differences)} of {len(choices)} calls:\n" + "\n".join(differences[:60])
    assert refused < len(choices) / 2, "calls that are refused prove nothing"


def targets(*families):
    return [make_target(family, attn=None, vocab_size=VOCAB) for family in families]


def check_alone(seed: int, *families: str) -> None:
    """Every value once, in one row or three."""
    values = arguments()
    assert len(values) > 60
    together = {name: {other: values[other][0] for other in TOGETHER.get(name, ())} for name in values}
    choices = [{name: value, **together[name]} for name, alternatives in values.items() for value in alternatives]
    run(random.Random(seed), targets(*families), choices)


def check_together(seed: int, number: int) -> None:
    draws = random.Random(seed)
    choices = []
    values = {
        name: alternatives
        for name, alternatives in arguments().items()
        if name not in {*REFUSED, "token_healing", "max_time"}
    }
    for _ in range(number):
        chosen: dict = {}
        for name in draws.sample(sorted(values), draws.randint(2, 5)):
            chosen.setdefault(name, draws.choice(values[name]))
            for other in TOGETHER.get(name, ()):
                chosen.setdefault(other, values[other][0])
        choices.append(chosen)
    run(draws, targets("qwen3", "gemma3", "gpt2", "qwen3_5_text"), choices)


def test_each_argument_alone_keeps_the_text():
    check_alone(0, "qwen3", "gemma3", "qwen3_5_text")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_arguments_together_keep_the_text(seed):
    check_together(seed, 50)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_guidance_inside_a_round_keeps_the_text(family):
    """Its forwards are no part of what is listed."""
    listed = {"guidance_scale": 1.5, "output_logits": True, "return_dict_in_generate": True}
    run(random.Random(0), targets(family), [listed] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2", "qwen3_5_text", "lfm2", "jamba"])
def test_each_argument_keeps_the_text_of_a_family(family):
    for seed in range(5):
        check_alone(seed, family)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_argument_mixes_keep_the_text(seed):
    check_together(seed, 1500)
