"""
Which way a drafter of SmolLM2-135M-Instruct learns best: optimizers and weightings of the loss, each for equal CPU
time on one thread, on the same stored features, measured on held-out answers: teacher-forced, and decoded in blocks.

    D=examples/smollm2-135m-dflash/data; F="dflash features --target smollm2 --mask-token-id 16 --states"
    $F --target-layer-ids 8 15 22 27 --data $D/answers.jsonl.gz --output features
    $F --target-layer-ids 8 15 22 27 --data $D/held_out.jsonl.gz --output held-out
    python examples/benchmarks/ways_to_learn.py --features features --eval-features held-out --work runs --minutes 10

Each finished cell is a line of `ways.jsonl` in `--work`; the same command again runs the missing ones, and prints the
table. `--draft smollm2` goes on from the bundled drafter instead of the target's last two layers.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from ablation import BASE, trained

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.sources import load_rows
from dflash_hf.decoding.packing import emulated
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.evaluation.measure import evaluate, in_blocks
from dflash_hf.evaluation.methods import DFLASH, TARGET
from dflash_hf.smollm2 import folder_of, load_pair
from dflash_hf.training.pace import Pace


PROMPTS = Path(__file__).parents[1] / "smollm2-135m-dflash" / "data" / "held_out.jsonl.gz"
SHARED = {"per_device_train_batch_size": 4, "num_anchors": 16, "loss_type": "dpace", "learning_rate": 1e-3}
WAYS = {
    "AdamW, D-PACE": {},
    "blocks of 6": {"block_size": 6},
    "blocks of 4": {"block_size": 4},
    "batches of 2": {"per_device_train_batch_size": 2},
    "blocks of 6, batches of 2": {"block_size": 6, "per_device_train_batch_size": 2},
    "AdamW, decaying weights": {"loss_type": "ce"},
    "AdamW, first failure": {"loss_type": "auf"},
    "AdamW, D-PACE, KL": {"loss_type": "dpace_kl"},
    "AdamW, first failure, KL": {"loss_type": "auf_kl"},
    "Muon, D-PACE": {"muon": True},
    "Muon, D-PACE, rate 2e-3": {"muon": True, "learning_rate": 2e-3},
    "Muon, D-PACE, rate 4e-3": {"muon": True, "learning_rate": 4e-3},
    "Muon, first failure": {"muon": True, "loss_type": "auf"},
    "Muon, first failure, KL": {"muon": True, "loss_type": "auf_kl"},
}


def decoded(folder: Path, pair, arguments) -> dict:
    """tau of a drafter, decoded in whole blocks."""
    draft = DFlashDraftModel.from_pretrained(folder, dtype=pair.target.dtype).eval()
    encoder, rows = RowEncoder(pair.tokenizer), load_rows(str(PROMPTS))
    prompts = [prompt_ids(encoder, rows[i]) for i in range(arguments.prompts)]
    limit, methods = arguments.max_new_tokens, (TARGET, DFLASH)
    report = evaluate(pair.target, in_blocks(draft), prompts, limit, runs=1, methods=methods)
    return {"tau_decoded": round(report.tau, 3), "wrong": report.is_wrong}


def cell(name: str, seed: int, pair, arguments) -> dict:
    """Train and measure one way."""
    folder = arguments.work / f"{name}-{seed}".replace(",", "").replace(" ", "-")
    keys = {**(SHARED if arguments.draft else BASE | SHARED), **WAYS[name], "overwrite_output_dir": True}
    keys |= {"bf16": not emulated(torch.bfloat16)}
    keys |= {"draft": folder_of(arguments.draft, drafter=True)} if arguments.draft else {}
    seconds = 60 * arguments.minutes
    figures = trained(keys, arguments.features, arguments.eval_features, str(folder), seconds, seed)
    return {"name": name, "seed": seed, "minutes": arguments.minutes, **figures, **decoded(folder, pair, arguments)}


def table(cells: list[dict]) -> str:
    """The cells as Markdown, best first."""
    lines = ["| way | tau, teacher-forced | tau, decoded | sequences |", "|---|---|---|---|"]
    for one in sorted(cells, key=lambda one: -one["tau"]):
        name = one["name"] + (f", seed {one['seed']}" if one["seed"] else "")
        lines.append(f"| {name} | {one['tau']:.3f} | {one['tau_decoded']:.2f} | {one['sequences']:,} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", nargs="+", required=True)
    parser.add_argument("--eval-features", nargs=1, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of the drafters and of ways.jsonl")
    parser.add_argument("--minutes", type=float, default=10.0, help="of CPU time for each way")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--draft", help="a trained drafter to go on from")
    parser.add_argument("--only", nargs="+", choices=list(WAYS))
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts to decode")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    Pace.clock = staticmethod(time.process_time)
    arguments.work.mkdir(parents=True, exist_ok=True)
    log = arguments.work / "ways.jsonl"
    cells = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    pair = load_pair()
    for seed in range(arguments.seeds):
        for name in arguments.only or WAYS:
            if any((one["name"], one["seed"], one["minutes"]) == (name, seed, arguments.minutes) for one in cells):
                continue
            cells.append(cell(name, seed, pair, arguments))
            print(json.dumps(cells[-1]), flush=True)
            with log.open("a") as file:
                file.write(json.dumps(cells[-1]) + "\n")
    print(table([one for one in cells if one["minutes"] == arguments.minutes]))


if __name__ == "__main__":
    main()
