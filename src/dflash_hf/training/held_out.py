"""
Rows that a run does not train on, but evaluates.

The rows that a run reads again and again are memorised: their tau rises whatever the drafter has learned about other
texts. So without evaluation data a run holds some conversations out (`held_out_rows`), the same ones after an
interruption, and ends with their tau. The numbers go into `card_facts.json`, as `held_out_rows` of each checkpoint
(with `held_out_seed` where they were chosen by another seed than its own) and `held_out_simulated_tau` beside
`training_simulated_tau` of the finished drafter, with `eval_decode` also `held_out_tau`.
"""

from pathlib import Path

import torch

from dflash_hf._io.files import read_json
from dflash_hf._io.names import FACTS_FILE
from dflash_hf.data.hold_out import hold_out
from dflash_hf.data.prepare import CONVERSATION
from dflash_hf.training.features import parts_of


PREFIX = "held_out"  # metric prefix for these rows
TAU = "simulated_tau"
# An overfitted drafter loses this share of the training rows' accepted drafts on other rows. 56 passes over 60 answers
# lose nine tenths (tau 3.95 and 1.26); half is already more than rows that differ by chance.
_OVERFITTED_LOSS = 0.5


def held_out_of_checkpoint(checkpoint: str | Path | None, requested: int | None, seed: int) -> tuple[int | None, int]:
    """
    How many conversations a run holds out, and the seed that chooses them: those with which a resumed run began.

    Args:
        checkpoint (`str` or `Path`, *optional*): The checkpoint to resume from. If its facts say nothing about
            held-out rows, it was trained on all rows.
        requested (`int`, *optional*): `held_out_rows` of the recipe.
        seed (`int`): The run's seed.

    Raises:
        `ValueError`: the recipe asks for another number than the run began with.
    """
    if checkpoint is None:
        return requested, seed
    path = Path(checkpoint, FACTS_FILE)
    training = read_json(path).get("training", {}) if path.is_file() else {}
    count = training.get("held_out_rows", 0)
    if requested not in (None, count):
        raise ValueError(
            f"held_out_rows={requested}, but {checkpoint} was trained with {count}: rows that were trained on "
            "tell nothing. Leave it out, or start a new run."
        )
    seed_of_checkpoint = training.get("seed", 0)  # facts that are 0 are left out
    # Its rows were chosen by another seed if it was itself resumed with another one.
    return count, training.get("held_out_seed", seed_of_checkpoint)


def split_rows(rows, count: int | None, seed: int) -> tuple:
    """
    The rows to train on, those that are held out (`None` if there are none), and the conversations among these; see
    [`~dflash_hf.data.hold_out.hold_out`].

    Args:
        rows: An encoded `datasets.Dataset` with the column `conversation`, or stored features.
    """
    is_table = hasattr(rows, "remove_columns")
    if is_table:
        keys = list(rows[CONVERSATION])
        rows = rows.remove_columns(CONVERSATION)
    else:
        keys = []
        for part in parts_of(rows):
            keys += part.conversations
    train_indices, held_out_indices, conversations = hold_out(keys, count, seed)
    if not held_out_indices:
        return rows, None, 0
    if is_table:
        return rows.select(train_indices), rows.select(held_out_indices), conversations
    train_rows = torch.utils.data.Subset(rows, train_indices)
    held_out_rows = torch.utils.data.Subset(rows, held_out_indices)
    return train_rows, held_out_rows, conversations


def taus(log_history: list[dict]) -> dict[str, float]:
    """The last simulated tau of each kind of rows in a trainer's log: `training`, `eval` and `held_out`."""
    names = {"training": TAU, "eval": f"eval_{TAU}", PREFIX: f"{PREFIX}_{TAU}"}
    last = {}
    for kind, name in names.items():
        values = [line[name] for line in log_history if name in line]
        if values:
            last[kind] = values[-1]
    return last


def last_decoded_tau(log_history: list[dict], kind: str) -> float | None:
    """The last tau of decoded prompts (`eval_decode`) in a trainer's log, of `eval` or `held_out` rows."""
    values = [line[f"{kind}_tau"] for line in log_history if f"{kind}_tau" in line]
    return values[-1] if values else None


def is_overfitted(training_tau: float, held_out_tau: float) -> bool:
    """Whether less than half as many drafted tokens are accepted on held-out rows as on training rows."""
    return held_out_tau - 1 < (1 - _OVERFITTED_LOSS) * (training_tau - 1)


def closing_line(trainer) -> str:
    """The last line of a run: the tau of rows that it was not trained on, or that there were none."""
    last = taus(trainer.state.log_history)
    kind = PREFIX if PREFIX in last else "eval"
    if kind not in last:
        return (
            "held-out tau      unknown: no row was held out (--held-out-rows N holds out N, --eval-data names "
            "others); the tau of the training rows says nothing about other texts"
        )
    which_rows = "eval_data" if kind == "eval" else f"{len(trainer.eval_dataset):,} rows that were not trained on"
    decoded = last_decoded_tau(trainer.state.log_history, kind)
    line = "held-out tau      "
    if decoded is not None:
        line += f"{decoded:.2f}, decoded; "
    line += f"{last[kind]:.2f}, simulated, of {which_rows}"
    if "training" in last:
        line += f"; {last['training']:.2f} of the training rows"
        if is_overfitted(last["training"], last[kind]):
            line += ", which were memorised"
    return line
