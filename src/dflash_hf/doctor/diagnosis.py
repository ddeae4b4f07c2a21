"""All experiments on a pair, and the conclusion from them."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from dflash_hf.data.encode import digests_of_tokenizer
from dflash_hf.doctor.experiments import Case, Experiment, experiments
from dflash_hf.doctor.measure import Change, Counts, Text, measure
from dflash_hf.doctor.texts import surprise
from dflash_hf.doctor.verdict import SIGNIFICANT, SUSPICIOUS, Tried, likeliest
from dflash_hf.evaluation.measure import in_blocks
from dflash_hf.responses import generate_one


DECODED = 8  # number of prompts that are decoded
HARDLY = 1.15  # tau of a drafter that was trained for minutes, or for another target


@dataclass
class Diagnosis:
    """
    The result of [`diagnose`].

    Args:
        as_given (`Counts`): Teacher-forced counts of the unchanged pair.
        decoded, forced (`Counts`): Counts of decoding, and teacher-forced counts of the same blocks.
        tried (`list[Tried]`): The experiments and what they gave.
        cause (`Experiment`, *optional*): The likeliest cause.
        surprise, guess (`float`): The target's loss on the prompts, in nats per token, and a uniform guess's.
        unlike (`list[str]`): `tokenizer` and `template`, if they differ from those of the drafter's training.
    """

    as_given: Counts
    decoded: Counts
    forced: Counts
    tried: list[Tried]
    cause: Experiment | None
    surprise: float
    guess: float
    unlike: list[str]

    def lines(self) -> list[str]:
        """Lines for a terminal."""
        texts = sum(n > 0 for n in self.as_given.blocks)
        lines = [
            f"as it is          tau {self.as_given.tau:.2f}, teacher-forced, over {sum(self.as_given.blocks)} blocks "
            f"of {texts} texts by the target",
            f"slot accepted, %  {_percent(self.as_given.acceptance)}, if all before it are",
            f"slot correct, %   {_percent(self.as_given.accuracy)}",
            f"decoding          tau {self.decoded.tau:.2f}; teacher-forced, the same blocks {self.forced.tau:.2f}"
            if sum(self.decoded.blocks)
            else "decoding          without drafts: see the warning above",
            f"prompts           cost the target {self.surprise:.2f} nats per token; guessing costs {self.guess:.2f}",
            *[f"noticed           the {what} differs from the drafter's training" for what in self.unlike],
            "",
            f"{'tried':44}{'tau':>6}{'change':>9}{'std. errors':>13}{'nats':>8}{'std. errors':>13}",
        ]
        for one in self.tried:
            name = one.experiment.name
            if not sum(one.after.blocks):
                lines.append(f"{name:44}{'no text':>6}")
                continue
            gain, errors = one.difference
            mark = "  <- likeliest cause" if one.experiment is self.cause else "  better" if one.is_better else ""
            figures = f"{name:44}{one.after.tau:6.2f}{gain:+9.2f}{errors:+13.1f}"
            if one.likelihood is not None:
                figures += "{:+8.2f}{:+13.1f}".format(*one.likelihood)
            lines.append(f"{figures:93}{mark}".rstrip())
        lines.append("")
        if self.cause is not None:
            return [*lines, f"likeliest cause   {self.cause.cause}", f"remedy            {self.cause.remedy}"]
        nearest = max(reversed(self.tried), key=lambda one: one.suspicion, default=None)
        if nearest is not None and (errors := nearest.suspicion) >= SUSPICIOUS:
            more = math.ceil(texts * (SIGNIFICANT / errors) ** 2 / 8) * 8
            chance = f"by {errors:.1f} standard errors; it takes {SIGNIFICANT} to rule out chance"
            lines.append(f"likeliest cause   perhaps {nearest.experiment.name}, {chance}")
            return [*lines, f"remedy            measure again with --prompts {more} or more"]
        none = "likeliest cause   none of these: no change is better by more than chance."
        if changed := " and ".join(self.unlike):
            lines.append(f"{none} But the {changed} changed after training;")
            return [*lines, f"{'':18}use the {changed} of training, or train with the new one."]
        lines.append(f"{none} The drafter has learned no more;")
        return [*lines, f"{'':18}more of the target's own answers and more training raise acceptance."]

    def facts(self) -> dict:
        """The data for `--json`."""
        tried = []
        for one in self.tried:
            gain, errors = one.difference
            figures = {"tau": one.after.tau, "gain": gain, "standard_errors": errors, "better": one.is_better}
            if one.likelihood is not None:
                figures["nats"], figures["nats_standard_errors"] = one.likelihood
            names = {"key": one.experiment.key, "name": one.experiment.name}
            tried.append({**names, **figures, "blocks": sum(one.after.blocks)})
        cause = self.cause
        return {
            "tau": self.as_given.tau,
            "accuracy": self.as_given.accuracy,
            "acceptance": self.as_given.acceptance,
            "decoding": {"tau": self.decoded.tau, "teacher_forced": self.forced.tau},
            "prompt_nats": {"target": self.surprise, "guess": self.guess},
            "unlike": self.unlike,
            "tried": tried,
            "cause": None if cause is None else {"key": cause.key, "cause": cause.cause, "remedy": cause.remedy},
        }


def _percent(shares: list[float]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in shares)


def diagnose(case: Case, progress: Callable[[Iterable], Iterable] = iter) -> Diagnosis:
    """
    Run all experiments on a pair.

    Raises:
        `ValueError`: the target's answers are too short for drafts.
    """
    answered = sum(text is not None for text in case.texts)
    if answered < 2:
        raise ValueError(
            f"Two answers of more than a token or two are needed, and {len(case.rows)} prompt(s) gave {answered}; "
            "give more with --data."
        )
    # 1. All experiments but decoding; the unchanged pair comes first.
    known = experiments(case)
    changes = [Change(), *(one.change for one in known)]
    as_given, *counts = measure(case.target, case.draft, case.texts, changes, progress)
    tried = [Tried(one, as_given, after) for one, after in zip(known, counts, strict=True)]
    # 2. Decoding against teacher forcing, and whether the target can read its prompts.
    decoded, forced = decoding(case)
    nats = surprise(case.target, case.prompts)
    guess = math.log(case.target.get_input_embeddings().weight.shape[0])
    trained_with = case.draft.config.dflash_config.get("trained_with", {})
    unlike = differing(trained_with, digests_of_tokenizer(case.encoder.tokenizer))
    # 3. The cause: unreadable prompts, then a loss in decoding alone, then the best change.
    cause = None
    if nats > guess:  # it cannot read them: wrong ids, or a damaged target
        damaged = case.base is not None and surprise(case.base, case.prompts) < guess
        cause = [one for one in known if one.key == ("base" if damaged else "tokenizer")][-1]
    elif (worse := Tried(_decoding_is_worse(case), decoded, forced)).accepts_more:
        cause = worse.experiment
        tried.append(worse)
    else:
        best = likeliest(tried)
        cause = None if best is None else best.experiment
        if max(as_given.tau, 1.0 if best is None else best.after.tau) < HARDLY:
            cause = _hardly_anything(case)
            tried.append(Tried(cause, as_given, as_given))
    return Diagnosis(as_given, decoded, forced, tried, cause, nats, guess, unlike)


def differing(before: dict, now: dict) -> list[str]:
    """The names whose values differ."""
    return [name for name in ("tokenizer", "template") if name in before and before[name] != now[name]]


def decoding(case: Case) -> tuple[Counts, Counts]:
    """
    Counts of decoding, and teacher-forced counts at the same anchors; in fp32 they are equal, block by block. The last
    block of each text is left out: the end of the text cuts it short.
    """
    decoded, texts = Counts(), []
    for text, prompt in zip(case.texts, case.prompts, strict=True):
        if text is None or len(texts) == DECODED:
            continue
        options = {"do_sample": False, "max_new_tokens": case.writer.max_new_tokens}
        output = generate_one(case.target, prompt, assistant_model=in_blocks(case.draft), **options)
        lengths = (getattr(output, "acceptance_lengths", None) or [[]])[0][:-1]
        if lengths:
            starts = torch.tensor([0, *lengths[:-1]]).cumsum(0) + len(prompt)
            texts.append(Text(output.sequences.cpu(), starts[None]))
            decoded.accepted.append(sum(lengths) - len(lengths))
            decoded.blocks.append(len(lengths))
    return decoded, measure(case.target, case.draft, texts, [Change()])[0]


def _hardly_anything(case: Case) -> Experiment:
    cause = "hardly any draft is accepted: the drafter was trained for another target, or hardly at all"
    return Experiment("target", "nothing changed", Change(), cause, case.train_again())


def _decoding_is_worse(case: Case) -> Experiment:
    cause = "decoding accepts less than teacher forcing does in the same blocks: a defect, or low precision"
    remedy = case.again("eval", "--data prompts.jsonl --dtype float32")
    return Experiment("decoding", "teacher forcing instead of decoding", Change(), cause, remedy)
