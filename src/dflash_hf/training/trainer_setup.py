"""What [`~dflash_hf.training.trainer.DFlashTrainer`] checks and prepares before upstream's trainer exists."""

import torch
from transformers.utils import logging

from dflash_hf.data.examples import DFlashCollator, has_rows
from dflash_hf.targets.digests import digest_of_target
from dflash_hf.targets.weights import quantised_layer
from dflash_hf.training.features import StoredFeatures, check_stored, parts_of
from dflash_hf.training.rows import lengths_of, validate_and_count
from dflash_hf.training.training_args import DFlashTrainingArguments


logger = logging.get_logger(__name__)

# Arguments of upstream's Trainer that this one would ignore.
_UNSUPPORTED_KWARGS = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics", "model_init")


def default_collator(target) -> DFlashCollator:
    """A collator that pads with the target's padding token, or 0."""
    pad_token_id = target.config.get_text_config().pad_token_id
    return DFlashCollator(0 if pad_token_id is None else pad_token_id)


def check_datasets(train_dataset, eval_dataset, args, draft_config, target) -> None:
    """
    Check the rows of a trainer, except those of a stream.

    Args:
        train_dataset, eval_dataset: As for `DFlashTrainer`, or `None`.
        args (`DFlashTrainingArguments`): Its loss decides what stored features must hold.
        draft_config (`DFlashDraftConfig`): Stored features must have its `target_layer_ids`.
        target (`PreTrainedModel`): Stored features must have been made with its weights.

    Raises:
        `ValueError`: rows cannot be trained on, or stored features do not fit the drafter, the target or the loss.
            The rows of stored features were checked when they were stored.
    """
    eval_datasets = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    for dataset in (train_dataset, *eval_datasets):
        if dataset is None:
            continue
        parts = parts_of(dataset)
        if all(isinstance(part, StoredFeatures) for part in parts):
            weights = getattr(target, "weights_digest", None) or digest_of_target(target)
            for part in parts:
                check_stored(part, args.has_teacher, weights, layer_ids=draft_config.target_layer_ids)
        elif has_rows(dataset):
            validate_and_count(dataset)


def record_trained_length(draft_config, train_dataset) -> None:
    """Write the length of the longest row that a drafter has seen into its configuration, if it has the field."""
    trained_length = draft_config.trained_length
    if trained_length is not None and train_dataset is not None and has_rows(train_dataset):
        draft_config.trained_length = max(trained_length, longest_row(train_dataset))


def longest_row(dataset) -> int:
    """Tokens of the longest row."""
    longest = 0
    for part in parts_of(dataset):
        lengths = part.lengths if isinstance(part, StoredFeatures) else lengths_of(part)
        longest = max(longest, int(lengths.max()))
    return longest


def check_arguments(args, train_dataset, kwargs: dict) -> None:
    """
    Check a trainer's arguments against each other.

    Raises:
        `ValueError`: `args` has another class, an argument of upstream's trainer in `kwargs` would be ignored, or two
            arguments contradict each other.
    """
    if not isinstance(args, DFlashTrainingArguments):
        raise ValueError(f"args is a {type(args).__name__}; pass `DFlashTrainingArguments` with the same fields.")
    for name in _UNSUPPORTED_KWARGS:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} does not apply to DFlashTrainer, which is given the drafter as `model` and has its own loss "
                "(loss_type) and metrics; leave it out."
            )
    limit = f"max_minutes={args.max_minutes}"
    if args.max_minutes is not None and (kwargs.get("optimizers") or (None, None))[1] is not None:
        raise ValueError(
            f"{limit} sets the learning rate over time: leave the scheduler out of `optimizers`, or train by steps."
        )
    if args.max_minutes is not None and train_dataset is not None and not hasattr(train_dataset, "__len__"):
        raise ValueError(
            f"{limit} cannot be used with a stream, whose passes have no length: set max_steps instead, or pass a "
            "dataset with a length."
        )


def to_training_dtype(draft, args) -> None:
    """Convert a drafter in half precision to fp32 if it is trained in mixed precision, which needs fp32 weights."""
    if (args.bf16 or args.fp16) and draft.dtype in (torch.bfloat16, torch.float16):
        logger.info(f"The drafter's {draft.dtype} weights are trained in fp32, with autocast.")
        draft.float()


def set_trainable_parameters(draft, args, adapted: bool) -> None:
    """
    Set `requires_grad` of a drafter's parameters by `args.head_only`, and warn if a token head is not trained.

    Args:
        draft (`DFlashDraftModel`): The drafter, without an adapter.
        args (`DFlashTrainingArguments`): The arguments of the run.
        adapted (`bool`): Whether an adapter on it is trained.

    Raises:
        `ValueError`: it is quantised, or its head cannot be trained as `args.head_only` says.
    """
    layer = quantised_layer(draft)
    if layer is not None and not adapted:
        raise ValueError(
            f"model is a quantised drafter ({layer} holds codes), which cannot be trained: train the drafter as it "
            "was before, and quantise the result; or train an adapter on it (peft_config)."
        )
    config = draft.config
    head = config.token_head_class
    if head.needs_teacher(config) and not args.has_teacher:
        logger.warning(
            f"Part of the {head.name} learns from the target's distribution only and is not trained "
            f"with loss_type={args.loss_type}; use dspark or kl."
        )
    with torch.device("meta"):
        module_names = set(head.build_modules(config))
    if args.head_only:
        if not module_names or adapted:
            raise ValueError(
                "head_only=True trains the head of a drafter, and no adapter: set the fields of a head, such as "
                "selector_rank and selector_top_k (in a recipe draft_config={selector_rank: 128, selector_top_k: "
                "16}), and leave out peft_config."
            )
        draft.requires_grad_(False)
        for name in module_names:
            getattr(draft, name).requires_grad_(True)
    elif module_names and adapted:
        logger.warning(f"peft_config trains an adapter: the {head.name} itself is not trained.")
    elif module_names:
        _check_more_than_head_is_trained(draft, module_names)
    if config.has_own_lm_head:
        draft.lm_head.requires_grad_(False)  # its rows are those of the target's head


def _check_more_than_head_is_trained(draft, head_modules: set[str]) -> None:
    """
    Raises:
        `ValueError`: an earlier run with `head_only` has left everything but the head's modules frozen.
    """
    trained = {name.split(".")[0] for name, parameter in draft.named_parameters() if parameter.requires_grad}
    if trained and trained <= head_modules:
        raise ValueError(
            "head_only=False, but an earlier run with head_only=True froze the rest of this drafter: call "
            "`model.requires_grad_(True)`, or set head_only=True again."
        )
