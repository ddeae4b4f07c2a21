# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.8", "transformers>=5.20", "huggingface-hub", "accelerate", "datasets", "peft", "pyyaml",
#     "jinja2", "dflash-hf"]
# ///
"""
Train a drafter on Hugging Face Jobs and publish it, in a single script with its own environment.

    hf jobs uv run --flavor a100-large --secrets HF_TOKEN examples/train_on_jobs.py \\
      --target Qwen/Qwen3-0.6B --data me/responses --repo me/Qwen3-0.6B-DFlash

The data are the target's own responses (`dflash regenerate`), as a Hub dataset: a job starts with an empty disk.
Until dflash-hf is on PyPI, build a wheel (`pip wheel . --no-deps`), put it where the job can download it and
name it with `--with URL` before the script. The script has not been run on a paid machine. `--dry-run` runs on any
machine: it reads the target's tokenizer and the data, and shows the settings that it chooses there.
"""

import argparse
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Hub name of the target")
    parser.add_argument("--data", required=True, help="Hub name of the dataset of its responses")
    parser.add_argument("--repo", required=True, help="where the drafter is published, such as me/my-drafter")
    parser.add_argument("--output", default="drafter", help="folder on the job's disk; default: %(default)s")
    parser.add_argument("--private", action="store_true", help="publish it in a private repository")
    parser.add_argument("--dry-run", action="store_true", help="only print the settings")
    arguments, further_options = parser.parse_known_args()  # further ones are those of `dflash train`

    # 1. Train. On several GPUs each process takes its share of the batches.
    settings = {
        "--preset": "paper",
        "--target": arguments.target,
        "--data": arguments.data,
        "--output-dir": arguments.output,
        "--report-to": "none",
    }
    train = ["train"]
    for option, value in settings.items():
        train += [option, value]
    train += further_options
    if arguments.dry_run:
        return subprocess.run([sys.executable, "-m", "dflash_hf.cli", *train, "--dry-run"]).returncode
    code = subprocess.run(["accelerate", "launch", "-m", "dflash_hf.cli", *train]).returncode
    if code:
        return code

    # 2. Ask whether engines will read it, and publish it with its card.
    publish = [
        "publish",
        arguments.output,
        arguments.repo,
        "--base-model",
        arguments.target,
        "--dataset",
        arguments.data,
    ]
    publish += ["--private"] if arguments.private else []
    return subprocess.run([sys.executable, "-m", "dflash_hf.cli", *publish]).returncode


if __name__ == "__main__":
    sys.exit(main())
