"""The command line, `dflash COMMAND`. The only module that prints."""

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dflash_hf.terminal import add_color, positive, wants_color


# Commands that live in rooms of their own, as `add_arguments(parser)` and `run(arguments, echo) -> int`. A room is
# imported when its command is asked for: torch takes seconds.
_ROOMS = {
    "bench": ("dflash_hf.evaluation.bench", "time every way of decoding a pair side by side"),
    "check": ("dflash_hf.hub.check", "will vLLM, SGLang and transformers read a drafter's folder, and read the same?"),
    "convert": ("dflash_hf.convert", "rewrite a drafter in another published layout"),
    "eval": ("dflash_hf.evaluation.command", "measure tau, speed-up and losslessness of a pair on prompts"),
    "features": (
        "dflash_hf.training.offline",
        "store the target's features of a dataset, for training without its layers",
    ),
    "prepare": ("dflash_hf.data.prepare", "show what of a dataset is learned, count it, and write it as ids"),
    "prompts": ("dflash_hf.data.magpie", "let a chat target write the requests that its drafter is trained on"),
    "regenerate": ("dflash_hf.data.regenerate", "write the target's own responses to the prompts of a dataset"),
    "smollm2": (
        "dflash_hf.demo.smollm2",
        "print the folder of SmolLM2-135M-Instruct, made by the first call",
    ),
    "train": ("dflash_hf.training.train", "train a drafter by a recipe"),
    "publish": ("dflash_hf.hub.publish", "upload a drafter with its card to the Hub"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command.

    Args:
        argv (`Sequence[str]`, *optional*): Arguments after the program's name. Default: the process's.

    Returns:
        `int`: 0; 1 after an error that was told in one line, or a result that is not lossless; 130 after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser(argv[0] if argv else "").parse_args(argv)
    try:
        return arguments.run(arguments, _echo)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:
        print(f"dflash {arguments.command}: {error}", file=sys.stderr)
        return 1


def _echo(line: str) -> None:
    print(line, flush=True)


def _parser(chosen: str) -> argparse.ArgumentParser:
    from dflash_hf import __version__

    parser = argparse.ArgumentParser(prog="dflash", description="Train, publish and run DFlash drafters.")
    parser.add_argument("--version", action="version", version=f"dflash-hf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add, run, summary in (
        ("demo", _add_demo, _demo, "train a small target and its drafter on this machine, and compare"),
        ("generate", _add_generate, _generate, "decode a prompt with a target and its drafter"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        add(command)
        command.set_defaults(run=run)
    for name, (module, summary) in _ROOMS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            room = importlib.import_module(module)
            room.add_arguments(command)
            command.set_defaults(run=room.run)
    return parser


def _add_demo(parser) -> None:
    parser.add_argument("--fresh", action="store_true", help="train even if a trained pair is in the cache")
    parser.add_argument(
        "--cache-dir", type=Path, help="where pair, figures and picture are kept; default: ~/.cache/dflash_hf/demo"
    )
    parser.add_argument("--seed", type=int, default=0, help="of data, weights and anchors; default: %(default)s")
    parser.add_argument("--self-generate", action="store_true", help="train the drafter on the target's own answers")
    parser.add_argument("--source", help="folder of Python files to learn from; default: the standard library")
    parser.add_argument("--prompts", type=positive, default=40, help="held-out lines to decode; default: %(default)s")
    parser.add_argument("--runs", type=positive, default=2, help="timed repetitions; default: %(default)s")
    parser.add_argument("--target-steps", type=positive, help="optimizer steps of the target")
    parser.add_argument("--draft-steps", type=positive, help="optimizer steps of the drafter")
    add_color(parser, "accepted draft tokens")


def _add_generate(parser) -> None:
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--draft", help="folder or Hub name of its drafter; without it the target decodes alone")
    parser.add_argument("--prompt", required=True, help="the user's message; - reads it from standard input")
    parser.add_argument("--raw", action="store_true", help="feed the prompt as it is, without the chat template")
    parser.add_argument("--max-new-tokens", type=positive, default=512, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the sample; default: %(default)s")
    parser.add_argument("--dtype", default="auto", help="of both models: auto, float32, bfloat16, float16")
    parser.add_argument(
        "--device", help="cpu, cuda, cuda:1, ... or auto, to spread a large target; default: a GPU if any"
    )
    parser.add_argument("--threads", type=positive, help="CPU threads of this process; default: as torch chooses")
    parser.add_argument(
        "--show-drafts", action="store_true", help="print the text again, accepted draft tokens marked"
    )
    parser.add_argument("--compare", action="store_true", help="also decode with the target alone")
    add_color(parser, "accepted draft tokens")


def _demo(arguments, echo) -> int:
    from dflash_hf.demo.cache import default_cache_dir
    from dflash_hf.demo.run import DemoSettings, run_demo

    chosen = {
        "seed": arguments.seed,
        "self_generate": arguments.self_generate,
        "source": arguments.source and str(Path(arguments.source).resolve()),
        "target_steps": arguments.target_steps,
        "draft_steps": arguments.draft_steps,
    }
    report = run_demo(
        DemoSettings(**{name: value for name, value in chosen.items() if value is not None}),
        arguments.cache_dir or default_cache_dir(),
        arguments.fresh,
        arguments.prompts,
        arguments.runs,
        wants_color(arguments.color, sys.stdout),
        say=echo,
    )
    return 0 if report.lossless else 1


def _generate(arguments, echo) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed

    from dflash_hf import DFlashDraftModel
    from dflash_hf.evaluation.text import colored_answer

    if arguments.temperature < 0:
        raise ValueError(f"--temperature {arguments.temperature} must not be negative; 0 decodes greedily.")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    loading = {"dtype": arguments.dtype, "device_map": device}
    AutoConfig.from_pretrained(arguments.target)  # says more clearly than the tokenizer that there is no model
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, **loading).eval()
    draft = DFlashDraftModel.from_pretrained(arguments.draft, **loading).eval() if arguments.draft else None

    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if tokenizer.chat_template and not arguments.raw:
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs = inputs.to(target.device)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise ValueError("--prompt is empty under this tokenizer; pass some text.")
    options = {"max_new_tokens": arguments.max_new_tokens, "return_dict_in_generate": True, "do_sample": False}
    if arguments.temperature:
        options.update(do_sample=True, temperature=arguments.temperature, top_p=arguments.top_p)

    def decode(**extra):
        set_seed(arguments.seed)
        start = time.perf_counter()
        output = target.generate(**inputs, **options, **extra)
        seconds = time.perf_counter() - start
        ids = output.sequences[0, length:].tolist()
        return output, ids, f"{len(ids)} tokens in {seconds:.2f} s, {len(ids) / seconds:.1f} tokens/s"

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    output, ids, speed = decode(streamer=streamer, **({"assistant_model": draft} if draft is not None else {}))
    # Figures go to standard error, so that the text alone can be piped.
    lengths = getattr(output, "acceptance_lengths", None)
    if lengths and lengths[0]:
        speed += f", tau {sum(lengths[0]) / len(lengths[0]):.2f} over {len(lengths[0])} verifications"
        if arguments.show_drafts:
            pieces = [tokenizer.decode([token]) for token in ids]
            echo(f"\n{colored_answer(pieces, lengths[0], wants_color(arguments.color, sys.stdout))}")
    print(f"\nwith the drafter: {speed}" if draft is not None else f"\ntarget alone: {speed}", file=sys.stderr)
    if arguments.compare and draft is not None:
        _, alone, speed = decode()
        equal = "the same tokens" if alone == ids else "other tokens"
        print(f"target alone: {speed}; {equal}", file=sys.stderr)
    return 0


if __name__ == "__main__":  # for `accelerate launch -m dflash_hf.cli train`
    sys.exit(main())
