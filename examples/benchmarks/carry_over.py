"""
Does a drafter gain if it reads the slots that the last verification rejected, and is trained for that (Carryover,
arXiv 2609.14717)? The bundled drafter of SmolLM2-135M-Instruct goes on with their features as context, and without.

    OMP_NUM_THREADS=1 python examples/benchmarks/carry_over.py --minutes 30 --seed 0 --output FILE.jsonl

Each step drafts blocks at random anchors, has the target read them, and trains the *next* blocks, which begin after
the accepted drafts and the target's own token. All arms take a step on the same blocks, one after another: rows, first
drafts (by the drafter as it was) and anchors are equal, and only the context differs. Texts are greedy answers of the
target, so what it accepts is what equals the text. A line of `FILE.jsonl` is an evaluation on held-out answers.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from cells import read_json_lines
from context_trials import DFlow, with_rejected
from torch import nn
from transformers import DynamicCache

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.examples import DFlashCollator
from dflash_hf.data.messages import UnusableRow
from dflash_hf.data.template import ChatTemplate
from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.modeling.candidates_dflash import CACHE_NAME
from dflash_hf.modeling.modeling_dflash import additive_mask
from dflash_hf.smollm2 import data_folder, load_pair
from dflash_hf.targets.features import FeatureTap
from dflash_hf.targets.frozen import freeze
from dflash_hf.training.anchors import example_seeds, sample_anchors
from dflash_hf.training.block_mask import block_mask
from dflash_hf.training.training_args import DFlashTrainingArguments


HELD_OUT = ("held_out", "held_out_conversations")
RATES = {"mark": 2e-3, "gate": 3e-2}  # of what is new; they have far to go
ARMS: dict[str, tuple[bool, float | None]] = {  # whether carried slots are seen, and where their gate begins
    "without": (False, None),
    "keys": (True, None),
    "gated keys": (True, -6.0),
}


class Carrying(nn.Module):
    """
    A drafter, called as it is in training, whose last context columns are carried slots: `B - 1` for each block.

    Args:
        draft (`DFlashDraftModel`): The drafter; a copy of it is trained.
        gate (`float`, *optional*): Where the gates begin, a constant for each layer and head that is added to the
            scores of carried keys. Without it they are keys like any other.

    Attributes:
        mark (`nn.Parameter`): `[H]`, added to the projected features of carried slots; begins at zero.
    """

    def __init__(self, draft, gate: float | None):
        super().__init__()
        self.draft = copy.deepcopy(draft)
        config = draft.config
        self.mark = nn.Parameter(torch.zeros(config.hidden_size))
        shape = (config.num_hidden_layers, config.num_attention_heads, 1, 1)
        self.gate = nn.Parameter(torch.full(shape, gate or 0.0), requires_grad=gate is not None)
        self.draft.hidden_norm.register_forward_hook(self._marked)
        for layer in self.draft.layers if gate is not None else ():
            layer.self_attn.register_forward_pre_hook(self._gated)

    def forward(self, **inputs):
        size = self.draft.config.block_size
        columns = inputs["context_hidden_states"].shape[1]
        first = columns - inputs["noise_embeds"].shape[1] // size * (size - 1)
        self.carried = (torch.arange(columns) >= first).float()  # [C]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.draft(**inputs)

    def _marked(self, module, inputs, output):
        return output + self.carried[:, None] * self.mark

    def _gated(self, module, inputs):
        hidden, context, rotary, mask, *rest = inputs
        carried = nn.functional.pad(self.carried, (0, mask.shape[-1] - len(self.carried)))
        return hidden, context, rotary, mask + self.gate[module.layer_idx] * carried, *rest


class Arm:
    """A drafter that is trained: its model, its loss, and how it drafts."""

    def __init__(self, draft, target, seen: bool, gate: float | None):
        self.model = Carrying(draft, gate)
        self.target = target
        options = {"output_dir": "unused", "use_cpu": True, "bf16": True, "report_to": "none", "loss_type": "dpace_kl"}
        self.objective = DFlow(self.model.draft, target, DFlashTrainingArguments(**options), with_rejected)
        self.objective.sees_rejected = seen
        self.drafter = DraftSession(self.model.draft, target)

    def optimise(self, rate: float) -> None:
        groups = [{"params": list(self.model.draft.parameters()), "lr": rate}]
        groups += [{"params": [getattr(self.model, name)], "lr": own} for name, own in RATES.items()]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        self.rates = [group["lr"] for group in groups]

    def learn(self, batch: dict, scale: float) -> None:
        """One step, at a share of the learning rates."""
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = scale * rate
        loss, _ = self.objective(self.model, batch)
        (loss.sum() / self.objective.normalizer(batch)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def drafts(self, batch: dict) -> tuple[torch.LongTensor, torch.LongTensor]:
        """The blocks `[N, A, B]` that are drafted at a batch's anchors, and how many drafts of each are right."""
        draft = self.model.draft
        blocks = self.objective.build_blocks(batch)
        hidden = self.model(
            noise_embeds=draft.embed(self.target, blocks.input_ids).to(draft.dtype),
            context_hidden_states=with_rejected(batch).features.to(draft.dtype),
            attention_mask=self.objective.attention_masks(batch),
            position_ids=blocks.position_ids,
        ).last_hidden_state.float()
        hidden = hidden.unflatten(1, (-1, draft.config.block_size))  # [N, A, B, H]
        drafted = self.drafter.decode_block(blocks.labels[..., 0].flatten(), hidden[:, :, 1:].flatten(0, 1))
        drafted = drafted.view_as(blocks.labels)
        right = (drafted == blocks.labels) & blocks.counted
        return drafted, right[..., 1:].long().cumprod(-1).sum(-1)


@torch.no_grad()
def read(target, layers: list[int], ids, mask, positions, cache) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and final states of tokens that follow those in a cache."""
    with FeatureTap(target, layers) as tap, tap.running():
        inputs = {"attention_mask": mask, "position_ids": positions, "use_cache": True, CACHE_NAME: cache}
        states = target.get_decoder()(input_ids=ids, **inputs).last_hidden_state
        return tap.take(), states


def opened(batch: dict, pair, anchors: int, seed: int) -> dict:
    """A batch that the target has read, with random anchors and nothing carried."""
    ids = batch["input_ids"]
    mask = batch["attention_mask"]
    config = pair.draft.config
    cache = DynamicCache()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    features, states = read(pair.target, config.target_layer_ids, ids, mask, positions, cache)
    begun, valid = sample_anchors(batch["loss_mask"], anchors, seeds=example_seeds(ids, mask, seed, 0))
    batch |= {"features": features, "states": states, "cache": cache, "anchors": begun, "valid": valid}
    batch["rejected"] = features.new_zeros(*begun.shape, config.block_size - 1, features.shape[-1])
    return batch | {"count": torch.zeros_like(begun)}


def verified(batch: dict, pair, drafted: torch.LongTensor, accepted: torch.LongTensor) -> dict:
    """The batch with the next anchors, and the target's features of the rejected drafts from there on."""
    config = pair.draft.config
    mask = batch["loss_mask"]
    begun = batch["anchors"]
    size = config.block_size
    length = mask.shape[1]
    # 1. The target reads each block after its own prefix, with the keys and values of the text.
    seen = additive_mask(block_mask(begun, batch["attention_mask"], size, causal=True), pair.target.dtype)
    positions = (begun[..., None] + torch.arange(size)).flatten(1)
    features, _ = read(
        pair.target, config.target_layer_ids, drafted.flatten(1), seen, positions, copy.deepcopy(batch["cache"])
    )
    # 2. The next anchor is the target's own token after the accepted drafts, in the place of the first rejected one.
    anchors = begun + accepted + 1
    inside = anchors.clamp(max=length - 2)
    valid = batch["valid"] & (anchors < length - 1)
    valid = valid & (mask.gather(1, inside) > 0) & (mask.gather(1, inside + 1) > 0)
    anchors = anchors.masked_fill(~valid, 0)
    # 3. Rejected drafts are moved to the front.
    slots = (accepted[..., None] + 1 + torch.arange(size - 1)).clamp(max=size - 1)  # [N, A, B - 1]
    features = features.unflatten(1, (-1, size))
    rejected = features.gather(2, slots[..., None].expand(*slots.shape, features.shape[-1]))
    count = (size - 1 - accepted).masked_fill(~valid, 0)
    return batch | {"anchors": anchors, "valid": valid, "count": count, "rejected": rejected}


def texts(name: str, tokenizer, longest: int, count: int, seed: int = 0) -> list[dict]:
    """Random rows of a file of answers, as ids and masks, in the order of their lengths."""
    rows = read_json_lines(data_folder() / f"{name}.jsonl.gz")
    encoder = RowEncoder(ChatTemplate(tokenizer), max_length=longest, mask_token_id=16)
    examples = list[dict]()
    for index in torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist():
        if len(examples) >= count:
            break
        try:
            examples += encoder(rows[index])
        except UnusableRow:
            pass
    return sorted(examples[:count], key=lambda row: len(row["input_ids"]))


def batches(rows: list[dict], pair, anchors: int, seed: int) -> Iterator[dict]:
    """Four rows of about one length at a time, in random order."""
    starts = torch.arange(0, len(rows), 4)
    for start in starts[torch.randperm(len(starts), generator=torch.Generator().manual_seed(seed))].tolist():
        yield opened(DFlashCollator()(rows[start : start + 4]), pair, anchors, seed)


def measure(arms: dict[str, Arm], first: Arm, pair, rows: list[dict], anchors: int) -> dict[str, list]:
    """
    For each held-out row: the rejected slots before its second blocks; the drafts that are accepted there of every
    arm, after equal first blocks, and if carried slots are hidden from it; and those in the third blocks, which follow
    the arm's own second ones.
    """
    values_by_name: dict[str, list] = {}

    def note(name: str, values: torch.Tensor, state: dict) -> None:
        values_by_name.setdefault(name, []).extend(row[valid].tolist() for row, valid in zip(values, state["valid"]))

    for batch in batches(rows, pair, anchors, seed=0):
        second = verified(batch, pair, *first.drafts(batch))
        note("rejected", second["count"], second)
        for name, arm in arms.items():
            drafted, accepted = arm.drafts(second)
            note(name, accepted, second)
            third = verified(second, pair, drafted, accepted)
            note(f"{name}, third", arm.drafts(third)[1], third)
            if ARMS[name][0]:
                note(f"{name}, hidden", arm.drafts(second | {"count": torch.zeros_like(second["count"])})[1], second)
    return values_by_name


def table(line: dict) -> str:
    """
    An evaluation as Markdown: tau, its difference from the arm without carried slots with the standard error over
    2,000 bootstraps of rows, and tau where few and many slots were rejected.
    """
    groups = ((0, 0), (1, 3), (4, 6), (7, 7))
    own = [name for name in line if name in ARMS or ", hidden" in name]
    blocks = torch.tensor([len(row) for row in line["rejected"]])
    count = torch.tensor([slots for row in line["rejected"] for slots in row])
    drawn = torch.randint(len(blocks), (2000, len(blocks)), generator=torch.Generator().manual_seed(0))
    sums = {name: torch.tensor([float(sum(row)) for row in line[name]]) for name in own}
    lines = [f"{line['texts']}, step {line['step']}, {len(count):,} blocks; rejected " + str(groups), "|---" * 7 + "|"]
    for name in own:
        accepted = torch.tensor([value for row in line[name] for value in row]).float()
        parts = [accepted[(count >= low) & (count <= high)].mean().item() + 1 for low, high in groups]
        gap = sums[name] - sums["without"]
        spread = (gap[drawn].sum(1) / blocks[drawn].sum(1)).std().item()
        figures = f"{accepted.mean() + 1:.3f} | {gap.sum() / blocks.sum():+.3f} +- {spread:.3f}"
        lines.append(f"| {name} | {figures} | " + " | ".join(f"{part:.2f}" for part in parts) + " |")
    third = {name: [value for row in line[f"{name}, third"] for value in row] for name in own if name in ARMS}
    means = {name: round(sum(each) / len(each) + 1, 3) for name, each in third.items()}
    return "\n".join([*lines, f"third blocks: {means}", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of training, all arms together; 0: as they begin")
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--anchors", type=int, default=16, help="blocks of each row")
    parser.add_argument("--longest", type=int, default=448, help="tokens of a row")
    parser.add_argument("--held-out", type=int, default=100, help="rows of each file for the evaluation")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="besides `without`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair = load_pair("bfloat16")
    freeze(pair.target)
    draft = pair.draft.float()
    first = Arm(draft, pair.target, False, None)
    arms = {name: Arm(draft, pair.target, *ARMS[name]) for name in dict.fromkeys(["without", *arguments.arms])}
    held_out = {name: texts(name, pair.tokenizer, arguments.longest, arguments.held_out) for name in HELD_OUT}

    def evaluate(step: int) -> None:
        for name, rows in held_out.items():
            figures = measure(arms, first, pair, rows, arguments.anchors)
            line = {"step": step, "seed": arguments.seed, "texts": name, **figures}
            with arguments.output.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(table(line), flush=True)

    for arm in arms.values():
        arm.optimise(arguments.rate)
    rows = texts("conversations", pair.tokenizer, arguments.longest, 4000, arguments.seed)
    begun = time.monotonic()
    steps = 0
    for batch in batches(rows, pair, arguments.anchors, arguments.seed):
        done = (time.monotonic() - begun) / (60 * arguments.minutes or 1e-9)
        if done >= 1:
            break
        batch = verified(batch, pair, *first.drafts(batch))
        steps += 1
        for arm in arms.values():
            arm.learn(batch, min(steps / 10, (1 + math.cos(math.pi * done)) / 2))
        if steps % 20 == 0:
            gates = {name: round(arm.model.gate.mean().item(), 2) for name, arm in arms.items()}
            print(steps, round(time.process_time()), gates, flush=True)
    evaluate(steps)


if __name__ == "__main__":
    main()
