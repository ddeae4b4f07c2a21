"""
Three proposals of other papers, each trained against its control for equal CPU time on one thread, on the stored
features of SmolLM2-135M-Instruct: RMSNorms of the features (Attention Drift, arXiv 2605.09992), the target's
probabilities as slot weights (CAT, from PARD-2), and rejected slots as context (DFlow, arXiv 2609.06498).

    python examples/benchmarks/context_trials.py fresh --features FOLDER ... --eval-features FOLDER --work FOLDER

trains new drafters for `--minutes` each, or `--steps`. The next, with the same arguments and a drafter,

    python examples/benchmarks/context_trials.py rejected --draft FOLDER --features ... --eval-features ... --work ...
    python examples/benchmarks/context_trials.py dflow --draft FOLDER --features ... --eval-features ... --work ...

first store what the target sees at the slots that it rejects, then train the drafter further with and without them.
`dflash features --target-layer-ids 8 15 22 27 --states` makes the features. Each finished arm is a line of
`results/heads/trials.jsonl`; a second call trains what is missing there.
"""

import argparse
import math
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from ablation import BASE, trained
from heads import SHARED, WHOLE, append, folder_of, lines_of
from torch import nn

from dflash_hf.data.examples import DFlashCollator
from dflash_hf.decoding.cpu_dtypes import is_emulated
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.modeling.modeling_dflash import additive_mask
from dflash_hf.smollm2 import drafter_folder, load_pair
from dflash_hf.targets.frozen import TargetOutput, target_features
from dflash_hf.training import train
from dflash_hf.training import trainer as training
from dflash_hf.training.anchors import example_seeds, sample_anchors
from dflash_hf.training.block_mask import block_mask
from dflash_hf.training.blocks import build_blocks
from dflash_hf.training.features import drop_layers, open_features
from dflash_hf.training.losses import LOSSES, TokenLosses
from dflash_hf.training.objective import Objective
from dflash_hf.training.time_budget import TimeBudget
from dflash_hf.training.trainer import DFlashTrainer
from dflash_hf.training.training_args import DFlashTrainingArguments


ANCHORS = 24  # blocks of each answer whose rejected slots are stored
LONGEST = 220  # tokens of a stored answer


class NormedLinear(nn.Linear):
    """`fc` with an RMSNorm for each layer's features, whose weights begin at 1: unit size, whatever the layer."""

    def __init__(self, fc: nn.Linear, layers: int):
        super().__init__(fc.in_features, fc.out_features, bias=False)
        self.weight = fc.weight
        self.norms = nn.Parameter(torch.ones(layers, fc.in_features // layers))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        parts = features.unflatten(-1, self.norms.shape)  # [N, C, L, H]
        normed = nn.functional.rms_norm(parts, parts.shape[-1:], eps=1e-5) * self.norms
        return super().forward(normed.flatten(-2))


class NormsTrainer(DFlashTrainer):
    """Trains a drafter with norms of the features."""

    def __init__(self, draft, *args, **kwargs):
        draft.fc = NormedLinear(draft.fc, len(draft.config.target_layer_ids))
        super().__init__(draft, *args, **kwargs)


class Cat(Objective):
    """Hands the target's likelihood of the labels to the slot weights, instead of the drafter's."""

    kind = "kl"

    def head_losses(self, hidden, labels, counted, previous_ids, teacher, progress=0.0):
        draftable = counted & (labels >= 0)
        gold = labels[draftable]
        nll = []

        def head(states):
            logits = teacher.head(states)
            own = gold[sum(map(len, nll)) :][: len(states)]
            if len(own):  # not again in the backward pass
                nll.append(nn.functional.cross_entropy(logits.float(), own, reduction="none"))
            return logits

        teacher = replace(teacher, head=head, kind=self.kind)
        losses = super().head_losses(hidden, labels, counted, previous_ids, teacher, progress)
        return replace(losses, nll=torch.zeros_like(losses.nll).masked_scatter(draftable, torch.cat(nll)))


class CatCrossEntropy(Cat):
    kind = "ce"


class CatTrainer(DFlashTrainer):
    objective_class = Cat


class CatCrossEntropyTrainer(CatTrainer):
    objective_class = CatCrossEntropy


def cat_weights(losses: TokenLosses, counted: torch.BoolTensor) -> torch.Tensor:
    """The target's probability that all earlier labels of the block are chosen, `[..., B]`."""
    nll = losses.nll.detach().masked_fill(counted & ~losses.draftable, math.inf)
    chosen = (-nll).exp().masked_fill(~counted, 1.0).cumprod(-1)
    return nn.functional.pad(chosen[..., :-1], (1, 0), value=1.0) * counted


class WithRejected(torch.utils.data.Dataset):
    """Stored features of some answers, with the blocks of [`store_rejected`] and their rejected slots."""

    def __init__(self, features, blocks: Path):
        self.features = features
        self.blocks = torch.load(blocks, mmap=True)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.features[self.blocks[index]["row"]]
        stored = row.pop("stored")
        return {**row, "features": stored.read("features"), "states": stored.read("states"), **self.blocks[index]}


class RejectedCollator(DFlashCollator):
    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        names = ("anchors", "valid", "count", "rejected")
        stacked = {name: torch.stack([example[name] for example in examples]) for name in names}
        states = ("features", "states")
        padded = {name: nn.utils.rnn.pad_sequence([example[name] for example in examples], True) for name in states}
        return super().__call__(examples) | stacked | padded


def with_rejected(batch) -> TargetOutput:
    """Stored features of the text, then of the rejected slots."""
    rejected = batch["rejected"].flatten(1, 2)  # [N, A * (B - 1), L*H]
    return TargetOutput(torch.cat([batch["features"], rejected], dim=1), batch["states"])


class DFlow(Objective):
    """A block also reads the features of the slots that the last verification rejected, at their own positions."""

    sees_rejected = True

    def draw_anchors(self, batch, step: int) -> None:
        """They are stored."""

    def build_blocks(self, batch):
        blocks = super().build_blocks(batch)
        length = batch["input_ids"].shape[1]
        places = batch["anchors"][..., None] + torch.arange(batch["rejected"].shape[2])  # [N, A, B - 1]
        context = blocks.position_ids[:, :length]
        slots = blocks.position_ids[:, length:]
        blocks.position_ids = torch.cat([context, places.flatten(1), slots], dim=1)
        return blocks

    def attention_masks(self, batch):
        size = self.config.block_size
        length = batch["input_ids"].shape[1]
        visible = block_mask(batch["anchors"], batch["attention_mask"], size)  # [N, 1, A*B, S + A*B]
        seen = torch.arange(size - 1) < batch["count"][..., None]  # [N, A, B - 1]
        own = torch.eye(seen.shape[1], dtype=torch.bool)[:, :, None] & seen[:, None] & self.sees_rejected
        own = own.flatten(2).repeat_interleave(size, dim=1)[:, None]  # [N, 1, A*B, A * (B - 1)]
        visible = torch.cat([visible[..., :length], own, visible[..., length:]], dim=-1)
        return additive_mask(visible, self.draft.dtype)


class Blind(DFlow):
    """The control: the same keys, hidden."""

    sees_rejected = False


class DFlowTrainer(DFlashTrainer):
    folder = Path()
    objective_class = DFlow

    def __init__(self, draft, target, args, train_dataset, eval_dataset, **kwargs):
        train_dataset = WithRejected(train_dataset, self.folder / "train.pt")
        eval_dataset = WithRejected(eval_dataset, self.folder / "eval.pt")
        super().__init__(draft, target, args, train_dataset, eval_dataset, RejectedCollator(), **kwargs)

    def reader(self):
        return with_rejected


class BlindTrainer(DFlowTrainer):
    objective_class = Blind


@torch.no_grad()
def rejected_of(pair, row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    Draft at `ANCHORS` places of an answer. For each: the next anchor, after the accepted drafts and the target's own
    token, and the target's features at the drafts from there on, which have seen true tokens before that anchor only.
    """
    draft = pair.draft
    ids = row["input_ids"][None].long()
    mask = row["loss_mask"][None]
    size = draft.config.block_size
    length = ids.shape[1]

    # 1. Drafts at random places.
    begun, valid = sample_anchors(mask, ANCHORS, seeds=example_seeds(ids, torch.ones_like(ids), 0, 0))
    blocks = build_blocks(ids, mask, begun, valid, size, draft.config.mask_token_id)
    visible = block_mask(begun, torch.ones_like(ids), size)
    hidden = draft(
        noise_embeds=draft.embed(pair.target, blocks.input_ids).to(draft.dtype),
        context_hidden_states=row["stored"].read("features")[None].to(draft.dtype),
        attention_mask=additive_mask(visible, draft.dtype),
        position_ids=blocks.position_ids,
    ).last_hidden_state.unflatten(1, (-1, size))[0, :, 1:]  # [A, B - 1, H]
    drafted = draft.target_ids(draft.draft_logits(hidden, pair.target.get_output_embeddings()).argmax(-1))
    right = (drafted == blocks.labels[0, :, 1:]) & blocks.counted[0, :, 1:]
    accepted = right.long().cumprod(-1).sum(-1)  # [A]

    # 2. The next anchors.
    anchors = begun[0] + accepted + 1
    inside = anchors.clamp(max=length - 2)
    valid = valid[0] & (anchors < length - 1) & (mask[0, inside] > 0) & (mask[0, inside + 1] > 0)
    anchors = anchors.masked_fill(~valid, 0)
    count = (size - 1 - accepted).masked_fill(~valid, 0)

    # 3. One forward of the target: the answer, then the rejected drafts of all blocks.
    slot = torch.arange(size - 1)
    is_rejected = slot < count[:, None]  # [A, B - 1]
    tokens = drafted.gather(1, (accepted[:, None] + slot).clamp(max=size - 2))[is_rejected]  # [M]
    places = (anchors[:, None] + slot)[is_rejected]
    block = torch.arange(len(anchors))[:, None].expand_as(is_rejected)[is_rejected]
    true = torch.ones(length, length, dtype=torch.bool).tril()
    before = torch.arange(length) < anchors[block][:, None]  # [M, S]
    earlier = (block[:, None] == block) & (places[:, None] >= places)  # [M, M]
    seen = torch.cat([nn.functional.pad(true, (0, len(tokens))), torch.cat([before, earlier], dim=1)])
    features = target_features(
        pair.target,
        draft.config.target_layer_ids,
        torch.cat([ids[0], tokens])[None],
        attention_mask=additive_mask(seen[None, None], pair.target.dtype),
        position_ids=torch.cat([torch.arange(length), places])[None],
    )[0]
    rejected = torch.zeros(*is_rejected.shape, features.shape[-1], dtype=torch.bfloat16)
    rejected[is_rejected] = features[length:].bfloat16()
    return {"anchors": anchors, "valid": valid, "count": count, "rejected": rejected}


def store_rejected(arguments) -> None:
    """The rejected slots of random answers, `--answers` for training and a third as many that are held out."""
    pair = load_pair(torch.bfloat16, arguments.draft)
    folder = arguments.work / "dflow"
    folder.mkdir(parents=True, exist_ok=True)
    pair.draft.float()
    parts = {
        "train": (arguments.features, arguments.answers),
        "eval": (arguments.eval_features, arguments.answers // 3),
    }
    for name, (features_path, limit) in parts.items():
        features = open_features(features_path)
        examples = []
        for index in torch.randperm(len(features), generator=torch.Generator().manual_seed(0)).tolist():
            row = features[index]
            if len(row["input_ids"]) <= LONGEST and len(examples) != limit:
                examples.append(rejected_of(pair, row) | {"row": index})
        torch.save(examples, folder / f"{name}.pt")
        print(name, len(examples), sum(int(example["valid"].sum()) for example in examples), flush=True)


class StepPace(TimeBudget):
    """
    A [`TimeBudget`] of steps instead of time, for arms whose steps cost the same on a machine that others use.
    """

    steps = 0

    @property
    def done(self) -> float:
        return min((self.last_step or 0) / self.steps, 1.0)

    @property
    def is_over(self) -> bool:
        return self.last_step >= self.steps


FRESH = {
    "from nothing": DFlashTrainer,
    "from nothing, feature norms": NormsTrainer,
    "from nothing, CAT, KL": CatTrainer,
    "from nothing, CAT, cross-entropy": CatCrossEntropyTrainer,
}


DFLOW = {
    "goes on, rejected slots hidden": BlindTrainer,
    "goes on, rejected slots as context": DFlowTrainer,
}


def halves() -> bool:
    """Whether this machine trains in half precision."""
    return not is_emulated(torch.bfloat16)


def place_of(name: str, arguments) -> dict:
    """What names an arm in the results; a drafter that was not trained has no length."""
    if name.startswith("as it was"):
        return {"name": name}
    length = {"steps": arguments.steps} if arguments.steps else {"minutes": arguments.minutes}
    return {"name": name, **length, "seed": arguments.seed}


def trained_folder(name: str, arguments) -> Path:
    return folder_of(arguments.work, name, arguments.steps or arguments.minutes, arguments.seed)


def train_arm(name: str, trainer: type, keys: dict, arguments) -> None:
    """Train one arm, unless it is known."""
    place = place_of(name, arguments)
    if any(place.items() <= line.items() for line in lines_of(arguments.output)):
        return
    keys |= {"bf16": halves(), "overwrite_output_dir": True}
    folder = trained_folder(name, arguments)
    with ExitStack() as patched:
        patched.enter_context(patch.object(train, "DFlashTrainer", trainer))
        if arguments.steps:
            patched.enter_context(patch.object(training, "TimeBudget", StepPace))
        if issubclass(trainer, CatTrainer):
            for loss_type in ("dpace", "dpace_kl"):
                loss = LOSSES[loss_type]._replace(adaptive_weights=cat_weights)
                patched.enter_context(patch.dict(LOSSES, {loss_type: loss}))
        feature_paths = arguments.features, arguments.eval_features
        figures = trained(keys, *feature_paths, str(folder), 60 * arguments.minutes, arguments.seed)
    append(arguments.output, place | figures)


def measure(trainer: type, folder: Path, arguments) -> dict:
    """A drafter, trained with or without rejected slots, on held-out blocks with or without them."""
    target = drop_layers(load_pair("bfloat16").target, torch.device("cpu"))
    draft = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
    options = {"use_cpu": True, "per_device_eval_batch_size": 16, "report_to": "none", "loss_type": "dpace_kl"}
    args = DFlashTrainingArguments(output_dir=str(arguments.work / "measured"), bf16=halves(), **options)
    feature_paths = arguments.features, arguments.eval_features
    datasets = [open_features(path) for path in feature_paths]
    figures = trainer(draft, target, args, *datasets).evaluate()
    return {"tau": round(figures["eval_simulated_tau"], 4), "slot_1": round(figures["eval_accuracy_1"], 4)}


def measure_all(arguments) -> None:
    """Drafters on held-out blocks of the other kind, and the one that both arms began with on both kinds."""
    seeing = trained_folder("goes on, rejected slots as context", arguments)
    crossed = {
        "as it was; measured hidden": (BlindTrainer, arguments.draft),
        "as it was; measured as context": (DFlowTrainer, arguments.draft),
        "goes on, rejected slots as context; measured hidden": (BlindTrainer, seeing),
    }
    for name, (trainer, folder) in crossed.items():
        place = place_of(name, arguments)
        if not any(place.items() <= line.items() for line in lines_of(arguments.output)):
            append(arguments.output, place | measure(trainer, folder, arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("fresh", "rejected", "dflow"))
    parser.add_argument("--draft", default=drafter_folder(), help="the drafter that goes on")
    parser.add_argument("--features", nargs="+", required=True)
    parser.add_argument("--eval-features", nargs=1, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, help="train for equal steps, not time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=int, default=300, help="training answers with rejected slots")
    parser.add_argument("--only", nargs="+", choices=[*FRESH, *DFLOW])
    parser.add_argument("--output", default="trials.jsonl", help="in results/heads")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    TimeBudget.clock = staticmethod(time.process_time)
    StepPace.steps = arguments.steps
    DFlowTrainer.folder = arguments.work / "dflow"
    if arguments.part == "rejected":
        store_rejected(arguments)
        return
    arms, keys = (FRESH, BASE) if arguments.part == "fresh" else (DFLOW, WHOLE | {"draft": str(arguments.draft)})
    for name in [name for name in arms if name in (arguments.only or arms)]:
        train_arm(name, arms[name], keys | SHARED, arguments)
    if arguments.part == "dflow":
        measure_all(arguments)


if __name__ == "__main__":
    main()
