"""Every argument of `generate` and field of `GenerationConfig`, alone and together: with a drafter as without."""

import inspect
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from support.pairs import make_target
from support.scripted_draft import recognising
from support.stress_calls import Collected, StopAfter, prompt
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
ASSISTED = {"prompt_lookup_num_tokens", "assistant_early_exit"}
LEFT_OUT |= {"speculation_type"}  # upstream's own loop, which is left alone
LEFT_OUT |= {"transformers_version", "_from_model_config", "generation_config", "kwargs", "self"}


def drawn_prompt(rows: int):
    return prompt(rows, 9, seed=rows, vocab_size=VOCAB)


def mask(case, start: int, stop: int) -> torch.LongTensor:
    """One that leaves out these columns of the last row."""
    ones = torch.ones(case.rows, 9, dtype=torch.long)
    ones[-1, start:stop] = 0
    return ones


# What is made anew for each call is a function of the case.
VALUES = {
    # arguments of generate
    "logits_processor": [lambda case: LogitsProcessorList([TemperatureLogitsWarper(0.5)])],
    "stopping_criteria": [lambda case: StoppingCriteriaList([StopAfter(5)])],
    "prefix_allowed_tokens_fn": [lambda case: lambda row, ids: list(range(row + 3, 200, 2))],
    "streamer": [lambda case: Collected()],
    "negative_prompt_ids": [lambda case: drawn_prompt(case.rows)[0]["input_ids"].flip(1)],
    "negative_prompt_attention_mask": [lambda case: torch.ones(case.rows, 9, dtype=torch.long)],
    "inputs": [lambda case: drawn_prompt(case.rows)[0]["input_ids"]],
    # what it hands on to the model
    "attention_mask": [lambda case: mask(case, 0, 4), lambda case: mask(case, 2, 5), lambda case: mask(case, 7, 9)],
    "inputs_embeds": [lambda case: case.target.get_input_embeddings()(drawn_prompt(case.rows)[0]["input_ids"])],
    "position_ids": [lambda case: torch.arange(9).expand(case.rows, -1) + 3],
    "past_key_values": [
        lambda case: DynamicCache(config=case.target.config),
        lambda case: StaticCache(case.target.config, max_cache_len=64),
    ],
    "logits_to_keep": [0, 2],
    "tokenizer": [lambda case: make_tokenizer()],
    # fields of GenerationConfig
    "max_length": [9, 10, 17],
    "max_new_tokens": [1, 2, 12, 30],
    "min_length": [0, 14],
    "min_new_tokens": [0, 6],
    "early_stopping": [True, "never"],
    "max_time": [60.0],
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
    "eos_token_id": [None, 11, [11, 12, 13], list(range(40, 60))],
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
}
BY_TYPE = {bool: [True, False], int: [1, 2], float: [0.5]}


def arguments() -> dict[str, list]:
    """Values for each argument and field that this version of transformers knows."""
    defaults = GenerationConfig._get_default_generation_params()
    names = {*inspect.signature(GenerationMixin.generate).parameters, *GenerationConfig().to_dict(), *VALUES}
    names |= {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    fields = {name: VALUES.get(name, BY_TYPE.get(type(defaults.get(name)), [])) for name in names - LEFT_OUT}
    of_model = {"attention_mask", "inputs_embeds", "position_ids", "past_key_values", "logits_to_keep", "tokenizer"}
    known = {*inspect.signature(GenerationMixin.generate).parameters, *vars(GenerationConfig()), *of_model}
    return {name: fields[name] for name in sorted(fields) if name in known}


@dataclass
class Case:
    target: torch.nn.Module
    rows: int
    chosen: dict  # argument -> value
    in_config: bool  # whether fields come in a GenerationConfig
    seed: int
    decoding: dict

    def call(self, draft):
        options = {"max_new_tokens": 14, **self.chosen}
        if "max_length" in self.chosen and "max_new_tokens" not in self.chosen:
            del options["max_new_tokens"]
        options = {name: value(self) if inspect.isfunction(value) else value for name, value in options.items()}
        own = {} if draft is None else {"assistant_model": draft}
        if self.in_config:
            fields = {name: options.pop(name) for name in list(options) if name in vars(GenerationConfig())}
            fields = {name: value for name, value in fields.items() if draft is not None or name not in ASSISTED}
            own["generation_config"] = GenerationConfig(**{"pad_token_id": 0, **fields})
        inputs = {**drawn_prompt(self.rows)[0], **options, **own}
        if "inputs" in inputs:
            del inputs["input_ids"]
        if draft is None:  # with another kind of assistant a target is not alone
            inputs = {name: value for name, value in inputs.items() if name not in ASSISTED}
        torch.manual_seed(self.seed)
        output = self.target.generate(**inputs)
        return output, options.get("streamer"), options.get("past_key_values")

    def texts(self, output) -> list[torch.LongTensor]:
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        inputs, pads = drawn_prompt(self.rows)
        each = max(len(sequences) // self.rows, 1)
        return [row[pads[min(number // each, self.rows - 1)] :] for number, row in enumerate(sequences)]

    def __str__(self):
        named = {name: "..." if inspect.isfunction(value) else value for name, value in self.chosen.items()}
        where = ", in a config" * self.in_config
        return f"{self.target.config.model_type}, {self.rows} rows, {named}{where}, {self.decoding}"


REFUSED_BY_BOTH = "plain decoding raises too"


def problem(case: Case) -> str | None:
    """What a drafter changes; `None` where nothing, or where it says what it cannot follow."""
    try:
        plain, heard, cache = case.call(None)
    except Exception:
        return REFUSED_BY_BOTH
    draft = recognising(case.target, case.texts(plain))
    draft.decoding_config = DFlashDecodingConfig(**case.decoding)
    try:
        output, said, own_cache = case.call(draft)
    except Exception as error:
        named = [name for name in case.chosen if name in str(error)]
        if isinstance(error, ValueError) and REFUSED.intersection(named):
            return None
        return f"raises {type(error).__name__}: {str(error).splitlines()[0][:160]}"
    # 1. The same kind of output, with the same in it.
    if isinstance(plain, torch.Tensor) != isinstance(output, torch.Tensor):
        return f"is a {type(output).__name__}, not a {type(plain).__name__}"
    if not isinstance(plain, torch.Tensor):
        if not isinstance(output, type(plain)):
            return f"is a {type(output).__name__}, not a {type(plain).__name__}"
        if set(plain.keys()) != set(output.keys()) - {"acceptance_lengths", "draft_sizes", "estimated_speedup"}:
            return f"holds {sorted(set(plain.keys()) ^ set(output.keys()))} or does not"
        if type(plain.past_key_values) is not type(output.past_key_values):
            return f"has a {type(output.past_key_values).__name__}, not a {type(plain.past_key_values).__name__}"
    sequences = [item if isinstance(item, torch.Tensor) else item.sequences for item in (plain, output)]
    # 2. The same text, greedy or of one seed.
    if not torch.equal(*sequences):
        return f"writes {sequences[1].tolist()}, not {sequences[0].tolist()}"
    # 3. The same on the way.
    if not isinstance(plain, torch.Tensor):
        for name in ("scores", "logits", "hidden_states", "attentions"):
            ours, theirs = getattr(output, name), getattr(plain, name)
            if theirs is not None and len(ours) != len(theirs):
                return f"has {len(ours)} {name}, not {len(theirs)}"
    if isinstance(heard, Collected) and not torch.equal(torch.cat(heard.tokens), torch.cat(said.tokens)):
        return "streams something else"
    if isinstance(cache, DynamicCache) and cache.get_seq_length() != own_cache.get_seq_length():
        return f"leaves {own_cache.get_seq_length()} tokens in the cache, not {cache.get_seq_length()}"
    return None


def targets(*families):
    return [make_target(family, attn=None, vocab_size=VOCAB) for family in families]


def drawn(draws: random.Random, models, chosen: dict) -> Case:
    decoding = draws.choice([{}, {}, {"tree_nodes": 10}, {"block_size": 3}, {"window": 6}])
    rows, in_config = draws.choice([1, 1, 3]), draws.random() < 0.3
    return Case(draws.choice(models), rows, chosen, in_config, draws.randrange(1000), decoding)


def run(cases) -> None:
    found, refused, of_these = [], 0, Counter()
    for case in cases:
        said = problem(case)
        if said is REFUSED_BY_BOTH:
            refused += 1
            of_these.update(case.chosen.keys())
        elif said is not None:
            found.append(f"{case}: {said}")
    print(f"{len(cases)} calls, {len(found)} differ; {refused} refused without a drafter, too: {dict(of_these)}")
    assert not found, f"{len(found)} of {len(cases)} calls:\n" + "\n".join(found[:60])
    assert refused < len(cases) / 2, "calls that are refused prove nothing"


def choice(draws: random.Random, values: dict[str, list], number: int) -> dict:
    chosen = {}
    for name in draws.sample(sorted(values), number):
        for each in (name, *TOGETHER.get(name, ())):
            if each not in chosen:
                chosen[each] = draws.choice(values[each] if each == name else values[each][:1])
    return chosen


def given_values() -> dict[str, list]:
    return {name: given for name, given in arguments().items() if given}


def check_alone(seed: int, *families: str) -> None:
    draws, models, values = random.Random(seed), targets(*families), given_values()
    assert len(values) > 60
    cases = []
    for name, given in values.items():
        for value in given:
            more = {other: values[other][0] for other in TOGETHER.get(name, ())}
            cases.append(drawn(draws, models, {name: value, **more}))
    run(cases)


def check_together(seed: int, number: int) -> None:
    draws, models = random.Random(seed), targets("qwen3", "gemma3", "gpt2", "qwen3_5_text")
    rarely_fit = REFUSED | {"token_healing"}
    values = {name: given for name, given in given_values().items() if name not in rarely_fit}
    run([drawn(draws, models, choice(draws, values, draws.randint(2, 5))) for _ in range(number)])


def test_each_argument_alone():
    """Every value once, in one row or three."""
    check_alone(0, "qwen3", "gemma3", "qwen3_5_text")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_arguments_together(seed):
    check_together(seed, 50)


def test_guidance_runs_the_target_inside_a_round():
    """Its forwards are no part of what is listed."""
    draws = random.Random(0)
    for family in ("qwen3", "qwen3_5_text"):
        chosen = {"guidance_scale": 1.5, "output_logits": True, "return_dict_in_generate": True}
        assert problem(drawn(draws, targets(family), chosen)) is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2", "qwen3_5_text", "lfm2", "jamba"])
def test_each_argument_alone_in_every_family(family):
    for seed in range(5):
        check_alone(seed, family)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_arguments_together_in_many_calls(seed):
    check_together(seed, 1500)
