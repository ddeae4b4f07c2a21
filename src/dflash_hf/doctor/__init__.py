"""
`dflash doctor`: why is acceptance low? A table of experiments, each a small change after which acceptance is counted.

The target writes texts, in which anchors are drawn once. At each anchor the drafter fills one block, given the
target's features of the text before it. Two figures are counted: the tokens that verification would accept, and the
text's log-likelihood under the drafter. Every token of a block contributes to the likelihood, only the first mistake
to acceptance: the likelihood tells a change from chance in a tenth of the texts.

    case.py         the pair, its prompts and texts, and how the drafter was trained
    experiments.py  the experiments, the smallest changes first
    measuring.py    an experiment: drafting with its change, and counting
    comparison.py   whether the change is better by more than chance, and which is the best
    causes.py       `diagnose`: run all experiments, and choose the likeliest cause
    report.py       the diagnosis, printed and as data for `--json`
"""

from dflash_hf.doctor.case import DraftedText, PairCase, TrainingHistory
from dflash_hf.doctor.causes import diagnose
from dflash_hf.doctor.comparison import Result, likeliest
from dflash_hf.doctor.experiments import plan_experiments
from dflash_hf.doctor.measuring import Cause, Counts, Experiment, TextCounts, changed_draft, measure
from dflash_hf.doctor.report import Diagnosis


__all__ = [
    "PairCase",
    "Cause",
    "Counts",
    "Diagnosis",
    "Experiment",
    "Result",
    "DraftedText",
    "TextCounts",
    "TrainingHistory",
    "changed_draft",
    "diagnose",
    "likeliest",
    "measure",
    "plan_experiments",
]
