"""
Does a drafted call's memory grow with its rounds?

Peak bytes of all live tensors in calls of 24, 120 and 480 new tokens, beyond the models, counted operation by
operation; tiny random targets whose parameters require gradients, as `from_pretrained` leaves them, and drafts with
one token in seven wrong. The cache grows with the text, a graph that is kept grows with the rounds.

    python examples/benchmarks/round_memory.py > examples/benchmarks/results/round_memory.md
"""

import datetime
import platform
import sys
from pathlib import Path

import torch
import transformers
from prompt_memory import LiveBytes


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.pairs import make_draft
from support.scripted_draft import scripted
from support.tiny_models import prompts, tiny_model


LENGTHS = (24, 120, 480)
CASES = [  # model type, rows
    ("qwen3", 1),
    ("mixtral", 1),
    ("gemma3_text", 1),
    ("lfm2_moe", 1),
    ("qwen3_5_text", 1),
    ("qwen3_next", 1),
    ("falcon_h1", 1),
    ("falcon_h1", 4),
]


def measure(model_type: str, rows: int) -> tuple[list[int], list[int]]:
    """The peaks in bytes, and the rounds, for each length."""
    target = tiny_model(model_type, max_position_embeddings=1024).requires_grad_(True)
    draft = make_draft(target, block_size=8).requires_grad_(True)
    options = {**prompts(rows)[0], "do_sample": False, "return_dict_in_generate": True}
    text = target.generate(**options, max_new_tokens=max(LENGTHS)).sequences
    draft = scripted(draft, text, error_rate=0.15)
    target.generate(**options, max_new_tokens=4, assistant_model=draft)  # the trial
    peaks = []
    rounds = []
    for length in LENGTHS:
        with LiveBytes() as counted:
            output = target.generate(**options, max_new_tokens=length, assistant_model=draft)
        if not torch.equal(output.sequences, text[:, : output.sequences.shape[1]]):
            raise RuntimeError(f"{model_type}: another text than the target's")
        peaks.append(counted.peak)
        rounds.append(max(map(len, output.acceptance_lengths)))
    return peaks, rounds


def main() -> None:
    torch.set_num_threads(1)
    print("# Memory of rounds\n")
    print(
        "Peak KB of live tensors in a drafted call, and what a round adds from the shortest to the longest call: keys"
    )
    print("and values of the committed tokens. Tiny targets, fp32, parameters that require gradients.\n")
    print("```\npython examples/benchmarks/round_memory.py > examples/benchmarks/results/round_memory.md\n```\n")
    print(f"{datetime.date.today()}, transformers {transformers.__version__}, torch {torch.__version__},")
    print(f"{platform.machine()}, 1 thread.\n")
    print("| model type | rows |", *(f"{length} tokens |" for length in LENGTHS), "rounds | KB a round |")
    print("|---|---|---|---|---|---|---|")
    for model_type, rows in CASES:
        peaks, rounds = measure(model_type, rows)
        each = (peaks[-1] - peaks[0]) / (rounds[-1] - rounds[0]) / 1024
        cells = [f"{peak / 1024:,.0f}" for peak in peaks]
        print(f"| {model_type} | {rows} | {' | '.join(cells)} | {rounds[-1]} | {each:,.1f} |", flush=True)


if __name__ == "__main__":
    main()
