"""`DFlashTrainer`: a Hugging Face `Trainer` for drafters, with the frozen target next to the model."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, ProgressCallback, Trainer
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import logging

from dflash_hf.data.examples import DFlashCollator, check_examples, has_rows
from dflash_hf.evaluation.measure import EvalReport
from dflash_hf.hub.card import CardFacts, origin, render_card
from dflash_hf.modeling.cache_dflash import additive
from dflash_hf.pairs import loaded
from dflash_hf.target import (
    TargetOutput,
    check_fit,
    check_logits,
    digest_of_parameters,
    freeze,
    packed_masks,
    target_forward,
    target_labels,
    target_logits,
)
from dflash_hf.training.adapters import add_adapter, is_adapted
from dflash_hf.training.blocks import (
    Blocks,
    block_mask,
    build_blocks,
    by_token,
    example_seeds,
    flex_mask,
    sample_anchors,
)
from dflash_hf.training.checkpoints import UNFINISHED, checkpoint_of, clear_aside, finish_checkpoint
from dflash_hf.training.finite import FiniteGuard
from dflash_hf.training.log_table import LogTable
from dflash_hf.training.losses import (
    Teacher,
    TokenLosses,
    block_loss,
    block_statistics,
    default_gamma,
    loss_normalizer,
    scored_losses,
    selected,
    slot_weights,
    statistics_to_metrics,
    token_losses,
)
from dflash_hf.training.pace import Pace, StopsInTime
from dflash_hf.training.settings_for import warning_of
from dflash_hf.training.start import draft_ids
from dflash_hf.training.trainer_card import WeightsHaveFigures, save_facts
from dflash_hf.training.training_args import DFlashTrainingArguments


logger = logging.get_logger(__name__)

_EVALUATION_STEP = -1  # evaluation draws the same anchors every time
# Arguments of upstream's Trainer that this one would ignore, and why.
_REFUSED = {
    "compute_loss_func": "loss_type and draft_config choose the loss",
    "compute_metrics": "a drafter's metrics are computed without gathering its logits",
    "preprocess_logits_for_metrics": "a drafter's metrics are computed without gathering its logits",
    "model_init": "pass the drafter as `model`, and build a trainer for each trial of a search",
}


class DFlashTrainer(Trainer):
    """
    Trains a drafter against a frozen target.

    The target belongs to the trainer, not to the model, so that checkpoints do not contain it. Besides `Trainer`'s
    metrics, each log line has `accuracy`, `accuracy_k` of each slot, `acceptance_k` (the same if all earlier slots are
    correct), `simulated_tau`: the mean over all sampled blocks of the accepted prefix plus the bonus token,
    teacher-forced (with a head also `simulated_tau_argmax`, for each slot's argmax without the head), and
    `tokens_per_second` of all processes, excluding evaluations. A terminal shows them as a table.
    [`~dflash_hf.training.callbacks.DecodingCallback`] measures the real tau.

    Args:
        model (`DFlashDraftModel` or `str`): The drafter, or its folder or name on the Hub.
        target (`PreTrainedModel` or `str`): Its target, or the target's folder or name; needs a head; frozen here.
        args (`DFlashTrainingArguments`): Default: the paper's recipe.
        train_dataset, eval_dataset: Rows with `input_ids` and `loss_mask`, see
            [`~dflash_hf.data.examples.make_example`].
        data_collator: Default: [`~dflash_hf.data.examples.DFlashCollator`].
        peft_config (`PeftConfig` or `dict`): Train an adapter on the drafter, see
            [`~dflash_hf.training.adapters.add_adapter`]; `merge_and_unload` merges both into a plain drafter.
        kwargs: Other arguments of `Trainer`, such as `callbacks` and `optimizers`; not its own losses and metrics.

    Attributes:
        eval_report ([`~dflash_hf.evaluation.measure.EvalReport`], *optional*): The result of decoding with the current
            weights; dropped when they change.

    Raises:
        `ValueError`: drafter and target do not fit, a dataset has rows that cannot be trained on, or an argument does
            not apply to drafters.
    """

    def __init__(
        self,
        model,
        target: PreTrainedModel | str | Path,
        args: DFlashTrainingArguments | None = None,
        train_dataset=None,
        eval_dataset=None,
        data_collator=None,
        peft_config=None,
        **kwargs,
    ):
        if args is None:
            args = DFlashTrainingArguments(output_dir="dflash_draft")
        if not isinstance(args, DFlashTrainingArguments):
            raise ValueError(f"args is a {type(args).__name__}; pass `DFlashTrainingArguments` with the same fields.")
        model, target = loaded(model, target)
        check_arguments(args, target, train_dataset, kwargs)
        check_fit(model.config, target)
        eval_datasets = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        for dataset in (train_dataset, *eval_datasets):
            if dataset is not None:
                self.check_dataset(dataset, args, model.config, target)
        if data_collator is None:
            pad_token_id = target.config.get_text_config().pad_token_id
            data_collator = DFlashCollator(0 if pad_token_id is None else pad_token_id)
        prepare_draft(model, args, peft_config)
        super().__init__(
            model=model if peft_config is None else add_adapter(model, peft_config),
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=data_collator,
            **kwargs,
        )
        if args.head_only and self.is_fsdp_enabled:
            # FSDP reduces gradients in hooks on the drafter's output, which has no gradient here.
            raise ValueError(
                "head_only=True would train nothing under FSDP, which only reduces gradients of the drafter's "
                "forward; use DDP (examples/accelerate/ddp.yaml)."
            )
        # compute_loss divides by the weights of the whole accumulated batch, so Trainer must not divide again.
        self.model_accepts_loss_kwargs = True
        self.draft_config, self.has_head = model.config, model.config.has_head
        self.uses_flex = uses_flex(args.block_attention, model.config, args.device)
        self.slot_weights = None  # D-PACE computes its own
        if not args.uses_dpace:
            tokens = model.config.block_size + model.config.sample_from_anchor
            gamma = args.loss_decay_gamma or default_gamma(model.config.block_tokens)
            self.slot_weights = slot_weights(tokens, gamma).to(args.device)  # [T]
        self._hold_target(target, model)
        self.train_statistics = self.eval_statistics = self.no_statistics()
        self.train_tokens = torch.zeros((), device=args.device)
        self.clock: float | None = None
        self.pace: Pace | None = None  # of `max_minutes`
        self.reserved_seconds = 0.0  # part of it reserved for work before and after training
        self.finite, self.saves_aside = FiniteGuard(self), False
        self._report: tuple[EvalReport | None, str] = (None, "")
        self.steps_of_weights: int | None = None  # if the best weights were reloaded
        self.add_callback(WeightsHaveFigures(self))
        bars = any(type(one) is ProgressCallback for one in self.callback_handler.callbacks)
        watched = sys.stdout.isatty()
        if bars and (watched or args.max_minutes is not None):
            self.remove_callback(ProgressCallback)
            self.add_callback(LogTable(watched))

    def _hold_target(self, target, draft) -> None:
        """Freeze a target, move it to the drafter's device, and keep what the losses need of both heads."""
        self.target = freeze(target)
        if not hasattr(target, "hf_device_map") and target.device != self.args.device:
            target.to(self.args.device)
        self.check_target(target)
        self.draft_head = partial(draft.draft_logits, target_head=target.get_output_embeddings())
        self.draft_ids = draft_ids(draft)  # [V] or None
        drafted_ids = None if self.draft_ids is None else draft.target_ids(torch.arange(len(draft.d2t)))  # [v]
        self.teacher_head = partial(target_logits, target, ids=drafted_ids)  # [M, H_t] -> [M, v]

    @property
    def eval_report(self) -> EvalReport | None:
        """The last report, if the drafter still has the weights that it was measured with."""
        report, digest = self._report
        same = report is not None and digest == digest_of_parameters(self.draft.named_parameters())
        return report if same else None

    @eval_report.setter
    def eval_report(self, report: EvalReport | None) -> None:
        self._report = report, "" if report is None else digest_of_parameters(self.draft.named_parameters())

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """As upstream, or over time with `max_minutes`."""
        if self.args.max_minutes is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        seconds = 60 * self.args.max_minutes
        self.pace = Pace(max(seconds - self.reserved_seconds, 0.01 * seconds), self.args.warmup_steps)
        self.lr_scheduler: LambdaLR = LambdaLR(self.optimizer if optimizer is None else optimizer, self.pace)
        self._created_lr_scheduler = True  # another call of `train` has its own time
        self.remove_callback(StopsInTime)
        self.add_callback(StopsInTime(self.pace))
        return self.lr_scheduler

    def check_dataset(self, dataset, args, draft_config, target) -> None:
        """Reject rows that cannot be trained on, see [`~dflash_hf.data.examples.check_examples`]."""
        if has_rows(dataset):
            check_examples(dataset)

    @property
    def draft(self):
        """The drafter itself, without training wrappers."""
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if is_adapted(model) else model

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
        args = self.args

        # 1. The frozen target reads the sequences: features [N, S, L*H_t] of every token.
        features, label_ids, states = self.read_target(inputs)

        # 2. Blocks of B slots at A anchors: [anchor, MASK, ..., MASK].
        blocks = self.build_blocks(inputs, label_ids)
        noise = self.draft.embed(self.target, blocks.input_ids)  # [N, A*B, H]
        if args.gradient_checkpointing and model.training:
            noise.requires_grad_()  # reentrant checkpoints take their parameters' gradients from their inputs'

        # 3. One pass of the drafter over [context | blocks].
        hidden = model(
            noise_embeds=noise.to(self.model.dtype),
            context_hidden_states=features.to(self.model.dtype),
            attention_mask=self.attention_masks(inputs),
            position_ids=blocks.position_ids,
        ).last_hidden_state.to(self.model.dtype)  # [N, A*B, H]; mixed precision returns fp32

        # 4. Token losses through the target's head, chunk by chunk, then the weighted sum of each sequence.
        hidden = by_token(hidden, self.draft_config.block_size, self.draft_config.sample_from_anchor)  # [N, A, T, H]
        labels = blocks.labels if self.draft_ids is None else self.draft_ids.to(label_ids.device)[blocks.labels]
        places = self.places_before(inputs, labels.shape[-1])  # [N, A, T]
        teacher = None
        if states is not None:
            teacher = Teacher(states.flatten(0, 1), places, self.teacher_head, args.loss_kind)
        losses = self.head_losses(hidden, labels, blocks.counted, inputs["input_ids"].flatten()[places], teacher)
        loss = block_loss(losses, blocks.counted, self.slot_weights, args.dpace_alpha)  # [N]
        normalizer = loss_normalizer(blocks.counted, self.slot_weights)  # [N]
        statistics = self.statistics_of(losses, blocks, loss, normalizer)  # [N, 4 * (T - 1) + 4]
        if model.training:
            self.train_statistics = self.train_statistics + statistics.sum(0)

        # 5. Normalise over all micro-batches and ranks.
        if num_items_in_batch is None:
            num_items_in_batch = _never_zero(normalizer.sum())
        loss = loss.sum() / num_items_in_batch
        return (loss, {"statistics": statistics}) if return_outputs else loss

    def read_target(self, inputs) -> tuple[torch.Tensor, torch.LongTensor, torch.Tensor | None]:
        """
        Run the frozen target on a batch.

        Returns:
            The features `[N, S, L*H_t]` of every token, the labels by position `[N, S]` (the target's own tokens with
            `label_source="target"`), and its final hidden states `[N, S, H_t]` if distributions are compared.
        """
        args, input_ids = self.args, inputs["input_ids"]
        output, label_ids = self.run_target(inputs), input_ids
        states = output.last_hidden_state
        if args.label_source == "target":
            label_ids = target_labels(self.target, states, input_ids, inputs["loss_mask"], args.loss_chunk_size)
        return output.features, label_ids, states if args.has_teacher else None

    def check_target(self, target) -> None:
        """
        Raises:
            `ValueError`: the loss needs the target's distribution, which is not known.
        """
        if self.args.has_teacher:
            check_logits(target)

    def run_target(self, inputs) -> TargetOutput:
        """The target's forward, as far as needed; a subclass may get the output from elsewhere."""
        layer_ids = self.draft_config.target_layer_ids
        masks = packed_masks(self.target, layer_ids, inputs)
        return target_forward(self.target, layer_ids, inputs["input_ids"], **masks, states=self.args.reads_states)

    def statistics_of(self, losses: TokenLosses, blocks: Blocks, loss, normalizer) -> torch.Tensor:
        """[`~dflash_hf.training.losses.block_statistics`] of the drafted tokens; the last may be trained only."""
        drafted = (..., slice(self.draft_config.block_tokens))
        correct, counted, alone = losses.correct[drafted], blocks.counted[drafted], losses.alone[drafted]
        return block_statistics(correct, counted, loss, normalizer, alone)

    def places_before(self, inputs, tokens: int) -> torch.LongTensor:
        """
        Index in the flattened batch of the token before each of the `tokens` of a block, `[N, A, T]`: its state
        predicts the token, and a head continues from it. The anchor and tokens past the end do not count.
        """
        anchors, length = inputs["anchors"], inputs["input_ids"].shape[1]
        token = torch.arange(tokens, device=anchors.device)
        place = (anchors[..., None] + token - 1).clamp(0, length - 1)  # [N, A, T]
        return place + length * torch.arange(len(anchors), device=anchors.device)[:, None, None]

    def head_losses(self, hidden, labels, counted, before, teacher) -> TokenLosses:
        """
        The losses of the drafter's head on the blocks, `[N, A, B]`, from hidden states `[N, A, B, H]`.

        Args:
            hidden, labels, counted, teacher: As for [`~dflash_hf.training.losses.token_losses`].
            before (`torch.LongTensor`): `[N, A, B]`, the token before each slot.
        """
        draft, chunk_size = self.draft, self.args.loss_chunk_size
        head = draft.config.head(draft, partial(draft.embed, self.target))
        # 1. A head over all tokens learns together with the slots.
        if self.has_head and head.top_k is None:
            known = counted & (labels >= 0)
            queries = head.forced(before, hidden, known)  # [M, q]

            def scores(query, logits):
                ids, logits = head.candidates(logits.to(query.device))
                return logits, head.scores(query, draft.target_ids(ids), logits)

            loss = partial(head.loss, progress=self.progress)
            return scored_losses(hidden, queries, self.draft_head, scores, loss, labels, known, chunk_size, teacher)

        # 2. A head that chooses among candidates learns from the slots' own logits, without changing them.
        likely = head.candidates if self.has_head else None
        losses = token_losses(hidden, self.draft_head, labels, counted, chunk_size, teacher, likely)
        if not self.has_head:
            return losses
        queries = head.forced(before, hidden.detach(), losses.known)
        return selected(losses, lambda one: head.scores(queries, draft.target_ids(one.ids), one.logits), labels)

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        if self.pace is not None:
            return self.pace.done
        return self.state.global_step / max(self.state.max_steps, 1)

    def build_blocks(self, inputs: dict[str, torch.Tensor], label_ids: torch.LongTensor | None = None) -> Blocks:
        """The blocks of a batch with anchors, see [`~dflash_hf.training.blocks.build_blocks`]."""
        return build_blocks(
            inputs["input_ids"],
            inputs["loss_mask"],
            inputs["anchors"],
            inputs["valid"],
            self.draft_config.block_size,
            self.draft_config.mask_token_id,
            label_ids=label_ids,
            position_ids=inputs.get("position_ids"),
            document_ids=inputs.get("document_ids"),
            anchor_first=self.draft_config.sample_from_anchor,
            unbroken=self.args.loss_type == "dspark",
        )

    def attention_masks(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The mask of each layer type: a `BlockMask` for flex attention, else additive `[N, 1, A*B, S + A*B]`."""

        def mask(window: int | None, is_causal: bool):
            arguments = (inputs["anchors"], inputs["attention_mask"], self.draft_config.block_size, window, is_causal)
            if self.uses_flex:
                return flex_mask(*arguments, inputs.get("document_ids"))
            return additive(block_mask(*arguments, inputs.get("document_ids")), self.model.dtype)

        return self.draft_config.by_layer_type(mask)

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        """
        Collect the micro-batches of one optimizer step, draw their anchors, and sum their normalizers over all
        micro-batches and ranks, so that the result does not depend on how the batch is split.
        """
        if self.clock is None:
            self.clock = time.perf_counter()
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        for batch in batches[:1]:
            if missing := {"input_ids", "attention_mask", "loss_mask"} - set(batch):
                raise ValueError(
                    f"data_collator returns {sorted(batch)} without {sorted(missing)}; see DFlashCollator."
                )
        self.finite.of_this_step = batches
        total = torch.zeros((), device=device)
        for batch in batches:
            self.train_tokens += batch["attention_mask"].sum().to(self.train_tokens.device)
            self.draw_anchors(batch, self.state.global_step)
            total += self.batch_normalizer(batch).to(device)
        # Gradients (and the logged loss) are averaged over ranks; a sum over ranks needs the mean of the normalizers.
        total = self.accelerator.reduce(total, "mean")
        return batches, _never_zero(total)

    def draw_anchors(self, batch: dict[str, torch.Tensor], step: int) -> None:
        """Add `anchors` and `valid` `[N, A]` to a batch; they depend only on each sequence, the seed and the step."""
        seeds = example_seeds(batch["input_ids"], batch["attention_mask"], self.args.anchor_seed, step)
        slots = min(self.args.num_anchors, batch["input_ids"].shape[1])  # more would all be invalid
        batch["anchors"], batch["valid"] = sample_anchors(
            batch["loss_mask"], slots, seeds=seeds, document_ids=batch.get("document_ids")
        )

    def batch_normalizer(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The divisor of the summed loss of a batch with anchors, `[]`."""
        return loss_normalizer(self.build_blocks(batch).counted, self.slot_weights).sum()

    def no_statistics(self) -> torch.Tensor:
        """Zeros `[4 * (T - 1) + 4]`, the initial sum of [`~dflash_hf.training.losses.block_statistics`]."""
        return torch.zeros(4 * (self.draft_config.block_tokens - 1) + 4, device=self.args.device)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The loss of one evaluation batch; its statistics are gathered without the last batch's padding samples."""
        inputs = self._prepare_inputs(inputs)
        self.draw_anchors(inputs, _EVALUATION_STEP)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        statistics = self.accelerator.gather_for_metrics(outputs["statistics"])
        self.eval_statistics = self.eval_statistics + statistics.sum(0)
        return loss, None, None

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """As upstream, with the metrics of the training log, each over all tokens or blocks of the dataset."""
        self.eval_statistics = self.no_statistics()
        self.target.eval()  # it may have been trained in between
        with self.off_the_clock():
            output = super().evaluation_loop(dataloader, description, True, ignore_keys, metric_key_prefix)
        for name, value in statistics_to_metrics(self.eval_statistics, self.has_head).items():
            output.metrics[f"{metric_key_prefix}_{name}"] = value
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As upstream; a line of the training loss also gets the metrics since the previous line."""
        if "loss" in logs and self.clock is not None:
            metrics = statistics_to_metrics(self.accelerator.reduce(self.train_statistics, "sum"), self.has_head)
            tokens = self.accelerator.reduce(self.train_tokens, "sum").item()
            metrics["tokens_per_second"] = tokens / (time.perf_counter() - self.clock)
            logs.update({**metrics, **logs})  # Trainer's own loss stays: the mean over optimizer steps
            self.train_statistics = self.no_statistics()
            self.train_tokens, self.clock = torch.zeros_like(self.train_tokens), time.perf_counter()
        super().log(logs, start_time)

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Time in this context does not count in `tokens_per_second`."""
        start = time.perf_counter()
        yield
        if self.clock is not None:
            self.clock += time.perf_counter() - start

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Forward and backward of the drafter over its blocks: 6 operations per parameter and token."""
        return 6 * self.model.num_parameters() * inputs["anchors"].numel() * self.draft_config.block_size

    # Training stops at the first NaN or inf, see `finite`.

    def _get_grad_norm(self, model, grad_norm=None):
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.finite.check_step(grad_norm)
        return grad_norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        """As upstream, plus the facts of the card; weights that are not finite raise, and existing files stay."""
        self.finite.check_weights()
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            save_facts(self, Path(self.args.output_dir if output_dir is None else output_dir))

    # A checkpoint is complete or absent, see `checkpoints`.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """As upstream, from a complete checkpoint of this drafter; `True` is the last complete checkpoint."""
        checkpoint = checkpoint_of(resume_from_checkpoint, self.args.output_dir, self.draft_config)
        freeze(self.target)  # it may have been trained in between
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ValueError(
                "No parameter of the drafter is trained: call `model.requires_grad_(True)`; to go on with an adapter, "
                "load it with `peft.PeftModel.from_pretrained(draft, folder, is_trainable=True)`."
            )
        if has_rows(self.train_dataset):
            said = warning_of(self.args, self.draft_config, self.target.config, self.train_dataset[0])
            if said:
                logger.warning(said)
        self.train_statistics = self.no_statistics()  # an earlier run may have ended in NaN
        self.clock = None  # the time between two runs is not a cost of the second
        return super().train(checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        # 1. Upstream writes everything to a side folder; when all processes are done, a rename makes it a checkpoint.
        run_dir = Path(self._get_output_dir(trial))
        clear_aside(self, run_dir)
        self.saves_aside = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.saves_aside = False
        checkpoint = finish_checkpoint(self, run_dir)

        # 2. Only now is it uploaded, and older checkpoints may be removed.
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            limit = self.args.save_total_limit
            rotate_checkpoints(str(run_dir), save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)

    def _get_output_dir(self, trial) -> str:
        run_dir = super()._get_output_dir(trial)
        return str(Path(run_dir, UNFINISHED)) if self.saves_aside else run_dir

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self.saves_aside:
            super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """
        Write the drafter's card, rendered from facts, as README.md of the output folder; `push_to_hub` calls this.

        Args:
            license (`str`): The Hub's short name, e.g. `"mit"`.
            tags (`str` or `list[str]`): Added to the card's own tags.
            model_name (`str`): The card's title if no repository is known yet. Default: the folder's name.
            finetuned_from (`str`): Repository of the target. Default: the repository it was loaded from.
            dataset (`str` or `list[str]`): Repositories of the training data. Default: `dataset_tags`.
            language, tasks, dataset_args: Not part of a drafter's card.

        Raises:
            `ValueError`: the target was not loaded from the Hub and `finetuned_from` is missing.
        """
        if not self.is_world_process_zero() or is_adapted(self.model):  # PEFT writes an adapter's card
            return
        folder = Path(self.args.output_dir)
        datasets = dataset_tags if dataset is None else dataset
        datasets = [datasets] if isinstance(datasets, str) else datasets
        facts = CardFacts.from_folder(folder, base_model=finetuned_from, license=license, datasets=datasets)
        repo = self.hub_model_id or self.args.hub_model_id or model_name or folder.absolute().name
        card = render_card(folder, facts, repo)
        wanted = [tags] if isinstance(tags, str) else tags or []
        card.data.tags += [tag for tag in wanted if tag not in card.data.tags]
        (folder / "README.md").write_text(str(card), encoding="utf-8")


def check_arguments(args, target, train_dataset, kwargs: dict) -> None:
    """
    Check a trainer's arguments against each other.

    Raises:
        `ValueError`: one of `kwargs`, upstream's, would be ignored, or two contradict each other.
    """
    for name in _REFUSED.keys() & {name for name, value in kwargs.items() if value is not None}:
        raise ValueError(f"{name} does not apply to DFlashTrainer: {_REFUSED[name]}.")
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
    if args.push_to_hub and not origin(target):
        raise ValueError(
            "push_to_hub=True publishes a card, which names the target's repository, but the target was loaded from "
            f"{target.name_or_path or 'no folder'!r}: set `target.name_or_path` to it, or leave push_to_hub out and "
            "publish the saved drafter with `dflash publish FOLDER REPO --base-model TARGET`."
        )


def prepare_draft(model, args, peft_config) -> None:
    """
    Choose which parameters of a drafter are trained, in which dtype.

    Raises:
        `ValueError`: its head cannot be trained as `args.head_only` says.
    """
    config = model.config
    model.main_input_name = "input_ids"  # of a batch, by which upstream counts tokens
    if (args.bf16 or args.fp16) and model.dtype in (torch.bfloat16, torch.float16):
        logger.info(f"The drafter's {model.dtype} weights are trained in fp32, with autocast.")
        model.float()
    if config.head.needs_teacher(config) and not args.has_teacher:
        logger.warning(
            f"Part of the {config.head.name} learns from the target's distribution only and is not trained "
            f"with loss_type={args.loss_type}; use dspark, kl or tv."
        )
    choose_parameters(model, args.head_only, peft_config)
    if config.has_head and peft_config is None and args.ddp_find_unused_parameters is None:
        # The head is used outside of the wrapped forward, where DDP's search would consider it unused.
        args.ddp_find_unused_parameters = False
    if config.has_own_head:
        model.lm_head.requires_grad_(False)  # rows of the target's


def choose_parameters(model, head_only: bool, peft_config) -> None:
    """
    Freeze all but the drafter's head if it is trained alone.

    Raises:
        `ValueError`: there is no head, or it would be trained alone without `head_only`.
    """
    head = model.config.head
    with torch.device("meta"):
        modules = head.modules(model.config)
    if head_only:
        if not modules or peft_config is not None:
            raise ValueError(
                "head_only=True trains the head of a drafter, and no adapter: set the fields of a head, such as "
                "selector_rank and selector_top_k (in a recipe draft_config={selector_rank: 128, selector_top_k: "
                "16}), and leave out peft_config."
            )
        model.requires_grad_(False)
        for name in modules:
            getattr(model, name).requires_grad_(True)
    elif modules and peft_config is None:
        trained = {name.split(".")[0] for name, one in model.named_parameters() if one.requires_grad}
        if trained and trained <= modules.keys():
            raise ValueError(
                "head_only=False, but an earlier run with head_only=True froze the rest of this drafter: call "
                "`model.requires_grad_(True)`, or set head_only=True again."
            )
    elif modules:
        logger.warning(f"peft_config trains an adapter: the {head.name} itself is not trained.")


def uses_flex(choice: str, config, device: torch.device) -> bool:
    """Whether blocks use flex attention; `"auto"` does on CUDA if its kernels support this drafter."""
    if choice == "flex" and config.attention_sink_bias:
        raise ValueError(
            "block_attention='flex' cannot train a drafter with attention_sink_bias=True, whose sinks are a column of "
            "a dense mask; use 'dense'."
        )
    fits = not config.attention_sink_bias and min(config.head_dim, config.v_head_dim) >= 16
    return choice == "flex" or (choice == "auto" and device.type == "cuda" and fits)


def _never_zero(weight: torch.Tensor) -> torch.Tensor:
    # Without any anchor the loss is 0 / 1, and every rank still runs its backward.
    return torch.where(weight > 0, weight, torch.ones_like(weight))
