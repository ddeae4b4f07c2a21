"""A training run, from its data to a saved drafter."""

import gc
import math
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PrinterCallback, ProgressCallback, set_seed

from dflash_hf._io.argument_types import check_writable
from dflash_hf._io.files import locked, read_json
from dflash_hf._io.progress import without_bars
from dflash_hf._io.terminal import note
from dflash_hf.conversion.convert import with_shared_head
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.examples import DFlashCollator
from dflash_hf.data.images import load_image_reader
from dflash_hf.data.prepare import prepare_dataset
from dflash_hf.data.prompts import template_kwargs
from dflash_hf.data.sources import load_rows
from dflash_hf.data.template import digests_of_tokenizer
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.evaluation.report import PLOT_FILE, REPORT_FILE
from dflash_hf.hub.card import FACTS_FILE
from dflash_hf.layouts.read import is_drafter_config
from dflash_hf.pairs.configs import check_pair_configs, check_token_id
from dflash_hf.pairs.loading import Loading, load_draft_config, load_target, load_tokenizer
from dflash_hf.training.adapters import adapter_config, add_adapter, merged
from dflash_hf.training.arguments import ScriptArguments
from dflash_hf.training.callbacks import (
    BarOnlyCallback,
    LogLinesCallback,
    StepCountCallback,
    TimeBudgetSchedule,
    duration,
)
from dflash_hf.training.checkpoints import check_same_drafter, checkpoint_of, checkpoints_in, last_checkpoint
from dflash_hf.training.features import (
    MANIFEST,
    FeatureManifest,
    StoredFeatures,
    check_stored,
    drop_layers,
    open_features,
    store_rows,
    stored_tokens,
)
from dflash_hf.training.held_out import PREFIX, held_out_of_checkpoint, split_rows
from dflash_hf.training.nodes import one_process_first, smallest_count, wait_for_all, writes_to
from dflash_hf.training.rows import validate_and_count
from dflash_hf.training.start import make_draft, mask_token_of, set_draft_vocabulary, vocabulary_size
from dflash_hf.training.trainer import DFlashTrainer
from dflash_hf.training.trainer_card import save_facts
from dflash_hf.training.training_args import DFlashTrainingArguments


STORED = ".features"  # of rows that a run reads more than once; it is removed, so its name is not a user's
_METRICS = re.compile(r"(eval_)?(loss|simulated_tau(_argmax)?|(accuracy|acceptance)(_\d+)?)")


def train(script: ScriptArguments, training: dict, echo=lambda line: None, callbacks=(), choices=()):
    """
    Train a drafter, and save it to its `output_dir`.

    Args:
        script, training: From [`~dflash_hf.training.recipe.read_recipe`].
        echo: Called with the counts of the data, in the main process.
        callbacks (`Sequence[TrainerCallback]`): Additional callbacks.
        choices (`Sequence[str]`): What nobody decided but the run, said once its arguments are known to be right.

    Returns:
        `DFlashTrainer`: After training.
    """
    # 1. The arguments, and whatever else can be checked before a model is loaded.
    start = TimeBudgetSchedule.clock()
    folder = Path(training["output_dir"]).expanduser()  # as transformers does
    args = DFlashTrainingArguments(**{**training, "output_dir": str(folder), "resume_from_checkpoint": None})
    resume = checkpoint_to_resume(folder, training.get("resume_from_checkpoint"), script.overwrite_output_dir)
    target_config = check_run(script, args)
    is_first = args.process_index == 0
    say = echo if is_first else _say_nothing  # what a run is about to do
    tell = note if is_first else _say_nothing  # what it does otherwise than one might expect
    for line in choices:
        say(line)
    with one_process_first(args):
        rows, eval_rows = _load_rows(script)
    tokenizer = load_tokenizer(
        script.target,
        script.chat_template,
        script.target_revision,
        script.trust_remote_code,
        empty=rows is None or "input_ids" in rows[0],  # only texts need a vocabulary
    )
    loading = Loading(script.target_dtype, revision=script.target_revision, trust_remote_code=script.trust_remote_code)
    reader = load_image_reader(script.target, target_config, tokenizer, loading)  # and its template
    for features in script.feature_folders:
        check_stored(StoredFeatures(features), args.has_teacher, **digests_of_tokenizer(tokenizer))

    # 2. The target, on the device of this process; with stored features, which need little of it, in main memory.
    set_seed(args.seed)
    attention = {"attn_implementation": script.attn_implementation} if script.attn_implementation else {}
    device = "cpu" if script.features else args.device
    target = load_target(script.target, loading, device, argument_format="{}={}", **attention)

    # 3. Data, encoded by one process for all, and the drafter.
    encoder = _make_encoder(script, target, tokenizer, reader, tell)
    with one_process_first(args):
        eval_rows = _encode_rows(eval_rows, script.eval_data or script.data, encoder, script.num_proc, say)
        rows = _encode_rows(rows, script.data, encoder, script.num_proc, say, conversations=True)
    if script.features:
        rows = open_features(script.features)
        eval_rows = open_features(script.eval_features) if script.eval_features else None
    rows, held_out, facts = _hold_rows_out(rows, script, args, resume, say)
    draft = _make_draft_with_vocabulary(script, target, encoder, rows, held_out, say, tell)

    shares_head = script.share_head and draft.config.has_own_lm_head
    if shares_head:
        with_shared_head(draft)  # which says now whether it can be done after training

    # 4. The trainer, which checks the rest.
    if script.features:
        drop_layers(target, args.device)
    model = add_adapter(draft, script.peft_config) if script.peft_config else draft
    rows_to_evaluate = eval_rows if held_out is None else held_out
    collator = DFlashCollator(0, encoder.reader)
    trainer = DFlashTrainer(model, target, args, rows, rows_to_evaluate, collator, card_facts=facts)
    _add_callbacks(trainer, callbacks, say, tell)
    if resume:
        check_same_drafter(Path(resume), draft)

    with ExitStack() as stack:
        # The first process locks and clears the folder before any other looks there; on a node with a disk of its
        # own, the node's first process does the same with the folder there.
        is_new_run = not training.get("resume_from_checkpoint")
        if is_first:
            _prepare_folder(folder, is_new_run, stack)
        wait_for_all(args)
        writes = writes_to(folder, args)
        if writes and not is_first:
            _prepare_folder(folder, is_new_run, stack)
        # 5. Features of rows that are read more than once.
        if script.store_rows:
            _replace_rows_by_features(trainer, script, encoder, writes, say)
        # 6. Training. The time limit covers what came before it, and what follows: saving, and held-out rows.
        if resume:
            say(f"resuming from {resume}")
        saving_seconds = 2.0 + 4 * draft.num_parameters() / 1e8
        evaluation_seconds = 0.0 if held_out is None else 0.03 * 60 * (args.max_minutes or 0)
        trainer.reserved_seconds = TimeBudgetSchedule.clock() - start + saving_seconds + evaluation_seconds
        trainer.train(resume_from_checkpoint=resume)
        if held_out is not None:
            trainer.evaluate(metric_key_prefix=PREFIX)
        save(trainer, adapted=bool(script.peft_config))
        if shares_head and is_first:
            save_with_shared_head(folder, say)
    if writes:
        shutil.rmtree(folder / STORED, ignore_errors=True)
    passes = f"{trainer.state.epoch:.1f} passes over {len(trainer.train_dataset):,} rows"
    total_time = duration(TimeBudgetSchedule.clock() - start)
    say(f"trained           {trainer.state.global_step:,} steps, {total_time} in all: {passes}")
    return trainer


def _say_nothing(line: str) -> None:
    """In place of the printers of the first process, in the others."""


def _hold_rows_out(rows, script: ScriptArguments, args, resume: str | None, say) -> tuple:
    """The rows to train on, those that are held out, if any, and what a checkpoint must say of the choice."""
    if script.evaluates:
        count = 0
        seed = args.seed
    else:
        count, seed = held_out_of_checkpoint(resume, script.held_out_rows, args.seed)
    rows, held_out, conversations = split_rows(rows, count, seed)
    if held_out is not None:
        say(f"held out          {len(held_out):,} rows, which are not trained on: the run ends with their tau")
    facts = {"held_out_rows": conversations}
    if held_out is not None and seed != args.seed:
        facts["held_out_seed"] = seed
    return rows, held_out, facts


def _make_draft_with_vocabulary(script: ScriptArguments, target, encoder: RowEncoder, rows, held_out, say, tell):
    """The drafter of a run; a reduced vocabulary is that of the rows to train on."""
    if not script.draft_vocab_size:
        return make_draft(script, target, encoder, tell)
    counts = _count_supervised_tokens(rows, held_out, script)
    size = vocabulary_size(script, counts, target.get_input_embeddings().weight.shape[0])
    draft = make_draft(replace(script, draft_vocab_size=size), target, encoder, tell)
    if size:
        share = set_draft_vocabulary(draft, target, counts)
        say(f"draft vocabulary  {size:,} tokens, {share:.2%} of the supervised tokens")
    return draft


def _count_supervised_tokens(rows, held_out, script: ScriptArguments) -> torch.LongTensor:
    """How often each token is supervised in the rows to train on, `[V]`."""
    if not script.features:
        return validate_and_count(rows)
    counts = validate_and_count(stored_tokens(script.features))  # shard by shard, which is much faster than row by row
    if held_out is not None:
        held_out_counts = validate_and_count(held_out)
        counts[: len(held_out_counts)] -= held_out_counts
    return counts


def _add_callbacks(trainer: DFlashTrainer, callbacks, say, tell) -> None:
    """
    Give a run its additional callbacks, and lines for people in place of upstream's. The caller's callbacks come
    first: what they add to a log or decide at a step is there when the run's own read it.
    """
    trainer.remove_callback(StepCountCallback)
    trainer.remove_callback(PrinterCallback)
    bar = trainer.pop_callback(ProgressCallback)
    own = [LogLinesCallback(say), StepCountCallback(say, tell)]
    if bar is not None:
        own.append(BarOnlyCallback())
    for callback in (*callbacks, *own):
        trainer.add_callback(callback)


def check_run(script: ScriptArguments, args: DFlashTrainingArguments) -> dict:
    """
    Check what would otherwise fail after the target was loaded, or after hours.

    Returns:
        `dict`: The target's configuration.

    Raises:
        `ValueError`: the output cannot be written, or a name, the evaluation or an adapter are wrong.
        `OSError`: a model or a file does not exist.
    """
    folder = Path(args.output_dir)
    if folder.is_file():
        raise ValueError(f"output_dir={folder} is a file; name a folder.")
    try:
        check_writable(folder)
    except OSError as error:
        raise ValueError(f"output_dir={folder} cannot be written: {error.strerror or error}.") from error
    metric = args.metric_for_best_model
    if args.eval_strategy != "no" and not script.evaluates:
        raise ValueError(
            f"eval_strategy={args.eval_strategy.value} has nothing to evaluate on: name eval_data, eval_split or "
            "eval_features, or leave it out."
        )
    if metric is not None and not _METRICS.fullmatch(metric):
        raise ValueError(
            f"metric_for_best_model={metric} is not measured; loss, accuracy and simulated_tau are, and accuracy_k "
            "and acceptance_k of slot k."
        )
    if script.peft_config:
        adapter_config(script.peft_config)
    loading = Loading(revision=script.target_revision, draft_revision=script.draft_revision)
    config = check_pair_configs(script.target, script.draft, loading, argument_format="{}={}")
    check_token_id(script.mask_token_id, config, f"mask_token_id={script.mask_token_id}")
    return config


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
    checkpoint = checkpoint_of(resume, folder)
    last = last_checkpoint(folder)
    contents = None  # of a folder that has been used
    if any(folder.glob("*.safetensors")):
        contents = "a finished drafter"
    elif last is not None:
        contents = last.name
    resumes_here = checkpoint is not None and checkpoint.resolve().parent == folder.resolve()
    if contents is not None and not resumes_here and not overwrite:
        if resume == "auto":
            contents = f"no checkpoint to resume from, but {contents}"
        raise ValueError(
            f"output_dir={str(folder)} holds {contents}. Resume with --resume-from-checkpoint auto if there is a "
            "checkpoint, replace it with --overwrite-output-dir, or choose another --output-dir."
        )
    return None if checkpoint is None else str(checkpoint)


def _prepare_folder(folder: Path, is_new_run: bool, stack: ExitStack) -> None:
    """
    Lock a run's folder until `stack` closes; a new run removes what another left, so that none of it is ever taken for
    its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stack.enter_context(locked(folder))  # before anything is removed: another run may be writing
    if not is_new_run:
        return
    for leftover in (*checkpoints_in(folder), folder / STORED):
        shutil.rmtree(leftover, ignore_errors=True)
    for name in (FACTS_FILE, REPORT_FILE, PLOT_FILE):
        (folder / name).unlink(missing_ok=True)


def _make_encoder(script: ScriptArguments, target, tokenizer, reader, tell) -> RowEncoder:
    """What makes examples of a run's rows."""
    kwargs_of_features = {
        folder: FeatureManifest.load(Path(folder)).chat_template_kwargs for folder in script.feature_folders
    }
    draft_loading = Loading(draft_revision=script.draft_revision)
    draft_config = load_draft_config(script.draft, draft_loading) if script.draft else None
    kwargs = template_kwargs(script.chat_template_kwargs, script.data, kwargs_of_features, draft_config, tell)
    mask_token_id = mask_token_of(script, target, tokenizer)
    rows = target.get_input_embeddings().weight.shape[0]
    return RowEncoder(tokenizer, kwargs, reader, script.max_length, mask_token_id, rows)


def _load_rows(script: ScriptArguments) -> tuple:
    """The rows to train and to evaluate on; of a run on stored features, none."""

    def load(data, split):
        """The rows of a split of some data."""
        return load_rows(data, split, name=script.data_name, revision=script.data_revision)

    if script.features:
        return None, None
    evaluates = script.eval_data or script.eval_split
    eval_rows = load(script.eval_data or script.data, script.eval_split) if evaluates else None
    return load(script.data, script.split), eval_rows


def _encode_rows(rows, data, encoder: RowEncoder, num_proc: int | None, say, conversations: bool = False):
    """Rows, if there are any, as examples."""
    if rows is None:
        return None
    dataset, report = prepare_dataset(rows, encoder, num_proc, data, conversations)
    say(f"{data}:")
    for line in report.lines():
        say(f"  {line}")
    return dataset


def _draw_rows_to_store(rows, script: ScriptArguments, args):
    """The rows whose features a run stores, in random order: as many as asked, or as it can read."""
    count = script.store_rows
    stored_before = Path(args.output_dir, STORED, "train", MANIFEST).is_file()
    if count == -1 and args.max_steps > 0 and not stored_before:  # else those that are stored come first
        count = args.max_steps * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed))
    if count > 0:
        order = order[:count]
    return rows.select(order.tolist())


def _replace_rows_by_features(
    trainer: DFlashTrainer, script: ScriptArguments, encoder: RowEncoder, writes: bool, say
) -> None:
    """
    Replace a trainer's rows by their features. One process stores them on each disk, as it `writes`; the others wait.
    """
    args = trainer.args
    folder = Path(args.output_dir) / STORED
    train_rows = _draw_rows_to_store(trainer.train_dataset, script, args)
    eval_rows = trainer.eval_dataset
    if writes:
        enough = _storing_limit(script, args, folder.parent, 1 / 3)
        store_rows(train_rows, folder / "train", trainer, script, encoder, enough)
        # Held-out rows, too, as many as fit into their share of the time; evaluation data are the user's.
        enough = None if script.evaluates else _storing_limit(script, args, folder.parent, 1 / 20)
        store_rows(eval_rows, folder / "eval", trainer, script, encoder, enough)
    wait_for_all(args)
    trainer.train_dataset = _common_rows(StoredFeatures(folder / "train"), trainer)
    if eval_rows is not None:
        trainer.eval_dataset = _common_rows(StoredFeatures(folder / "eval"), trainer)
    say(f"features          of {len(trainer.train_dataset):,} of {len(train_rows):,} rows, as many as time allows")


def _common_rows(dataset: StoredFeatures, trainer: DFlashTrainer):
    """The rows that every node has stored: in the same time a slower one stores fewer, of the same order."""
    count = smallest_count(len(dataset), trainer)
    return dataset if count == len(dataset) else torch.utils.data.Subset(dataset, range(count))


def _storing_limit(script: ScriptArguments, args, folder: Path, share: float) -> Callable[[], bool] | None:
    """
    A function that says whether storing features, as many as a run can, has taken its share of the time or half of the
    free disk; `None` if `store_rows` is their number.
    """
    if script.store_rows != -1:
        return None
    start = TimeBudgetSchedule.clock()
    free_bytes = shutil.disk_usage(folder).free
    seconds = share * 60 * args.max_minutes if args.max_minutes else math.inf

    def enough() -> bool:
        """Whether either limit is reached."""
        return TimeBudgetSchedule.clock() - start > seconds or shutil.disk_usage(folder).free < free_bytes / 2

    return enough


def save(trainer: DFlashTrainer, adapted: bool) -> None:
    """
    Save the drafter; with its adapter merged, which engines serve, and the adapter alone next to it.

    Every process calls it: the weights of a sharded drafter are gathered from all.
    """
    folder = Path(trainer.args.output_dir)
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if not adapted:
        if not is_sharded:
            _to_half_precision(trainer.draft, trainer.args)
        trainer.save_model(str(folder))
        return
    trainer.save_model(str(folder / "adapter"))
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if is_sharded else None  # gathered by all
    if trainer.is_world_process_zero():
        merged_draft = merged(trainer.accelerator.unwrap_model(trainer.model), state)
        _to_half_precision(merged_draft, trainer.args).save_pretrained(folder)
        (folder / FACTS_FILE).unlink(missing_ok=True)  # of the weights that were here before
        save_facts(trainer, folder, trainer.trained_steps)


def save_with_shared_head(folder: Path, say) -> None:
    """
    Replace the drafter of a folder, whose vocabulary is reduced, by the same one with the target's head. Its rows of
    that head were not trained, so it drafts the same tokens, and rarely one of the others.
    """
    with without_bars():
        draft = DFlashDraftModel.from_pretrained(folder)
        with_shared_head(draft).save_pretrained(folder)
    say(
        f"shared head       all tokens are drafted, with the target's head; --share-head false keeps the "
        f"{draft.config.draft_vocab_size:,} of training, which SGLang does not serve"
    )


def _to_half_precision(draft, args):
    """A drafter, converted to half precision if a run trains in half precision."""
    if args.bf16:
        return draft.to(torch.bfloat16)
    if args.fp16:
        return draft.to(torch.float16)
    return draft
