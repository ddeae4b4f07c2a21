"""What `DFlashTrainer` writes next to a drafter's weights: the facts of its model card."""

from collections.abc import Sized
from pathlib import Path

from dflash_hf._io.files import read_json, write_json
from dflash_hf._io.names import FACTS_FILE
from dflash_hf._io.repositories import origin
from dflash_hf.training.held_out import PREFIX, last_decoded_tau, taus


# The training arguments of transformers that a card lists; for our own arguments the fields say so.
_UPSTREAM_ARGUMENTS = (
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "weight_decay",
    "max_grad_norm",
    "optim",
    "bf16",
    "fp16",
    "seed",
)


def with_origin(facts: dict, target, user_facts: dict) -> dict:
    """
    Facts of a card, with the target's repository and commit if it has any, and with those that a user gives, which
    win.
    """
    facts = dict(facts)
    target_facts = origin(target)
    if target_facts:
        facts |= {"base_model_revision": None, **target_facts}
    if "base_model" in user_facts:
        facts["base_model_revision"] = None  # of another repository
    return facts | user_facts


def save_facts(trainer, folder: Path, steps: int, user_facts: dict) -> None:
    """
    Write what training knows into `card_facts.json` of weights after some steps, and the facts that the user gives;
    other facts in it are kept.
    """
    training = {**training_facts(trainer.args), "optimizer_steps": steps, **trainer.card_facts}
    if isinstance(trainer.train_dataset, Sized):
        training["train_examples"] = len(trainer.train_dataset)
    last = taus(trainer.state.log_history)
    if PREFIX in last:  # a tau of the training rows alone would flatter
        training["held_out_simulated_tau"] = round(last[PREFIX], 3)
        decoded = last_decoded_tau(trainer.state.log_history, PREFIX)
        if decoded is not None:
            training["held_out_tau"] = round(decoded, 3)
        if "training" in last:
            training["training_simulated_tau"] = round(last["training"], 3)
    folder.mkdir(parents=True, exist_ok=True)  # FSDP may have written nothing there yet
    path = folder / FACTS_FILE
    facts = read_json(path) if path.is_file() else {}
    facts = {**with_origin(facts, trainer.target, user_facts), "training": training}
    write_json(path, {name: value for name, value in facts.items() if value})


def training_facts(arguments) -> dict:
    """The training arguments that the card lists, if they are set."""
    absent = (None, False, "", -1)  # -1: `max_steps` if epochs set the length
    unused = ("num_train_epochs", "lr_scheduler_type") if arguments.max_minutes else ()
    names = [name for name in arguments.fields_on_model_card if name not in unused]
    values = {**arguments.to_dict(), "world_size": arguments.world_size}
    return {name: values[name] for name in (*names, *_UPSTREAM_ARGUMENTS) if values[name] not in absent}
