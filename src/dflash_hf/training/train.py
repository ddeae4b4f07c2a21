"""A recipe, from its data to a saved drafter."""

import gc
import shutil
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import set_seed

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prepare import load_tokenizer, prepare_dataset
from dflash_hf.data.sources import load_rows
from dflash_hf.data.time_left import duration
from dflash_hf.hub.card import FACTS_FILE
from dflash_hf.pairs import Loading, load_target
from dflash_hf.terminal import note
from dflash_hf.training.adapters import merged
from dflash_hf.training.callbacks import DecodingCallback
from dflash_hf.training.choice import choose
from dflash_hf.training.features import drawn, drop_layers, store_rows, stored
from dflash_hf.training.offline import DFlashOfflineTrainer
from dflash_hf.training.pace import Pace
from dflash_hf.training.recipe import RecipeArguments, completed
from dflash_hf.training.run import Run
from dflash_hf.training.run_file import STORED, checkpoint_to_resume, describe_run, run_in
from dflash_hf.training.start import count_tokens, make_draft, take_vocabulary
from dflash_hf.training.trainer import DFlashTrainer
from dflash_hf.training.trainer_card import kept_report, save_facts
from dflash_hf.training.training_args import DFlashTrainingArguments


def train(recipe: RecipeArguments, training: dict, echo=lambda line: None, callbacks=(), given=None):
    """
    Train according to a recipe, and save the drafter to its `output_dir`.

    Args:
        recipe, training: From [`~dflash_hf.training.recipe.read_recipe`].
        echo: Called with the counts of the data, in the main process.
        callbacks (`Sequence[TrainerCallback]`): Additional callbacks.
        given (`Set[str]`, *optional*): The keys that are given; the others are chosen for the machine. Default: none
            is chosen.

    Returns:
        `DFlashTrainer`: After training.
    """
    # 1. The arguments, completed for this machine. Only the finished drafter is published, once, with its card.
    start, folder = Pace.clock(), Path(training["output_dir"]).expanduser()  # as transformers does
    training = {**training, "output_dir": str(folder)}
    resume = checkpoint_to_resume(folder, training.get("resume_from_checkpoint"), recipe.overwrite_output_dir)
    revision, trusted = recipe.target_revision, recipe.trust_remote_code
    tokenizer = load_tokenizer(recipe.target, recipe.chat_template, revision, trusted, empty=True)
    chosen = choose(recipe, training, given, tokenizer, echo, resume)
    recipe, training = completed(recipe, training, chosen)
    options = {**training, "push_to_hub": False, "resume_from_checkpoint": None}
    if recipe.streaming and not options.get("max_steps", -1) > 0:
        raise ValueError("streaming=True has no length; set max_steps.")
    args = DFlashTrainingArguments(**options)
    if recipe.streaming:
        args.accelerator_config.dispatch_batches = False  # batches differ in width; each rank reads its own share
    say = echo if args.process_index == 0 else lambda line: None

    # 2. Target and drafter.
    set_seed(args.seed)
    loading = Loading(recipe.target_dtype, revision=revision, trust_remote_code=trusted)
    attention = {"attn_implementation": recipe.attn_implementation} if recipe.attn_implementation else {}
    # On the device of this process; with stored features, which need little of the target, in main memory.
    device = "cpu" if recipe.features else args.device
    target = load_target(recipe.target, loading, device, form="{}={}", **attention)
    tell = note if args.process_index == 0 else lambda line: None
    draft = make_draft(recipe, target, tokenizer, tell, lenient="init_layers" in chosen)
    of_template = draft.config.dflash_config.get("chat_template_kwargs") or {}
    vocab_size = target.get_input_embeddings().weight.shape[0]
    encoder = RowEncoder(tokenizer, recipe.max_length, of_template, draft.config.mask_token_id, vocab_size)
    run = Run(recipe, args, target, draft, encoder)

    # 3. Data, encoded by one process for all; it determines the tokens of a reduced vocabulary.
    with args.main_process_first(desc="data"):
        rows, eval_rows = _datasets(run, say)
    if run.recipe.draft_vocab_size:
        _take_vocabulary(run, rows, say)

    # 4. The description of the run, before training changes anything.
    def described() -> dict:
        return describe_run(run, rows) | {"chosen": chosen}

    with run_in(args, described, resume):
        # 5. Features of rows read more than once.
        if run.recipe.store_rows:
            with args.main_process_first(desc="features"):
                parts = {"train": drawn(rows, run), "eval": eval_rows}
                rows, eval_rows = (store_rows(part, folder / STORED / name, run) for name, part in parts.items())
        # 6. Training.
        trainer = _trainer(run, rows, eval_rows, list(callbacks))
        if resume:
            say(f"resuming from {resume}")
        saving = 2.0 + 4 * trainer.draft.num_parameters() / 1e8
        trainer.reserved_seconds = Pace.clock() - start + saving
        trainer.train(resume_from_checkpoint=resume)
        with kept_report(folder) if args.process_index == 0 else nullcontext():
            _save(run, trainer)
    if args.process_index == 0:
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


def _halved(draft, args):
    """A drafter, converted to half precision if a run trains in half precision."""
    return draft.to(torch.bfloat16 if args.bf16 else torch.float16) if args.bf16 or args.fp16 else draft


def _trainer(run: Run, rows, eval_rows, callbacks: list) -> DFlashTrainer:
    """The trainer of a run, which reads the target's features from disk or computes them."""
    recipe = run.recipe
    kind = DFlashOfflineTrainer if recipe.features or recipe.store_rows else DFlashTrainer
    options = {"peft_config": recipe.peft_config, "callbacks": callbacks}
    trainer = kind(run.draft, run.target, run.args, rows, eval_rows, **options)
    if recipe.decode_prompts:
        tokens, steps = recipe.decode_max_new_tokens, recipe.decode_steps
        trainer.add_callback(DecodingCallback(trainer, None, recipe.decode_prompts, tokens, steps))
    return trainer


def _save(run: Run, trainer: DFlashTrainer) -> None:
    """Save the drafter; with its adapter merged, which engines serve, and the adapter alone next to it."""
    folder = Path(run.args.output_dir)
    if run.recipe.peft_config is None:
        if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            _halved(trainer.draft, trainer.args)
        trainer.save_model(str(folder))
        return
    trainer.save_model(str(folder / "adapter"))
    if trainer.is_world_process_zero():
        whole = merged(trainer.accelerator.unwrap_model(trainer.model))
        _halved(whole, trainer.args).save_pretrained(folder)
        (folder / FACTS_FILE).unlink(missing_ok=True)  # of the weights that were here before
        save_facts(trainer, folder)


def _take_vocabulary(run: Run, rows, say) -> None:
    """The most frequent tokens of the data, as the drafter's vocabulary."""
    features = run.recipe.features
    learned = stored(features, layer_ids=[]) if features else rows  # their ids are enough
    share = take_vocabulary(run.draft, run.target, count_tokens(learned, run.draft.config.vocab_size))
    say(f"draft vocabulary  {run.recipe.draft_vocab_size:,} tokens, {share:.2%} of the supervised tokens")


def _datasets(run: Run, say) -> tuple:
    """The training and evaluation data."""
    recipe = run.recipe
    if recipe.features:
        drop_layers(run.target, run.args.device)
        folders = (recipe.features, recipe.eval_features)
        return tuple(stored(one, run.layer_ids, run.args.reads_states) if one else None for one in folders)

    def prepared(data, split, streaming, packing):
        rows = load_rows(data, split, streaming, recipe.data_name, recipe.data_revision)
        dataset, report = prepare_dataset(rows, run.encoder, packing, recipe.num_proc, data)
        say(f"{data}:" if not streaming else f"{data}, its first rows:")
        for line in report.lines():
            say(f"  {line}")
        return dataset

    rows, eval_rows = prepared(recipe.data, recipe.split, recipe.streaming, recipe.packing), None
    if recipe.eval_data or recipe.eval_split:
        eval_rows = prepared(recipe.eval_data or recipe.data, recipe.eval_split, False, False)
    return rows, eval_rows
