"""
A training run on two nodes with many rows, on one machine: what reading, encoding, holding out, shuffling, sharding,
checkpoints and resumption cost, and whether every row is read once.

    python examples/benchmarks/scale.py WORK                         # 200,000 rows; results: `results/scale.md`
    python examples/benchmarks/scale.py WORK --rows 1000 --batch 16

`accelerate launch` starts two agents with one process each, as two machines would; each has its own cache of
`datasets`, and both write to one folder, as on a shared disk. The target is tiny and the rows are short: what is
measured is the rows, not the models. One pass over the rows, in two runs:

    killed    the second node dies (SIGKILL of its process and its agent) three steps after the second checkpoint; the
              first one is watched until it ends
    resumed   both nodes again, with `--resume-from-checkpoint auto`, to the end

Each process writes down which rows it has trained on in which step, the losses, when each phase ended, and its memory:
pages of its own (anonymous), and of files, which the system may drop.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import datasets
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback


ROOT = Path(__file__).resolve().parents[2]
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)
DIGITS_OF_ROW = 7  # each row begins with its number, by which the rows of a step are recognised
NODES = 2
SAVES_PER_PASS = 4


# ----------------------------------------------------------------------------------------------- data and target


def write_rows(path: Path, rows: int) -> None:
    """Short conversations, each with its number."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            name = f"{number:0{DIGITS_OF_ROW}d}"
            messages = [{"role": "user", "content": name}, {"role": "assistant", "content": name[::-1]}]
            file.write(json.dumps({"messages": messages}) + "\n")


def save_target(folder: Path) -> None:
    """A tiny target with one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=280,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


# ----------------------------------------------------------------------------------------------- one process


class Recorder(TrainerCallback):
    """Writes the time, the memory and the rows of each step to a file, line by line, so that a kill loses none."""

    def __init__(self, path: Path):
        self.file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, event: str, **facts) -> None:
        """Write a line: seconds since the process began, its CPU seconds, and MB of memory."""
        usage = _memory()
        cpu = sum(os.times()[:4])
        line = {"event": event, "time": time.time(), "cpu": round(cpu, 2), **usage, **facts}
        self.file.write(json.dumps(line) + "\n")

    def on_log(self, args, state, control, logs=None, **kwargs):
        """A step is over."""
        if "loss" in logs:
            self.write("loss", step=state.global_step, loss=logs["loss"])

    def on_train_begin(self, args, state, control, **kwargs):
        """The first step follows."""
        self.write("first step", step=state.global_step)

    def on_save(self, args, state, control, **kwargs):
        """A checkpoint is complete."""
        self.write("checkpoint", step=state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        """The last step is over."""
        self.write("last step", step=state.global_step)


def _memory() -> dict[str, float]:
    """MB of this process: anonymous pages, and those of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1e3 for line in lines if line.startswith(("Rss", "VmHWM"))}
    return {"own_mb": round(sizes["RssAnon"]), "file_mb": round(sizes["RssFile"]), "peak_mb": round(sizes["VmHWM"])}


def train_process(settings: list[str], folder: Path) -> None:
    """Train as `dflash train` does, and record the phases and the rows of each step."""
    from dflash_hf.training import train as training
    from dflash_hf.training.recipe import parse_option, read_recipe
    from dflash_hf.training.trainer import DFlashTrainer

    recorder = Recorder(folder / f"rank{os.environ['RANK']}.jsonl")
    recorder.write("start")
    die_at = int(os.environ["DIE_AT"])
    original = DFlashTrainer.get_batch_samples

    def get_batch_samples(trainer, *args, **kwargs):
        """As it is, and the rows are recorded."""
        result = original(trainer, *args, **kwargs)
        rows = [_row_number(ids) for batch in result[0] for ids in batch["input_ids"].tolist()]
        step = trainer.state.global_step + 1
        recorder.write("step", step=step, rows=rows)
        if step == die_at:
            recorder.write("killed", step=step)
            os.kill(os.getppid(), signal.SIGKILL)  # the agent, which would start or report something
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    DFlashTrainer.get_batch_samples = get_batch_samples
    for name, function in (("encoded", "_prepare_data"), ("trainer", "_make_trainer")):
        setattr(training, function, _recorded(getattr(training, function), name, recorder))
    training.note = print
    options = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        options[name] = parse_option(name, text)
    trainer = training.train(*read_recipe(None, options), echo=print, callbacks=[recorder])
    recorder.write("end", held_out_rows=len(trainer.eval_dataset))
    del trainer  # its model holds the group
    training.leave_group()


def _recorded(function, name: str, recorder: Recorder):
    """A function after which an event is recorded."""

    def wrapper(*args, **kwargs):
        result = function(*args, **kwargs)
        recorder.write(name)
        return result

    return wrapper


def _row_number(ids: list[int]) -> int:
    """The number with which a row begins, after `<|im_start|>u` and a line break."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first = 1 + len("u\n")
    return int("".join(alphabet[token - len(SPECIAL)] for token in ids[first : first + DIGITS_OF_ROW]))


# ----------------------------------------------------------------------------------------------- two nodes


def start_node(rank: int, port: int, settings: list[str], folder: Path, cache: Path, die_at: int) -> subprocess.Popen:
    """One node: an agent of `accelerate launch` with one process."""
    env = {**os.environ, "HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"DIE_AT": str(die_at if rank == NODES - 1 else 0)}
    command = ["nice", "-n", "10", sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(ROOT / "examples" / "accelerate" / "ddp.yaml"), "--mixed_precision", "no"]
    command += ["--num_machines", str(NODES), "--num_processes", str(NODES), "--machine_rank", str(rank)]
    command += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    command += [__file__, "process", str(folder), *settings]
    log = (folder / f"node{rank}.log").open("w")
    return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def read_events(folder: Path) -> list[list[dict]]:
    """What each process has recorded, without a line that a kill has cut."""
    events = []
    for rank in range(NODES):
        path = folder / f"rank{rank}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        events.append([json.loads(line) for line in lines if line.endswith("\n")])
    return events


def run_nodes(name: str, work: Path, settings: list[str], timeout: float, die_at: int = 0) -> list[int]:
    """
    Start both nodes, and wait for them; the exit statuses of their agents.

    Args:
        die_at (`int`): The step in which the second node dies; 0: it does not.
    """
    folder = work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [start_node(rank, port, settings, folder, work / f"cache{rank}", die_at) for rank in range(NODES)]
    try:
        return [node.wait(timeout=timeout) for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                node.kill()


def steps_of(events: list[list[dict]]) -> dict[int, list[list[int]]]:
    """For each step, the rows of each process."""
    steps: dict[int, list[list[int]]] = {}
    for rank, lines in enumerate(events):
        for line in lines:
            if line["event"] == "step":
                steps.setdefault(line["step"], [[] for _ in range(NODES)])[rank] = line["rows"]
    return steps


def losses_of(lines: list[dict]) -> dict[int, float]:
    """The loss of each step."""
    return {line["step"]: line["loss"] for line in lines if line["event"] == "loss"}


def last_of(lines: list[dict], event: str) -> dict:
    """The last line of an event."""
    return [line for line in lines if line["event"] == event][-1]


def phases_of(lines: list[dict]) -> dict[str, float]:
    """Seconds by the clock and of the processor between the events of a process."""
    names = ("start", "encoded", "trainer", "first step", "last step", "end")
    marks = [last_of(lines, name) for name in names if any(line["event"] == name for line in lines)]
    seconds = {}
    for before, after in zip(marks, marks[1:]):
        seconds[after["event"]] = (after["time"] - before["time"], after["cpu"] - before["cpu"])
    return seconds


def measure(work: Path, rows: int, batch: int, timeout: float) -> dict:
    """Make both runs, and compare what they read."""
    work.mkdir(parents=True, exist_ok=True)
    write_rows(work / "rows.jsonl", rows)
    save_target(work / "target")
    save_steps = max(rows // (NODES * batch) // SAVES_PER_PASS, 2)
    settings = [f"target={work / 'target'}", f"data={work / 'rows.jsonl'}", "mask_token_id=null", "preset=paper"]
    settings += ["target_layer_ids=[0, 1]", "num_draft_layers=1", "block_size=4", "num_anchors=1", "max_length=64"]
    settings += ["num_train_epochs=1", f"per_device_train_batch_size={batch}", "gradient_accumulation_steps=1"]
    settings += ["bf16=false", "use_cpu=true", "target_dtype=float32", "logging_steps=1", f"save_steps={save_steps}"]
    settings += ["save_total_limit=2", "disable_tqdm=true", "report_to=none", "dataloader_num_workers=0"]

    # 1. A run until a node dies, and the rest of it.
    output = work / "output"
    settings += [f"output_dir={output}"]
    last_save = 2 * save_steps
    codes_after_death = run_nodes("killed", work, settings, timeout, die_at=last_save + 3)
    ended = time.time()
    codes = run_nodes("resumed", work, [*settings, "resume_from_checkpoint=auto"], timeout)
    if codes != [0, 0]:
        raise SystemExit(f"The nodes ended with {codes}, see {work / 'resumed'}.")

    # 2. Which rows were read: until the checkpoint by the first run, from there on by the second one.
    killed = read_events(work / "killed")
    resumed = read_events(work / "resumed")
    steps_before = steps_of(killed)
    steps_after = steps_of(resumed)
    steps = {step: rows_of_ranks for step, rows_of_ranks in steps_before.items() if step <= last_save} | steps_after
    read = [row for rows_of_ranks in steps.values() for rows_of_rank in rows_of_ranks for row in rows_of_rank]
    losses_before = losses_of(killed[0])
    losses_after = losses_of(resumed[0])
    again = sorted(losses_before.keys() & losses_after.keys())
    checkpoints = sorted(output.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    facts = {
        "rows": rows,
        "batch": batch,
        "steps": len(steps),
        "trained_rows": len(read),
        "different_rows": len(set(read)),
        "held_out": last_of(resumed[0], "end")["held_out_rows"],
        "in_file_order": read == sorted(read),
        "steps_made_twice": again,
        "same_rows_twice": all(steps_before[step] == steps_after[step] for step in again),
        "losses_twice": [(losses_before[step], losses_after[step]) for step in again],
        "resumed_from": last_save,
        "exit_statuses_after_death": codes_after_death,
        "seconds_until_the_other_ended": ended - last_of(killed[1], "killed")["time"],
        "checkpoint_bytes": sum(file.stat().st_size for file in checkpoints[-1].iterdir()),
        "checkpoint_files": sorted(file.name for file in checkpoints[-1].iterdir()),
        "cache_bytes": [_bytes_of(work / f"cache{rank}") for rank in range(NODES)],
        "data_bytes": (work / "rows.jsonl").stat().st_size,
    }
    for name, events in (("killed", killed), ("resumed", resumed)):
        for rank, lines in enumerate(events):
            memory = {key: max(line[key] for line in lines) for key in ("own_mb", "file_mb", "peak_mb")}
            facts[f"{name} {rank}"] = {"phases": phases_of(lines), **memory}
    return facts


def _bytes_of(folder: Path) -> int:
    """The size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    if sys.argv[1:2] == ["process"]:
        train_process(sys.argv[3:], Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=256, help="rows of a step in each process")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for each run")
    arguments = parser.parse_args()
    facts = measure(arguments.work, arguments.rows, arguments.batch, arguments.timeout)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, datasets {datasets.__version__}"
    facts["machine"] = f"{_processor()}, {versions}, {date.today()}"
    (arguments.work / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


def _processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.processor()


if __name__ == "__main__":
    main()
