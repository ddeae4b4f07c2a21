"""
What of DFlash's training matters on the demo's task, in equal CPU seconds, three seeds each.

One small target is trained and kept; then, for each variant and seed, a drafter is trained against
it for a fixed number of CPU seconds of its process, target forwards included, on one thread. Its acceptance length is
then measured by decoding held-out prompts with `target.generate(assistant_model=draft)`, every text compared with the
target's own.

    python examples/benchmarks/ablation.py [--seconds 15] [--seeds 3] [--only NAME ...] [--report]

Each finished run is one line of `runs.jsonl` in the folder; calling it again does what is missing. `ablation.json`,
`ablation.md` and `ablation.png` are written from the finished runs, to `examples/benchmarks/results` by default.

Two variants are not part of the package and live here: regular blocks (`RegularBlocks`) and input fusion
(`InputFusion`).
"""

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from ablation_results import USE_8, write_results
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback
from transformers.modeling_outputs import BaseModelOutputWithPast

from dflash_hf import (
    DFlashDraftConfig,
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
    generate_responses,
    make_example,
)
from dflash_hf.cache import default_cache_dir, whole_folder
from dflash_hf.demo.task import MASK, encode_pairs, read_task, train_tokenizer
from dflash_hf.demo.training import Muon, train_target
from dflash_hf.evaluation.measure import hardware
from dflash_hf.modeling.target_dflash import FeatureTap, raw_embedding


# A narrow target, so that a drafter learns something in a fraction of a minute of one thread.
VOCAB_SIZE, HIDDEN_SIZE, LAYERS, HEADS, TARGET_STEPS = 512, 64, 6, 2, 1000
TRAIN_PAIRS, HELD_OUT = 24_000, 200
TRAIN_ROWS, PROMPTS = 2400, 24
BATCH_SIZE, NUM_ANCHORS = 8, 8
MAX_NEW_TOKENS = 224


@dataclass(frozen=True)
class Variant:
    """One drafter and its training; the defaults are the base that the others are compared with."""

    name: str
    axis: str
    layers: int = 3
    features: tuple[int, ...] = (1, 3, 5)
    block_size: int = 16
    loss_type: str = "ce"
    gamma: float | None = None
    anchors: str = "random"
    context: str = "kv"
    data: str = "text"


BASE = Variant("base", "base")
VARIANTS = [
    BASE,
    replace(BASE, name="regular blocks", axis="anchors", anchors="regular"),
    replace(BASE, name="input fusion", axis="context", context="fusion"),
    replace(BASE, name="1 draft layer", axis="draft layers", layers=1),
    replace(BASE, name="5 draft layers", axis="draft layers", layers=5),
    replace(BASE, name="1 feature", axis="features", features=(3,)),
    replace(BASE, name="5 features", axis="features", features=(1, 2, 3, 4, 5)),
    replace(BASE, name="block 8", axis="block size", block_size=8),
    replace(BASE, name="D-PACE", axis="loss", loss_type="dpace"),
    replace(BASE, name="uniform weights", axis="loss", gamma=float("inf")),
    replace(BASE, name="target's own answers", axis="data", data="own"),
]


class RegularBlocks(DFlashTrainer):
    """
    Anchors at every block-size-th token of a response from its first on, instead of random ones. Short responses leave
    some of the `num_anchors` slots empty, which cost as much as the others.
    """

    def draw_anchors(self, batch, step):
        mask = batch["loss_mask"].bool()
        slots = min(self.args.num_anchors, mask.shape[1])
        anchors = torch.zeros(len(mask), slots, dtype=torch.long)
        valid = torch.zeros_like(anchors, dtype=torch.bool)
        for row in range(len(mask)):
            places = (mask[row, 1:-1] & mask[row, 2:]).nonzero()[:: self.draft_config.block_size, 0] + 1
            places = places[:slots]
            anchors[row, : len(places)], valid[row, : len(places)] = places, True
        batch["anchors"], batch["valid"] = anchors, valid


class InputFusion(DFlashDraftModel):
    """
    Features enter at the first layer only, as inputs of the context's own positions, which every layer then carries
    on; a block attends to them there. The parameters are those of KV injection.
    """

    def forward(self, noise_embeds, context_hidden_states, attention_mask=None, position_ids=None, **kwargs):
        context = self.project_context(context_hidden_states)  # [N, S, H]
        states = torch.cat([context, noise_embeds], dim=1)  # [N, S + A*B, H]
        length, total = context.shape[1], states.shape[1]
        if position_ids is None:
            position_ids = torch.arange(total)[None]
        seen = torch.ones(length, total, dtype=torch.bool).tril()
        own = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(states.dtype).min)  # [S, S + A*B]
        own = own.expand(len(states), 1, -1, -1)
        block = own.new_zeros(len(states), 1, total - length, total)
        mask = torch.cat([own, block if attention_mask is None else attention_mask["full_attention"]], dim=2)
        tables = self.rotary_emb(states, position_ids)
        for layer in self.layers:
            states = layer(states, None, tables, mask)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(states[:, length:]))


class CpuBudget(TrainerCallback):
    """Ends training when the process has used so many CPU seconds, with a learning rate that has decayed by then."""

    warmup = 0.05

    def __init__(self, seconds: float):
        self.seconds, self.start = seconds, time.process_time()

    def fraction(self) -> float:
        return min((time.process_time() - self.start) / self.seconds, 1.0)

    def scale(self, step: int) -> float:
        done = self.fraction()
        return min(1.0, (done + 0.005) / self.warmup) * (1 - 0.98 * done)

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = self.fraction() >= 1


def train(variant: Variant, seed: int, target, data: dict, seconds: float):
    """A drafter, the steps it took, and the CPU seconds that they really took."""
    torch.manual_seed(seed)
    config = DFlashDraftConfig.for_target(
        target.config,
        data["mask_token_id"],
        num_hidden_layers=variant.layers,
        block_size=variant.block_size,
        target_layer_ids=list(variant.features),
    )
    config._attn_implementation = "eager"
    draft = (InputFusion if variant.context == "fusion" else DFlashDraftModel)(config)
    draft.norm.load_state_dict(target.get_decoder().norm.state_dict())
    budget = CpuBudget(seconds)
    optimizer = Muon(draft, matrix_lr=5e-3, lr=3e-3)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = (RegularBlocks if variant.anchors == "regular" else DFlashTrainer)(
            draft,
            target,
            DFlashTrainingArguments(
                output_dir=scratch,
                max_steps=100_000,
                per_device_train_batch_size=BATCH_SIZE,
                train_sampling_strategy="group_by_length",
                num_anchors=NUM_ANCHORS,
                loss_type=variant.loss_type,
                loss_decay_gamma=variant.gamma,
                seed=seed,
                use_cpu=True,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            [make_example(prompt, answer) for prompt, answer in data[variant.data]],
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, budget.scale)),
            callbacks=[budget],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        used = time.process_time() - budget.start
    return draft.eval(), trainer.state.global_step, used


@torch.no_grad()
def decode_without_cache(target, draft, prompt: list[int], max_new_tokens: int) -> tuple[list[int], list[int]]:
    """
    Draft, verify, accept, in the plainest way, for a drafter that has no cache: everything is read anew each round.

    Returns:
        The answer, and the tokens that each verification committed.
    """
    eos, layer_ids, size = target.config.eos_token_id, draft.config.target_layer_ids, draft.config.block_size
    text, lengths = list(prompt), []
    with FeatureTap(target, layer_ids) as tap:
        text.append(target(torch.tensor([text]), use_cache=False).logits[0, -1].argmax().item())
        features = tap.take()  # [1, S, L*H], of all tokens before the anchor
        while text[-1] != eos and len(text) - len(prompt) < max_new_tokens:
            block = torch.tensor([[text[-1]] + [draft.config.mask_token_id] * (size - 1)])
            hidden = draft(raw_embedding(target, block), features).last_hidden_state
            drafted = target.lm_head(hidden)[0, 1:].argmax(-1).tolist()
            logits = target(torch.tensor([text + drafted]), use_cache=False).logits[0, len(text) - 1 :]
            own = logits.argmax(-1).tolist()  # the target's token after the anchor and after each drafted one
            accepted = next((k for k in range(size - 1) if drafted[k] != own[k]), size - 1)
            new = own[: accepted + 1][: max_new_tokens - (len(text) - len(prompt))]
            new = new[: new.index(eos) + 1] if eos in new else new
            features = tap.take()[:, : len(text) - 1 + len(new)]
            text += new
            lengths.append(len(new))
    return text[len(prompt) :], lengths


def decode(target, draft, prompt: list[int], verified: int | None = None) -> tuple[list[int], list[int]]:
    """A prompt's answer and the tokens that each verification committed."""
    if isinstance(draft, InputFusion):
        return decode_without_cache(target, draft, prompt, MAX_NEW_TOKENS)
    draft.decoding_config.block_size = verified
    output = target.generate(
        torch.tensor([prompt]),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        assistant_model=draft,
        return_dict_in_generate=True,
    )
    return output.sequences[0, len(prompt) :].tolist(), output.acceptance_lengths[0]


def measure(target, draft, prompts, answers, verified: int | None = None) -> dict:
    """tau over all verifications of the prompts, bonus included, prompt excluded, and whether the texts are right."""
    decoded = [decode(target, draft, prompt, verified) for prompt in prompts]
    lengths = [length for _, committed in decoded for length in committed]
    return {
        "tau": statistics.fmean(lengths),
        "verifications": len(lengths),
        "equal": sum(text == answer for (text, _), answer in zip(decoded, answers, strict=True)),
        "prompts": len(prompts),
    }


def build(folder: Path) -> None:
    """Train the target; let it answer the training rows and the held-out prompts."""
    task = read_task(TRAIN_PAIRS, HELD_OUT)
    tokenizer = train_tokenizer(task.train[:4000], VOCAB_SIZE)
    rows = encode_pairs(tokenizer, task.train)
    target, _ = train_target(
        rows,
        tokenizer,
        TARGET_STEPS,
        math.inf,
        0,
        HIDDEN_SIZE,
        LAYERS,
        HEADS,
        tokens_per_step=1024,
        on_step=report_step,
    )
    target.eval().save_pretrained(folder / "target")
    mask_token_id = tokenizer.convert_tokens_to_ids(MASK)
    rows = rows[:TRAIN_ROWS]
    prompts = [prompt for prompt, _ in encode_pairs(tokenizer, task.held_out[:PROMPTS])]
    print(f"the target answers {len(rows)} training prompts and {len(prompts)} held-out ones", flush=True)
    own = generate_responses(target, [prompt for prompt, _ in rows], MAX_NEW_TOKENS, mask_token_id, batch_size=64)
    # Held-out texts are compared token for token, so they are decoded one at a time.
    answers = [
        target.generate(torch.tensor([prompt]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[0, len(prompt) :]
        for prompt in prompts
    ]
    data = {
        "mask_token_id": mask_token_id,
        "text": rows,
        "own": [(prompt, answer) for (prompt, _), answer in zip(rows, own, strict=True)],
        "prompts": prompts,
        "answers": [answer.tolist() for answer in answers],
    }
    (folder / "data.json").write_text(json.dumps(data), encoding="utf-8")


def report_step(step: int, loss: float) -> None:
    if step % 100 == 0:
        print(f"target: step {step} of {TARGET_STEPS}, loss {loss:.3f}", flush=True)


def check_the_plain_loop(target, draft, prompts) -> None:
    """The loop for drafters without a cache commits what `generate` commits."""
    for prompt in prompts[:3]:
        plain, ours = decode_without_cache(target, draft, prompt, MAX_NEW_TOKENS), decode(target, draft, prompt)
        if plain[0] != ours[0] or plain[1] != ours[1]:
            raise SystemExit(f"the plain loop and `generate` differ: {plain[1]} and {ours[1]}")


def open_target(cache: Path):
    """The target and its data, made now if they are not there."""
    folder = cache / "ablation-target"
    if not folder.exists():
        with whole_folder(folder) as building:
            build(building)
    target = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    return target, json.loads((folder / "data.json").read_text(encoding="utf-8"))


def run_one(variant: Variant, seed: int, target, data: dict, seconds: float) -> list[dict]:
    """Train and measure one drafter; of the base also with half of its blocks verified."""
    start, prompts, answers = time.monotonic(), data["prompts"], data["answers"]
    draft, steps, used = train(variant, seed, target, data, seconds)
    if variant is BASE and seed == 0:
        check_the_plain_loop(target, draft, prompts)
    facts = {"seed": seed, "steps": steps, "cpu_seconds": used, "parameters": draft.num_parameters()}
    runs = [{"variant": variant.name, **facts, **measure(target, draft, prompts, answers)}]
    if variant is BASE:
        runs.append({"variant": USE_8, **facts, **measure(target, draft, prompts, answers, verified=8)})
    for run in runs:
        print(
            f"{run['variant']:24} seed {seed}: {steps} steps in {used:.1f} CPU s, tau {run['tau']:.3f}, "
            f"{run['equal']}/{run['prompts']} equal ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="CPU seconds of each drafter's training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of variants; default: all")
    parser.add_argument("--report", action="store_true", help="run nothing, write the results of what is finished")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="where the target is kept")
    parser.add_argument("--folder", type=Path, help="where runs.jsonl is kept; default: in the cache")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    folder = arguments.folder or arguments.cache_dir / f"ablation-{arguments.seconds:g}s"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "runs.jsonl"
    runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(run["variant"], run["seed"]) for run in runs}
    chosen = [variant for variant in VARIANTS if not arguments.only or variant.name in arguments.only]
    # Seed by seed, so that whatever is finished can be compared.
    missing = [(seed, one) for seed in range(arguments.seeds) for one in chosen if (one.name, seed) not in done]
    if missing and not arguments.report:
        target, data = open_target(arguments.cache_dir)
        for seed, variant in missing:
            new = run_one(variant, seed, target, data, arguments.seconds)
            with path.open("a") as file:
                file.writelines(json.dumps(run) + "\n" for run in new)
            runs += new
    setting = {
        "hardware": f"{hardware(torch.device('cpu'))}, one thread, other processes on its cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_seconds": arguments.seconds,
        "target": f"hidden size {HIDDEN_SIZE}, {LAYERS} layers, vocabulary of {VOCAB_SIZE}",
        "training rows": TRAIN_ROWS,
        "held-out prompts": PROMPTS,
        "finished runs": f"{sum(run['variant'] != USE_8 for run in runs)} of {len(VARIANTS) * arguments.seeds}",
        "command": f"python examples/benchmarks/ablation.py --seconds {arguments.seconds:g}",
    }
    write_results(runs, {variant.name: variant.axis for variant in VARIANTS}, setting, arguments.results)


if __name__ == "__main__":
    main()
