"""How the demo trains: one optimizer and one clock for the target (a short loop) and the drafter (`DFlashTrainer`)."""

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional as F
from transformers import PrinterCallback, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from dflash_hf.data.examples import make_example
from dflash_hf.modeling.configuration_dflash import DFlashDraftConfig
from dflash_hf.modeling.modeling_dflash import DFlashDraftModel
from dflash_hf.training.trainer import DFlashTrainer
from dflash_hf.training.training_args import DFlashTrainingArguments


Row = tuple[list[int], list[int]]  # prompt ids, answer ids


def fastest_dtype() -> torch.dtype:
    """The quicker of bf16 and fp32 for matrix products on this CPU; without hardware support bf16 is far slower."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 128, dtype=dtype), torch.ones(128, 384, dtype=dtype)
        a @ b
        start = time.perf_counter()
        for _ in range(20):
            a @ b
        seconds[dtype] = time.perf_counter() - start
    return torch.bfloat16 if seconds[torch.bfloat16] < 0.8 * seconds[torch.float32] else torch.float32


@contextlib.contextmanager
def fastest_threads() -> Iterator[int]:
    """
    One thread inside, or as many as the process has where they help: on models this small two threads gain little, and
    where another process holds a core they wait for each other at every operation. The best of several short tries
    counts, so that a moment's load does not decide.
    """
    own = torch.get_num_threads()
    layer, x = torch.nn.Linear(128, 384), torch.ones(1024, 128)
    seconds: dict[int, float] = {}
    try:
        for threads in (1, own) * 5:
            torch.set_num_threads(threads)
            layer(x).sum().backward()
            start = time.perf_counter()
            for _ in range(20):
                layer(x).relu().sum().backward()
            seconds[threads] = min(time.perf_counter() - start, seconds.get(threads, float("inf")))
        torch.set_num_threads(own if seconds[own] < 0.85 * seconds[1] else 1)
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(own)


class Pace:
    """
    How far a training run has come, from 0 to 1: by its steps or, on a machine too slow for them, by the clock.

    Args:
        steps (`int`): Optimizer steps.
        seconds (`float`): Time after which the run ends all the same, with its learning rate decayed.
    """

    warmup = 0.03

    def __init__(self, steps: int, seconds: float):
        self.steps, self.seconds = steps, seconds
        self.start = time.monotonic()

    def fraction(self, step: int) -> float:
        return min(1.0, max(step / self.steps, (time.monotonic() - self.start) / self.seconds))

    def scale(self, step: int) -> float:
        """Factor of the learning rate: linear warm-up, linear decay."""
        done = self.fraction(step)
        return min(1.0, (done + 1 / self.steps) / self.warmup) * (1 - 0.98 * done)


class Muon(torch.optim.Optimizer):
    """
    Muon for the matrices of the layers, Adam for embeddings and norms.

    With a few hundred steps to spend it learns the task in about half the sequences that AdamW needs. Matrices of one
    shape are orthogonalised together.

    Args:
        model (`nn.Module`): Its trainable parameters.
        matrix_lr (`float`): Size of a matrix update relative to AdamW's.
        lr (`float`): Adam's learning rate.
        dtype (`torch.dtype`): Of the Newton-Schulz iteration.
    """

    momentum, betas, eps = 0.95, (0.9, 0.95), 1e-8
    coefficients = (3.4445, -4.7750, 2.0315)  # quintic iteration of Jordan et al.

    def __init__(self, model, matrix_lr: float, lr: float, dtype: torch.dtype = torch.float32):
        shapes: dict[tuple, list] = {}
        others = []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
                shapes.setdefault(tuple(parameter.shape), []).append(parameter)
            else:
                others.append(parameter)
        groups = [{"params": matrices, "lr": matrix_lr, "matrices": True} for matrices in shapes.values()]
        if others:
            groups.append({"params": others, "lr": lr, "matrices": False})
        super().__init__(groups, {})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params and group["matrices"]:
                self._step_matrices(group, params)
            elif params:
                self._step_adam(group, params)

    def _step_matrices(self, group, params):
        gradient = torch.stack([p.grad for p in params])  # [M, out, in]
        state = self.state[params[0]]
        momentum = state.setdefault("momentum", torch.zeros_like(gradient))
        momentum.lerp_(gradient, 1 - self.momentum)
        update = gradient.lerp_(momentum, self.momentum).to(self.dtype)  # Nesterov
        tall = update.shape[1] > update.shape[2]
        x = update.mT if tall else update
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        a, b, c = self.coefficients
        for _ in range(5):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        x = (x.mT if tall else x).float()
        # The size of an AdamW update (Liu et al., 2502.16982).
        rate = group["lr"] * 0.2 * math.sqrt(max(x.shape[1:]))
        for parameter, direction in zip(params, x.unbind()):
            parameter.add_(direction, alpha=-rate)

    def _step_adam(self, group, params):
        for parameter in params:
            state = self.state[parameter]
            if not state:
                state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
            state["step"] += 1
            state["mean"].lerp_(parameter.grad, 1 - self.betas[0])
            state["square"].lerp_(parameter.grad.square(), 1 - self.betas[1])
            correction = [1 - beta ** state["step"] for beta in self.betas]
            denominator = (state["square"] / correction[1]).sqrt_().add_(self.eps)
            parameter.addcdiv_(state["mean"], denominator, value=-group["lr"] / correction[0])


def token_batches(rows: Sequence[Row], tokens: int, seed: int) -> Iterator[list[Row]]:
    """Endless batches of rows of similar length, each of about `tokens` tokens with its padding, in random order."""
    order = random.Random(seed)
    while True:
        shuffled = list(rows)
        order.shuffle(shuffled)
        batches = []
        for start in range(0, len(shuffled), 2048):
            batch: list[Row] = []
            for row in sorted(shuffled[start : start + 2048], key=_length):
                if batch and _length(row) * (len(batch) + 1) > tokens:
                    batches.append(batch)
                    batch = []
                batch.append(row)
            batches.append(batch)
        order.shuffle(batches)
        yield from batches


def _length(row: Row) -> int:
    return len(row[0]) + len(row[1])


def train_target(
    rows: Sequence[Row],
    tokenizer,
    steps: int,
    seconds: float,
    seed: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    tokens_per_step: int,
    on_step: Callable[[int, float], None],
) -> tuple[Qwen3ForCausalLM, int]:
    """
    Train a small Qwen3 from scratch on the answers.

    Args:
        rows (`Sequence[Row]`): Prompt and answer ids.
        tokenizer: Names the special tokens and the vocabulary.
        steps, seconds: See [`Pace`].
        seed (`int`): Weights and order of the data.
        hidden_size, num_layers, num_heads, tokens_per_step (`int`): Sizes; heads are 64 wide.
        on_step: Called after each step with its number and a running mean of the loss.

    Returns:
        The model in training mode, and the number of steps done.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",  # on short rows the backward of SDPA takes twice as long on a CPU
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).train()
    dtype = fastest_dtype()
    pace = Pace(steps, seconds)
    optimizer = Muon(model, matrix_lr=5e-3, lr=6e-3, dtype=dtype)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, pace.scale)
    batches = token_batches(rows, tokens_per_step, seed)
    step, mean_loss = 0, 0.0
    while pace.fraction(step) < 1:
        batch = next(batches)
        width = max(_length(row) for row in batch)
        input_ids = torch.full((len(batch), width), config.pad_token_id)  # [N, S], padded on the right
        labels = torch.full((len(batch), width), -100)
        for i, (prompt, answer) in enumerate(batch):
            input_ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        supervised = labels[:, 1:] != -100
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]  # [N, S-1, H]
            logits = model.lm_head(hidden[supervised])
        loss = F.cross_entropy(logits.float(), labels[:, 1:][supervised])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        step += 1
        mean_loss += (loss.item() - mean_loss) / min(step, 50)
        on_step(step, mean_loss)
    return model, step


class _Follow(TrainerCallback):
    """Ends the Trainer's run with the clock, and hands its steps to a progress bar."""

    def __init__(self, pace: Pace, on_step: Callable[[int, float], None]):
        self.pace, self.on_step = pace, on_step
        self.simulated_tau = 0.0

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.simulated_tau = (logs or {}).get("simulated_tau", self.simulated_tau)

    def on_step_end(self, args, state, control, **kwargs):
        self.on_step(state.global_step, self.simulated_tau)
        if self.pace.fraction(state.global_step) >= 1:
            control.should_training_stop = True


def train_drafter(
    rows: Sequence[Row],
    target,
    mask_token_id: int,
    steps: int,
    seconds: float,
    seed: int,
    output_dir: str,
    num_layers: int,
    block_size: int,
    target_layer_ids: list[int],
    batch_size: int,
    num_anchors: int,
    loss_type: str,
    on_step: Callable[[int, float], None],
) -> tuple[DFlashDraftModel, int]:
    """
    Train a drafter with [`DFlashTrainer`], beginning with the target's own final norm.

    Args:
        rows (`Sequence[Row]`): Prompt and answer ids; whose answers they are is the caller's choice.
        target: The trained target; frozen.
        mask_token_id (`int`): Fills the unknown slots.
        steps, seconds: See [`Pace`].
        output_dir (`str`): Where Trainer may write.
        num_layers, block_size, target_layer_ids: Shape of the drafter.
        batch_size, num_anchors, loss_type: See [`DFlashTrainingArguments`].
        on_step: Called after each step with its number and the simulated acceptance length.

    Returns:
        The drafter and the number of steps done.
    """
    torch.manual_seed(seed)
    config = DFlashDraftConfig.for_target(
        target.config,
        mask_token_id,
        num_hidden_layers=num_layers,
        block_size=block_size,
        target_layer_ids=target_layer_ids,
    )
    config._attn_implementation = "eager"
    draft = DFlashDraftModel(config)
    draft.norm.load_state_dict(target.get_decoder().norm.state_dict())
    dtype = fastest_dtype()
    pace = Pace(steps, seconds)
    optimizer = Muon(draft, matrix_lr=9e-3, lr=4e-3, dtype=dtype)
    follow = _Follow(pace, on_step)
    trainer = DFlashTrainer(
        model=draft,
        target=target,
        args=DFlashTrainingArguments(
            output_dir=output_dir,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            train_sampling_strategy="group_by_length",
            num_anchors=num_anchors,
            loss_type=loss_type,
            bf16=dtype is torch.bfloat16,
            use_cpu=True,
            seed=seed,
            save_strategy="no",
            report_to="none",
            logging_steps=20,
            disable_tqdm=True,
        ),
        train_dataset=[make_example(prompt, answer) for prompt, answer in rows],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, pace.scale)),
        callbacks=[follow],
    )
    trainer.remove_callback(PrinterCallback)  # it would print each log line
    trainer.train()
    # Under bf16 accelerate has wrapped `forward` in autocast; decoding wants the drafter as it was.
    draft = trainer.accelerator.unwrap_model(draft, keep_fp32_wrapper=False)
    return draft.eval(), trainer.state.global_step
