"""What each rank of the distributed tests runs; one process alone runs the same for comparison."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from accelerate import DistributedType, PartialState
from torch.distributed.fsdp import fully_shard

from dflash_hf.training.adapters import add_adapter
from dflash_hf.training.saving import save
from dflash_hf.training.train import leave_group
from support.hub_stand_in import stand_in
from support.pairs import make_draft, make_target
from support.rows import uneven_rows
from support.runs import BLOCK, PLAIN_SGD, history, make_trainer


# The rows of one step, in order, for each loss: the first half is the first rank's. The second row has no anchor.
ROWS = {"ce": (1, 1, 0, 3), "dpace": (0, 2, 1, 3), "kl": (2, 1, 3, 0), "selector": (3, 1, 0, 2)}
LOSSES = {"ddp": ("dpace", "kl"), "fsdp2": ("ce", "selector")}
KEYS = ("loss", "accuracy", "simulated_tau")


def train_and_evaluate(folder, ranks, loss_type):
    """
    One step on four rows; three rows to evaluate, so that two ranks are given the first of them twice.

    Returns the figures, and the parameters after the step.
    """
    rows = [uneven_rows()[i] for i in ROWS[loss_type]]
    fields = {"per_device_train_batch_size": 4 // ranks, "per_device_eval_batch_size": 1, "loss_type": loss_type}
    fields["eval_decode"] = 3 if loss_type == "dpace" else 0  # FSDP has no whole drafter to decode with
    target = make_target(dtype=torch.float64)
    draft = None
    if loss_type == "selector":
        fields["loss_type"] = "ce"
        draft = make_draft(target, block_size=BLOCK, selector_rank=4, selector_top_k=4)
        successors = draft.candidate_selector.successor_codebook.detach()
        successors.normal_(generator=torch.Generator().manual_seed(0))  # zeros would give the others no gradient
    trainer = make_trainer(folder, target, rows, draft, eval_rows=rows[:0:-1], **fields, **PLAIN_SGD)
    assert trainer.args.world_size == ranks
    trainer.train()
    evaluated = trainer.evaluate()
    figures = [history(trainer, key)[0] for key in KEYS] + [evaluated[f"eval_{key}"] for key in KEYS]
    figures.append(evaluated.get("eval_tau", 0.0))
    return figures, {name: whole(parameter) for name, parameter in trainer.model.named_parameters()}


def train_selector_alone(folder, ranks):
    """The selector after one step, the rest of the drafter frozen; or why it is not trained."""
    rows = [uneven_rows()[i] for i in ROWS["ce"]]
    target = make_target(dtype=torch.float64)
    draft = make_draft(target, block_size=BLOCK, selector_rank=4, selector_top_k=40)
    fields = {"per_device_train_batch_size": 4 // ranks, "head_only": True, "loss_type": "kl"}
    try:
        make_trainer(folder, target, rows, draft, **fields, **PLAIN_SGD).train()
    except ValueError as error:
        return str(error)
    return draft.candidate_selector.state_dict()


def save_adapter(folder, ranks):
    """One step of an adapter, saved alone and merged into its drafter, as `dflash train` does."""
    torch.manual_seed(0)
    target = make_target(dtype=torch.float64)
    model = add_adapter(make_draft(target, block_size=BLOCK), {"r": 2})
    fields = {"per_device_train_batch_size": 4 // ranks, **PLAIN_SGD}
    trainer = make_trainer(Path(folder, "adapted"), target, [uneven_rows()[i] for i in ROWS["ce"]], model, **fields)
    trainer.train()
    save(trainer, adapted=True)


def publish_run(folder, ranks):
    """The commits of a run with `push_to_hub`, and its card, from the rank that can reach the Hub."""
    rank = torch.distributed.get_rank()
    fields = {"per_device_train_batch_size": 4 // ranks, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    fields |= {"push_to_hub": True, "hub_model_id": "someone/a-draft", "hub_always_push": True}
    fields |= {"hub_token": "hf_right", "hub_card": {"base_model": "someone/target"}}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        hub = stack.enter_context(stand_in(patch)) if rank == 0 else None
        trainer = make_trainer(Path(folder, "published"), make_target(), uneven_rows(), **fields)
        trainer.train()
        publication = trainer.push_to_hub(license="mit")
        if rank == 0:
            saved = Path(folder, "published", "model.safetensors").read_bytes()
            assert hub.files["someone/a-draft"]["model.safetensors"] == saved
    if hub is None:
        assert publication is None
        return None
    return [commit["message"] for commit in hub.commits], hub.files["someone/a-draft"]["README.md"].decode()


def save_and_resume(folder, ranks):
    """Losses of two steps, the same with a resume between them, the parameters, and of which kind these were."""
    fields = {"per_device_train_batch_size": 4 // ranks, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    results = []
    for checkpoint in (None, str(Path(folder, "checkpoint-1"))):
        trainer = make_trainer(folder, make_target(), uneven_rows(), warmup_steps=0, **fields)
        trainer.train(resume_from_checkpoint=checkpoint)
        results.append(history(trainer, "loss"))
    kinds = {type(parameter).__name__ for parameter in trainer.model.parameters()}
    return results, {name: whole(parameter) for name, parameter in trainer.model.named_parameters()}, kinds


def whole(parameter):
    """A parameter, gathered from all ranks where it is sharded."""
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


def generate_in_step(rank, shard=False):
    """Texts of different lengths, without and with a drafter, of a target sharded or whole; how often it was run."""
    target = make_target(dtype=torch.float64)
    draft = make_draft(target)
    forwards = []
    if shard:
        fully_shard(target)
    target.register_forward_pre_hook(lambda *_: forwards.append(1))
    prompt = torch.tensor([[5, 9, 17, 33 + rank]])
    options = {"max_new_tokens": (4, 11)[rank], "do_sample": False, "synced_gpus": shard}
    texts = []
    counts = []
    for assistant in (None, draft):
        forwards.clear()
        texts.append(target.generate(prompt, **options, assistant_model=assistant))
        counts.append(len(forwards))
    return texts, counts


def take_cpus_for_accelerators():
    """accelerate shards on accelerators only, although torch shards on CPUs as well."""
    initialize = PartialState.__init__

    def patched(self, *args, **kwargs):
        initialize(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = patched


def main(scenario, folder):
    if scenario == "fsdp2":
        take_cpus_for_accelerators()
    results = {loss_type: train_and_evaluate(folder, 2, loss_type) for loss_type in LOSSES[scenario]}
    results["resumed"] = save_and_resume(folder, 2)
    results["selector alone"] = train_selector_alone(folder, 2)
    save_adapter(folder, 2)
    results["published"] = publish_run(folder, 2)
    if scenario == "ddp":
        results["texts"] = generate_in_step(torch.distributed.get_rank(), shard=True)
    torch.save(results, Path(folder, f"rank{torch.distributed.get_rank()}.pt"))
    leave_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
