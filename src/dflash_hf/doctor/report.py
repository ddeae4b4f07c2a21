"""What the doctor found, as lines for a terminal and as data."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_hf.doctor.measuring import Counts, Experiment, Result


@dataclass
class Diagnosis:
    """
    The result of [`diagnose`].

    Args:
        as_given (`Counts`): Teacher-forced counts of the unchanged pair.
        results (`list[Result]`): What the experiments gave.
        cause (`Experiment`, *optional*): The likeliest cause.
        loss, guess (`float`): The target's loss on the prompts, in nats per token, and a uniform guess's.
        unlike (`list[str]`): `tokenizer` and `template`, if they differ from those of the drafter's training.
    """

    as_given: Counts
    results: list[Result]
    cause: Experiment | None
    loss: float
    guess: float
    unlike: list[str]

    def lines(self) -> list[str]:
        """Lines for a terminal: the cause and its remedy first, then what was tried."""
        cause = "none of these: no change is better by more than chance"
        remedy = "more of the target's own answers, and more training; more --prompts show smaller faults"
        if self.cause is not None:
            cause = self.cause.cause
            remedy = self.cause.remedy
        elif self.unlike:
            remedy = f"use the {' and '.join(self.unlike)} of training, or train with the new one"
        changing = [result for result in self.results if not _is_idle(result)]
        idle = [result for result in self.results if _is_idle(result)]
        return [
            f"as it is          tau {self.as_given.tau:.2f}, teacher-forced, over {self.as_given.blocks} blocks",
            f"prompts           cost the target {self.loss:.2f} nats per token; guessing costs {self.guess:.2f}",
            *[f"noticed           the {part} differs from the drafter's training" for part in self.unlike],
            "",
            f"likeliest cause   {cause}",
            f"remedy            {remedy}",
            "",
            f"{'tried':44}{'tau':>6}{'change':>9}{'std. errors':>13}{'nats':>8}{'std. errors':>13}",
            *[self._row(result) for result in changing],
            *_idle_lines(idle),
        ]

    def _row(self, result: Result) -> str:
        row = f"{result.experiment.name:44}{result.after.tau:6.2f}"
        gain, standard_errors = result.accepted
        row += f"{gain:+9.2f}{standard_errors:+13.1f}"
        if result.likelihood is not None:
            nats, nats_standard_errors = result.likelihood
            row += f"{nats:+8.2f}{nats_standard_errors:+13.1f}"
        mark = ""
        if result.experiment is self.cause:
            mark = "  <- likeliest cause"
        elif result.is_better:
            mark = "  better"
        return f"{row:93}{mark}".rstrip()

    def facts(self) -> dict:
        """The data for `--json`."""
        tried = [
            {
                "key": result.experiment.key,
                "name": result.experiment.name,
                "tau": result.after.tau,
                "better": result.is_better,
                **result.figures,
            }
            for result in self.results
        ]
        cause = None
        if self.cause is not None:
            cause = {"key": self.cause.key, "cause": self.cause.cause, "remedy": self.cause.remedy}
        return {
            "tau": self.as_given.tau,
            "prompt_nats": {"target": self.loss, "guess": self.guess},
            "unlike": self.unlike,
            "tried": tried,
            "cause": cause,
        }


def _is_idle(result: Result) -> bool:
    """Whether a row would show no change at all, or one that is shown as +0.00."""
    if result.is_better:
        return False
    return all(abs(result.figures.get(name, 0.0)) < 0.005 for name in ("gain", "nats"))


def _idle_lines(idle: Sequence[Result]) -> list[str]:
    """One line for all changes that changed nothing, those without a text last; none if there are no such changes."""
    names = [result.experiment.name for result in idle if result.after.blocks]
    names += [f"{result.experiment.name} (no text)" for result in idle if not result.after.blocks]
    if not names:
        return []
    return [f"no difference     {', '.join(names)}"]
