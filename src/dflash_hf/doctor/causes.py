"""`diagnose`: run all experiments on a pair, and choose the likeliest cause."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from dflash_hf.data.template import digests_of_tokenizer
from dflash_hf.doctor.case import DraftedText, DraftedTexts, PairCase, TrainingHistory, loss_on
from dflash_hf.doctor.comparison import MIN_STANDARD_ERRORS, Result, likeliest
from dflash_hf.doctor.experiments import FITS_BASE_ONLY, TRAIN_AGAIN, plan_experiments, quantisation_of
from dflash_hf.doctor.measuring import Cause, Counts, Experiment, TextCounts, measure
from dflash_hf.doctor.report import Diagnosis
from dflash_hf.evaluation.report import DepthReport, depth_index, depth_reports
from dflash_hf.evaluation.text import depth_phrase
from dflash_hf.training.held_out import is_overfitted


# A drafter with a lower tau was trained for minutes only, or for another target.
MIN_TAU_OF_TRAINED = 1.15
# With at least this many passes over at most this many rows, a drafter may have memorised them: 56 passes over 60 rows
# gave tau 3.95 on these rows, and 1.26 on others.
MIN_PASSES_TO_MEMORISE = 8.0
MAX_MEMORISED_ROWS = 2000
# Texts of a depth, and the share of tau that long texts must lose.
MIN_TEXTS_OF_DEPTH = 4
MIN_SHARE_OF_DEPTH = 0.1
_OTHER_TOKENIZER = Cause(
    key="tokenizer",
    text="the tokenizer or chat template is not the one that the target was trained with",
    remedy="save the tokenizer of the model that the target was made from beside the target",
)


def diagnose(case: PairCase, progress: Callable[[Iterable], Iterable] = iter) -> Diagnosis:
    """
    Run all experiments on a pair.

    Args:
        case ([`PairCase`]): The pair and the prompts.
        progress (`Callable`): Wraps the iteration over prompts.

    Returns:
        [`Diagnosis`].

    Raises:
        `ValueError`: the target's answers are too short for drafts.
    """
    answered = sum(text is not None for text in case.texts)
    if answered < 2:
        raise ValueError(
            f"Two answers of more than a token or two are needed, and {len(case.rows)} prompt(s) gave {answered}; "
            "give more with --data."
        )
    # 1. All experiments; the unchanged pair comes first.
    experiments = list(plan_experiments(case))
    unchanged, *counts = measure(case.target, case.draft, case.texts, [Experiment(), *experiments], progress)
    results = [Result(experiment, unchanged, after) for experiment, after in zip(experiments, counts, strict=True)]
    depths = depths_of(case.texts, unchanged)
    # 2. Whether the target can read its prompts, and what has changed since training.
    prompt_loss = loss_on(case.target, case.prompts)
    uniform_loss = math.log(case.target.get_input_embeddings().weight.shape[0])
    trained_with = case.draft.config.dflash_config.get("trained_with", {})
    digests = digests_of_tokenizer(case.encoder.template.tokenizer)
    changed_since_training = []
    for name in ("tokenizer", "template"):
        if name in trained_with and trained_with[name] != digests[name]:
            changed_since_training.append(name)
    # 3. The cause: prompts that the target cannot read, or else the best change. Memorised rows come before the
    # general "hardly any draft is accepted", which they also explain, because they have a more specific remedy.
    best = likeliest(results)
    cause = None if best is None else best.experiment.cause
    best_tau = max(unchanged.tau, 1.0 if best is None else best.after.tau)
    if prompt_loss > uniform_loss:  # wrong ids, or a damaged target
        is_damaged = case.base is not None and loss_on(case.base, case.prompts) <= uniform_loss
        cause = FITS_BASE_ONLY if is_damaged else _OTHER_TOKENIZER
    elif best is None and _has_memorised_rows(case.training, unchanged.tau):
        cause = _memorised_rows(case.training, unchanged.tau)
    elif best_tau < MIN_TAU_OF_TRAINED:
        cause = _hardly_accepted(case)
    elif best is None and falls_with_depth(case.texts, unchanged):
        cause = _depth(depths)
    return Diagnosis(unchanged, results, cause, prompt_loss, uniform_loss, changed_since_training, depths)


def depths_of(texts: DraftedTexts, counts: Counts) -> list[DepthReport]:
    """Tau by the length of the text before a block."""
    rounds = []
    for text, count in zip(texts, counts.texts, strict=True):
        if text is not None:
            rounds += [(_depth_of(text), _tau_of(count))] * count.blocks
    return depth_reports(rounds)


def falls_with_depth(texts: DraftedTexts, counts: Counts) -> bool:
    """
    Whether tau is lower in long texts than in short ones, by more than chance and by a tenth. Of the ranges of lengths
    that [`~dflash_hf.evaluation.report.DEPTHS`] separates, the first and the last that occur are compared.
    """
    taus: dict[int, list[float]] = {}
    for text, count in zip(texts, counts.texts, strict=True):
        if text is not None:
            taus.setdefault(depth_index(_depth_of(text)), []).append(_tau_of(count))
    shallow = taus[min(taus)]
    deep = taus[max(taus)]
    if min(taus) == max(taus) or min(len(shallow), len(deep)) < MIN_TEXTS_OF_DEPTH:
        return False
    loss = statistics.fmean(shallow) - statistics.fmean(deep)
    variance = statistics.variance(shallow) / len(shallow) + statistics.variance(deep) / len(deep)
    return loss > max(MIN_SHARE_OF_DEPTH * statistics.fmean(shallow), MIN_STANDARD_ERRORS * math.sqrt(variance))


def _depth_of(text: DraftedText) -> int:
    """The mean number of tokens before a block of a text."""
    return round(text.anchors.float().mean().item())


def _tau_of(count: TextCounts) -> float:
    return 1 + count.accepted / count.blocks


def _depth(depths: Sequence[DepthReport]) -> Cause:
    """The cause where acceptance falls with the length of the text."""
    return Cause(
        key="depth",
        text=f"acceptance falls with the length of the text: tau {depth_phrase(depths)} tokens",
        remedy="train on texts as long as those that you decode, or have the drafter look back less far: "
        "`draft.decoding_config.window`",
    )


def _has_memorised_rows(training: TrainingHistory | None, tau: float) -> bool:
    """Whether few rows were read many times, and tau is far lower on the prompts than on these rows."""
    if training is None or training.passes < MIN_PASSES_TO_MEMORISE or training.rows > MAX_MEMORISED_ROWS:
        return False
    return training.tau is None or is_overfitted(training.tau, tau)


def _memorised_rows(training: TrainingHistory, tau: float) -> Cause:
    """The cause where a drafter has memorised its training rows."""
    taus = "" if training.tau is None else f": tau {training.tau:.2f} there, {tau:.2f} here"
    return Cause(
        key="by_heart",
        text=f"{training.rows} rows were memorised, in {training.passes:.0f} passes{taus}",
        remedy="train on more rows, with few passes: `dflash prompts`, `dflash regenerate`",
    )


def _hardly_accepted(case: PairCase) -> Cause:
    """The cause where hardly any draft is accepted, with any change."""
    method = quantisation_of(case.draft)
    if method is None:
        return Cause(
            key="target",
            text="hardly any draft is accepted: the drafter was trained for another target, or hardly at all",
            remedy=TRAIN_AGAIN,
        )
    return Cause(
        key="quantised",
        text=f"hardly any draft is accepted, and the drafter is quantised ({method}): "
        "few bits of a small model ruin it",
        remedy="draft with the drafter as it was before; it costs little memory",
    )
