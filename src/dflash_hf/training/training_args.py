"""Arguments of drafter training, with the paper's recipe as defaults (DFlash, arXiv 2602.06036)."""

from dataclasses import dataclass

import torch
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import HubStrategy

from dflash_hf.hub.card import CardFacts
from dflash_hf.training.arguments import DFlashOptions, check_values
from dflash_hf.training.losses import LOSSES, Loss


# Arguments of transformers that must stay off, and what they would do.
_UNSUPPORTED_ARGUMENTS = {
    "remove_unused_columns": "would drop `input_ids` and `loss_mask`, which the drafter's forward does not take",
    "logging_nan_inf_filter": "hides losses that are not finite, at which training stops",
    "label_smoothing_factor": "is not part of this loss",
    "neftune_noise_alpha": "adds noise to an input embedding, which a drafter does not have",
    "bf16_full_eval": "rounds the drafter's weights for good; bf16=True evaluates with autocast",
    "fp16_full_eval": "rounds the drafter's weights for good; fp16=True evaluates with autocast",
}


@dataclass
class DFlashTrainingArguments(DFlashOptions, TrainingArguments):
    """
    `TrainingArguments` and what DFlash adds.

    Args:
        num_anchors (`int`): Blocks sampled from each sequence at each step.
        anchor_sampling (`str`): `"random"`: blocks begin anywhere in an answer. `"regular"`: at its first token and
            every `block_size` tokens from there, as in standard block diffusion; an ablation of the paper.
        loss_type (`str`): `"ce"`: cross-entropy with decaying slot weights. `"dpace"`: with D-PACE's weights
            (arXiv 2605.18810). `"auf"`: up to the first token of a block that the drafter gets wrong (Spec-AUF, arXiv
            2607.01893). `"kl"`, `"dpace_kl"`, `"auf_kl"`: divergence from the target's own distribution, with the
            weights of each. `"dspark"`: 0.1 times cross-entropy plus 1.8 times total variation (arXiv 2607.05147).
        loss_decay_gamma (`float`): Slot `k` weighs `exp(-(k - 1) / gamma)`; `inf` weighs all equally. Default: by
            block size, see [`~dflash_hf.training.losses.default_gamma`]. Not used by D-PACE.
        muon (`bool`): Train the matrices of the layers with `torch.optim.Muon` and the rest with AdamW, see
            [`~dflash_hf.training.muon.MuonAdamW`]; instead of `optim`.
        head_only (`bool`): Train only the drafter's head, such as DFlash 2's path selector; the rest is frozen.
        hub_card (`dict`): Facts of the card, see [`~dflash_hf.hub.card.CardFacts`], which are saved with the drafter:
            `{"license": "mit"}`. `base_model` is known if the target was loaded from the Hub.
        eval_decode (`int`): At each evaluation, so many prompts of its rows are decoded greedily in whole blocks, up
            to 128 tokens each: `eval_tau` is their real tau. 0: none.
        loss_chunk_size (`int`): Tokens whose logits are in memory at a time.
        max_minutes (`float`): Length of the training, with warm-up and cosine decay over time instead of steps;
            replaces `num_train_epochs` and `lr_scheduler_type`; not with `max_steps`. Evaluations count.
            `warmup_steps` is a share of it, below 1.
        block_attention (`str`): `"dense"`: groups of neighbouring blocks attend one after another, each with a mask
            over the keys that its blocks may see (`training/block_attention.py`); on any device. `"flex"`: flex
            attention, which skips tiles that no block sees; CUDA only. `"auto"`: flex if supported, or dense.

    With `push_to_hub` the drafter is published as by `dflash publish`, with its card: each save in the background, and
    the trained one by `push_to_hub` or `save_model` of the trainer. `hub_strategy="end"` publishes the trained one
    alone; `"checkpoint"` and `"all_checkpoints"`, which upload training states, are rejected.

    Raises:
        `ValueError`: names argument, value and remedy.
        `ImportError`: a package of `report_to` is unknown or not installed.
    """

    # The arguments that a model card lists if they are set.
    fields_on_model_card = (
        "learning_rate",
        "lr_scheduler_type",
        "warmup_steps",
        "num_train_epochs",
        "max_minutes",
        "num_anchors",
        "loss_type",
        "loss_decay_gamma",
        "muon",
        "head_only",
    )

    @property
    def loss(self) -> Loss:
        """What `loss_type` stands for."""
        return LOSSES[self.loss_type]

    @property
    def has_teacher(self) -> bool:
        """Whether the drafter is compared with the target's distribution instead of labels."""
        return self.loss.kind != "ce"

    def __post_init__(self):
        super().__post_init__()
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False
        for name in set(self.report_to) - set(get_available_reporting_integrations()):
            raise ImportError(f"report_to={name} is not installed, or unknown: `pip install {name}`, or leave it out.")
        if self.muon and not hasattr(torch.optim, "Muon"):
            raise ImportError(
                f"muon=True needs torch 2.9, and this is {torch.__version__}; upgrade torch, or leave it out."
            )
        if self.max_minutes is not None:
            if not self.max_minutes > 0:
                raise ValueError(f"max_minutes={self.max_minutes} must be positive; leave it out to train by steps.")
            if self.max_steps > 0:
                raise ValueError(f"max_minutes and max_steps={self.max_steps} both end training; leave one out.")
            if self.warmup_steps >= 1:
                raise ValueError(
                    f"warmup_steps={self.warmup_steps:g} counts steps, but with max_minutes the learning rate follows "
                    "the time: give a share of it below 1, such as warmup_steps=0.04."
                )
            self.num_train_epochs = 1e6  # so that the time limit ends training; logs and the bar show time instead
        minima = {"num_anchors": 1, "loss_chunk_size": 1, "gradient_accumulation_steps": 1, "eval_decode": 0}
        check_values(self, DFlashOptions, minima)
        if self.max_steps == 0 or (self.max_steps < 0 and not self.num_train_epochs > 0):
            name = "num_train_epochs" if self.max_steps else "max_steps"
            raise ValueError(f"{name}={getattr(self, name)} trains nothing; give a positive number, or leave it out.")
        if self.loss_decay_gamma is not None and not self.loss_decay_gamma > 0:
            raise ValueError(
                f"loss_decay_gamma={self.loss_decay_gamma} must be positive; None is the default of the block size."
            )
        CardFacts.check(self.hub_card, "hub_card")
        if self.push_to_hub and self.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            raise ValueError(
                f"hub_strategy={self.hub_strategy.value} would add training states and further weights to the "
                "repository that users download: take every_save, which publishes the drafter of each checkpoint as a "
                "commit of its own, or end. Checkpoints to resume from stay in output_dir."
            )
        for name, effect in _UNSUPPORTED_ARGUMENTS.items():
            if getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)} {effect}; leave it out.")
