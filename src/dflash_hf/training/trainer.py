"""`DFlashTrainer`: a Hugging Face `Trainer` for drafters, with the frozen target next to the model."""

import copy
import math
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, ProgressCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress, logging

from dflash_hf._io.errors import DetailedError
from dflash_hf._io.names import FACTS_FILE
from dflash_hf._io.weights import is_finite
from dflash_hf.data.examples import has_rows
from dflash_hf.hub.card import CardFacts, has_own_card, render_card
from dflash_hf.hub.publish import Publication
from dflash_hf.pairs.loading import load_for_training
from dflash_hf.targets.frozen import TargetOutput, check_fit, freeze, target_forward
from dflash_hf.targets.logits import check_logits
from dflash_hf.training.adapters import gather_merged, is_adapted
from dflash_hf.training.block_attention import groups_as_masks
from dflash_hf.training.callbacks import OpenEndedProgressCallback, StepCountCallback
from dflash_hf.training.checkpoints import AtomicTrainer, check_same_drafter, checkpoint_of, last_checkpoint
from dflash_hf.training.decoded_tau import check_decoding, decoded_tau
from dflash_hf.training.features import FeaturesAhead, StoredFeatures, parts_of, stored_output
from dflash_hf.training.metrics import Statistics, statistics_to_metrics
from dflash_hf.training.muon import muon_of
from dflash_hf.training.nodes import one_process_first
from dflash_hf.training.objective import Objective
from dflash_hf.training.publishing import STAGING, DrafterPublisher
from dflash_hf.training.time_budget import TimeBudget, TimeBudgetCallback, TimeBudgetScheduler
from dflash_hf.training.trainer_card import save_facts
from dflash_hf.training.trainer_setup import (
    check_arguments,
    check_datasets,
    default_collator,
    record_trained_length,
    set_trainable_parameters,
    to_training_dtype,
)
from dflash_hf.training.training_args import DFlashTrainingArguments


logger = logging.get_logger(__name__)

_EVALUATION_STEP = -1  # evaluation draws the same anchors every time
_MIN_TIME_SHARE = 0.01  # of `max_minutes`, for training, even if more than all of it is reserved


class NotFiniteError(DetailedError):
    """A loss, gradient or weight is inf or NaN: later steps would learn nothing, with an apparent loss of 0."""


class DFlashTrainer(AtomicTrainer):
    """
    Trains a drafter against a frozen target.

    The target belongs to the trainer, not to the model, so that checkpoints do not contain it. The drafter belongs to
    the trainer, too: construction sets the dtype of its weights, their `requires_grad` and its `trained_length`.

    Besides `Trainer`'s metrics, each log line has these, of teacher-forced blocks:

    - `accuracy`, and `accuracy_k` of each slot `k`: the share of tokens that are drafted right;
    - `acceptance_k`: the accuracy of slot `k` in blocks whose earlier slots are all right;
    - `simulated_tau`: the mean over blocks of the accepted prefix plus the bonus token;
    - `simulated_tau_argmax`, with a token head: the same for the argmax of each slot, without the head.

    With `eval_decode`, an evaluation also has `eval_tau`, the real tau of decoded prompts. `dflash eval` measures that
    of a checkpoint, with its speed.

    Args:
        model (`DFlashDraftModel`, `PeftModel` or `str`): The drafter, or its folder or name on the Hub; with
            `peft.get_peft_model(draft, ...)` an adapter on it is trained.
        target (`PreTrainedModel` or `str`): Its target, or the target's folder or name; needs a head; frozen here.
        args (`DFlashTrainingArguments`): Default: the paper's recipe.
        train_dataset, eval_dataset: Rows with `input_ids` and `loss_mask`, see
            [`~dflash_hf.data.examples.make_example`]; or [`~dflash_hf.training.features.StoredFeatures`], several of
            them as a `ConcatDataset`.
        data_collator: Default: [`~dflash_hf.data.examples.DFlashCollator`].
        card_facts (`dict`, *optional*): What the card says of the training besides its arguments.
        kwargs: Other arguments of `Trainer`, such as `callbacks` and `optimizers`; not its own losses and metrics.

    Attributes:
        draft (`DFlashDraftModel`): The drafter itself, without adapter and training wrappers.
        objective_class (`type`): The class of its loss, [`~dflash_hf.training.objective.Objective`] or a subclass.

    Raises:
        `ValueError`: drafter and target do not fit, a dataset has rows that cannot be trained on, or an argument does
            not apply to drafters.
    """

    objective_class = Objective

    def __init__(
        self,
        model,
        target: PreTrainedModel | str | Path,
        args: DFlashTrainingArguments | None = None,
        train_dataset=None,
        eval_dataset=None,
        data_collator=None,
        card_facts: dict | None = None,
        **kwargs,
    ):
        # 1. Validate everything before upstream's trainer exists.
        if args is None:
            args = DFlashTrainingArguments(output_dir="dflash_draft")
        model, target = load_for_training(model, target)
        check_arguments(args, train_dataset, kwargs)
        check_fit(model.config, target)
        check_datasets(train_dataset, eval_dataset, args, model.config, target)
        if args.eval_decode:
            check_decoding(eval_dataset, target, args.eval_decode)

        # 2. The drafter, which from here on belongs to the trainer: the dtype of its weights, which of them are
        # trained, and on sequences of which length.
        adapted = is_adapted(model)
        self.draft = model.get_base_model() if adapted else model
        self.draft.main_input_name = "input_ids"  # of a batch, by which upstream counts tokens
        to_training_dtype(self.draft, args)
        set_trainable_parameters(self.draft, args, adapted)
        if not args.head_only:
            record_trained_length(self.draft.config, train_dataset)
        if self.draft.config.has_token_head and not adapted and args.ddp_find_unused_parameters is None:
            # The head is used outside of the wrapped forward, where DDP's search would consider it unused.
            args = copy.copy(args)  # the caller may use them for a drafter without a head
            args.ddp_find_unused_parameters = False

        # 3. Upstream's trainer, which places the drafter and knows how processes share it. With `push_to_hub` it calls
        # `init_hf_repo`, which reads the target.
        self.target = target
        self.publisher: DrafterPublisher | None = None  # once something is to be published
        collator = default_collator(target) if data_collator is None else data_collator
        super().__init__(model, args, collator, train_dataset, eval_dataset, **kwargs)
        self._check_launch()
        # compute_loss divides by the weights of the whole accumulated batch, so Trainer must not divide again.
        self.model_accepts_loss_kwargs = True

        # 4. The target beside it, frozen, and the loss of the two. The trainer owns both. The objective reads the
        # arguments and the drafter on the device where upstream's trainer has placed it, so it comes after 2 and 3.
        freeze(target)
        if not hasattr(target, "hf_device_map") and target.device != args.device:
            target.to(args.device)
        self.objective = self.make_objective()

        self._features_ahead: FeaturesAhead | None = None  # of the current pass, if its features are stored

        # 5. Metrics and log lines.
        self.card_facts = dict(card_facts or {})
        self.statistics = Statistics.zeros(args.device)  # since the last line of the log
        self.eval_statistics = Statistics.zeros(args.device)
        self.time_budget: TimeBudget | None = None  # of the latest run, if it had `max_minutes`
        self.add_callback(StepCountCallback())
        if args.max_minutes is not None and self.pop_callback(ProgressCallback) is not None:
            self.add_callback(OpenEndedProgressCallback())

    def _check_launch(self) -> None:
        """
        Raises:
            `ValueError`: the arguments do not fit the processes and wrappers of this run.
        """
        args = self.args
        if args.head_only and self.is_fsdp_enabled:
            # FSDP reduces gradients in hooks on the drafter's output, which has no gradient here.
            raise ValueError(
                "head_only=True would train nothing under FSDP, which only reduces gradients of the drafter's "
                "forward; use DDP (examples/accelerate/ddp.yaml)."
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"One process cannot train on {args.n_gpu} GPUs: start one for each with `accelerate launch`, or set "
                "CUDA_VISIBLE_DEVICES=0."
            )
        if args.eval_decode and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError(
                f"eval_decode={args.eval_decode} decodes in each process by itself, which needs a whole drafter: FSDP "
                "and DeepSpeed shard it; use DDP, or leave it out."
            )
        if args.muon and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError("muon=True needs whole matrices, which FSDP and DeepSpeed shard; use DDP, or adamw.")

    def create_optimizer(self, *args):
        """As upstream, or with `muon` Muon and AdamW."""
        if self.args.muon and self.optimizer is None:
            self.optimizer = muon_of(self.draft, self.args)
        return super().create_optimizer(*args)

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """As upstream, or over the time of [`train`] with `max_minutes`."""
        if self.time_budget is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        optimizer = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler: LambdaLR = TimeBudgetScheduler(optimizer, self.time_budget)
        self._created_lr_scheduler = True  # upstream drops it before another run
        return self.lr_scheduler

    def make_objective(self) -> Objective:
        """
        The objective of the arguments and the drafter as they are now. It is made at construction, so that its errors
        are raised there and `evaluate` has one, and again by each `train`, since either may have changed in between.
        """
        return self.objective_class(self.draft, self.target, self.args, self.make_target_reader())

    def make_target_reader(self) -> Callable[[dict], TargetOutput]:
        """Maps a batch to the target's output: by a forward of the target, as far as needed, or from disk."""
        has_all_weights = not any(parameter.is_meta for parameter in self.target.parameters())
        if self.args.has_teacher and has_all_weights:  # stored states were checked when they were stored
            check_logits(self.target)
        return partial(read_target, self.target, self.draft.config.target_layer_ids, self.args, self.data_collator)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """
        The loss of one micro-batch, divided by `num_items_in_batch`, which [`get_batch_samples`] sums over the whole
        accumulated batch: slot weights, or valid anchors for D-PACE.

        Args:
            model: The (wrapped) drafter.
            inputs (`dict`): A collated batch with `anchors` and `valid`, both `[N, A]`.
            return_outputs (`bool`): Also return the statistics of each sequence.
            num_items_in_batch (`torch.Tensor`): Default: the sum over this micro-batch.
        """
        loss, statistics = self.objective(model, inputs, self.progress)
        if model.training:
            self.statistics = self.statistics.add(statistics)
        if num_items_in_batch is None:
            total = statistics.normalizer.sum()
            num_items_in_batch = total.where(total > 0, 1)
        loss = loss.sum() / num_items_in_batch
        return (loss, {"statistics": statistics}) if return_outputs else loss

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        if self.time_budget is not None:
            return self.time_budget.done
        return self.state.global_step / max(self.state.max_steps, 1)

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        """
        Collect the micro-batches of one optimizer step, draw their anchors, and sum their normalizers over all
        micro-batches and ranks, so that the result does not depend on how the batch is split.
        """
        if 0 < self.state.max_steps <= self.state.global_step:
            return [], None  # upstream would run one step too many when it resumes a finished run
        batches, _ = super().get_batch_samples(self._read_ahead(epoch_iterator), num_batches, device)
        if not batches and self.state.global_step == 0:
            rows = self.train_dataset
            batch_size = f"per_device_train_batch_size={self.args.per_device_train_batch_size}"
            examples = f"{len(rows):,} examples are" if has_rows(rows) else "a stream without examples is"
            raise ValueError(
                f"No step can be trained: {examples} less than a batch of {batch_size} on each of "
                f"{self.args.world_size} processes; give more examples, a smaller batch, or "
                "dataloader_drop_last=false."
            )
        if batches:
            columns = set(batches[0])
            missing = {"input_ids", "attention_mask", "loss_mask"} - columns
            if missing:
                raise ValueError(
                    f"data_collator returns {sorted(columns)} without {sorted(missing)}; see DFlashCollator."
                )
        total = torch.zeros((), device=device)
        for batch in batches:
            self.objective.draw_anchors(batch, self.state.global_step)
            total += self.objective.normalizer(batch).to(device)
        # Gradients (and the logged loss) are averaged over ranks; a sum over ranks needs the mean of the normalizers.
        total = self.accelerator.reduce(total, "mean")
        return batches, total.where(total > 0, 1)  # without any anchor, every rank still runs the backward of 0 / 1

    def _read_ahead(self, epoch_iterator: Iterator[dict]) -> Iterator[dict]:
        """The micro-batches of a pass over the data, which read ahead if their features are stored."""
        if not all(isinstance(part, StoredFeatures) for part in parts_of(self.train_dataset)):
            return epoch_iterator
        if self._features_ahead is None or self._features_ahead.source is not epoch_iterator:
            self._end_reading()
            self._features_ahead = FeaturesAhead(
                epoch_iterator, self.args.has_teacher, self.args.dataloader_pin_memory
            )
        return self._features_ahead

    def _end_reading(self) -> None:
        """End what reads ahead in the last pass, if anything does."""
        if self._features_ahead is not None:
            self._features_ahead.close()
        self._features_ahead = None

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The loss of one evaluation batch; its statistics are gathered without the last batch's padding samples."""
        inputs = self._prepare_inputs(inputs)
        self.objective.draw_anchors(inputs, _EVALUATION_STEP)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        statistics = self.accelerator.gather_for_metrics(outputs["statistics"])
        self.eval_statistics = self.eval_statistics.add(statistics)
        return loss, None, None

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """As upstream, with the metrics of the training log, each over all tokens or blocks of the dataset."""
        self.eval_statistics = Statistics.zeros(self.args.device)
        self.target.eval()  # it may have been trained in between
        with groups_as_masks(self.draft.config):
            output = super().evaluation_loop(dataloader, description, True, ignore_keys, metric_key_prefix)
        for name, value in statistics_to_metrics(self.eval_statistics, self.draft.config.has_token_head).items():
            output.metrics[f"{metric_key_prefix}_{name}"] = value
        if self.args.eval_decode and has_rows(dataloader.dataset):
            output.metrics[f"{metric_key_prefix}_tau"] = decoded_tau(self, dataloader.dataset)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As upstream; a line of the training loss also gets the metrics since the previous line."""
        if "loss" in logs:
            sums = self.accelerator.reduce(self.statistics, "sum")
            metrics = statistics_to_metrics(sums, self.draft.config.has_token_head)
            logs.update({**metrics, **logs})  # Trainer's own loss stays: the mean over optimizer steps
            self.statistics = Statistics.zeros(self.args.device)
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Forward and backward of the drafter over its blocks: 6 operations per parameter and token."""
        return 6 * self.model.num_parameters() * inputs["anchors"].numel() * self.draft.config.block_size

    # Training stops at the first NaN or inf, before the optimizer's step. Upstream logs an average in its place.

    def _get_grad_norm(self, model, grad_norm=None):
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        loss = self.statistics.loss.item()
        if not math.isfinite(loss):
            raise self._not_finite(f"the loss is {loss}")
        # An fp16 scaler skips steps in search of its scale.
        if grad_norm is not None and self.accelerator.scaler is None and not math.isfinite(grad_norm):
            raise self._not_finite(f"the norm of the gradient is {float(grad_norm)}")
        return grad_norm

    def _not_finite(self, what: str) -> NotFiniteError:
        checkpoint = last_checkpoint(self.args.output_dir)
        if checkpoint is None:
            remedy = "There is no checkpoint before it."
        else:
            remedy = f"The last good checkpoint is {checkpoint}."
        return NotFiniteError(
            f"Step {self.state.global_step + 1}: {what}. {remedy} "
            "If the target is in fp16, load it in bfloat16 or float32 (target_dtype). Otherwise lower learning_rate="
            f"{self.args.learning_rate}, warm up longer, or use bf16 instead of fp16; a checkpoint given as the model "
            "to start from (`draft=` of `dflash train`) may use other settings."
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        """
        As upstream, plus the facts of the card; weights that are not finite raise, and existing files stay. With
        `push_to_hub` it also publishes the drafter, as upstream, unless the trainer itself has called it.
        """
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        self.save_drafter(folder, self.state.global_step if _internal_call else self.trained_steps)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def save_drafter(self, folder: Path, steps: int, card_facts: dict | None = None) -> None:
        """
        Save the weights after some steps, and the facts of their card; nothing is published.

        Args:
            folder (`Path`): Where.
            steps (`int`): Optimizer steps of the weights.
            card_facts (`dict`, *optional*): What the user says of them. Default: `hub_card`.
        """
        if not is_finite(self.model.parameters()):
            raise self._not_finite("the drafter's weights are not finite, and are not saved")
        super().save_model(str(folder), _internal_call=True)
        if self.args.should_save:
            save_facts(self, folder, steps, self.args.hub_card if card_facts is None else card_facts)

    @property
    def trained_steps(self) -> int:
        """Steps of the weights after training: of the best ones, if they were loaded at the end."""
        best = self.state.best_global_step if self.args.load_best_model_at_end else None
        return self.state.global_step if best is None else best

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, reserved_seconds: float = 0.0, **kwargs):
        """
        As upstream, from a complete checkpoint of this drafter.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): A checkpoint; `True` is the last complete one.
            reserved_seconds (`float`): Part of `max_minutes` for work before and after training, such as loading.
            args, kwargs: As upstream.
        """
        # 1. The checkpoint to resume from.
        checkpoint = checkpoint_of(resume_from_checkpoint, self.args.output_dir)
        if checkpoint is not None:
            check_same_drafter(checkpoint, self.draft)
        self.latest = None if checkpoint is None else checkpoint.resolve()

        # 2. The models: the caller may have changed either since construction.
        freeze(self.target)
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ValueError(
                "No parameter of the drafter is trained: call `model.requires_grad_(True)`; to go on with an adapter, "
                "load it with `peft.PeftModel.from_pretrained(draft, folder, is_trainable=True)`."
            )

        # 3. What belongs to one run: its loss, its figures and its time. The time begins with upstream's loop.
        self.objective = self.make_objective()
        self.statistics = Statistics.zeros(self.args.device)
        self.remove_callback(TimeBudgetCallback)
        self.time_budget = None
        if self.args.max_minutes is not None:
            seconds = 60 * self.args.max_minutes
            seconds_left = max(seconds - reserved_seconds, _MIN_TIME_SHARE * seconds)
            self.time_budget = TimeBudget(seconds_left, self.args.warmup_steps)
            self.add_callback(TimeBudgetCallback(self.time_budget))

        # 4. Upstream's loop.
        try:
            with groups_as_masks(self.draft.config):
                return super().train(None if checkpoint is None else str(checkpoint), *args, **kwargs)
        finally:
            self._end_reading()

    # Publishing. Upstream decides when; what is published, and how, is that of `dflash publish`.

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """
        Rehearse the publication of the drafter, and create its repository. Called at construction with `push_to_hub`,
        and otherwise by the first call of [`push_to_hub`].

        Args:
            token (`str`, *optional*): Default: `hub_token`, or that of `hf auth login`.
            private (`bool`, *optional*): Create it as a private repository; an existing public one is rejected.
                Default: `hub_private_repo`.

        Raises:
            `PublishError`: the drafter could not be published; says why, and what to do.
        """
        self._make_publisher(token, private)
        with one_process_first(self.args, self.is_world_process_zero()):
            if self.is_world_process_zero():
                self.publisher.open(self.model, self.target)
                self.hub_model_id = self.publisher.repo

    def _make_publisher(self, token: str | None, private: bool | None) -> None:
        """
        Raises:
            `ValueError`: under DeepSpeed's ZeRO-3.
        """
        if is_deepspeed_zero3_enabled():
            raise ValueError(
                "push_to_hub loads the saved drafter in one process, where ZeRO-3 would wait for the others: leave it "
                "out, and publish the trained drafter with `dflash publish`."
            )
        self.publisher = DrafterPublisher(self.args, token, private)
        self.push_in_progress: PushInProgress | None = None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Publish the drafter of a checkpoint in the background, unless the one before is still being published."""
        if self.args.hub_strategy == HubStrategy.END:
            return
        folder = Path(checkpoint_folder)
        if is_adapted(self.model):  # the checkpoint holds the adapter alone
            facts = folder / FACTS_FILE
            folder = Path(self.args.output_dir, STAGING, folder.name)
            self._save_merged(folder)
            if self.is_world_process_zero():
                shutil.copy2(facts, folder)
        if not self.is_world_process_zero():
            return
        in_progress = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if in_progress and not self.args.hub_always_push:
            logger.info(f"{folder.name} is not published: the checkpoint before it is still being uploaded.")
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        publication = self.publisher.start(folder, f"Training in progress, step {self.state.global_step}")
        if publication is None:
            return
        if in_progress:
            self.push_in_progress.jobs.append(publication)
        else:
            self.push_in_progress = PushInProgress([publication])

    def _save_merged(self, folder: Path) -> None:
        """Save the drafter with its adapter merged. Every process calls it."""
        draft = gather_merged(self)
        if draft is not None:
            draft.save_pretrained(folder)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card_facts,
    ) -> Publication | None:
        """
        Save the drafter in `output_dir` and publish it with its card, as `dflash publish` does: it is checked first,
        the first process sends one commit, and only what the repository does not have. An adapter is merged.

        Args:
            commit_message (`str`): That of the commit.
            blocking (`bool`): Must be true: weights may change before another thread has read them.
            token, private: As in [`init_hf_repo`]; without effect once the repository is open.
            revision (`str`, *optional*): The branch, which is created if it does not exist. Default: `hub_revision`.
            card_facts: Facts of the card, see [`~dflash_hf.hub.card.CardFacts`], in place of those of `hub_card`.

        Returns:
            [`~dflash_hf.hub.publish.Publication`] in the first process, else `None`.

        Raises:
            `PublishError`: the drafter was not published; it is complete in `output_dir`.
        """
        CardFacts.check(card_facts, "push_to_hub")
        if not blocking:
            raise ValueError("blocking=False is not supported: leave it out; saves are published in the background.")
        if self.publisher is None:
            self._make_publisher(token, private)
        card_facts = {**self.args.hub_card, **card_facts}
        folder = Path(self.args.output_dir)
        if is_adapted(self.model):
            self._save_merged(folder)
            if self.args.should_save:
                save_facts(self, folder, self.trained_steps, card_facts)
        else:
            self.save_drafter(folder, self.trained_steps, card_facts)
        return self.publish_output_dir(commit_message, revision, card_facts)

    def publish_output_dir(
        self, commit_message: str | None, revision: str | None = None, card_facts: dict | None = None
    ) -> Publication | None:
        """As [`push_to_hub`], of the drafter that is in `output_dir` already; its facts are saved there."""
        if not self.is_world_process_zero():
            return None
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self._finish_current_push()
        card_facts = self.args.hub_card if card_facts is None else card_facts
        return self.publisher.publish(commit_message or "Upload DFlash drafter", card_facts, revision)

    def create_model_card(self, **card_facts) -> None:
        """
        Write the card of the drafter that is saved in `output_dir` beside it. `push_to_hub` renders it anew.

        Args:
            card_facts: As for [`push_to_hub`].

        Raises:
            `ValueError`: an unknown fact, or a card was written by hand.
        """
        CardFacts.check(card_facts, "create_model_card")
        folder = Path(self.args.output_dir)
        if has_own_card(folder):
            raise ValueError(f"{folder / 'README.md'} was written by hand, and is kept: remove it for a rendered one.")
        if self.is_world_process_zero():
            save_facts(self, folder, self.trained_steps, {**self.args.hub_card, **card_facts})
            repo = self.args.hub_model_id or folder.absolute().name
            render_card(folder, CardFacts.from_folder(folder), repo).save(folder / "README.md")


def read_target(target, layer_ids: list[int], args, collator, batch: dict[str, Any]) -> TargetOutput:
    """The target's output for a batch, as far as its features and the loss need it."""
    if "stored" in batch:
        return stored_output(batch, args.has_teacher)
    images = collator.read_images(batch) if "images" in batch else None  # a caller's own collator may have none
    return target_forward(
        target,
        layer_ids,
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        images=images,
        with_last_hidden_state=args.has_teacher,
    )
