"""A diagnosis, as lines for a terminal and as JSON data."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dflash_hf.doctor.comparison import Result
from dflash_hf.doctor.measuring import Cause, Counts
from dflash_hf.evaluation.report import DepthReport
from dflash_hf.evaluation.text import depth_lines


@dataclass
class Diagnosis:
    """
    The result of [`diagnose`].

    Args:
        unchanged (`Counts`): Teacher-forced counts of the unchanged pair.
        results (`list[Result]`): The results of the experiments.
        cause (`Cause`, *optional*): The likeliest cause.
        prompt_loss, uniform_loss (`float`): The target's loss on the prompts, in nats per token, and the loss of a
            uniform guess.
        changed_since_training (`list[str]`): `tokenizer` and `template`, if they are not the same as in the drafter's
            training.
        depths (`Sequence[DepthReport]`): The unchanged pair's tau by the length of the text before a block.
    """

    unchanged: Counts
    results: list[Result]
    cause: Cause | None
    prompt_loss: float
    uniform_loss: float
    changed_since_training: list[str]
    depths: Sequence[DepthReport] = ()

    def lines(self) -> list[str]:
        """Lines for a terminal: the cause and its remedy first, then what was tried."""
        cause = "none of these: no change is better by more than chance"
        remedy = "more of the target's own answers, and more training; more --prompts show smaller faults"
        if self.cause is not None:
            cause = self.cause.text
            remedy = self.cause.remedy
        elif self.changed_since_training:
            remedy = f"use the {' and '.join(self.changed_since_training)} of training, or train with the new one"
        with_effect = [result for result in self.results if not _changes_nothing(result)]
        without_effect = [result for result in self.results if _changes_nothing(result)]
        lines = [
            f"as it is          tau {self.unchanged.tau:.2f}, teacher-forced, over {self.unchanged.blocks} blocks",
            f"prompts           cost the target {self.prompt_loss:.2f} nats per token; "
            f"guessing costs {self.uniform_loss:.2f}",
        ]
        lines += depth_lines(self.depths)
        for part in self.changed_since_training:
            lines.append(f"noticed           the {part} differs from the drafter's training")
        lines += [
            "",
            f"likeliest cause   {cause}",
            f"remedy            {remedy}",
            "",
            f"{'tried':44}{'tau':>6}{'change':>9}{'std. errors':>13}{'nats':>8}{'std. errors':>13}",
        ]
        lines += [self._row(result) for result in with_effect]
        lines += _lines_without_effect(without_effect)
        return lines

    def _row(self, result: Result) -> str:
        row = f"{result.experiment.name:44}{result.after.tau:6.2f}"
        gain, standard_errors = result.accepted_gain
        row += f"{gain:+9.2f}{standard_errors:+13.1f}"
        if result.likelihood_gain is not None:
            nats, nats_standard_errors = result.likelihood_gain
            row += f"{nats:+8.2f}{nats_standard_errors:+13.1f}"
        mark = ""
        if self.cause is not None and result.experiment.cause is self.cause:
            mark = "  <- likeliest cause"
        elif result.is_better:
            mark = "  better"
        return f"{row:93}{mark}".rstrip()

    def facts(self) -> dict:
        """
        The data for `--json`. Its keys and the keys of causes are stable; `unlike` is `changed_since_training`, and
        `better` says whether the gain of an experiment is more than chance.
        """
        tried = []
        for result in self.results:
            experiment = result.experiment
            tried.append(
                {
                    "key": "" if experiment.cause is None else experiment.cause.key,
                    "name": experiment.name,
                    "tau": result.after.tau,
                    "better": result.is_better,
                    **result.figures,
                }
            )
        cause = None
        if self.cause is not None:
            cause = {"key": self.cause.key, "cause": self.cause.text, "remedy": self.cause.remedy}
        return {
            "tau": self.unchanged.tau,
            "tau_by_depth": [asdict(depth) for depth in self.depths],
            "prompt_nats": {"target": self.prompt_loss, "guess": self.uniform_loss},
            "unlike": self.changed_since_training,
            "tried": tried,
            "cause": cause,
        }


def _changes_nothing(result: Result) -> bool:
    """Whether a row would show no change at all, or one that is shown as +0.00."""
    if result.is_better:
        return False
    return all(abs(result.figures.get(name, 0.0)) < 0.005 for name in ("gain", "nats"))


def _lines_without_effect(without_effect: Sequence[Result]) -> list[str]:
    """One line for all changes that changed nothing, those without a text last; none if there are no such changes."""
    names = [result.experiment.name for result in without_effect if result.after.blocks]
    names += [f"{result.experiment.name} (no text)" for result in without_effect if not result.after.blocks]
    if not names:
        return []
    return [f"no difference     {', '.join(names)}"]
