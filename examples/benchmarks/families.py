"""
Is decoding with a drafter lossless for every family, and how is each target rolled back?

Tiny random targets of every family in `tests/support/families.py`, in fp32 on the CPU, and drafters that know the text
but err in one token of ten, so that drafts are accepted and rejected. Three ways of calling `generate`: greedy, greedy
for four prompts of different lengths, and sampling from one prompt with the same seed. About a minute of one core.

    python examples/benchmarks/families.py > examples/benchmarks/results/families.md
"""

import platform
import sys
import time
from pathlib import Path

import torch
import transformers


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support import families as tiny
from support.pairs import FAMILIES, make_draft, make_target
from support.rows import ragged_prompts

from dflash_hf import DFlashCandidateGenerator
from dflash_hf.modeling.probe_dflash import probe_rollback


NEW_TOKENS, ERROR_RATE, BLOCK_SIZE = 40, 0.1, 8
ROLLBACK = {
    "SlotSession": "slots",
    "ReplaySession": "slots, recurrent layers replayed",
    "StepSession": "slots, recurrent layers in steps",
    "CropSession": "crop, rows in step",
    "NoneType": "none: decoded without the drafter",
}


def perturbed(text, pads):
    """A `draft` that knows what comes and errs in one token of ten."""
    random = torch.Generator().manual_seed(0)
    original = DFlashCandidateGenerator.draft

    def draft(self, anchors, start, *args, **kwargs):
        block = original(self, anchors, start, *args, **kwargs)
        for row in range(block.shape[0]):
            known = text[row, pads[row] + int(start[row]) + 1 :][: block.shape[1] - 1]
            block[row, 1 : 1 + len(known)] = known
        wrong = torch.rand(block.shape, generator=random) < ERROR_RATE
        wrong[:, 0] = False
        return torch.where(wrong, (block + 1) % self.config.vocab_size, block)

    return draft


def compare(target, draft, rows: int, do_sample: bool) -> tuple[int, int, float]:
    """Wrong tokens, tokens, and the acceptance length of one call."""
    inputs, pads = ragged_prompts(rows)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample, "return_dict_in_generate": True}
    torch.manual_seed(1)
    expected = target.generate(**inputs, **options).sequences
    original, DFlashCandidateGenerator.draft = DFlashCandidateGenerator.draft, perturbed(expected, pads)
    try:
        torch.manual_seed(1)
        output = target.generate(**inputs, **options, assistant_model=draft)
    finally:
        DFlashCandidateGenerator.draft = original
    new = expected.shape[1] - inputs["input_ids"].shape[1]
    lengths = [n for row in output.acceptance_lengths for n in row]
    wrong = int((output.sequences != expected).sum())
    return wrong, rows * new, sum(lengths) / len(lengths) if lengths else float("nan")


def main() -> None:
    transformers.logging.set_verbosity_error()
    began, wrong_tokens, tokens, lines = time.time(), 0, 0, []
    names = [*FAMILIES, *tiny.SLOTS, *tiny.REPLAY, *tiny.STEP, *tiny.CROP]
    for family in names:
        target = make_target(family, attn=None)
        draft, rollback = make_draft(target, BLOCK_SIZE), probe_rollback(target)
        cells = []
        for rows, do_sample in ((1, False), (4, False), (1, True)):
            wrong, count, tau = compare(target, draft, rows, do_sample)
            wrong_tokens, tokens = wrong_tokens + wrong, tokens + count
            cells.append(f"{'yes' if wrong == 0 else f'**{wrong} wrong**'} | {tau:.2f}")
        kind = ROLLBACK[rollback.__name__ if rollback else "NoneType"]
        lines.append(f"| {type(target).__name__} | {family} | {' | '.join(cells)} | {kind} |")
        print(lines[-1], file=sys.stderr)

    print("# Families\n")
    print(f"{len(names)} families, {tokens} tokens, {wrong_tokens} wrong. Tiny random targets, fp32, CPU; drafts that")
    print(f"err in one token of ten, blocks of {BLOCK_SIZE}, {NEW_TOKENS} new tokens. Batches: four prompts of")
    print("different lengths, left-padded. Sampling: one prompt, the same seed with and without a drafter. tau:")
    print("tokens committed per verification, the target's own included.\n")
    print("```\npython examples/benchmarks/families.py > examples/benchmarks/results/families.md\n```\n")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {platform.machine()}, ", end="")
    print(f"{torch.get_num_threads()} thread(s), {time.time() - began:.0f} s.\n")
    print("| target | family | greedy | tau | batch | tau | sampled | tau | rollback |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(sorted(lines)))


if __name__ == "__main__":
    main()
