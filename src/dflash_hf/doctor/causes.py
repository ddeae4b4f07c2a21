"""`diagnose`: run all experiments on a pair, and choose the likeliest cause."""

import math
from collections.abc import Callable, Iterable

from dflash_hf.data.template import digests_of_tokenizer
from dflash_hf.doctor.case import Case, Training, loss_on
from dflash_hf.doctor.comparison import Result, likeliest
from dflash_hf.doctor.experiments import TRAIN_AGAIN, plan_experiments, quantisation_of
from dflash_hf.doctor.measuring import Experiment, measure
from dflash_hf.doctor.report import Diagnosis
from dflash_hf.training.held_out import is_overfitted


# A drafter with a lower tau was trained for minutes only, or for another target.
MIN_TAU_OF_TRAINED = 1.15
# So many passes over so few training rows are learned by heart: 56 over 60 rows gave tau 3.95 there, 1.26 elsewhere.
MIN_PASSES_BY_HEART = 8.0
MAX_ROWS_BY_HEART = 2000


def diagnose(case: Case, progress: Callable[[Iterable], Iterable] = iter) -> Diagnosis:
    """
    Run all experiments on a pair.

    Args:
        case ([`Case`]): The pair and the prompts.
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
    # 2. Whether the target can read its prompts, and what has changed since training.
    prompt_loss = loss_on(case.target, case.prompts)
    uniform_loss = math.log(case.target.get_input_embeddings().weight.shape[0])
    trained_with = case.draft.config.dflash_config.get("trained_with", {})
    digests = digests_of_tokenizer(case.encoder.tokenizer)
    changed_since_training = []
    for name in ("tokenizer", "template"):
        if name in trained_with and trained_with[name] != digests[name]:
            changed_since_training.append(name)
    # 3. The cause: prompts that the target cannot read, or else the best change. The order matters: rows
    # that were learned by heart also explain a pair that accepts hardly anything, and say what to do.
    best = likeliest(results)
    cause = None if best is None else best.experiment
    best_tau = max(unchanged.tau, 1.0 if best is None else best.after.tau)
    if prompt_loss > uniform_loss:  # wrong ids, or a damaged target
        is_damaged = case.base is not None and loss_on(case.base, case.prompts) <= uniform_loss
        cause = experiments[-1] if is_damaged else _OTHER_TOKENIZER  # the last experiment is the base itself
    elif best is None and _is_learned_by_heart(case.training, unchanged.tau):
        cause = _explain_learned_by_heart(case.training, unchanged.tau)
    elif best_tau < MIN_TAU_OF_TRAINED:
        cause = _explain_hardly_accepted(case)
    return Diagnosis(unchanged, results, cause, prompt_loss, uniform_loss, changed_since_training)


# Causes that no single experiment shows have the form of one.
_OTHER_TOKENIZER = Experiment(
    key="tokenizer",
    cause="the tokenizer or chat template is not the one that the target was trained with",
    remedy="save the tokenizer of the model that the target was made from beside the target",
)


def _is_learned_by_heart(training: Training | None, tau: float) -> bool:
    """Whether few rows were read so often that the drafter knows them, and little else: tau is far lower here."""
    if training is None or training.passes < MIN_PASSES_BY_HEART or training.rows > MAX_ROWS_BY_HEART:
        return False
    return training.tau is None or is_overfitted(training.tau, tau)


def _explain_learned_by_heart(training: Training, tau: float) -> Experiment:
    """The cause where a drafter knows its training rows alone."""
    taus = "" if training.tau is None else f": tau {training.tau:.2f} there, {tau:.2f} here"
    return Experiment(
        key="by_heart",
        cause=f"{training.rows} rows were learned by heart, in {training.passes:.0f} passes{taus}",
        remedy="train on more rows, with few passes: `dflash prompts`, `dflash regenerate`",
    )


def _explain_hardly_accepted(case: Case) -> Experiment:
    """The cause where no change lets more than a few drafts be accepted."""
    method = quantisation_of(case.draft)
    if method is None:
        return Experiment(
            key="target",
            cause="hardly any draft is accepted: the drafter was trained for another target, or hardly at all",
            remedy=TRAIN_AGAIN,
        )
    return Experiment(
        key="quantised",
        cause=f"hardly any draft is accepted, and the drafter is quantised ({method}): "
        "few bits of a small model ruin it",
        remedy="draft with the drafter as it was before; it costs little memory",
    )
