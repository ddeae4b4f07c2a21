"""A training run, from its data to a saved drafter."""

import gc
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PrinterCallback, ProgressCallback, set_seed

from dflash_hf._io.argument_types import check_writable
from dflash_hf._io.files import locked, read_json
from dflash_hf._io.names import FACTS_FILE, PLOT_FILE, REPORT_FILE
from dflash_hf._io.terminal import note
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.examples import DFlashCollator
from dflash_hf.data.images import ImageReader, load_image_reader
from dflash_hf.data.prepare import prepare_dataset
from dflash_hf.data.prompts import template_kwargs
from dflash_hf.data.sources import load_rows
from dflash_hf.data.template import ChatTemplate, digests_of_tokenizer
from dflash_hf.hub.card import has_own_card
from dflash_hf.layouts.read import is_drafter_config
from dflash_hf.pairs.configs import check_mask_token_id, check_pair_configs
from dflash_hf.pairs.draft_vocabulary import set_draft_vocabulary, with_shared_head
from dflash_hf.pairs.loading import Loading, load_draft_config, load_target
from dflash_hf.pairs.tokenizers import load_tokenizer
from dflash_hf.training.adapters import adapter_config, add_adapter
from dflash_hf.training.arguments import ScriptArguments
from dflash_hf.training.callbacks import (
    BarOnlyCallback,
    LogLinesCallback,
    StepCountCallback,
    duration,
)
from dflash_hf.training.checkpoints import (
    check_same_drafter,
    checkpoint_of,
    checkpoints_in,
    last_checkpoint,
    wants_to_resume,
)
from dflash_hf.training.feature_manifest import FeatureManifest
from dflash_hf.training.features import (
    StoredFeatures,
    check_stored,
    drop_layers,
    open_features,
    stored_tokens,
)
from dflash_hf.training.held_out import PREFIX, held_out_of_checkpoint, split_rows
from dflash_hf.training.interruption import checkpoint_on_interrupt
from dflash_hf.training.nodes import check_same_checkpoint, one_process_first, wait_for_all, writes_to
from dflash_hf.training.row_features import FOLDER, replace_rows_by_features
from dflash_hf.training.rows import validate_and_count
from dflash_hf.training.saving import save, save_with_shared_head
from dflash_hf.training.start import make_draft, mask_token_of, vocabulary_size
from dflash_hf.training.time_budget import TimeBudget
from dflash_hf.training.trainer import DFlashTrainer
from dflash_hf.training.training_args import DFlashTrainingArguments


_METRICS = re.compile(r"(eval_)?(loss|tau|simulated_tau(_argmax)?|(accuracy|acceptance)(_\d+)?)")
# Of the time limit, the share reserved for the evaluation at the end.
_EVALUATION_TIME_SHARE = 0.03
# Seconds reserved for saving: a constant, and a part that grows with the parameters.
_SAVING_SECONDS = 2.0
_SAVING_SECONDS_PER_PARAMETER = 4e-8


@dataclass(frozen=True)
class Run:
    """
    What is decided of a run before anything is loaded; all of it is checked.

    Args:
        script (`ScriptArguments`): Target, drafter and data.
        args (`DFlashTrainingArguments`): The trainer's arguments. Their `resume_from_checkpoint` is always `None`:
            `checkpoint` is the one to resume from.
        folder (`Path`): The `output_dir`.
        is_new (`bool`): Whether it starts over, so that what an earlier run left in `folder` is removed.
        checkpoint (`str`, *optional*): The checkpoint to resume from.
        target_config (`dict`): The target's configuration.
        say (`Callable`): Prints a line about what the run does; only in the first process.
        warn (`Callable`): Prints a warning; only in the first process.
        start_time (`float`): When it began, by the clock of [`TimeBudget`], whose limit covers all of it.
    """

    script: ScriptArguments
    args: DFlashTrainingArguments
    folder: Path
    is_new: bool
    checkpoint: str | None
    target_config: dict
    say: Callable[[str], None]
    warn: Callable[[str], None]
    start_time: float

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all processes."""
        return self.args.process_index == 0

    @property
    def loading(self) -> Loading:
        """How its target is loaded."""
        script = self.script
        return Loading(
            script.target_dtype, revision=script.target_revision, trust_remote_code=script.trust_remote_code
        )


@dataclass(frozen=True)
class Sources:
    """The rows of a run as they are in their files, and what encodes them."""

    rows: object  # `None` for a run on stored features
    eval_rows: object  # also `None` without evaluation data
    tokenizer: object
    image_reader: ImageReader | None


@dataclass(frozen=True)
class TrainingData:
    """The encoded rows, or stored features, of a run."""

    rows: object  # to train on
    eval_rows: object  # the user's evaluation data, or `None`
    held_out: object  # rows that are not trained on, or `None`
    card_facts: dict  # what a checkpoint and the card say of the held-out rows

    @property
    def rows_to_evaluate(self):
        """Held-out rows, else evaluation data; a run never has both."""
        return self.eval_rows if self.held_out is None else self.held_out


def train(script: ScriptArguments, training: dict, echo=lambda line: None, callbacks=(), machine_lines=()):
    """
    Train a drafter, and save it to its `output_dir`.

    Args:
        script, training: From [`~dflash_hf.training.recipe.read_recipe`].
        echo: Called with the counts of the data, in the main process.
        callbacks (`Sequence[TrainerCallback]`): Additional callbacks.
        machine_lines (`Sequence[str]`): From [`~dflash_hf.training.recipe.machine_lines`]; printed after all settings
            are checked.

    Returns:
        `DFlashTrainer`: After training.
    """
    # 1. Whatever can be checked before a model is loaded is checked first.
    run = _check_settings(script, training, echo)
    for line in machine_lines:
        run.say(line)
    sources = _load_sources(run)

    # 2. Target, data and drafter.
    set_seed(run.args.seed)
    target = _load_target(run)
    encoder = _make_encoder(run, target, sources)
    data = _prepare_data(run, sources, encoder)
    draft = _make_draft_with_vocabulary(run, target, encoder, data)

    # 3. The trainer, which checks the rest, and then the run.
    trainer = _make_trainer(run, draft, target, encoder, data, callbacks)
    _train_and_save(run, trainer, draft, encoder, data)
    return trainer


def _check_settings(script: ScriptArguments, training: dict, echo) -> Run:
    """The run of some settings, see [`check_run`] and [`checkpoint_to_resume`]."""
    start_time = TimeBudget.clock()
    folder = Path(training["output_dir"]).expanduser()  # as transformers does
    resume = training.get("resume_from_checkpoint")
    if not wants_to_resume(resume):
        resume = None
    args = DFlashTrainingArguments(**{**training, "output_dir": str(folder), "resume_from_checkpoint": None})
    checkpoint = checkpoint_to_resume(folder, resume, script.overwrite_output_dir)
    check_same_checkpoint(checkpoint, args)
    target_config = check_run(script, args)
    is_first = args.process_index == 0
    return Run(
        script=script,
        args=args,
        folder=folder,
        is_new=not resume,
        checkpoint=checkpoint,
        target_config=target_config,
        say=echo if is_first else _ignore,
        warn=note if is_first else _ignore,
        start_time=start_time,
    )


def _ignore(line: str) -> None:
    """Print nothing, in all processes but the first."""


def _load_sources(run: Run) -> Sources:
    """
    The rows, the tokenizer and the image reader of a run.

    Raises:
        `ValueError`: stored features were made with another tokenizer or chat template.
    """
    script = run.script
    with one_process_first(run.args):
        rows, eval_rows = _load_rows(script)
    tokenizer = load_tokenizer(
        script.target,
        script.chat_template,
        script.target_revision,
        script.trust_remote_code,
        allow_no_vocabulary=rows is None or "input_ids" in rows[0],  # only texts need a vocabulary
    )
    reader = load_image_reader(script.target, run.target_config, tokenizer, run.loading)
    # From here on the tokenizer may have the chat template of the image reader.
    for features in script.feature_folders:
        check_stored(StoredFeatures(features), run.args.has_teacher, **digests_of_tokenizer(tokenizer))
    return Sources(rows, eval_rows, tokenizer, reader)


def _load_target(run: Run):
    """The target, on the device of this process; with stored features, which need little of it, in main memory."""
    script = run.script
    options = {}
    if script.attn_implementation:
        options["attn_implementation"] = script.attn_implementation
    device = "cpu" if script.features else run.args.device
    return load_target(script.target, run.loading, device, **options)


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


def _make_encoder(run: Run, target, sources: Sources) -> RowEncoder:
    """What makes examples of a run's rows."""
    script = run.script
    template = ChatTemplate(sources.tokenizer, _template_kwargs(run), sources.image_reader)
    return RowEncoder(
        template,
        max_length=script.max_length,
        mask_token_id=mask_token_of(script, target, sources.tokenizer),
        vocab_size=target.get_input_embeddings().weight.shape[0],
    )


def _template_kwargs(run: Run) -> dict:
    """The arguments of the chat template: the run's own, or those of its data, its stored features or its drafter."""
    script = run.script
    kwargs_of_features = {}
    for folder in script.feature_folders:
        kwargs_of_features[folder] = FeatureManifest.load(Path(folder)).chat_template_kwargs
    draft_config = None
    if script.draft:
        draft_config = load_draft_config(script.draft, Loading(draft_revision=script.draft_revision))
    return template_kwargs(script.chat_template_kwargs, script.data, kwargs_of_features, draft_config, run.warn)


def _prepare_data(run: Run, sources: Sources, encoder: RowEncoder) -> TrainingData:
    """The encoded rows of a run, encoded by one process for all, or its stored features; some of them held out."""
    script = run.script
    with one_process_first(run.args):
        eval_rows = _encode_rows(run, sources.eval_rows, script.eval_data or script.data, encoder)
        rows = _encode_rows(run, sources.rows, script.data, encoder, conversations=True)
    if script.features:
        rows = open_features(script.features)
        eval_rows = open_features(script.eval_features) if script.eval_features else None
    # Rows are held out unless the user names evaluation data.
    if script.has_eval_data:
        count = 0
        seed = run.args.seed
    else:
        count, seed = held_out_of_checkpoint(run.checkpoint, script.held_out_rows, run.args.seed)
    rows, held_out, conversations = split_rows(rows, count, seed)
    facts = {"held_out_rows": conversations}
    if held_out is not None:
        run.say(f"held out          {len(held_out):,} rows, which are not trained on: the run ends with their tau")
        if seed != run.args.seed:
            facts["held_out_seed"] = seed
    return TrainingData(rows, eval_rows, held_out, facts)


def _encode_rows(run: Run, rows, data, encoder: RowEncoder, conversations: bool = False):
    """Rows, if there are any, as examples."""
    if rows is None:
        return None
    dataset, report = prepare_dataset(rows, encoder, run.script.num_proc, data, conversations)
    run.say(f"{data}:")
    for line in report.lines():
        run.say(f"  {line}")
    return dataset


def _make_draft_with_vocabulary(run: Run, target, encoder: RowEncoder, data: TrainingData):
    """The drafter of a run; a reduced vocabulary is that of the rows to train on."""
    script = run.script
    if not script.draft_vocab_size:
        draft = make_draft(script, target, encoder, run.warn)
    else:
        counts = _count_supervised_tokens(script, data)
        size = vocabulary_size(script, counts, target.get_input_embeddings().weight.shape[0])
        draft = make_draft(replace(script, draft_vocab_size=size), target, encoder, run.warn)
        if draft.config.has_own_lm_head:  # not for a size of all tokens
            share = set_draft_vocabulary(draft, target, counts)
            run.say(f"draft vocabulary  {size:,} tokens, {share:.2%} of the supervised tokens")
    if _shares_head(run, draft):
        with_shared_head(draft)  # raises now if it could not be done after training
    return draft


def _shares_head(run: Run, draft) -> bool:
    """Whether the trained drafter, whose vocabulary is reduced, is saved with the target's head."""
    return run.script.share_head and draft.config.has_own_lm_head


def _count_supervised_tokens(script: ScriptArguments, data: TrainingData) -> torch.LongTensor:
    """How often each token is supervised in the rows to train on, `[V]`."""
    if not script.features:
        return validate_and_count(data.rows)
    counts = validate_and_count(stored_tokens(script.features))  # shard by shard, which is much faster than row by row
    if data.held_out is not None:
        held_out_counts = validate_and_count(data.held_out)
        counts[: len(held_out_counts)] -= held_out_counts
    return counts


def _make_trainer(run: Run, draft, target, encoder: RowEncoder, data: TrainingData, callbacks) -> DFlashTrainer:
    """
    The trainer of a run.

    Raises:
        `ValueError`: its arguments or data do not fit, or the checkpoint is another drafter's.
    """
    script = run.script
    if script.features:
        drop_layers(target, run.args.device)
    model = add_adapter(draft, script.peft_config) if script.peft_config else draft
    collator = DFlashCollator(0, encoder.template.reader)
    trainer = DFlashTrainer(
        model, target, run.args, data.rows, data.rows_to_evaluate, collator, card_facts=data.card_facts
    )
    _add_callbacks(trainer, callbacks, run)
    if run.checkpoint:  # as `trainer.train` does, but before features are stored, which may take hours
        check_same_drafter(Path(run.checkpoint), draft)
    return trainer


def _add_callbacks(trainer: DFlashTrainer, callbacks, run: Run) -> None:
    """
    Add the callbacks of a run. They are called in this order: transformers' own, which decides when to log, evaluate
    and save; the caller's; the run's, which print what the others have added to the log.
    """
    trainer.remove_callback(StepCountCallback)
    trainer.remove_callback(PrinterCallback)
    progress_bar = trainer.pop_callback(ProgressCallback)
    own_callbacks = [LogLinesCallback(run.say), StepCountCallback(run.say, run.warn)]
    if progress_bar is not None:
        own_callbacks.append(BarOnlyCallback())
    for callback in (*callbacks, *own_callbacks):
        trainer.add_callback(callback)


def _train_and_save(run: Run, trainer: DFlashTrainer, draft, encoder: RowEncoder, data: TrainingData) -> None:
    """Train in the run's folder, which is locked meanwhile, evaluate the finished drafter, and save it."""
    with ExitStack() as stack:
        # 1. The first process locks and clears the folder before any other looks there; on a node with a disk of its
        # own, the node's first process does the same with the folder there.
        if run.is_first:
            _prepare_folder(run, stack)
        wait_for_all(run.args)
        writes = writes_to(run.folder, run.args)
        if writes and not run.is_first:
            _prepare_folder(run, stack)
        # 2. Features of rows that are read more than once.
        if run.script.store_rows:
            replace_rows_by_features(trainer, run.script, encoder, writes, run.say)
        # 3. Training. The time limit covers what came before it, and what follows: an evaluation, and saving.
        if run.checkpoint:
            run.say(f"resuming from {run.checkpoint}")
        elif not run.is_new:
            run.say(f"no complete checkpoint in {run.folder}: starting a new run")
        seconds_before = TimeBudget.clock() - run.start_time
        reserved_seconds = seconds_before + _seconds_after(run, draft, data)
        with checkpoint_on_interrupt(trainer, run.say):
            trainer.train(resume_from_checkpoint=run.checkpoint, reserved_seconds=reserved_seconds)
        # 4. The tau of held-out rows, and the drafter. Evaluation data were evaluated with the last step.
        if data.held_out is not None:
            trainer.evaluate(metric_key_prefix=PREFIX)
        save(trainer, adapted=bool(run.script.peft_config))
        if _shares_head(run, draft) and run.is_first:
            save_with_shared_head(run.folder, run.say)
    if writes:  # the trainer can still read the shards, which are open: the disk is freed at the end of the process
        shutil.rmtree(run.folder / FOLDER, ignore_errors=True)
    passes = f"{trainer.state.epoch:.1f} passes over {len(trainer.train_dataset):,} rows"
    total_time = duration(TimeBudget.clock() - run.start_time)
    run.say(f"trained           {trainer.state.global_step:,} steps, {total_time} in all: {passes}")
    if run.args.push_to_hub and run.is_first:
        publication = trainer.publish_output_dir("End of training")
        run.say(f"published         {publication.url or f'{publication.repo} has all of it already'}")


def _seconds_after(run: Run, draft, data: TrainingData) -> float:
    """The time that is reserved, of a time limit, for what follows the last step."""
    seconds = _SAVING_SECONDS + _SAVING_SECONDS_PER_PARAMETER * draft.num_parameters()
    if data.rows_to_evaluate is not None:
        seconds += _EVALUATION_TIME_SHARE * 60 * (run.args.max_minutes or 0)
    return seconds


def _prepare_folder(run: Run, stack: ExitStack) -> None:
    """
    Lock a run's folder until `stack` closes; a new run removes what another left, so that none of it is ever taken for
    its own.
    """
    folder = run.folder
    folder.mkdir(parents=True, exist_ok=True)
    stack.enter_context(locked(folder))  # before anything is removed: another run may be writing
    if not run.is_new:
        return
    for leftover in (*checkpoints_in(folder), folder / FOLDER):
        shutil.rmtree(leftover, ignore_errors=True)
    for name in (FACTS_FILE, REPORT_FILE, PLOT_FILE):
        (folder / name).unlink(missing_ok=True)


def check_run(script: ScriptArguments, args: DFlashTrainingArguments) -> dict:
    """
    Check what would otherwise fail after the target was loaded, or after hours.

    Returns:
        `dict`: The target's configuration.

    Raises:
        `ValueError`: the output cannot be written, or a name, the evaluation or an adapter is wrong.
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
    if args.eval_strategy != "no" and not script.has_eval_data:
        raise ValueError(
            f"eval_strategy={args.eval_strategy.value} has nothing to evaluate on: name eval_data, eval_split or "
            "eval_features, or leave it out."
        )
    if metric is not None and not _METRICS.fullmatch(metric):
        raise ValueError(
            f"metric_for_best_model={metric} is not measured; loss, accuracy and simulated_tau are, and accuracy_k "
            "and acceptance_k of slot k."
        )
    if metric is not None and metric.removeprefix("eval_") == "tau" and not args.eval_decode:
        raise ValueError(
            f"metric_for_best_model={metric} is measured with eval_decode, the number of prompts to decode: set it, "
            "or take simulated_tau."
        )
    target_is_known = "base_model" in args.hub_card or not Path(str(script.target)).expanduser().exists()
    if args.push_to_hub and not target_is_known and not has_own_card(folder):
        raise ValueError(
            f"push_to_hub=True publishes a card, which names the target, and target={script.target} is a folder: set "
            "hub_card.base_model to its repository."
        )
    if script.peft_config:
        adapter_config(script.peft_config)
    loading = Loading(revision=script.target_revision, draft_revision=script.draft_revision)
    config = check_pair_configs(script.target, script.draft, loading)
    check_mask_token_id(script.mask_token_id, config)
    return config


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
        remedy = "Replace it" if last is None else "Resume with --resume-from-checkpoint auto, replace it"
        raise ValueError(
            f"output_dir={str(folder)} holds {contents}. {remedy} with --overwrite-output-dir, or choose another "
            "--output-dir."
        )
    return None if checkpoint is None else str(checkpoint)


def leave_group() -> None:
    """
    Leave the process group, if there is one, when the trainer is no longer needed. The group lives in reference
    cycles; if one of its threads wakes while the interpreter exits, it kills the process.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        gc.collect()
