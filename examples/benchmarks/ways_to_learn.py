"""
Which way a drafter of SmolLM2-135M-Instruct learns best: block sizes, losses, optimizers and starts, each for equal
CPU time on one thread, on the same stored features, measured on held-out answers: teacher-forced, decoded in blocks.

    D=examples/smollm2-135m-dflash/data; F="dflash features --target smollm2 --mask-token-id 16 --states"
    $F --target-layer-ids 8 15 22 27 --data $D/answers.jsonl.gz --output features
    $F --target-layer-ids 8 15 22 27 --data $D/held_out.jsonl.gz --output held-out
    python examples/benchmarks/ways_to_learn.py --features features --eval-features held-out --work runs --minutes 6

Each finished cell is a line of `ways.jsonl` in `--work`; the same command again runs the missing ones, and prints the
table. `--draft smollm2` goes on from the bundled drafter instead of the target's last two layers. Selectors are
trained alone, on the bundled drafter without its own.
"""

import argparse
import json
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from ablation import BASE, trained, trainer_of
from cells import Cells

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prepare import prepare_dataset
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.sources import load_rows
from dflash_hf.data.template import ChatTemplate
from dflash_hf.decoding.cpu_dtypes import is_emulated
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.evaluation.measure import evaluate, with_whole_blocks
from dflash_hf.evaluation.methods import TARGET_ALONE, WHOLE_BLOCKS
from dflash_hf.smollm2 import draft_folder_of, drafter_folder, load_pair
from dflash_hf.training.feature_manifest import manifest_of
from dflash_hf.training.feature_store import store_features
from dflash_hf.training.features import StoredFeatures
from dflash_hf.training.start import initialize_from_target, with_parts
from dflash_hf.training.time_budget import TimeBudget


DATA = Path(__file__).parents[1] / "smollm2-135m-dflash" / "data"
FRESH = BASE | {"block_size": 4}
SHARED = {
    **{"per_device_train_batch_size": 4, "num_anchors": 16, "loss_type": "dpace", "learning_rate": 1e-3},
    **{"bf16": not is_emulated(torch.bfloat16), "overwrite_output_dir": True},
}
SELECTOR = {"head_only": True, "loss_type": "dpace_kl", "draft_config": {"selector_rank": 32, "selector_top_k": 16}}
WAYS: dict[str, dict] = {
    "blocks of 4": {},
    "blocks of 8": {"block_size": 8},
    "first failure": {"loss_type": "auf"},
    "KL": {"loss_type": "dpace_kl"},
    "first failure, KL": {"loss_type": "auf_kl"},
    "Muon, rate 2e-3": {"muon": True, "learning_rate": 2e-3},
    "raw text first": {},
    "selector": SELECTOR,
    "selector, codebooks of text": SELECTOR,
}


def text(pair, rows: int = 0):
    """The last rows of the conversations, or all of them, encoded, and their encoder."""
    encoder = RowEncoder(ChatTemplate(pair.tokenizer), mask_token_id=16)
    rows_of_file = load_rows(str(DATA / "conversations.jsonl.gz"))
    return prepare_dataset(
        rows_of_file.select(range(len(rows_of_file) - rows if rows else 0, len(rows_of_file))), encoder
    )[0], encoder


def after_text(folder: Path, seed: int, pair, arguments) -> float:
    """
    A drafter that learned from text in a third of the time, with the embedding of each token as its only feature: the
    target never runs. It keeps its layers and its head, and reads the target's features as a fresh drafter does.
    Returns the minutes.
    """
    minutes = arguments.minutes / 3
    store = arguments.work / "text"
    rows, encoder = text(pair, 3000)
    store_features(pair.target, rows, store, manifest_of(pair.target, "smollm2", [-1], encoder, "bfloat16"))
    keys = FRESH | SHARED | {"target_layer_ids": [-1]}
    learned = trainer_of(keys, [str(store)], str(folder), 60 * minutes, seed).draft
    config = type(learned.config).from_dict(learned.config.to_dict(), target_layer_ids=BASE["target_layer_ids"])
    draft = DFlashDraftModel(config)
    initialize_from_target(draft, pair.target, BASE["init_layers"])
    learned_weights = {
        name: weight
        for name, weight in learned.state_dict().items()
        if name not in ("fc.weight", "hidden_norm.weight")
    }
    draft.load_state_dict(draft.state_dict() | learned_weights)
    draft.save_pretrained(folder)
    return minutes


def without_selector(folder: Path, *_) -> float:
    """The bundled drafter without its path selector, at no cost."""
    trained = DFlashDraftModel.from_pretrained(drafter_folder(), dtype=torch.float32)
    none = dict.fromkeys(SELECTOR["draft_config"])
    draft = DFlashDraftModel(type(trained.config).from_dict(trained.config.to_dict(), **none))
    draft.load_state_dict({name: trained.state_dict()[name] for name in draft.state_dict()})
    draft.save_pretrained(folder)
    return 0.0


@torch.no_grad()
def with_codebooks(folder: Path, seed: int, pair, arguments) -> float:
    """The same with a selector that begins with codebooks of text, and `W h` about `--scale`, at no cost."""
    without_selector(folder)
    draft = with_parts(DFlashDraftModel.from_pretrained(folder, dtype=torch.float32), SELECTOR["draft_config"])
    own = draft.candidate_selector
    stored = StoredFeatures(arguments.features[0])
    states = torch.cat([stored[i]["stored"].read("states").float() for i in range(100)])  # [T, H]
    weights = torch.linalg.lstsq(states, torch.full((len(states), 1), arguments.scale)).solution  # [H, 1]
    before, after = codebooks(text(pair)[0], *own.predecessor_codebook.shape)
    for codebook, values in ((own.predecessor_codebook, before), (own.successor_codebook, after)):
        codebook.copy_(values)
    own.hidden_projection.weight.copy_(weights.T.expand(len(before.T), -1))
    draft.save_pretrained(folder)
    return 0.0


def codebooks(rows, size: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codebooks `[V, r]` of predecessors and successors: a truncated SVD of the bigrams' positive information."""
    counts = Counter(pair for ids in rows["input_ids"] for pair in pairwise(ids))
    pairs = torch.tensor(list(counts)).T
    times = torch.tensor(list(counts.values()), dtype=torch.float64)
    before, after = (torch.bincount(tokens, times, size)[tokens] for tokens in pairs)
    information = (times * times.sum() / (before * after)).log().clamp(min=0.0).float()
    u, s, v = torch.svd_lowrank(torch.sparse_coo_tensor(pairs, information, (size, size)), rank, niter=6)
    return u * s.sqrt(), v * s.sqrt()


STARTS = {
    "raw text first": after_text,
    "selector": without_selector,
    "selector, codebooks of text": with_codebooks,
}


def decoded(folder: Path, pair, arguments) -> dict:
    """tau of a drafter, decoded in whole blocks."""
    draft = DFlashDraftModel.from_pretrained(folder, dtype=pair.target.dtype).eval()
    encoder = RowEncoder(ChatTemplate(pair.tokenizer))
    rows = load_rows(str(DATA / "held_out.jsonl.gz"))
    prompts = [prompt_ids(encoder, rows[i]) for i in range(arguments.prompts)]
    limit = arguments.max_new_tokens
    methods = (TARGET_ALONE, WHOLE_BLOCKS)
    report = evaluate(pair.target, with_whole_blocks(draft), prompts, limit, runs=1, methods=methods)
    return {"tau_decoded": round(report.tau, 3), "wrong": report.is_wrong}


def cell(name: str, seed: int, pair, arguments) -> dict:
    """Train and measure one method."""
    folder = arguments.work / f"{name}-{seed}".replace(",", "").replace(" ", "-")
    draft = draft_folder_of(arguments.draft)
    minutes = arguments.minutes
    begin = STARTS.get(name)
    if begin is not None:
        draft = f"{folder}-start"
        minutes -= begin(Path(draft), seed, pair, arguments)
    keys = ({"draft": draft} if draft else FRESH) | SHARED | WAYS[name]
    figures = trained(keys, arguments.features, arguments.eval_features, str(folder), 60 * minutes, seed)
    return {"name": name, "seed": seed, "minutes": arguments.minutes, **figures, **decoded(folder, pair, arguments)}


def table(cells: list[dict]) -> str:
    """The cells as Markdown, best first."""
    lines = ["| way | tau, teacher-forced | tau, decoded | sequences |", "|---|---|---|---|"]
    for cell in sorted(cells, key=lambda cell: -cell["tau"]):
        name = cell["name"] + (f", seed {cell['seed']}" if cell["seed"] else "")
        lines.append(f"| {name} | {cell['tau']:.3f} | {cell['tau_decoded']:.2f} | {cell['sequences']:,} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", nargs="+", required=True)
    parser.add_argument("--eval-features", nargs=1, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of the drafters and of ways.jsonl")
    parser.add_argument("--minutes", type=float, default=10.0, help="of CPU time for each way")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--draft", help="a trained drafter to go on from")
    parser.add_argument("--scale", type=float, default=0.3, help="of the codebooks of text")
    parser.add_argument("--only", nargs="+", choices=list(WAYS))
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts to decode")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    TimeBudget.clock = staticmethod(time.process_time)
    arguments.work.mkdir(parents=True, exist_ok=True)
    log = arguments.work / "ways.jsonl"
    cells = Cells(log).rows()
    pair = load_pair()
    for seed in arguments.seeds:
        for name in arguments.only or WAYS:
            if any((line["name"], line["seed"], line["minutes"]) == (name, seed, arguments.minutes) for line in cells):
                continue
            cells.append(cell(name, seed, pair, arguments))
            print(json.dumps(cells[-1]), flush=True)
            with log.open("a") as file:
                file.write(json.dumps(cells[-1]) + "\n")
    print(table([cell for cell in cells if cell["minutes"] == arguments.minutes]))


if __name__ == "__main__":
    main()
