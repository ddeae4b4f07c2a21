"""
Is upstream's own loop lossless with our drafter in it?

`GenerationMixin._assisted_decoding` with a [`DFlashCandidateGenerator`], as if no hook of ours existed: tiny random
targets in fp32, drafters that know the text with one token in five wrong, so that drafts are accepted and rejected.
Each cell compares what `generate` returns with and without the drafter: texts, streams, caches that are continued;
samples by chi-square. Run it under each version of transformers that is to be judged.

    python examples/benchmarks/upstream_loop.py [--families qwen3 gemma3] [--json FILE]
"""

import argparse
import copy
import json
import sys
import traceback
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
import transformers
from transformers import GenerationMixin


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.calls import Collected, EveryOther, StopAfter
from support.heads import EVERY
from support.pairs import make_draft, make_target
from support.scripted_draft import scripted
from support.tiny_models import tiny_model

from dflash_hf.modeling.candidates_dflash import CACHE_NAME, DFlashCandidateGenerator
from dflash_hf.modeling.hook_dflash import unwrap_generation


NEW_TOKENS = 30
BLOCK_SIZE = 6
PROMPT = torch.tensor([[5, 9, 17, 33, 21, 8, 60, 44, 13]])
FAMILIES = (
    "qwen3",
    "mixtral",
    "gpt2",
    "deepseek_v3",
    "gpt_oss",
    "gemma3",
    "mistral_sliding",
    "llama4_text",
    "lfm2",
    "lfm2_moe",
    "qwen3_5_text",
    "falcon_h1",
)
SAMPLES = 400  # per cell of the chi-square test; its statistic is compared with the 99.9 % quantile


def target_of(family: str):
    """A tiny random target of a family."""
    return tiny_model(family) if family == "lfm2_moe" else make_target(family, attn=None)


class Upstream:
    """
    Upstream's loop for one target: inside, `generate(assistant_model=draft)` runs `_assisted_decoding` with our
    generator.
    """

    def __init__(self, target):
        self.target = target
        self.drafted: list[int] = []  # matches of each verification

    def generate(self, draft, **options):
        def candidates(model, generation_config, **kwargs):
            generator = DFlashCandidateGenerator(draft, model, generation_config.max_length)
            generator.update_candidate_strategy = lambda ids, scores, matches: self.drafted.append(int(matches))
            return generator

        if hasattr(draft, "begin"):
            draft.begin(options["input_ids"])
        unwrap_generation()
        kind = type(self.target)
        with (
            mock.patch.object(kind, "_get_candidate_generator", candidates, create=True),
            mock.patch.object(GenerationMixin, "_validate_generation_mode", lambda *args: None),
        ):
            return self.target.generate(**options, assistant_model=draft)


def options_of(case: str, plain_text: list[int]) -> dict:
    """The arguments of a call; `plain_text` are the tokens that the target writes alone."""
    options = {"input_ids": PROMPT, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    if case == "end inside a block":
        options["eos_token_id"] = plain_text[8]
    elif case == "repetition penalty":
        options["repetition_penalty"] = 1.3
    elif case == "minimum length":
        options |= {"eos_token_id": plain_text[8], "min_new_tokens": 15}
    elif case == "processor with a state":
        options["logits_processor"] = [EveryOther()]
    elif case == "criterion with a state":
        options["stopping_criteria"] = [StopAfter(11)]
    elif case == "streamer":
        options["streamer"] = Collected()
    elif case == "prompt of one token":
        options["input_ids"] = PROMPT[:, :1]
    elif case == "padded prompt":
        options["input_ids"] = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], dim=1)
        options["attention_mask"] = torch.tensor([[0] * 3 + [1] * PROMPT.shape[1]])
    elif case == "outputs":
        options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    return options


CASES = (
    "greedy",
    "end inside a block",
    "repetition penalty",
    "minimum length",
    "processor with a state",
    "criterion with a state",
    "streamer",
    "prompt of one token",
    "padded prompt",
    "outputs",
)


def compared(target, case: str) -> str:
    """`equal`, what differs, or the error; with tokens per verification."""
    plain_text = target.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    expected_options = options_of(case, plain_text)
    expected = target.generate(**expected_options)
    text = expected if isinstance(expected, torch.Tensor) else expected.sequences
    full = target.generate(**{**options_of(case, plain_text), "eos_token_id": None, "stopping_criteria": None})
    script = full if isinstance(full, torch.Tensor) else full.sequences
    script = torch.cat([text, script[:, text.shape[1] :]], dim=1)
    draft = scripted(make_draft(target, block_size=BLOCK_SIZE), script, error_rate=0.2)
    upstream = Upstream(target)
    options = options_of(case, plain_text)
    output = upstream.generate(draft, **options)
    written = output if isinstance(output, torch.Tensor) else output.sequences
    if not torch.equal(written, text):
        return "other text"
    if "streamer" in options:
        streams = [
            torch.cat(streamer.tokens).tolist() for streamer in (options["streamer"], expected_options["streamer"])
        ]
        if streams[0] != streams[1]:
            return "other stream"
    if case == "outputs":
        if len(output.scores) != len(expected.scores):
            return f"{len(output.scores)} scores, not {len(expected.scores)}"
        if not all(torch.allclose(a, b, atol=1e-3) for a, b in zip(output.scores, expected.scores)):
            return "other scores"
        columns = (output[CACHE_NAME].get_seq_length(), expected[CACHE_NAME].get_seq_length())
        if columns[0] != columns[1]:
            return f"cache of {columns[0]} tokens, not {columns[1]}"
        return continued(target, expected, output)
    if not any(upstream.drafted):
        return "equal, nothing accepted"
    return "equal"


def continued(target, expected, output) -> str:
    """Whether returned caches go on alike, without a drafter."""
    more = torch.cat([expected.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    texts = []
    for result in (expected, output):
        cache = copy.deepcopy(result[CACHE_NAME])
        texts.append(target.generate(more, max_new_tokens=8, do_sample=False, past_key_values=cache))
    return "equal" if torch.equal(*texts) else "the returned cache goes on otherwise"


def sampled(target) -> str:
    """The distribution of the third sampled token with and without the drafter, by chi-square."""
    from scipy.stats import chi2

    settings = {"max_new_tokens": 4, "do_sample": True, "top_k": 4, "temperature": 0.7}
    draft = make_draft(target, block_size=BLOCK_SIZE)
    upstream = Upstream(target)
    counts = []
    for use in (None, draft):
        torch.manual_seed(3)
        tokens: Counter = Counter()
        for _ in range(SAMPLES):
            if use is None:
                text = target.generate(PROMPT, **settings)
            else:
                text = upstream.generate(use, input_ids=PROMPT, **settings)
            tokens[int(text[0, -2])] += 1
        counts.append(tokens)
    kinds = set(counts[0]) | set(counts[1])
    statistic = sum((counts[0][t] - counts[1][t]) ** 2 / (counts[0][t] + counts[1][t]) for t in kinds)
    limit = chi2.ppf(0.999, max(len(kinds) - 1, 1))
    return "equal" if statistic < limit else f"other distribution ({statistic:.1f} > {limit:.1f})"


def heads(target) -> dict[str, str]:
    """Each kind of head, untrained, greedy."""
    options = options_of("greedy", [])
    expected = target.generate(**options)
    results = {}
    for name, make in EVERY.items():
        upstream = Upstream(target)
        try:
            output = upstream.generate(make(target, block_size=BLOCK_SIZE), **options)
            results[f"head {name}"] = "equal" if torch.equal(output, expected) else "other text"
        except Exception as error:
            results[f"head {name}"] = f"{type(error).__name__}: {str(error)[:80]}"
    return results


def judged(function, *arguments) -> str:
    """The result of a cell, or its error in a line."""
    try:
        return function(*arguments)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:80]} ({Path(place.filename).name}:{place.lineno})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--json", type=Path, help="also write the cells here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    cells: dict[str, dict[str, str]] = {}
    for family in arguments.families:
        target = target_of(family)
        cells[family] = {case: judged(compared, target, case) for case in CASES}
        if family in ("qwen3", "gemma3"):
            cells[family]["sampled"] = judged(sampled, target)
        if family == "qwen3":
            cells[family] |= heads(target)
        wrong = {case: result for case, result in cells[family].items() if not result.startswith("equal")}
        print(f"{transformers.__version__} {family}: {len(cells[family]) - len(wrong)} of {len(cells[family])} equal")
        for case, result in wrong.items():
            print(f"    {case}: {result}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"transformers": transformers.__version__, "cells": cells}, indent=1))


if __name__ == "__main__":
    main()
