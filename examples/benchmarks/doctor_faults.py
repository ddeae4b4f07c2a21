"""
Does `dflash doctor` find what is wrong? Faults are injected into a pair one by one, and the doctor is run on each.

By default the pair is the tiny pair of the tests (`tests/support/chat_pair.py`), trained on the spot in fp32; with
`--target` and `--draft` another pair, without the faults that need training or a thinking mode.

    OMP_NUM_THREADS=1 python examples/benchmarks/doctor_faults.py
    python examples/benchmarks/doctor_faults.py --target smollm2 --draft smollm2
"""

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.chat_pair import OFF, chat_tokenizer, requests, train_chat_draft, train_chat_target
from support.faults import FAULTS, anchor_first, thinking

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.template import ChatTemplate
from dflash_hf.doctor import PairCase, diagnose
from dflash_hf.evaluation.measure import hardware
from dflash_hf.evaluation.sets import rows_of_every_kind
from dflash_hf.pairs.loading import Loading, load_draft, load_target
from dflash_hf.pairs.tokenizers import load_tokenizer
from dflash_hf.targets.frozen import freeze


def tiny_case() -> PairCase:
    tokenizer = chat_tokenizer()
    target = train_chat_target(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        draft = train_chat_draft(target, tokenizer, folder)
    rows = [{"prompt": request} for request in requests(40, seed=9)]
    encoder = RowEncoder(ChatTemplate(tokenizer, OFF))
    return PairCase(target, draft, rows, encoder, max_new_tokens=40, batch_size=40)


def real_case(arguments) -> PairCase:
    loading = Loading(arguments.dtype)
    target = freeze(load_target(arguments.target, loading, "cpu"))
    draft = load_draft(arguments.draft, loading, "cpu")
    kwargs = (draft.config.dflash_config or {}).get("chat_template_kwargs", {})
    encoder = RowEncoder(ChatTemplate(load_tokenizer(arguments.target), kwargs))
    rows = rows_of_every_kind(arguments.prompts)
    lengths = (arguments.max_new_tokens, arguments.blocks)
    return PairCase(target, draft, rows, encoder, None, *lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--faults", help="names, separated by commas; default: all")
    arguments = parser.parse_args()
    case = real_case(arguments) if arguments.target else tiny_case()
    left_out = {thinking, anchor_first} if arguments.target else set()
    names = arguments.faults.split(",") if arguments.faults else ["none", *(fault.__name__ for fault in FAULTS)]
    faults = {"none": (lambda case, **_: None, None)} | {fault.__name__: (fault, FAULTS[fault]) for fault in FAULTS}
    pair = Path(arguments.draft).name if arguments.draft else "the pair of tests/support/chat_pair.py"
    print(
        f"{pair}, {hardware(case.target.device)}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    print("\n| fault | tau | named | tau then | standard errors | right |\n|---|---|---|---|---|---|", flush=True)
    for name in names:
        put_in, expected = faults[name]
        if put_in in left_out:
            continue
        start = time.perf_counter()
        patient = copy.copy(case)
        with tempfile.TemporaryDirectory() as folder:
            put_in(patient, folder=folder)
            diagnosis = diagnose(patient)
        cells = ["nothing" if diagnosis.cause is None else diagnosis.cause.key, "", ""]
        of_cause = [result for result in diagnosis.results if result.experiment.cause is diagnosis.cause]
        if of_cause:
            result = of_cause[0]
            cells = [result.experiment.name, f"{result.after.tau:.2f}", f"{result.accepted_gain[1]:+.1f}"]
        is_right = "yes" if (diagnosis.cause and diagnosis.cause.key) == expected else "no"
        print(
            f"| {name.replace('_', ' ')} | {diagnosis.unchanged.tau:.2f} | {' | '.join(cells)} | {is_right} |",
            flush=True,
        )
        print(*diagnosis.lines(), f"{time.perf_counter() - start:.0f} s", sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
