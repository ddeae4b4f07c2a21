"""
What toy models hide, on SmolLM2-135M-Instruct and its drafter: acceptance far into an answer and after a long prompt,
a second turn on the cache of the first, sampling, batches, threads, and the distribution of samples.

    python examples/benchmarks/real_pair.py [PART ...] [--draft FOLDER]

Parts: position, long_prompt, turns, sampling, batches, threads, samples, equal, at_once, nested. Each appends its
lines to `results/real_pair.md`. Ratios are from alternating runs in one process; bf16 for speed, fp32 for equality.
"""

import argparse
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from scipy.stats import chi2_contingency
from transformers import LogitsProcessor, LogitsProcessorList

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.template import ChatTemplate
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.demo.run import demo_prompts
from dflash_hf.evaluation.measure import with_decoding_config
from dflash_hf.evaluation.sets import GENERATED, conversations
from dflash_hf.modeling.candidates_dflash import CACHE_NAME
from dflash_hf.smollm2 import LoadedPair, load_pair


STORIES = ("Write a long story about a lighthouse keeper.", "Explain in great detail how a computer works.")


def ids_of(pair: LoadedPair, text: str) -> list[int]:
    return prompt_ids(RowEncoder(ChatTemplate(pair.tokenizer)), {"messages": [{"role": "user", "content": text}]})


def decode(pair: LoadedPair, rows: list[list[int]], new: int, drafted: bool = True, **options):
    """Decode left-padded rows; returns the output and the seconds."""
    width = max(map(len, rows))
    ids = torch.tensor([[pair.tokenizer.eos_token_id] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    start = time.perf_counter()
    output = pair.target.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        return_dict_in_generate=True,
        assistant_model=pair.draft if drafted else None,
        **{"do_sample": False, **options},
    )
    return output, time.perf_counter() - start


def mean(lengths) -> float:
    return statistics.fmean(lengths) if lengths else float("nan")


def position(pair: LoadedPair) -> list[str]:
    """tau by distance into answers of up to 2,000 tokens."""
    buckets: dict[int, list[int]] = {}
    for text in STORIES:
        output, _ = decode(pair, [ids_of(pair, text)], 2000)
        index = 1  # of the next token in the answer
        for length in output.acceptance_lengths[0]:
            buckets.setdefault(index // 250 * 250, []).append(length)
            index += length
    return [f"tau by position: {', '.join(f'{at}+ {mean(lengths):.2f}' for at, lengths in sorted(buckets.items()))}"]


def long_prompt(pair: LoadedPair) -> list[str]:
    """A request after 4,000 tokens of other requests, against the target alone, in fp32."""
    pair = load_pair(torch.float32, pair.draft.name_or_path)
    text = "\n\n".join(row["messages"][0]["content"] for row in demo_prompts(120))
    text = pair.tokenizer.decode(pair.tokenizer(text)["input_ids"][:4000]) + "\n\nWhich of these is about cooking?"
    row = ids_of(pair, text)
    drafted, _ = decode(pair, [row], 96)
    alone, _ = decode(pair, [row], 96, drafted=False)
    same = "equal" if torch.equal(drafted.sequences, alone.sequences) else "OTHER TOKENS"
    return [f"a prompt of {len(row):,} tokens: tau {mean(drafted.acceptance_lengths[0]):.2f}, {same}"]


def turns(pair: LoadedPair) -> list[str]:
    """Three turns, each on the previous turn's cache, against the same without a drafter, in fp32."""
    pair = load_pair(torch.float32, pair.draft.name_or_path)
    texts = []
    taus = []
    for drafted in (True, False):
        messages = []
        cache = None
        answers = []
        for question in ("What is a prime number?", "Give me three of them.", "And why is nine none?"):
            messages.append({"role": "user", "content": question})
            row = prompt_ids(RowEncoder(ChatTemplate(pair.tokenizer)), {"messages": messages})
            output, _ = decode(pair, [row], 64, drafted, **{CACHE_NAME: cache})
            answer = output.sequences[0, len(row) :]
            cache = output[CACHE_NAME]
            text = pair.tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            answers.append(text)
            if drafted:
                taus.append(mean(output.acceptance_lengths[0]))
            messages_of_turn = [*messages, {"role": "user", "content": "?"}]
            row = prompt_ids(RowEncoder(ChatTemplate(pair.tokenizer)), {"messages": messages_of_turn})
            if row[: output.sequences.shape[1]] != output.sequences[0].tolist():
                cache = None  # the answer was cut, or encodes differently
        texts.append(answers)
    same = "equal" if texts[0] == texts[1] else "OTHER TEXT"
    return [f"three turns on one cache: tau {', '.join(f'{tau:.2f}' for tau in taus)}, {same}"]


def sampling(pair: LoadedPair) -> list[str]:
    """T = 0 and T = 1, blocks and trees: tau, and speed over the target alone, all packed."""
    free = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    methods = {
        "T = 0": ({}, {}),
        "T = 0, trees of 15": ({"tree_nodes": 15}, {}),
        "T = 1": ({}, free),
        "T = 1, trees of 7": ({"tree_nodes": 7}, free),
    }
    lengths = {name: [] for name in methods}
    ratios = {name: [] for name in methods}

    def seconds_per_token(changes: dict, ids: list[int], options: dict, drafted: bool = True):
        changed = LoadedPair(pair.target, with_decoding_config(pair.draft, **changes), pair.tokenizer)
        torch.manual_seed(len(ids))
        output, seconds = decode(changed, [ids], 48, drafted, **options)
        return output, seconds / (output.sequences.shape[1] - len(ids))

    with packed_weights(pair.target, pair.draft):
        for row in demo_prompts(48):
            ids = prompt_ids(RowEncoder(ChatTemplate(pair.tokenizer)), row)
            for name, (changes, options) in methods.items():
                _, target_only = seconds_per_token({}, ids, options, drafted=False)
                output, seconds = seconds_per_token(changes, ids, options)
                lengths[name] += output.acceptance_lengths[0]
                ratios[name].append(target_only / seconds)
    lines = []
    for name in methods:
        low, middle, high = statistics.quantiles(ratios[name], n=4)
        tau = mean(lengths[name])
        lines.append(f"{name}: tau {tau:.2f}, {middle:.2f}x (quartiles {low:.2f}-{high:.2f}; bf16, eager, all packed)")
    return lines


def batches(pair: LoadedPair) -> list[str]:
    """Rows decoded together, against the target alone with the same number of rows."""
    rows = [prompt_ids(RowEncoder(ChatTemplate(pair.tokenizer)), row) for row in demo_prompts(8)]
    lines = []
    for size in (1, 4, 8):
        ratios = []
        for start in range(0, 8, size):
            _, seconds = decode(pair, rows[start : start + size], 48)
            _, without = decode(pair, rows[start : start + size], 48, drafted=False)
            ratios.append(without / seconds)
        lines.append(f"batch of {size}: {statistics.median(ratios):.2f}x (bf16, eager)")
    return lines


def threads(pair: LoadedPair) -> list[str]:
    """One thread and two."""
    rows = [prompt_ids(RowEncoder(ChatTemplate(pair.tokenizer)), row) for row in demo_prompts(6)]
    lines = []
    for count in (1, 2):
        torch.set_num_threads(count)
        ratios = [decode(pair, [row], 64, drafted=False)[1] / decode(pair, [row], 64)[1] for row in rows]
        lines.append(f"{count} thread(s): {statistics.median(ratios):.2f}x (bf16, eager)")
    torch.set_num_threads(1)
    return lines


def samples(pair: LoadedPair) -> list[str]:
    """The distribution of three sampled tokens with and without a drafter, by chi-square, in fp32."""
    pair = load_pair(torch.float32, pair.draft.name_or_path)
    row = ids_of(pair, "Name a color.")
    options = {"do_sample": True, "temperature": 0.8, "top_k": 5, "top_p": 1.0, "min_new_tokens": 3}
    counts = []
    for drafted in (True, False):
        counter: Counter = Counter()
        for seed in range(25):
            torch.manual_seed(1000 * drafted + seed)
            output, _ = decode(pair, [row] * 80, 3, drafted, **options)
            counter.update(map(tuple, output.sequences[:, len(row) :].tolist()))
        counts.append(counter)
    common = [key for key in counts[0] | counts[1] if counts[0][key] + counts[1][key] >= 10]
    table = [
        [tally[key] for key in common] + [sum(tally.values()) - sum(tally[k] for k in common)] for tally in counts
    ]
    table = [list(column) for column in zip(*table) if sum(column)]
    p = chi2_contingency(table).pvalue
    return [f"2,000 samples of three tokens each way, {len(table)} kinds: p = {p:.3f} (chi-square, fp32)"]


def equal(pair: LoadedPair) -> list[str]:
    """300 answers, six at a time, against the target alone with the same number of rows, in fp32, both packed."""
    pair = load_pair(torch.float32, pair.draft.name_or_path)
    asked = [row["messages"] for row in demo_prompts(150)]
    for kind in GENERATED:
        asked += [[{"role": "user", "content": turns[0]}] for turns in conversations(kind, 50)]
    rows = [prompt_ids(RowEncoder(ChatTemplate(pair.tokenizer)), {"messages": messages}) for messages in asked]
    rows.sort(key=len)
    same = 0
    lengths = []
    with packed_weights(pair.target, pair.draft):
        for start in range(0, len(rows), 6):
            batch = rows[start : start + 6]
            drafted, _ = decode(pair, batch, 48)
            target_only, _ = decode(pair, batch, 48, drafted=False)
            same += sum(map(torch.equal, drafted.sequences, target_only.sequences))
            lengths += [length for row_lengths in drafted.acceptance_lengths for length in row_lengths]
    return [f"{same} of {len(rows)} answers of 48 tokens equal, tau {mean(lengths):.2f} (fp32, six rows at a time)"]


def at_once(pair: LoadedPair) -> list[str]:
    """Four threads that share both models, every other call plain, against the same calls in turn, in fp32."""
    pair = load_pair(torch.float32, pair.draft.name_or_path)
    rows = [prompt_ids(RowEncoder(ChatTemplate(pair.tokenizer)), row) for row in demo_prompts(16)]

    def answer(number: int) -> list[int]:
        output, _ = decode(pair, [rows[number]], 32, drafted=number % 2 == 0)
        return output.sequences[0].tolist()

    alone = [decode(pair, [row], 32, drafted=False)[0].sequences[0].tolist() for row in rows]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(answer, range(len(rows))))
    same = sum(map(list.__eq__, alone, together))
    return [f"{same} of {len(rows)} calls of four threads equal, half of them plain (fp32)"]


class Asking(LogitsProcessor):
    """Changes nothing, and at every eighth call runs another request on the same pair."""

    def __init__(self, pair: LoadedPair, row: list[int], drafted: bool):
        self.pair = pair
        self.row = row
        self.drafted = drafted
        self.calls = 0
        self.answers = []

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls % 8 == 0:
            output, _ = decode(self.pair, [self.row], 12, self.drafted)
            self.answers.append(output.sequences[0].tolist())
        return scores


def nested(pair: LoadedPair) -> list[str]:
    """Drafted calls inside the processors of drafted and plain calls, in fp32."""
    pair = load_pair(torch.float32, pair.draft.name_or_path)
    rows = [prompt_ids(RowEncoder(ChatTemplate(pair.tokenizer)), row) for row in demo_prompts(6)]
    same = inner = 0
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        alone, _ = decode(pair, [row], 48, drafted=False)
        expected, _ = decode(pair, [other], 12, drafted=False)
        for outside, inside in ((True, True), (True, False), (False, True)):
            asking = Asking(pair, other, inside)
            output, _ = decode(pair, [row], 48, outside, logits_processor=LogitsProcessorList([asking]))
            inner += len(asking.answers)
            answers = all(answer == expected.sequences[0].tolist() for answer in asking.answers)
            same += answers and torch.equal(output.sequences, alone.sequences)
    return [f"{same} of {3 * len(rows)} calls equal with {inner} calls in their processors, equal too (fp32)"]


PARTS = {
    experiment.__name__: experiment
    for experiment in (
        position,
        long_prompt,
        turns,
        sampling,
        batches,
        threads,
        samples,
        equal,
        at_once,
        nested,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *PARTS], default=[])
    parser.add_argument("--draft")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "real_pair.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair = load_pair(torch.bfloat16, arguments.draft)
    for name in arguments.parts or PARTS:
        with arguments.output.open("a", encoding="utf-8") as file:
            for line in PARTS[name](pair):
                print(line, flush=True)
                file.write(f"- {line}\n")


if __name__ == "__main__":
    main()
