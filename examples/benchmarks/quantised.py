"""
Quantised targets and quantised drafters: what is left of the acceptance length, and what a short training on the
quantised target's own answers brings back.

    python examples/benchmarks/quantised.py WORK [--rows 300] [--steps 400] [--prompts 32] [--max-new-tokens 64]

The pair is `smollm2`. Its target is quantised by torchao (8 bits; 4 bits in groups of 32) and by bitsandbytes (NF4),
and saved as a folder, as users have it. Each answers the same requests by `dflash regenerate`; its answers train the
bundled drafter further by `dflash train`. The control is the same training on the answers of the target that is not
quantised. tau is measured on held-out chats, in blocks and in trees. Drafters are quantised when they are loaded.

Each part appends a line to `WORK/parts.jsonl` and is skipped from then on; `results/quantised.md` is rewritten after
each. Needs torchao and bitsandbytes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from cells import acceptance_lengths, read_json_lines
from transformers import AutoTokenizer, BitsAndBytesConfig, TorchAoConfig

from dflash_hf import DFlashDraftModel, cli
from dflash_hf._io.files import atomic
from dflash_hf.evaluation.measure import hardware, with_decoding_config
from dflash_hf.evaluation.methods import TREE_NODES
from dflash_hf.pairs.loading import Loading, load_draft, load_target
from dflash_hf.smollm2 import data_folder, drafter_folder, smollm2_folder


RESULT = Path(__file__).parent / "results" / "quantised.md"
MASK_TOKEN = 16  # of the bundled drafter
ROWS_AT_A_TIME = 8
FP32 = "fp32"
BF16 = "bf16"
TARGETS = {
    FP32: "fp32",
    BF16: "bf16",
    "int8": "int8 weights (torchao `Int8WeightOnlyConfig`)",
    "nf4": "4 bit, NF4 (bitsandbytes)",
    "int4": "4 bit, groups of 32 (torchao `IntxWeightOnlyConfig`)",
}
BUNDLED = "bundled"
DRAFTERS = {
    "int8": "int8 weights (torchao `Int8WeightOnlyConfig`)",
    "nf4": "4 bit, NF4 (bitsandbytes), without head and convolution",
    "int4": "4 bit, groups of 32 (torchao `IntxWeightOnlyConfig`)",
    "fp8": "fp8 weights (torchao `Float8WeightOnlyConfig`)",
}


def quantisation(kind: str):
    """The `quantization_config` of a kind; `None`: it is not quantised."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

    if kind == "nf4":
        # The convolution's projections have 144 rows, and kernels for CPUs take multiples of 32.
        options = {"bnb_4bit_compute_dtype": torch.bfloat16, "llm_int8_skip_modules": ["kernel_projection", "lm_head"]}
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **options)
    if kind == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig(version=2))
    if kind == "fp8":
        return TorchAoConfig(Float8WeightOnlyConfig())
    if kind == "int4":
        return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    return None


# ----------------------------------------------------------------------------------------------------------- the parts


class Work:
    """The folder of a benchmark: what its parts have written, and the figures of those that are done."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.folder: Path = arguments.work
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lines = self.folder / "parts.jsonl"
        self.figures = {}
        if self.lines.exists():
            for line in read_json_lines(self.lines):
                self.figures[line.pop("part")] = line

    def put(self, part: str, **figures) -> None:
        """Append the figures of a part."""
        with self.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": part, **figures}) + "\n")
        self.figures[part] = figures
        print(part, figures, flush=True)

    def target(self, kind: str) -> Path:
        """The folder of a target."""
        return smollm2_folder() if kind in (FP32, BF16) else self.folder / f"target-{kind}"

    def answers(self, kind: str) -> Path:
        """The answers of a target, on which a drafter is trained."""
        return self.folder / f"answers-{kind}.jsonl"

    def drafter(self, kind: str) -> Path:
        """The folder of the bundled drafter, or of one trained on a target's answers."""
        return drafter_folder() if kind == BUNDLED else self.folder / f"drafter-{kind}"


def chats(name: str) -> list[dict]:
    """The chats of a file of the bundled drafter's data."""
    return [row for row in read_json_lines(data_folder() / name) if row["kind"] == "chat"]


def dflash(*arguments) -> None:
    code = cli.main([str(argument) for argument in arguments])
    if code:
        sys.exit(code)


def load_quantised(kind: str, dtype: str):
    """The target, quantised when it is loaded."""
    loading = Loading(dtype, device="cpu")
    return load_target(str(smollm2_folder()), loading, quantization_config=quantisation(kind))


@torch.no_grad()
def save_target(work: Work, kind: str) -> None:
    """A plain model with the quantised target's weights: the same numbers at the speed of bf16."""
    from bitsandbytes.functional import dequantize_4bit

    quantised = load_quantised(kind, "bfloat16")
    plain = load_target(str(smollm2_folder()), Loading("bfloat16", device="cpu"))
    for name, module in plain.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        weight = quantised.get_submodule(name).weight
        if hasattr(weight, "quant_state"):
            weight = dequantize_4bit(weight.data, weight.quant_state)
        elif type(weight) is not torch.nn.Parameter:
            weight = weight.dequantize()
        module.weight.copy_(weight)
    plain.save_pretrained(work.target(kind))
    AutoTokenizer.from_pretrained(smollm2_folder()).save_pretrained(work.target(kind))


def answer_requests(work: Work, kind: str) -> None:
    """The target's greedy answers to requests that the bundled drafter's training set has."""
    requests = work.folder / "requests.jsonl"
    rows = chats("answers.jsonl.gz")[: work.arguments.rows]
    with atomic(requests) as half:
        half.write_text("".join(json.dumps({"messages": row["messages"][:1]}) + "\n" for row in rows))
    greedy = ("--mask-token-id", MASK_TOKEN, "--temperature", 0, "--max-new-tokens", 128, "--dtype", "bfloat16")
    files = ("--data", requests, "--output", work.answers(kind))
    dflash("regenerate", "--target", work.target(kind), *files, *greedy, "--batch-size", 32)


def train(work: Work, kind: str) -> None:
    """The bundled drafter, trained further on a target's own answers, with that target's features."""
    models = ("--target", work.target(kind), "--target-dtype", "bfloat16", "--draft", drafter_folder())
    files = ("--data", work.answers(kind), "--output-dir", work.drafter(kind), "--overwrite-output-dir", "true")
    steps = ("--max-steps", work.arguments.steps, "--held-out-rows", 0, "--learning-rate", 2e-4)
    dflash("train", *models, *files, *steps, "--disable-tqdm", "true", "--report-to", "none", "--save-strategy", "no")


def acceptance(work: Work, target, draft) -> dict[str, float]:
    """
    tau on held-out chats: tokens committed per verification, over all verifications; in blocks, and in trees.
    """
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    rows = chats("held_out.jsonl.gz")[: work.arguments.prompts]
    options = {"add_generation_prompt": True, "return_dict": False}
    prompts = [tokenizer.apply_chat_template(row["messages"][:1], **options) for row in rows]
    figures: dict[str, float] = {}
    lengths = acceptance_lengths(target, draft, prompts, work.arguments.max_new_tokens, ROWS_AT_A_TIME)
    for name, lengths_of_method in lengths.items():
        figures[name] = statistics.fmean(lengths_of_method)
        figures[f"{name}_verifications"] = len(lengths_of_method)
    return figures


def load(name: Path, dtype: str, loader):
    return loader(str(name), Loading(dtype, device="cpu"))


def measure_target(work: Work, target_kind: str, drafter_kind: str) -> dict[str, float]:
    dtype = "float32" if target_kind == FP32 else "bfloat16"
    target = load(work.target(target_kind), dtype, load_target)
    draft = load(work.drafter(drafter_kind), dtype, load_draft)
    return acceptance(work, target, draft)


def measure_drafter(work: Work, kind: str) -> dict[str, float]:
    target = load(work.target(BF16), "bfloat16", load_target)
    config = quantisation(kind)
    draft = DFlashDraftModel.from_pretrained(drafter_folder(), quantization_config=config, dtype=torch.bfloat16).eval()
    return acceptance(work, target, draft)


def check_text(work: Work, kind: str) -> dict[str, float]:
    """Whether a quantised target, with its library's kernels in fp32, writes with the drafter what it writes alone."""
    target = load_quantised(kind, "float32")
    draft = load(drafter_folder(), "float32", load_draft)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    rows = chats("held_out.jsonl.gz")[:4]
    blocks = with_decoding_config(draft, block_size=draft.config.max_block_tokens)
    equal = 0
    lengths = []
    for row in rows:
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        inputs = tokenizer.apply_chat_template(row["messages"][:1], **options)
        alone = target.generate(**inputs, max_new_tokens=48, do_sample=False)
        options = {"max_new_tokens": 48, "do_sample": False, "return_dict_in_generate": True}
        drafted = target.generate(**inputs, assistant_model=blocks, **options)
        equal += torch.equal(alone, drafted.sequences)
        lengths += drafted.acceptance_lengths[0]
    return {
        "equal": equal,
        "texts": len(rows),
        "blocks": sum(lengths) / max(len(lengths), 1),
    }  # 0: it declined the drafter


# -------------------------------------------------------------------------------------------------------------- report


def parts_of(work: Work) -> dict[str, Callable[[], None]]:
    """What to measure, by name; what matters most comes first."""
    parts: dict[str, Callable[[], None]] = {}

    def measure(target_kind: str, drafter_kind: str = BUNDLED) -> None:
        if target_kind not in (FP32, BF16):
            parts[f"target {target_kind}"] = partial(save_target, work, target_kind)
        parts[f"tau {target_kind} {drafter_kind}"] = partial(measure_target, work, target_kind, drafter_kind)

    def learn(kind: str) -> None:
        parts[f"answers {kind}"] = partial(answer_requests, work, kind)
        parts[f"train {kind}"] = partial(train, work, kind)
        measure(kind, kind)
        if kind in ("int4", "int8"):  # that of nf4 comes before the control's answers
            measure(kind, BF16)

    measure(BF16)
    measure("nf4")
    for kind in ("int8", "int4"):
        measure(kind)
        parts[f"drafter {kind}"] = partial(measure_drafter, work, kind)
    parts["drafter nf4"] = partial(measure_drafter, work, "nf4")
    for kind in ("nf4", "int8"):
        parts[f"text {kind}"] = partial(check_text, work, kind)
    measure(FP32)
    parts["drafter fp8"] = partial(measure_drafter, work, "fp8")
    learn("nf4")
    learn(BF16)
    measure("nf4", BF16)
    learn("int4")
    learn("int8")
    parts["text int4"] = partial(check_text, work, "int4")
    return parts


def write_report(work: Work) -> None:
    """Rewrite the results' file with the parts that are done."""
    arguments = work.arguments
    reference = work.figures.get(f"tau {BF16} {BUNDLED}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULT.parent)
    packages = ("torch", "transformers", "torchao", "bitsandbytes")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    command = f"quantised.py WORK --rows {arguments.rows} --steps {arguments.steps} --prompts {arguments.prompts}"
    lines = [
        "# Quantised targets and drafters",
        "",
        f"`python examples/benchmarks/{command} --max-new-tokens {arguments.max_new_tokens}`. "
        f"{date.today():%d %B %Y}, commit {commit.stdout.strip()}, {versions}; one thread of "
        f"{hardware(torch.device('cpu'))} beside other jobs, on which tau does not depend.",
        "",
        "SmolLM2-135M-Instruct and its bundled drafter; the package's target is itself 4 bit (GGUF Q4_1), unpacked to "
        "bf16, and that is the model called fp32 and bf16 here: what is quantised below is quantised a second time. "
        f"tau: tokens committed per verification on {arguments.prompts} held-out chats of {arguments.max_new_tokens} "
        f"tokens, greedy, {ROWS_AT_A_TIME} rows at a time; in blocks of 8, and in trees of {TREE_NODES} tokens. All "
        "compute in bf16, except for the row fp32. Targets are the plain copies of the quantised weights, which write "
        "the same up to rounding; the column *texts* is of the library's own kernels, in fp32: texts that are equal "
        "with and without the drafter, and tau in blocks over them.",
        "",
        "## Targets",
        "",
        "| target | drafter | blocks | trees | of bf16 | texts |",
        "|---|---|---|---|---|---|",
    ]
    drafters = {BUNDLED: "bundled", BF16: "trained on the bf16 target's answers"}
    for kind, label in TARGETS.items():
        text = work.figures.get(f"text {kind}")
        column = ""
        if text is not None:
            drafted = f"tau {text['blocks']:.2f}" if text["blocks"] else "decoded without the drafter"
            column = f"{text['equal']} of {text['texts']}, {drafted}"
        for drafter, name in (drafters | {kind: drafters.get(kind, "trained on its own answers")}).items():
            figures = work.figures.get(f"tau {kind} {drafter}")
            if figures is not None:
                lines.append(f"| {label} | {name} | {_taus(figures, reference)} | {column} |")
                column = ""
    lines += ["", "## Drafters, on the bf16 target", "", "| drafter | blocks | trees | of bf16 |", "|---|---|---|---|"]
    for part, label in (
        (f"tau {BF16} {BUNDLED}", "bf16"),
        *((f"drafter {kind}", DRAFTERS[kind]) for kind in DRAFTERS),
    ):
        if part in work.figures:
            lines.append(f"| {label} | {_taus(work.figures[part], reference)} |")
    missing = [part for part in parts_of(work) if part not in work.figures]
    if missing:
        lines += ["", f"Not measured yet, the same command goes on with them: {', '.join(missing)}."]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _taus(figures: dict, reference: dict | None) -> str:
    """Three columns: tau in blocks, in trees, and the change of both from the bf16 pair."""
    change = ""
    if reference is not None:
        change = ", ".join(f"{figures[way] / reference[way] - 1:+.0%}" for way in ("blocks", "trees"))
    return f"{figures['blocks']:.2f} | {figures['trees']:.2f} | {change}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rows", type=int, default=300, help="answers of each target")
    parser.add_argument("--steps", type=int, default=400, help="steps of each training")
    parser.add_argument("--prompts", type=int, default=32, help="held-out chats")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    torch.set_num_threads(1)
    work = Work(parser.parse_args())
    for part, measure in parts_of(work).items():
        if part in work.figures:
            continue
        begin = time.process_time()
        figures = measure() or {}
        work.put(part, cpu_seconds=round(time.process_time() - begin), **figures)
        write_report(work)
    write_report(work)


if __name__ == "__main__":
    main()
