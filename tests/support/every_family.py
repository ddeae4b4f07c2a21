"""
Is decoding with a drafter lossless for one family of targets, and how is it rolled back? Asked in a process of its
own, with a limit of time and memory, so that no family can hold up or bring down the others.
"""

import contextlib
import logging
import math
import multiprocessing
import os
import resource
import sys
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import torch
import transformers
from prompt_memory import LiveBytes
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.decoding.probe import capabilities_of
from dflash_hf.decoding.session import SlotSession
from support.pairs import make_draft
from support.scripted_draft import scripted
from support.tiny_models import DIVERSE, prompts, tiny_model


NEW_TOKENS = 40
ERROR_RATE = 0.15
BLOCK_SIZE = 8
SECONDS = 120
BYTES = 4 << 30
# Live bytes at the peak of a call may grow by so many from 24 to 120 tokens: caches of a tiny model take a few hundred
# kilobytes, a graph of every round took 100 MB.
SHORT = 24
LONG = 120
MOST_GROWTH = 4 << 20
ROLLBACK = {"SlotSession": "slots", "ReplaySession": "slots, recurrent layers replayed"}


@dataclass
class Outcome:
    """
    What became of one family.

    Args:
        verdict (`str`): `"right"`, with drafts that were accepted; `"plain"`, decoded without the drafter, with the
            warning; `"refused"`, told before any call that there can be no drafter; `"wrong"`; `"leaks"`, a forward
            records gradients, or memory grows from round to round; `"error"`; `"not made"`, no tiny model of it, or
            one that does not generate alone.
        detail (`str`): The way of rolling back, the warning, the place of the difference, the message.
        tau (`list[float]`): Tokens committed per verification, for one row and for four.
        growth (`int`): Bytes by which the peak of a call of 120 tokens is above that of one of 24 tokens.
    """

    model_type: str
    name: str = ""
    verdict: str = "not made"
    detail: str = ""
    tau: tuple[float, ...] = ()
    growth: int = 0


def families() -> list[tuple[str, bool]]:
    """Model types of all causal language models, and of wrappers that read images too: those are `True`."""
    wrappers = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    return [(name, False) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES] + [
        (name, True) for name, _ in sorted(wrappers)
    ]


def examine(model_type: str, wrapper: bool = False) -> Outcome:
    """Greedy text of a tiny target with and without a drafter that knows it: one prompt, and four left-padded ones."""
    transformers.logging.set_verbosity_error()
    outcome = Outcome(model_type)
    try:
        target = tiny_model(model_type, wrapper).requires_grad_(True)  # as `from_pretrained` leaves it
        outcome.name = type(target).__name__
        if target.config.is_encoder_decoder:
            raise ValueError("an encoder-decoder model")
        expected = {rows: _generated(target, rows).sequences for rows in (1, 4)}
        if not torch.equal(_generated(target, 4).sequences, expected[4]):
            raise ValueError("its own greedy text differs from call to call")
        if len(set(expected[4][:, -NEW_TOKENS:].flatten().tolist())) < DIVERSE / 2:
            raise ValueError("its greedy text is not diverse")
    except Exception as error:
        outcome.detail = _summary(error)
        return outcome
    try:
        draft = make_draft(target, BLOCK_SIZE)
    except ValueError as error:
        outcome.verdict = "refused"
        outcome.detail = str(error)
        return outcome
    except Exception as error:
        outcome.verdict = "error"
        outcome.detail = _summary(error)
        return outcome
    warnings = _Warnings()
    logging.getLogger().addHandler(warnings)
    tau = []
    try:
        for rows, text in expected.items():
            with recorded_gradients() as recorded:
                output = _generated(target, rows, scripted(draft, text, ERROR_RATE))
            if recorded:
                outcome.verdict = "leaks"
                outcome.detail = f"gradients are recorded in {recorded[0]}"
                return outcome
            if output.sequences.shape != text.shape or not torch.equal(output.sequences, text):
                outcome.verdict = "wrong"
                outcome.detail = _difference(target, rows, output.sequences, text)
                return outcome
            lengths = [n for row in output.acceptance_lengths for n in row]
            tau.append(sum(lengths) / len(lengths) if lengths else math.nan)
        if not any(math.isnan(number) for number in tau):
            outcome.growth = memory_growth(target, draft)
            if outcome.growth > MOST_GROWTH:
                outcome.verdict = "leaks"
                outcome.detail = f"{outcome.growth:,} bytes more after {LONG} tokens than after {SHORT}"
                return outcome
    except Exception as error:
        outcome.verdict = "error"
        outcome.detail = _summary(error)
        return outcome
    outcome.tau = tuple(tau)
    if not any(math.isnan(number) for number in tau):
        outcome.verdict = "right"
        outcome.detail = ROLLBACK[capabilities_of(target).session.__name__]
    elif warnings.messages:
        outcome.verdict = "plain"
        outcome.detail = warnings.messages[0].removeprefix("Decoding without the drafter: ")
    else:
        outcome.verdict = "error"
        outcome.detail = "decoded without the drafter and without a warning"
    return outcome


@contextlib.contextmanager
def recorded_gradients():
    """Yields a list of the forwards of drafted calls, inside, whose output records gradients."""
    recorded: list[str] = []

    def watch(owner, name: str):
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            output = original(*args, **kwargs)
            outputs = output if isinstance(output, tuple) else (output,)
            if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in outputs):
                recorded.append(f"{owner.__name__}.{name}")
            return output

        return mock.patch.object(owner, name, watched)

    with watch(SlotSession, "verify"), watch(DraftSession, "hidden_states"), watch(DraftSession, "logits"):
        yield recorded


def memory_growth(target, draft) -> int:
    """Bytes by which the peak of a call of `LONG` tokens and four rows is above that of one of `SHORT` tokens."""
    text = _generated(target, 4, new_tokens=LONG).sequences
    scripted_draft = scripted(draft, text, ERROR_RATE)
    peaks = []
    for new_tokens in (SHORT, LONG):
        with LiveBytes() as counted:
            _generated(target, 4, scripted_draft, new_tokens)
        peaks.append(counted.peak)
    return peaks[1] - peaks[0]


def examine_all(names, report=lambda outcome: None) -> list[Outcome]:
    """Each family in a process of its own, one after the other; `report` is told of each as it is known."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once, and found there through the environment
    tests = Path(__file__).resolve().parents[1]
    paths = [str(tests), str(tests.parent / "examples" / "benchmarks")]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
        forkserver.ensure_running()
    outcomes = []
    for model_type, wrapper in names:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_apart, args=(model_type, wrapper, sending))
        process.start()
        sending.close()
        outcome = Outcome(model_type, detail=f"not done after {SECONDS} s")
        try:
            if receiving.poll(SECONDS):
                outcome = receiving.recv()
        except EOFError:
            process.join()
            outcome.detail = f"the process ended with status {process.exitcode}"
        process.kill()
        process.join()
        outcomes.append(outcome)
        report(outcome)
    return outcomes


def _apart(model_type: str, wrapper: bool, sending) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # where a model prints
    sending.send(examine(model_type, wrapper))


@torch.no_grad()
def _generated(target, rows: int, draft=None, new_tokens: int = NEW_TOKENS):
    return target.generate(
        **prompts(rows)[0],
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        assistant_model=draft,
    )


def _difference(target, rows: int, actual, expected) -> str:
    """Where two batches of texts `[rows, S]` begin to differ."""
    if actual.shape != expected.shape:
        return f"{rows} rows: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    different = actual != expected
    row = int(different.any(dim=1).nonzero()[0])
    column = int(different[row].nonzero()[0])
    new = column - prompts(rows)[0]["input_ids"].shape[1]
    return f"batch of {rows}: {int(different.any(dim=1).sum())} rows differ, row {row} from new token {new} on"


def _summary(error: Exception) -> str:
    """The type, the first line and the place of an error."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().split("\n")[0][:200]
    return f"{type(error).__name__}: {text} ({'/'.join(place.filename.split('/')[-2:])}:{place.lineno})"


class _Warnings(logging.Handler):
    """Keeps what the package warned of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record):
        if record.name.startswith("dflash_hf"):
            self.messages.append(record.getMessage())
