"""A recipe, from its data to a saved drafter."""

import gc
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dflash_hf.pairs import Loading, load_target
from dflash_hf.terminal import note
from dflash_hf.training.recipe import RecipeArguments


def train(recipe: RecipeArguments, training: dict, echo=lambda line: None, callbacks=()):
    """
    Train as a recipe says, and save the drafter into its `output_dir`.

    Args:
        recipe, training: Of [`~dflash_hf.training.recipe.read_recipe`].
        echo: Is told the counts of the data, by the main process.
        callbacks (`Sequence[TrainerCallback]`): More of them.

    Returns:
        `DFlashTrainer`: After training.
    """
    from transformers import set_seed

    from dflash_hf.training.features import drop_layers
    from dflash_hf.training.run_file import checkpoint_to_resume, describe_run
    from dflash_hf.training.training_args import DFlashTrainingArguments

    # 1. The arguments. What is published is the finished drafter, once, with its card.
    folder = Path(training["output_dir"])
    resume = checkpoint_to_resume(folder, training.get("resume_from_checkpoint"), recipe.overwrite_output_dir)
    options = {**training, "push_to_hub": False, "resume_from_checkpoint": None}
    if recipe.streaming and not options.get("max_steps", -1) > 0:
        raise ValueError("streaming=True has no length; set max_steps.")
    args = DFlashTrainingArguments(**options)
    if recipe.streaming:
        args.accelerator_config.dispatch_batches = False  # batches of unlike width; each rank reads its own share
    say = echo if args.process_index == 0 else lambda line: None

    # 2. Target and drafter.
    set_seed(args.seed)
    encoder = _encoder(recipe)
    target = _load_target(recipe, args)
    draft = _make_draft(recipe, target, encoder, note if args.process_index == 0 else lambda line: None)
    if recipe.features:
        drop_layers(target, args.device)

    # 3. Data, encoded by one process for all; it says which tokens a reduced vocabulary holds.
    with args.main_process_first(desc="data"):
        train_dataset, eval_dataset = _datasets(recipe, args, draft.config, encoder, say)
    if recipe.draft_vocab_size:
        _choose_vocabulary(recipe, draft, target, train_dataset, say)

    # 4. What the run depends on, before training changes any of it.
    run = None
    if args.process_index == 0:
        run = describe_run(recipe, args, target, draft, encoder, train_dataset, resume)

    # 5. Training.
    extra = {} if recipe.peft_config is None else {"peft_config": recipe.peft_config}
    extra["callbacks"] = list(callbacks)
    if recipe.features:
        from dflash_hf.training.offline import DFlashOfflineTrainer as Trainer
    else:
        from dflash_hf.training.trainer import DFlashTrainer as Trainer
    trainer = Trainer(draft, target, args, train_dataset, eval_dataset, **extra)
    if recipe.decode_prompts:
        from dflash_hf.training.callbacks import DecodingCallback

        prompts = {"num_prompts": recipe.decode_prompts, "max_new_tokens": recipe.decode_max_new_tokens}
        trainer.add_callback(DecodingCallback(trainer, decode_steps=recipe.decode_steps, **prompts))
    with _begun(args, run, resume):
        if resume:
            say(f"going on from {resume}")
        trainer.train(resume_from_checkpoint=resume)
        if recipe.peft_config is None:
            trainer.save_model(args.output_dir)
        else:
            _save_adapted(trainer)
    return trainer


def leave_group() -> None:
    """
    Part from the other processes, if there are any, when the trainer is no longer needed. Its group lives in reference
    cycles; a thread of it that wakes while the interpreter ends kills the process.
    """
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        gc.collect()


@contextmanager
def _begun(args, run: dict | None, resume: str | None) -> Iterator[None]:
    """The first process holds the folder of the run, and tells the others if it may not."""
    from accelerate.utils import broadcast_object_list

    from dflash_hf.training.run_file import begun

    outcome: list = [None]
    with ExitStack() as stack:
        if run is not None:
            try:
                stack.enter_context(begun(Path(args.output_dir), run, resume))
            except (ValueError, OSError) as error:
                outcome[0] = error
        (error,) = broadcast_object_list(outcome)
        if error is not None:
            raise error
        yield


def _save_adapted(trainer) -> None:
    """The drafter with its adapter merged, which engines serve, and the adapter alone beside it."""
    from dflash_hf.evaluation.report import PLOT_FILE, REPORT_FILE
    from dflash_hf.hub.card import FACTS_FILE
    from dflash_hf.training.adapters import merged

    folder = Path(trainer.args.output_dir)
    trainer.save_model(str(folder / "adapter"))
    if trainer.is_world_process_zero():
        merged(trainer.accelerator.unwrap_model(trainer.model)).save_pretrained(folder)
        for name in (FACTS_FILE, REPORT_FILE, PLOT_FILE):
            if (folder / "adapter" / name).is_file():
                shutil.copyfile(folder / "adapter" / name, folder / name)


def _encoder(recipe: RecipeArguments):
    from dflash_hf.data.encode import RowEncoder
    from dflash_hf.data.prepare import load_tokenizer

    tokenizer = load_tokenizer(recipe.target, recipe.chat_template, recipe.target_revision, recipe.trust_remote_code)
    return RowEncoder(tokenizer, recipe.max_length)


def _load_target(recipe: RecipeArguments, args):
    """The target on the device of this process; for stored features, which need little of it, in main memory."""
    loading = Loading(recipe.target_dtype, revision=recipe.target_revision, trust_remote_code=recipe.trust_remote_code)
    options = {"attn_implementation": recipe.attn_implementation} if recipe.attn_implementation else {}
    device = {"": "cpu" if recipe.features else args.device}
    return load_target(recipe.target, loading, device, form="{}={}", **options)


def _make_draft(recipe: RecipeArguments, target, encoder, say):
    """A fresh drafter, or the one to go on from; its configuration keeps the arguments of the chat template."""
    import torch

    from dflash_hf.data.encode import digests_of_tokenizer
    from dflash_hf.data.prompts import template_kwargs
    from dflash_hf.modeling.checks_dflash import part_keys
    from dflash_hf.modeling.configuration_dflash import DFlashDraftConfig
    from dflash_hf.modeling.modeling_dflash import DFlashDraftModel
    from dflash_hf.target import spare_token_id
    from dflash_hf.training.features import FeatureManifest
    from dflash_hf.training.start import begin_as_target, with_parts

    folders = [recipe.features] if isinstance(recipe.features, str) else recipe.features or []
    stored = {folder: FeatureManifest.load(Path(folder)) for folder in folders}
    if recipe.draft:
        draft = DFlashDraftModel.from_pretrained(recipe.draft, dtype=torch.float32)
        config = draft.config
        if recipe.mask_token_id not in (None, config.mask_token_id):
            raise ValueError(
                f"mask_token_id={recipe.mask_token_id} is not the {config.mask_token_id} that {recipe.draft} was "
                "trained with; leave it out."
            )
        parts = {key: value for key, value in recipe.draft_config.items() if key in part_keys()}
        for key, value in recipe.draft_config.items():
            if key not in parts and getattr(config, key, None) != value:
                say(f"draft_config.{key}={value} is for a fresh drafter: {recipe.draft} stays as it is")
        if parts:
            draft = with_parts(draft, parts)
            config = draft.config
    else:
        mask_token_id = recipe.mask_token_id
        if mask_token_id is None:
            mask_token_id = spare_token_id(target, encoder.tokenizer)
        if mask_token_id is None:
            raise ValueError(
                f"{recipe.target} has no spare row in its embedding for the mask token; set mask_token_id to an id "
                "that its text never uses, such as a reserved token."
            )
        fields = {**recipe.draft_config}
        if recipe.target_layer_ids or stored:
            fields["target_layer_ids"] = recipe.target_layer_ids or stored[folders[0]].layer_ids
        if recipe.draft_vocab_size:
            fields["draft_vocab_size"] = recipe.draft_vocab_size
        layers, block = recipe.num_draft_layers, recipe.block_size
        config = DFlashDraftConfig.for_target(target.config, mask_token_id, layers, block, **fields)
        draft = DFlashDraftModel(config)
        if recipe.init_layers:
            taken = begin_as_target(draft, target, recipe.init_layers)
            say(f"{len(taken)} of the drafter's {len(list(draft.parameters()))} tensors begin as the target's")
    known = config.dflash_config.get("chat_template_kwargs")
    made_with = {folder: manifest.chat_template_kwargs for folder, manifest in stored.items()}
    kwargs = template_kwargs(recipe.chat_template_kwargs, recipe.data, made_with, config, say)
    encoder.chat_template_kwargs = kwargs
    encoder.mask_token_id = config.mask_token_id
    encoder.vocab_size = target.get_input_embeddings().weight.shape[0]
    if kwargs or known is not None:
        config.dflash_config["chat_template_kwargs"] = kwargs
    if encoder.tokenizer is not None:
        config.dflash_config["trained_with"] = digests_of_tokenizer(encoder.tokenizer)
    return draft


def _choose_vocabulary(recipe: RecipeArguments, draft, target, dataset, say) -> None:
    from dflash_hf.training.features import stored
    from dflash_hf.training.start import count_tokens, take_vocabulary

    rows = stored(recipe.features, layer_ids=[]) if recipe.features else dataset
    share = take_vocabulary(draft, target, count_tokens(rows, draft.config.vocab_size))
    say(f"draft vocabulary  {recipe.draft_vocab_size:,} tokens, {share:.2%} of those that are learned")


def _datasets(recipe: RecipeArguments, args, config, encoder, say):
    from dflash_hf.data.prepare import prepare_dataset
    from dflash_hf.data.sources import load_rows
    from dflash_hf.training.features import stored

    if recipe.features:
        folders = (recipe.features, recipe.eval_features)
        return tuple(stored(one, config.target_layer_ids, args.reads_states) if one else None for one in folders)

    def prepared(data, split, streaming, packing):
        rows = load_rows(data, split, streaming, recipe.data_name, recipe.data_revision)
        dataset, report = prepare_dataset(rows, encoder, packing, recipe.num_proc)
        say(f"{data}:" if not streaming else f"{data}, its first rows:")
        for line in report.lines():
            say(f"  {line}")
        return dataset

    dataset = prepared(recipe.data, recipe.split, recipe.streaming, recipe.packing)
    if not recipe.eval_data and not recipe.eval_split:
        return dataset, None
    return dataset, prepared(recipe.eval_data or recipe.data, recipe.eval_split, False, False)
