"""
Where the time of a drafted call goes: SmolLM2-135M with its drafter, one thread, its CPU time, in a fresh process.

    python examples/benchmarks/call_parts.py [--dtype float32] [--prompts 12] [--new-tokens 40] [--drafter random]

The demo's requests are answered by the target alone, by the target with packed weights and with the drafter, in turn;
with `--unpacked`, the drafted calls multiply by plain weights too. The first drafted call includes the probe of the
target and the rounds that measure latencies; so `--prompts 4 --new-tokens 32` is a process of four short calls. A part
does not include the parts that run inside of it. Answers must be equal in fp32.

For a processor without AVX-512, set ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2.
"""

import argparse
import functools
import statistics
import time
from collections import Counter, defaultdict

import torch
from recorded_rounds import with_random_weights

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.template import ChatTemplate
from dflash_hf.decoding import adaptive, call, draft_context, draft_session, loop, session, state, trees
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.demo.run import demo_prompts
from dflash_hf.smollm2 import load_pair


PARTS = {
    "probe of the target": (call, "capabilities_of"),
    "prompt, target": (loop, "_prefill_target"),
    "prompt, drafter": (draft_context.DraftContext, "append"),
    "prompt, the drafter's keys": (draft_context.DraftContext, "prefill"),
    "policy, made": (loop, "policy_for"),
    "slots, made": (session.SlotSession, "__init__"),
    "target's forward": (session.SlotSession, "_forward"),
    "masks": (session.SlotSession, "verify"),
    "slots, kept": (session.SlotSession, "keep"),
    "drafter's forward": (draft_session.DraftSession, "_hidden_states"),
    "drafter's head": (draft_session.DraftSession, "logits"),
    "tree": (trees, "tree_of"),
    "features": (draft_session.DraftSession, "read"),
    "acceptance": (state.GenerationState, "accept"),
    "policy, draft": (adaptive.AdaptiveLength, "get_candidates"),
    "policy, outcome": (adaptive.AdaptiveLength, "update_candidate_strategy"),
}


class Parts:
    """
    Times the functions of `PARTS`.

    Attributes:
        seconds (`Counter`), calls (`Counter`): Of each part.
        forwards (`dict[int, list[float]]`): Seconds of the target's forwards in rounds, by their number of tokens.
    """

    def __init__(self):
        self.seconds: Counter = Counter()
        self.calls: Counter = Counter()
        self.forwards: dict[int, list[float]] = defaultdict(list)
        self._inner: list[float] = []  # for each part that is running, the seconds of the parts inside of it
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function):
        @functools.wraps(function)
        def timed(*args, **kwargs):
            self._inner.append(0.0)
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - start
                self.seconds[part] += spent - self._inner.pop()
                self.calls[part] += 1
                if self._inner:
                    self._inner[-1] += spent
                if part == "target's forward":
                    self.forwards[args[1]["input_ids"].shape[1]].append(spent)

        return timed


def generate(pair, ids: list[int], draft, new_tokens: int):
    """The output and its CPU seconds."""
    prompt = torch.tensor([ids])
    options = {"max_new_tokens": new_tokens, "do_sample": False, "return_dict_in_generate": True}
    start = time.thread_time()
    output = pair.target.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=draft, **options)
    return output, time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--drafter", choices=("bundled", "random"), default="bundled")
    parser.add_argument("--unpacked", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair = load_pair(arguments.dtype)
    draft = pair.draft if arguments.drafter == "bundled" else with_random_weights(pair.draft)
    encoder = RowEncoder(ChatTemplate(pair.tokenizer))
    rows = [prompt_ids(encoder, row) for row in demo_prompts(arguments.prompts)]
    generate(pair, rows[0], None, 4)  # libraries are loaded
    parts = Parts()
    seconds = []  # of each prompt: alone, packed, drafted
    lengths = []
    for ids in rows:
        alone, alone_seconds = generate(pair, ids, None, arguments.new_tokens)
        packed = packed_weights(pair.target, draft)
        _, packed_seconds = generate(pair, ids, None, arguments.new_tokens)
        if arguments.unpacked:
            packed.restore()
        drafted, drafted_seconds = generate(pair, ids, draft, arguments.new_tokens)
        packed.restore()
        if arguments.dtype == "float32" and not torch.equal(drafted.sequences, alone.sequences):
            raise SystemExit(f"another answer to prompt {len(seconds)}")
        seconds.append((alone_seconds, packed_seconds, drafted_seconds))
        lengths += drafted.acceptance_lengths[0]
        print(
            f"{alone.sequences.shape[1] - len(ids)} tokens: {alone_seconds:.2f} s alone, {packed_seconds:.2f} s "
            f"packed, {drafted_seconds:.2f} s drafted ({alone_seconds / drafted_seconds:.2f}x); drafted per round: "
            f"{' '.join(map(str, drafted.draft_sizes))}",
            flush=True,
        )
    for title, calls in (("all calls", seconds), ("all but the first", seconds[1:])):
        alone_total, packed_total, drafted_total = map(sum, zip(*calls, strict=True))
        print(f"{title}: {alone_total / drafted_total:.2f}x alone, {packed_total / drafted_total:.2f}x packed")
    tau = statistics.fmean(lengths)
    print(f"tau {tau:.2f}, {len(lengths)} rounds")
    total = sum(drafted for _, _, drafted in seconds)
    parts.seconds["everything else"] = total - sum(parts.seconds.values())
    print("\n| part | share | calls | ms each |\n|---|---|---|---|")
    for part, spent in parts.seconds.most_common():
        calls_of_part = max(parts.calls[part], 1)
        print(f"| {part} | {spent / total:.1%} | {calls_of_part} | {1e3 * spent / calls_of_part:.1f} |")
    print("\n| tokens of the target's forward | " + " | ".join(map(str, sorted(parts.forwards))) + " |")
    print("|---" * (1 + len(parts.forwards)) + "|")
    medians = [statistics.median(parts.forwards[size]) for size in sorted(parts.forwards)]
    print("| ms, median | " + " | ".join(f"{1e3 * median:.0f}" for median in medians) + " |")


if __name__ == "__main__":
    main()
