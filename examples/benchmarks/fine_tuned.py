"""
"My model is a fine-tune": how a published drafter fares, and what ten minutes of training recover.

    python examples/benchmarks/fine_tuned.py WORK [--minutes 10] [--rows 500]

SmolLM2-135M-Instruct learns, with a merged LoRA, to answer in a house style: a headline, numbered points, always the
same closing. Its own answers then train the bundled drafter (`draft=`), and another from scratch, by `dflash train`
with no setting but the minutes; all three are measured on held-out requests by `dflash eval`. Steps whose result is in
WORK are skipped. One CPU thread; writes `results/fine_tuned.md`.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path

import torch
from cells import read_json_lines
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import cli
from dflash_hf._io.files import atomic
from dflash_hf._io.names import REPORT_FILE
from dflash_hf.evaluation.methods import PLAIN_CALL
from dflash_hf.evaluation.report import EvalReport
from dflash_hf.smollm2 import data_folder, drafter_folder, smollm2_folder
from dflash_hf.training.time_budget import TimeBudget


TAUGHT = 240  # answers in the new style
RESULT = Path(__file__).parent / "results" / "fine_tuned.md"


def in_style(answer: str) -> str:
    """The same answer in the house style."""
    parts = [part.strip(" -*#") for part in re.split(r"\n+|(?<=[.!?])\s+", answer) if len(part) > 20]
    points = [f"{number}. {part}" for number, part in enumerate(parts[:5], start=1)]
    return "\n".join(["## Our answer", "", *points, "", "Yours sincerely, the team at Harbour & Sons."])


def fine_tune(folder: Path) -> None:
    """A LoRA on all linear layers, merged."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    optimizer = torch.optim.AdamW((parameter for parameter in model.parameters() if parameter.requires_grad), lr=5e-4)
    for number, row in enumerate(read_json_lines(data_folder() / "answers.jsonl.gz")[:TAUGHT]):
        answer = in_style(tokenizer.decode(row["response_ids"], skip_special_tokens=True))
        prompt = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
        ids = prompt + tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id]
        labels = [-100] * len(prompt) + ids[len(prompt) :]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.tensor([ids]), labels=torch.tensor([labels])).loss
        (loss / 4).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    model.merge_and_unload().to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def requests(name: str, rows: list[dict]) -> Path:
    path = Path(name)
    with atomic(path) as half:
        half.write_text("".join(json.dumps({"messages": row["messages"][:1]}) + "\n" for row in rows))
    return path


def dflash(*arguments) -> None:
    code = cli.main([str(argument) for argument in arguments])
    if code:
        sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of each training")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=24, help="held-out requests")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    TimeBudget.clock = staticmethod(time.process_time)
    work = arguments.work
    target = work / "target"
    answers = work / "answers.jsonl"
    held_out = work / "held_out.jsonl"
    work.mkdir(parents=True, exist_ok=True)
    if not (target / "config.json").exists():
        fine_tune(target)

    trained_rows = read_json_lines(data_folder() / "answers.jsonl.gz")[TAUGHT:]
    chats = [row for row in read_json_lines(data_folder() / "held_out.jsonl.gz") if row["kind"] == "chat"]
    prompts = requests(work / "prompts.jsonl", trained_rows[: arguments.rows])
    unseen = requests(work / "unseen.jsonl", chats[:24])
    greedy = ("--target", target, "--mask-token-id", 16, "--temperature", 0, "--max-new-tokens", 160)
    dflash("regenerate", "--data", prompts, "--output", answers, *greedy)
    dflash("regenerate", "--data", unseen, "--output", held_out, *greedy)

    drafters = {"the base model's drafter": drafter_folder()}
    starts = {"trained on": ["--draft", drafter_folder()], "from nothing": ["--mask-token-id", 16]}
    for name, settings in starts.items():
        drafters[name] = work / name.replace(" ", "-")
        if not (drafters[name] / "model.safetensors").exists():
            settings += ["--max-minutes", arguments.minutes, "--disable-tqdm", "true", "--report-to", "none"]
            dflash("train", "--target", target, "--data", answers, "--output-dir", drafters[name], *settings)

    answer_count = sum(1 for _ in answers.open())
    lines = [
        "# A drafter for a fine-tuned model",
        "",
        f"`python examples/benchmarks/fine_tuned.py WORK --minutes {arguments.minutes:g} --rows {arguments.rows} "
        f"--prompts {arguments.prompts} --max-new-tokens {arguments.max_new_tokens}`: "
        "SmolLM2-135M-Instruct with a merged LoRA that answers in a house style. "
        f"{answer_count} of its answers train the bundled drafter and a new one, "
        f"{arguments.minutes:g} CPU minutes each; "
        f"one thread, bf16, {arguments.prompts} held-out chats of {arguments.max_new_tokens} tokens, tau in blocks.",
        "",
        "| drafter | tau | speed-up of the plain call | over the packed target |",
        "|---|---|---|---|",
    ]
    for name, folder in drafters.items():
        report = work / f"report {name}".replace(" ", "-").replace("'", "")
        if not (report / REPORT_FILE).exists():
            pair = ("--target", target, "--draft", folder, "--threads", 1)
            amount = ("--prompts", arguments.prompts, "--max-new-tokens", arguments.max_new_tokens, "--runs", 1)
            dflash("eval", *pair, "--data", held_out, *amount, "--output", report)
        evaluation = EvalReport.from_json((report / REPORT_FILE).read_text(encoding="utf-8"))
        packed = evaluation.methods[PLAIN_CALL]
        lines.append(f"| {name} | {evaluation.tau:.2f} | {packed.speedup:.2f}x | {packed.speedup_over_packed:.2f}x |")
    RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
