"""`run.json` in a run's folder holds its settings: the run resumes with them, and no other run replaces it."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from itertools import islice
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from dflash_hf.data.encode import digests_of_tokenizer
from dflash_hf.files import differences, locked, read_json, write_json
from dflash_hf.layouts.read import is_drafter_config
from dflash_hf.target import digest_of_parameters, digest_of_target
from dflash_hf.terminal import DetailedError
from dflash_hf.training.checkpoints import checkpoints_of, last_whole_checkpoint
from dflash_hf.training.features import digest_of_rows, parts_of
from dflash_hf.training.processes import in_first_process
from dflash_hf.training.run import Run


logger = logging.get_logger(__name__)
RUN_FILE = "run.json"
STORED = ".features"  # of rows that a run reads more than once; it is removed, so its name is not a user's
# The arguments of transformers that a run must resume with; our own fields and a recipe's keys say so themselves.
# Arguments that may differ are left out: duration, logging, saving, evaluation, and the split over processes.
_OF_UPSTREAM = (
    *("lr_scheduler_kwargs", "weight_decay", "max_grad_norm", "optim", "optim_args", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "bf16", "fp16", "seed", "data_seed", "train_sampling_strategy"),
)
_NOT_OF_DRAFT = {"transformers_version", "_name_or_path", "dtype", "auto_map", "architectures", "dflash_config"}


def used_by(folder: Path) -> str | None:
    """Describes what a folder holds of an earlier run; a run killed before it saved anything does not count."""
    checkpoint = next((one.name for one in checkpoints_of(folder)), None)
    if any(folder.glob("*.safetensors")):
        return "a finished drafter" + (f" and {checkpoint}" if checkpoint else "")
    return checkpoint


def checkpoint_to_resume(folder: Path, resume: str | None, overwrite: bool) -> str | None:
    """
    The checkpoint to resume from, or `None` for a new run.

    Args:
        folder (`Path`): Its `output_dir`.
        resume (`str`, *optional*): `"auto"`, the folder's last complete checkpoint if there is one; or a checkpoint.
        overwrite (`bool`): Start over in a folder that has been used.

    Raises:
        `ValueError`: the folder has been used, and neither is given; or both are; or it holds another model, such as
            the target, which is never overwritten.
    """
    config = folder / "config.json"
    if config.is_file() and not is_drafter_config(read_json(config)):
        raise ValueError(
            f"output_dir={str(folder)} holds another model, which the drafter would overwrite; choose another "
            "output_dir."
        )
    if resume and overwrite:
        raise ValueError(
            f"resume_from_checkpoint={resume} and overwrite_output_dir=True contradict each other; leave one out."
        )
    if resume and resume != "auto" and not Path(resume).is_dir():
        raise ValueError(
            f"resume_from_checkpoint={resume}: there is no such folder; `auto` finds the last checkpoint."
        )
    found = used_by(folder)
    last = last_whole_checkpoint(folder) if resume == "auto" else resume
    elsewhere = last is None or Path(last).resolve().parent != folder.resolve()
    if found and elsewhere and not overwrite:
        why = f"no checkpoint to resume from, but {found}" if resume == "auto" else found
        raise ValueError(
            f"output_dir={str(folder)} holds {why}. Resume with resume_from_checkpoint=auto if there is a "
            "checkpoint, replace it with overwrite_output_dir=true, or choose another output_dir."
        )
    return last


def describe_run(run: Run, dataset) -> dict:
    """
    Everything that a run depends on.

    Args:
        run (`Run`): Its settings, models as loaded, and encoder.
        dataset: The training data, encoded.

    Returns:
        `dict`: `settings`, which must not change.
    """
    recipe, args, draft = run.recipe, run.args, run.draft
    if recipe.features:
        data = "+".join(part.manifest.data for part in parts_of(dataset))  # a folder may be named twice
    else:
        batches = dataset.with_format("numpy").iter(1000)
        batches = islice(batches, 1 if recipe.streaming else None)  # the first rows of a stream
        data, _ = digest_of_rows(row for batch in batches for row in zip(batch["input_ids"], batch["loss_mask"]))
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    shape = {name: value for name, value in draft.config.to_dict().items() if name not in _NOT_OF_DRAFT}
    shape["num_draft_layers"] = shape.pop("num_hidden_layers")
    settings = {
        "digest of data": data,  # `data` of earlier versions was one of files
        "target_weights": digest_of_target(run.target),
        "draft_weights": digest_of_parameters(draft.named_parameters()) if recipe.draft else None,
        "target_dtype": str(run.target.dtype),
        **digests_of_tokenizer(run.encoder.tokenizer),
        "chat_template_kwargs": run.encoder.chat_template_kwargs,
        **shape,
        **{one.name: getattr(keys, one.name) for keys in (recipe, args) for one in fields(keys) if _is_of_run(one)},
        **{name: getattr(args, name) for name in _OF_UPSTREAM},
        "batch (per_device_train_batch_size * gradient_accumulation_steps * processes)": batch,
    }
    described = {"target": recipe.target, "settings": settings}
    return json.loads(json.dumps(described, default=str), parse_constant=str)  # JSON has no infinity


def _is_of_run(option) -> bool:
    return getattr(option.metadata.get("help"), "of_run", False)


def read_run(folder: Path) -> dict | None:
    """
    The description of the run in a folder.

    Raises:
        `ValueError`: the file is damaged.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        return None
    try:
        run = json.loads(path.read_text(encoding="utf-8"), parse_constant=str)
        return {"settings": dict(run["settings"]), "chosen": dict(run.get("chosen", {}))}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r}); remove it to continue unchecked, or choose another output_dir."
        ) from error


@contextmanager
def run_in(args, described: Callable[[], dict], resume: str | None) -> Iterator[None]:
    """
    Train with exclusive use of a folder, with `run.json` in it. A new run removes old checkpoints from it, so that
    none is ever taken for its own; a finished drafter stays until the new one is done. The first process locks the
    folder, and informs the others if it cannot.

    Args:
        args (`DFlashTrainingArguments`): Name the `output_dir`.
        described (`Callable`): Gives the result of [`describe_run`]; called in the first process.
        resume (`str`, *optional*): The checkpoint to resume from.

    Raises:
        `ValueError`: the checkpoint belongs to a run with other settings; names each with both values.
    """
    with ExitStack() as stack:

        def begin():
            run = described()
            stack.enter_context(locked(Path(args.output_dir)))
            _begin(Path(args.output_dir), run, resume)

        in_first_process(begin)
        yield


def _begin(folder: Path, run: dict, resume: str | None) -> None:
    before = read_run(Path(resume).resolve().parent) if resume else None
    if resume and not before:
        logger.warning(f"There is no {RUN_FILE} next to {resume}: its settings cannot be compared.")
    if before and (others := differences(before["settings"], run["settings"])):
        raise DetailedError(
            f"{resume} was trained with {'; '.join(others)}. Resume with the same settings, start over with "
            "overwrite_output_dir=true, or choose another output_dir."
        )
    if resume and before:
        run = {**run, "chosen": before["chosen"]}  # whether or not this command gives them
    if not resume:
        stale = [*folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")]
        with suppress(ValueError):  # it is damaged
            before = read_run(folder)
        if not before or differences(before["settings"], run["settings"]):
            stale.append(folder / STORED)
        for one in stale:
            shutil.rmtree(one, ignore_errors=True)
    write_json(folder / RUN_FILE, run)
