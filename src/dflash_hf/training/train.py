"""A recipe, from its data to a saved drafter."""

import gc
import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, set_seed

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.images import load_image_reader
from dflash_hf.data.prepare import prepare_dataset
from dflash_hf.data.prompts import template_kwargs
from dflash_hf.data.sources import load_rows
from dflash_hf.data.time_left import duration
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.files import locked, read_json
from dflash_hf.hub.card import FACTS_FILE
from dflash_hf.layouts.read import is_drafter_config
from dflash_hf.pairs import Loading, draft_config_of, load_target, load_tokenizer
from dflash_hf.terminal import note
from dflash_hf.training.adapters import add_adapter, merged
from dflash_hf.training.callbacks import DecodingCallback
from dflash_hf.training.checkpoints import checkpoint_of, last_checkpoint
from dflash_hf.training.features import drop_layers, store_rows, stored, stored_tokens
from dflash_hf.training.pace import Pace, StepCount
from dflash_hf.training.processes import in_first_process
from dflash_hf.training.recipe import RecipeArguments
from dflash_hf.training.rows import survey
from dflash_hf.training.start import make_draft, mask_token_of, take_vocabulary, vocabulary_size
from dflash_hf.training.trainer import DFlashTrainer
from dflash_hf.training.trainer_card import save_facts, without_stale_report
from dflash_hf.training.training_args import DFlashTrainingArguments


STORED = ".features"  # of rows that a run reads more than once; it is removed, so its name is not a user's


@dataclass
class Run:
    """
    What a run trains with.

    Args:
        recipe (`RecipeArguments`), args (`DFlashTrainingArguments`): Its settings.
        target, draft: The models as loaded, or a fresh drafter.
        encoder (`RowEncoder`): Tokenizer, and the arguments of its template.
    """

    recipe: RecipeArguments
    args: DFlashTrainingArguments
    target: PreTrainedModel
    draft: DFlashDraftModel
    encoder: RowEncoder

    @property
    def layer_ids(self) -> list[int]:
        """The target layers whose outputs the drafter reads."""
        return self.draft.config.target_layer_ids


def train(recipe: RecipeArguments, training: dict, echo=lambda line: None, callbacks=()):
    """
    Train according to a recipe, and save the drafter to its `output_dir`.

    Args:
        recipe, training: From [`~dflash_hf.training.recipe.read_recipe`].
        echo: Called with the counts of the data, in the main process.
        callbacks (`Sequence[TrainerCallback]`): Additional callbacks.

    Returns:
        `DFlashTrainer`: After training.
    """
    # 1. The arguments.
    start, folder = Pace.clock(), Path(training["output_dir"]).expanduser()  # as transformers does
    resume = checkpoint_to_resume(folder, training.get("resume_from_checkpoint"), recipe.overwrite_output_dir)
    options = {**training, "output_dir": str(folder), "resume_from_checkpoint": None}
    if recipe.streaming and not options.get("max_steps", -1) > 0:
        raise ValueError("streaming=True has no length; set max_steps.")
    args = DFlashTrainingArguments(**options)
    if recipe.streaming:
        args.accelerator_config.dispatch_batches = False  # batches differ in width; each rank reads its own share
    first = args.process_index == 0
    say, tell = (echo, note) if first else (lambda line: None,) * 2

    # 2. The target, on the device of this process; with stored features, which need little of it, in main memory.
    set_seed(args.seed)
    loading = Loading(recipe.target_dtype, revision=recipe.target_revision, trust_remote_code=recipe.trust_remote_code)
    attention = {"attn_implementation": recipe.attn_implementation} if recipe.attn_implementation else {}
    device = "cpu" if recipe.features else args.device
    target = load_target(recipe.target, loading, device, form="{}={}", **attention)

    # 3. Data, encoded by one process for all, and the drafter; its reduced vocabulary is that of the data.
    encoder = _encoder(recipe, target, tell)
    with args.main_process_first(desc="data"):
        rows, eval_rows = _encoded(recipe, encoder, say)
    found = None
    if recipe.draft_vocab_size:
        found = survey(stored_tokens(recipe.features) if recipe.features else rows)
        size = vocabulary_size(recipe, found, target.get_input_embeddings().weight.shape[0])
        recipe = replace(recipe, draft_vocab_size=size)
    kwargs, tokenizer = encoder.chat_template_kwargs, encoder.tokenizer
    draft = make_draft(recipe, target, encoder.mask_token_id, kwargs, tokenizer, tell)
    if recipe.draft_vocab_size:
        share = take_vocabulary(draft, target, found.counts)
        say(f"draft vocabulary  {recipe.draft_vocab_size:,} tokens, {share:.2%} of the supervised tokens")
    run = Run(recipe, args, target, draft, encoder)

    with ExitStack() as stack:
        in_first_process(lambda: _begin(folder, not training.get("resume_from_checkpoint"), stack))
        # 4. Features: those of another command, or of rows that are read more than once.
        if recipe.features:
            drop_layers(target, args.device)
            names = (recipe.features, recipe.eval_features)
            rows, eval_rows = (stored(one, run.layer_ids, args.has_teacher) if one else None for one in names)
        elif recipe.store_rows:
            with args.main_process_first(desc="features"):
                rows = store_rows(_drawn(rows, run), folder / STORED / "train", run, _enough(run, folder))
                eval_rows = store_rows(eval_rows, folder / STORED / "eval", run)
            say(f"features          of {len(rows):,} rows are stored")
        # 5. Training.
        trainer = _trainer(run, rows, eval_rows, [*callbacks, StepCount(say)])
        if resume:
            say(f"resuming from {resume}")
        saving = 2.0 + 4 * trainer.draft.num_parameters() / 1e8
        trainer.reserved_seconds = Pace.clock() - start + saving
        trainer.train(resume_from_checkpoint=resume)
        _save(run, trainer)
    if first:
        shutil.rmtree(folder / STORED, ignore_errors=True)
    say(f"trained           {trainer.state.global_step:,} steps, {duration(Pace.clock() - start)} in all")
    return trainer


def leave_group() -> None:
    """
    Leave the process group, if there is one, when the trainer is no longer needed. The group lives in reference
    cycles; if one of its threads wakes while the interpreter exits, it kills the process.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        gc.collect()


def checkpoint_to_resume(folder: Path, resume: str | None, overwrite: bool) -> str | None:
    """
    The checkpoint to resume from, or `None` for a new run.

    Args:
        folder (`Path`): Its `output_dir`.
        resume (`str`, *optional*): `"auto"`, the folder's last whole checkpoint if there is one; or a checkpoint.
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
    checkpoint, last = checkpoint_of(resume, folder), last_checkpoint(folder)
    used = "a finished drafter" if any(folder.glob("*.safetensors")) else last and last.name
    elsewhere = checkpoint is None or checkpoint.resolve().parent != folder.resolve()
    if used and elsewhere and not overwrite:
        why = f"no checkpoint to resume from, but {used}" if resume == "auto" else used
        raise ValueError(
            f"output_dir={str(folder)} holds {why}. Resume with resume_from_checkpoint=auto if there is a "
            "checkpoint, replace it with overwrite_output_dir=true, or choose another output_dir."
        )
    return None if checkpoint is None else str(checkpoint)


def _begin(folder: Path, anew: bool, stack: ExitStack) -> None:
    """Lock a run's folder; a new run removes what another left, so that none of it is ever taken for its own."""
    stack.enter_context(locked(folder))
    for one in [*folder.glob("checkpoint-*"), folder / STORED] if anew else []:
        shutil.rmtree(one, ignore_errors=True)


def _encoder(recipe: RecipeArguments, target, tell) -> RowEncoder:
    """What makes examples of a run's rows."""
    tokenizer = load_tokenizer(
        recipe.target, recipe.chat_template, recipe.target_revision, recipe.trust_remote_code, empty=True
    )
    made_with = {folder: manifest.chat_template_kwargs for folder, manifest in recipe.manifests.items()}
    config = draft_config_of(recipe.draft, Loading()) if recipe.draft else None
    kwargs = template_kwargs(recipe.chat_template_kwargs, recipe.data, made_with, config, tell)
    mask_token_id = mask_token_of(recipe, target, tokenizer)
    rows = target.get_input_embeddings().weight.shape[0]
    loading = Loading(revision=recipe.target_revision, trust_remote_code=recipe.trust_remote_code)
    reader = load_image_reader(recipe.target, target.config.model_type, tokenizer, loading)
    return RowEncoder(tokenizer, recipe.max_length, kwargs, mask_token_id, rows, reader=reader)


def _encoded(recipe: RecipeArguments, encoder: RowEncoder, say) -> tuple:
    """The training and evaluation data as examples; without data, of a run on stored features, none."""

    def prepared(data, split, streaming, packing):
        rows = load_rows(data, split, streaming, recipe.data_name, recipe.data_revision)
        dataset, report = prepare_dataset(rows, encoder, packing, recipe.num_proc, data)
        say(f"{data}:" if not streaming else f"{data}, its first rows:")
        for line in report.lines():
            say(f"  {line}")
        return dataset

    if recipe.features:
        return None, None
    rows, eval_rows = prepared(recipe.data, recipe.split, recipe.streaming, recipe.packing), None
    if recipe.eval_data or recipe.eval_split:
        eval_rows = prepared(recipe.eval_data or recipe.data, recipe.eval_split, False, False)
    return rows, eval_rows


def _drawn(rows, run: Run):
    """The rows whose features a run stores, in random order: as many as asked, or as it can read."""
    count, args = run.recipe.store_rows, run.args
    if count == -1 and args.max_steps > 0:
        count = args.max_steps * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed))
    return rows.select(order[: count if count > 0 else None].tolist())


def _enough(run: Run, folder: Path) -> Callable[[], bool] | None:
    """Whether storing features, as many as a run can, has taken a third of its time or half of the free disk."""
    if run.recipe.store_rows != -1:
        return None
    start, free = Pace.clock(), shutil.disk_usage(folder).free
    seconds = 20 * run.args.max_minutes if run.args.max_minutes else math.inf
    return lambda: Pace.clock() - start > seconds or shutil.disk_usage(folder).free < free / 2


def _trainer(run: Run, rows, eval_rows, callbacks: list) -> DFlashTrainer:
    """The trainer of a run."""
    recipe = run.recipe
    model = add_adapter(run.draft, recipe.peft_config) if recipe.peft_config else run.draft
    trainer = DFlashTrainer(model, run.target, run.args, rows, eval_rows)
    if run.encoder.reader is not None:
        trainer.data_collator.reader = run.encoder.reader
    trainer.remove_callback(StepCount)
    for one in callbacks:
        trainer.add_callback(one)
    if recipe.decode_prompts:
        trainer.add_callback(DecodingCallback(trainer, None, recipe.decode_prompts, recipe.decode_max_new_tokens))
    return trainer


def _save(run: Run, trainer: DFlashTrainer) -> None:
    """Save the drafter; with its adapter merged, which engines serve, and the adapter alone next to it."""
    folder = Path(run.args.output_dir)
    if not run.recipe.peft_config:
        if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            _halved(trainer.draft, trainer.args)
        trainer.save_model(str(folder))
        return
    trainer.save_model(str(folder / "adapter"))
    if trainer.is_world_process_zero():
        whole = merged(trainer.accelerator.unwrap_model(trainer.model))
        with without_stale_report(folder):
            _halved(whole, trainer.args).save_pretrained(folder)
        (folder / FACTS_FILE).unlink(missing_ok=True)  # of the weights that were here before
        save_facts(trainer, folder, trainer.trained_steps)


def _halved(draft, args):
    """A drafter, converted to half precision if a run trains in half precision."""
    return draft.to(torch.bfloat16 if args.bf16 else torch.float16) if args.bf16 or args.fp16 else draft
