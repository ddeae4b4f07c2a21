"""
Which training settings matter for a real target, SmolLM2-135M-Instruct: each variant trains for equal CPU seconds on
one thread, on stored features, and is measured on held-out answers, teacher-forced.

    python examples/benchmarks/ablation.py --features FOLDER --eval-features FOLDER [--seconds 240] [--only NAME ...]

`dflash features --target-layer-ids 1 8 15 22 27 29` makes both folders. A finished run is one line of `runs.jsonl` in
`--output`; a second call runs the missing variants, then writes `ablation.md`.

    python examples/benchmarks/ablation.py --draft FOLDER --features FOLDER ... --output FOLDER

instead measures how best to add a path selector to a trained drafter; its features need `--states`.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from cells import Cells

from dflash_hf.evaluation.measure import hardware
from dflash_hf.smollm2 import smollm2_folder
from dflash_hf.training.recipe import read_recipe
from dflash_hf.training.time_budget import TimeBudget
from dflash_hf.training.train import train


BASE = {
    "target_layer_ids": [8, 15, 22, 27],
    "num_draft_layers": 2,
    "block_size": 8,
    "init_layers": [28, 29],
    "draft_vocab_size": 8192,
    "loss_type": "dpace",
    "num_anchors": 32,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "bf16": True,
}
VARIANTS = {
    "base": {},
    "fresh weights": {"init_layers": None},
    "all 49,152 tokens": {"draft_vocab_size": None},
    "4,096 tokens": {"draft_vocab_size": 4096},
    "begins as layers 14, 29": {"init_layers": [14, 29]},
    "1 layer": {"num_draft_layers": 1, "init_layers": [29]},
    "3 layers": {"num_draft_layers": 3, "init_layers": [27, 28, 29]},
    "4 layers": {"num_draft_layers": 4, "init_layers": [26, 27, 28, 29]},
    "2 features": {"target_layer_ids": [15, 27]},
    "3 features": {"target_layer_ids": [8, 15, 27]},
    "6 features": {"target_layer_ids": [1, 8, 15, 22, 27, 29]},
    "blocks of 6": {"block_size": 6},
    "blocks of 12": {"block_size": 12},
    "blocks of 16": {"block_size": 16},
    "16 anchors": {"num_anchors": 16},
    "64 anchors": {"num_anchors": 64},
    "batches of 16": {"per_device_train_batch_size": 16},
    "batches of 4": {"per_device_train_batch_size": 4},
    "batches of 4, 16 anchors": {"per_device_train_batch_size": 4, "num_anchors": 16},
    "decaying weights": {"loss_type": "ce"},
    "rate 5e-4": {"learning_rate": 5e-4},
    "rate 2e-3": {"learning_rate": 2e-3},
    "fp32": {"bf16": False},
}


SELECTOR = {
    "draft_config": {"selector_rank": 128, "selector_top_k": 16},
    "head_only": True,
    "loss_type": "dpace_kl",
    "num_anchors": 32,
    "per_device_train_batch_size": 4,
    "learning_rate": 2e-3,
    "bf16": True,
}
SELECTORS = {
    "path selector": {},
    "from labels": {"loss_type": "dpace"},
    "rank 32": {"draft_config": {"selector_rank": 32, "selector_top_k": 16}},
    "rank 256": {"draft_config": {"selector_rank": 256, "selector_top_k": 16}},
    "8 candidates": {"draft_config": {"selector_rank": 128, "selector_top_k": 8}},
    "rate 5e-4": {"learning_rate": 5e-4},
    "rate 5e-3": {"learning_rate": 5e-3},
    "with the drafter, rate 5e-4": {"head_only": False, "learning_rate": 5e-4},
    "the drafter goes on, no selector": {"head_only": False, "draft_config": {}, "learning_rate": 5e-4},
}


def measure(name: str, seed: int, arguments) -> dict:
    """Train one variant and return its figures."""
    keys = SELECTOR | SELECTORS[name] | {"draft": arguments.draft} if arguments.draft else BASE | VARIANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        figures = trained(keys, arguments.features, arguments.eval_features, folder, arguments.seconds, seed)
    return {"name": name, "seed": seed, "seconds": arguments.seconds, **figures}


def trained(keys: dict, features: list[str], eval_features: list[str], folder: str, seconds: float, seed: int) -> dict:
    """Train a drafter into a folder; returns its figures, teacher-forced on `eval_features`."""
    trainer = trainer_of({**keys, "eval_features": eval_features[0]}, features, folder, seconds, seed)
    figures = trainer.evaluate()
    log = [line for line in trainer.state.log_history if "simulated_tau" in line]
    return {
        "first_loss": round(float(log[0]["loss"]), 3),
        "train_tau": round(statistics.mean(line["simulated_tau"] for line in log[-8:]), 3),
        "tau": round(figures["eval_simulated_tau"], 4),
        "slot_1": round(figures["eval_accuracy_1"], 4),
        "sequences": trainer.state.global_step * trainer.args.per_device_train_batch_size,
        "parameters": trainer.draft.num_parameters(),
        "hardware": hardware(torch.device("cpu")),
    }


def trainer_of(keys: dict, features: list[str], folder: str, seconds: float, seed: int):
    """The trainer of a run on stored features, after it."""
    keys = {
        **{"target": str(smollm2_folder()), "target_dtype": "bfloat16", "mask_token_id": 16, "seed": seed},
        **{"init_layers": None, "draft_vocab_size": None, "gradient_accumulation_steps": 1, **keys},  # no preset's
        **{"preset": "cpu", "share_head": False},
        **{"features": features, "use_cpu": True, "max_minutes": seconds / 60},
        **{"per_device_eval_batch_size": 16, "logging_steps": 5, "loss_chunk_size": 512},
        **{"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "output_dir": folder},
    }
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in keys.items()}
    return train(*read_recipe(None, texts))


def table(runs: list[dict]) -> str:
    """The figures as Markdown, best first."""
    lines = ["| variant | tau, held out | slot 1 | tau, training | sequences | runs |", "|---|---|---|---|---|---|"]
    names = {run["name"] for run in runs}
    means = {name: statistics.mean(run["tau"] for run in runs if run["name"] == name) for name in names}
    for name in sorted(names, key=lambda name: -means[name]):
        own = [run for run in runs if run["name"] == name]
        spread = f" ({min(r['tau'] for r in own):.3f}-{max(r['tau'] for r in own):.3f})" if len(own) > 1 else ""
        slot, trained, rows = (
            statistics.mean(run[key] for run in own) for key in ("slot_1", "train_tau", "sequences")
        )
        lines.append(f"| {name} | {means[name]:.3f}{spread} | {slot:.1%} | {trained:.2f} | {rows:,.0f} | {len(own)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", nargs="+", required=True)
    parser.add_argument("--eval-features", nargs=1, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--draft", help="a trained drafter to add a path selector to")
    parser.add_argument("--only", nargs="+", choices=[*VARIANTS, *SELECTORS])
    parser.add_argument("--output", type=Path, help="default: results/ablation, with --draft results/selector")
    arguments = parser.parse_args()
    variants = SELECTORS if arguments.draft else VARIANTS
    for name in set(arguments.only or []) - variants.keys():
        parser.error(f"--only {name!r} is not a variant {'with' if arguments.draft else 'without'} --draft.")
    output = arguments.output or Path(__file__).parent / "results" / ("selector" if arguments.draft else "ablation")
    torch.set_num_threads(1)
    TimeBudget.clock = staticmethod(time.process_time)
    output.mkdir(parents=True, exist_ok=True)
    log = output / "runs.jsonl"
    runs = Cells(log).rows()
    for seed in range(arguments.seeds):
        for name in arguments.only or variants:
            if any((run["name"], run["seed"], run["seconds"]) == (name, seed, arguments.seconds) for run in runs):
                continue
            runs.append(measure(name, seed, arguments))
            print(json.dumps(runs[-1]), flush=True)
            with log.open("a") as file:
                file.write(json.dumps(runs[-1]) + "\n")
    (output / "ablation.md").write_text(table([r for r in runs if r["seconds"] == arguments.seconds]))


if __name__ == "__main__":
    main()
