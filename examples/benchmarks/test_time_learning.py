"""
Does a drafter that learns inside one `generate` call pay (test-time speculation, arXiv 2605.09329)?

    export OMP_NUM_THREADS=1
    python examples/benchmarks/test_time_learning.py record WORK    # long texts of SmolLM2, with features and states
    python examples/benchmarks/test_time_learning.py check WORK     # replay against decoding; the time of a round
    python examples/benchmarks/test_time_learning.py replay WORK "" "rate=1e-3 stride=4" --texts list computer
    python examples/benchmarks/test_time_learning.py table WORK --verify 60

A replay drafts at each anchor of a recorded text, accepts what the text has, and updates a private copy of the drafter
from the target's distributions there. No forward of the target is needed, so settings are compared in minutes. Times
are CPU seconds of the process: other jobs share the machine.
"""

import argparse
import copy
import json
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import torch
from cells import read_json_lines
from torch import nn
from transformers import DynamicCache

from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.template import ChatTemplate
from dflash_hf.decoding.acceptance import Acceptance
from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.decoding.packing import packed_weights
from dflash_hf.evaluation.measure import with_decoding_config
from dflash_hf.modeling.candidates_dflash import CACHE_NAME
from dflash_hf.modeling.modeling_dflash import additive_mask, apply_rotary
from dflash_hf.smollm2 import data_folder, load_pair
from dflash_hf.training.losses import slot_weights


WRITTEN = {  # temperature and request; the end of the text is suppressed
    "story": (0.8, "Write a long story about a lighthouse keeper, with many chapters and dialogue."),
    "python": (0.8, "Write a complete Python library for matrices, with many classes, functions and docstrings."),
    "list": (0.8, "List 200 animals, and describe each of them in two sentences."),
    "computer": (0.8, "Explain in great detail how a computer works, from the transistor to the web browser."),
    "play": (0.8, "Write a play in five acts about two brothers who inherit a farm. Give every line of the dialogue."),
    "novel": (1.0, "Write a long novel about a family of sailors, with many chapters and dialogue."),
    "history": (1.0, "Write a detailed history of the Roman Empire, year by year."),
    "letters": (1.0, "Write the letters that two friends, a doctor and a painter, send each other over twenty years."),
    "loop": (0.0, "Write a large JavaScript program for an online shop: products, cart, orders, users, tests."),
}
CHATS = ("chat 0", "chat 1")  # greedy answers to held-out requests, one after another
LONGEST_ANSWER = 384
END_OF_TURN = 2


class Writer:
    """The next token of a text: of a request as long as there is one, else the target's own."""

    def __init__(self, temperature: float, requests: list[list[int]], endless: bool, seed: int):
        self.temperature = temperature
        self.requests = requests
        self.endless = endless
        self.generator = torch.Generator().manual_seed(seed)
        self.ids = []
        self.answers = []
        self.unread = list(requests[0])
        self.turn = 0

    def write(self, logits: torch.Tensor | None) -> int:
        if not self.unread and self._ended():
            self.turn += 1
            self.unread = list(self.requests[self.turn])
            if self.ids[-1] != END_OF_TURN:
                self.unread.insert(0, END_OF_TURN)
        if self.unread:
            token = self.unread.pop(0)
        else:
            if not self.answers or self.answers[-1][0] <= self.answers[-1][1] < len(self.ids):
                self.answers.append([len(self.ids), len(self.ids)])
            if self.endless:
                logits = logits.index_fill(0, torch.arange(3), -torch.inf)
            token = int(logits.argmax())
            if self.temperature:
                chances = (logits / self.temperature).softmax(-1)
                token = int(torch.multinomial(chances, 1, generator=self.generator))
            self.answers[-1][1] = len(self.ids) + 1
        self.ids.append(token)
        return token

    def _ended(self) -> bool:
        if self.endless or not self.answers or self.answers[-1][1] != len(self.ids):
            return False
        start, stop = self.answers[-1]
        return self.ids[-1] == END_OF_TURN or stop - start == LONGEST_ANSWER


def writers_of(tokenizer) -> dict[str, Writer]:
    encoder = RowEncoder(ChatTemplate(tokenizer))
    writers = {}
    for seed, (name, (temperature, request)) in enumerate(WRITTEN.items()):
        ids = prompt_ids(encoder, {"messages": [{"role": "user", "content": request}]})
        writers[name] = Writer(temperature, [ids], True, seed)
    rows = read_json_lines(data_folder() / "held_out.jsonl.gz")
    for index, name in enumerate(CHATS):
        first, *rest = rows[index :: len(CHATS)]
        turns = ["\n<|im_start|>user\n" + row["messages"][0]["content"] for row in rest]
        turns = [tokenizer(turn + "<|im_end|>\n<|im_start|>assistant\n")["input_ids"] for turn in turns]
        writers[name] = Writer(0.0, [prompt_ids(encoder, first), *turns], False, 0)
    return writers


class Batch:
    """SmolLM2 over one token of each row, all rows at the same position; buffers are read without a copy."""

    def __init__(self, target, rows: int, room: int, layer_ids: list[int]):
        config = target.config
        self.model = target.model
        self.head = target.lm_head
        self.layer_ids = layer_ids
        self.heads = config.num_key_value_heads
        self.dim = config.head_dim
        shape = (config.num_hidden_layers, rows, self.heads, room, self.dim)
        self.keys = torch.zeros(shape)
        self.values = torch.zeros(shape)

    def read(self, tokens: torch.LongTensor, at: int):
        """Logits `[R, V]`, features `[R, L * H]` and final states `[R, H]`."""
        x = self.model.embed_tokens(tokens)
        features = []  # [R, H]
        cos, sin = self.model.rotary_emb(x[:, None], torch.tensor([[at]]))
        for index, layer in enumerate(self.model.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            query, key = (p(normed).unflatten(-1, (-1, 1, self.dim)) for p in (attention.q_proj, attention.k_proj))
            # [R, heads, 1, dim]
            query = apply_rotary(query, cos, sin)
            key = apply_rotary(key, cos, sin)
            self.keys[index, :, :, at] = key[:, :, 0]
            self.values[index, :, :, at] = attention.v_proj(normed).unflatten(-1, (-1, self.dim))
            query = query.unflatten(1, (self.heads, -1))[:, :, :, 0]  # [R, kv heads, group, dim]
            seen = slice(at + 1)
            mixed = nn.functional.scaled_dot_product_attention(
                query, self.keys[index, :, :, seen], self.values[index, :, :, seen]
            )
            x = x + attention.o_proj(mixed.flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if index in self.layer_ids:
                features.append(x)
        states = self.model.norm(x)
        return self.head(states), torch.cat(features, dim=-1), states


@torch.no_grad()
def record(work: Path, tokens: int, names: list[str] | None = None):
    """Write texts side by side, by default all, and keep the features and final states of their tokens."""
    work.mkdir(parents=True, exist_ok=True)
    pair = load_pair("float32")
    writers = {k: v for k, v in writers_of(pair.tokenizer).items() if names is None or k in names}
    batch = Batch(pair.target, len(writers), tokens, pair.draft.config.target_layer_ids)
    logits = [None] * len(writers)
    hidden_states = []
    with packed_weights(pair.target):
        for at in range(tokens):
            written = [writer.write(row) for writer, row in zip(writers.values(), logits, strict=True)]
            logits, *outputs = batch.read(torch.tensor(written), at)
            hidden_states.append(outputs)
            if (at + 1) % 400 == 0:
                print(f"{at + 1} tokens of each text, {time.process_time():.0f} s", flush=True)
                features, states = (
                    torch.stack(states_of_read, dim=1) for states_of_read in zip(*hidden_states, strict=True)
                )
                for row, (name, writer) in enumerate(writers.items()):
                    text = {"ids": writer.ids, "answers": writer.answers, "temperature": writer.temperature}
                    text |= {"features": features[row].clone(), "states": states[row].clone()}
                    torch.save(text, work / f"{name}.pt")


@dataclass
class Settings:
    """
    How the drafter is updated within a text.

    Args:
        train (`str`): `"lora"`: rank 8 on all projections and `fc`; `"norms"`; `"fc"`; `"layer"`: the last layer;
            `"head"`; `"bias"`: of the drafter's vocabulary; `"selector"`; `"projection"`: the selector's, without its
            codebooks.
        rate (`float`): Learning rate; 0 for no updates.
        stride (`int`): Rounds from one step to the next.
        rounds (`int`): Latest rounds in a step.
        slots (`str`): Slots of a round in its loss. `"committed"`: up to the first rejected one; `"later"`: also those
            whose true tokens were committed since.
        optimizer (`str`): `"adam"` or `"sgd"`; `"rows"`: for the head, SGD of one round on the rows of tokens whose
            logits have a gradient above `SMALL`, from the logits of the draft, without a backward pass.
        path (`bool`): Also the loss of the selector's scores; otherwise only that of independent slots.
        lookup (`int`): Draft what followed the last N tokens earlier in the text, where they occurred, instead of
            asking the drafter; 0: never.
        window (`int`): Context tokens that the drafter sees; 0 for all.
    """

    train: str = "lora"
    rate: float = 0.0
    stride: int = 1
    rounds: int = 1
    slots: str = "committed"
    optimizer: str = "adam"
    path: bool = True
    lookup: int = 0
    window: int = 0

    def __str__(self) -> str:
        default = Settings()
        changed = {k: v for k, v in asdict(self).items() if v != getattr(default, k)}
        return " ".join(f"{k}={v}" for k, v in changed.items()) or "no updates"


OUTSIDE = ("head", "bias", "selector", "projection")  # trained on the hidden states of the draft, without a forward
SMALL = 1e-3
FRESH = 16  # context tokens whose keys and values a step computes again, so that gradients reach fc and k, v


class Lora(nn.Module):
    """A frozen linear layer plus a product of rank `rank`, zero at first."""

    def __init__(self, base: nn.Linear, rank: int = 8):
        super().__init__()
        self.base = base
        self.in_features = base.in_features
        self.weight = base.weight
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


def private_copy(draft, train: str) -> tuple[nn.Module, list[nn.Parameter]]:
    """A copy of a drafter, and the parameters of the copy that are trained."""
    torch.manual_seed(0)
    draft = copy.deepcopy(draft).requires_grad_(False)
    names = dict(draft.named_parameters())
    if train == "lora":
        layers = [m for m in draft.modules() if isinstance(m, nn.Linear) and m is not draft.lm_head]
        layers = [m for m in layers if m.out_features > 64]  # neither the selector's nor a convolution's
        wrapped = {m: Lora(m) for m in layers}
        for module in list(draft.modules()):
            for name, child in list(module.named_children()):
                if child in wrapped and not isinstance(module, Lora):
                    setattr(module, name, wrapped[child])
        return draft, [p for m in wrapped.values() for p in (m.down, m.up)]
    if train == "bias":
        draft.lm_head.bias = nn.Parameter(torch.zeros(draft.config.draft_vocab_size))
        return draft, [draft.lm_head.bias]
    parts = {
        "norms": "norm",
        "fc": "fc.",
        "layer": f"layers.{len(draft.layers) - 1}.",
        "head": "lm_head",
        "selector": "candidate_selector",
        "projection": "hidden_projection",
    }
    chosen = [p for name, p in names.items() if parts[train] in name]
    return draft, [p.requires_grad_() for p in chosen]


class Round(NamedTuple):
    """A drafted and verified block."""

    start: int  # the anchor's index
    committed: int
    tokens: torch.LongTensor  # [B]  the anchor, and the tokens that the target has read
    teacher: torch.Tensor  # [B - 1, V]  its probabilities, of the drafter's vocabulary, after each of them
    hidden: torch.Tensor  # [B - 1, H]  of the draft
    logits: torch.Tensor  # [B - 1, V]


class Past:
    """The drafter's cache up to `length`, as constants, followed by the keys and values of one forward."""

    def __init__(self, cache, length: int):
        self.cache = cache
        self.length = length

    def get_seq_length(self) -> int:
        return self.length

    def update(self, keys, values, layer_idx: int, *args, **kwargs):
        layer = self.cache.layers[layer_idx]
        past = layer.keys[:, :, : self.length], layer.values[:, :, : self.length]
        return torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)


class Learner:
    """Updates a private drafter from verified rounds."""

    def __init__(self, draft, parameters, drafter: DraftSession, settings: Settings):
        self.draft = draft
        self.parameters = parameters
        self.drafter = drafter
        self.settings = settings
        self.recent: deque[Round] = deque(maxlen=settings.rounds)
        self.weights = slot_weights(draft.config.block_size)[1:]
        self.seen = self.steps = 0
        self.seconds = 0.0
        kind = {"adam": torch.optim.Adam}.get(settings.optimizer, torch.optim.SGD)
        self.optimizer = kind(parameters, lr=settings.rate)

    def observe(self, drafted_round: Round, features: torch.Tensor) -> None:
        """Take a round, and the features `[S, L * H]` of all tokens before its anchor; make a step if it is time."""
        self.recent.append(drafted_round)
        self.seen += 1
        if self.settings.rate and self.seen % self.settings.stride == 0:
            start = time.process_time()
            with torch.enable_grad():
                self.step(features)
            self.seconds += time.process_time() - start
            self.steps += 1

    def step(self, features: torch.Tensor) -> None:
        rounds = list(self.recent)
        settings = self.settings
        # 1. Hidden states of the rounds' blocks, under the present weights.
        if settings.train in OUTSIDE:
            hidden = torch.stack([drafted_round.hidden for drafted_round in rounds])  # [n, B - 1, H]
        else:
            hidden = self.hidden_states(rounds, features)
        # 2. The slots to learn from.
        end = rounds[-1].start + rounds[-1].committed
        size = self.draft.config.block_size
        limits = [
            end - drafted_round.start if settings.slots == "later" else drafted_round.committed
            for drafted_round in rounds
        ]
        learned = torch.arange(1, size) <= torch.tensor(limits)[:, None]  # [n, B - 1]
        weights = self.weights.expand(len(rounds), -1)[learned] / len(rounds)  # [M]
        target_probs = torch.stack([drafted_round.teacher for drafted_round in rounds])[learned]  # [M, V]
        # 3. The target's distribution against the drafter's: of independent slots, and of the path.
        if settings.optimizer == "rows":
            logits = rounds[-1].logits[learned[-1]].requires_grad_()
        else:
            logits = self.draft.draft_logits(hidden[learned], None)  # [M, V]
        loss = (weights * -(target_probs * logits.log_softmax(-1)).sum(-1)).sum()
        if settings.path:
            head = self.drafter.token_head
            before = torch.stack([drafted_round.tokens[:-1] for drafted_round in rounds])[learned]  # [M]
            ids, unary = head.candidates(logits)  # [M, k]
            query, _ = head.step(None, before, hidden[learned])
            scores = head.scores(query, self.draft.target_ids(ids), unary)  # [M, k]
            loss = loss + (weights * -(target_probs.gather(-1, ids) * scores.log_softmax(-1)).sum(-1)).sum()
        # 4. One step.
        if settings.optimizer == "rows":
            (grad,) = torch.autograd.grad(loss, logits)  # [M, V]
            rows = (grad.abs().amax(0) > SMALL).nonzero()[:, 0]
            self.parameters[0].data.index_add_(0, rows, grad[:, rows].T @ hidden[learned], alpha=-settings.rate)
            return
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def hidden_states(self, rounds: list[Round], features: torch.Tensor) -> torch.Tensor:
        """`[n, B - 1, H]` with gradients; all blocks in one forward, over keys and values that stay as they are."""
        size = self.draft.config.block_size
        last = rounds[-1].start
        fresh = min(FRESH, rounds[0].start)
        starts = torch.tensor([drafted_round.start for drafted_round in rounds])
        ids = torch.full((len(rounds), size), self.draft.config.mask_token_id)
        ids[:, 0] = torch.stack([drafted_round.tokens[0] for drafted_round in rounds])
        context = torch.arange(last - fresh, last)
        block = (starts[:, None] + torch.arange(size)).flatten()  # [n * B]
        mask = None
        if len(rounds) > 1:
            owner = torch.arange(len(rounds)).repeat_interleave(size)  # [n * B]
            past = torch.arange(last) < starts[owner, None]  # [n * B, last]
            mask = additive_mask(torch.cat([past, owner[:, None] == owner], dim=1), torch.float32)[None, None]
        hidden = self.draft(
            noise_embeds=self.draft.embed(self.drafter.target, ids.flatten()[None]).detach(),
            context_hidden_states=features[None, last - fresh : last],
            attention_mask=mask,
            position_ids=torch.cat([context, block])[None],
            past_key_values=Past(self.drafter.context.cache, last - fresh),
        ).last_hidden_state
        return hidden.unflatten(1, (-1, size))[0, :, 1:]


class Drafting(DraftSession):
    """Keeps the hidden states of the last draft; with a window, the drafter sees the last tokens only."""

    def __init__(self, draft, target, window: int = 0):
        super().__init__(draft, target)
        self.window = window

    def hidden_states(self, anchors):
        self.hidden = super().hidden_states(anchors)
        return self.hidden

    def logits(self, hidden):
        self.block_logits = super().logits(hidden)  # [R, B - 1, V]
        return self.block_logits

    def _masks(self, block):
        masks = super()._masks(block)
        if self.window:
            unseen = torch.arange(self.cache.num_attended) <= block[:, -1:] - self.window  # [R, view]
            least = torch.finfo(self.dtype).min
            masks = {name: mask.masked_fill(unseen[:, None, None], least) for name, mask in masks.items()}
        return masks


class Lookup:
    """Where each n-gram of a text occurred last."""

    def __init__(self, size: int):
        self.size = size
        self.places = {}
        self.read = size

    def after(self, ids: list[int], length: int, count: int) -> list[int]:
        """Up to `count` tokens that followed the last `size` tokens of `ids[:length]` where they occurred before."""
        for end in range(self.read, length):  # n-grams that end before the last token
            self.places[tuple(ids[end - self.size : end])] = end
        self.read = max(self.read, length)
        place = self.places.get(tuple(ids[length - self.size : length]))
        return [] if place is None else ids[place : min(place + count, length)]


@dataclass
class Run:
    """The rounds of one text."""

    text: str
    settings: Settings
    rounds: list[tuple[int, int, bool]] = field(default_factory=list)  # place in the output, committed, drafted
    drafts: int = 0  # those that ran the drafter, which `draft_seconds` counts
    draft_seconds: float = 0.0
    step_seconds: float = 0.0
    steps: int = 0


class Recording:
    """A recorded text."""

    def __init__(self, path: Path, target, draft):
        text = torch.load(path)
        self.name = path.stem
        self.ids = text["ids"]
        self.answers = text["answers"]
        self.features = text["features"]
        self.tokens = torch.tensor(self.ids)
        rows = target.get_output_embeddings().weight[draft.target_ids(torch.arange(draft.config.draft_vocab_size))]
        with torch.no_grad():
            logits = nn.functional.linear(text["states"], rows) / (text["temperature"] or 1.0)
            if self.name in WRITTEN:  # their end was suppressed
                logits[:, draft.target_ids(torch.arange(logits.shape[1])) < 3] = -torch.inf
            self.teacher = logits.softmax(-1)  # [S, V]
        self.drafts = path.with_suffix(".drafts")
        self.hidden: dict[tuple[int, int], torch.Tensor] = {}  # of drafts, by window and anchor
        if self.drafts.exists():
            self.hidden = torch.load(self.drafts)


@torch.no_grad()
def replay(pair, text: Recording, settings: Settings, most: int | None = None) -> Run:
    """Draft, accept and learn as decoding does, where the target's text and features are already known."""
    draft, parameters = private_copy(pair.draft, settings.train)
    drafter = Drafting(draft, pair.target, settings.window)
    learner = Learner(draft, parameters, drafter, settings) if settings.rate else None
    lookup = Lookup(settings.lookup) if settings.lookup else None
    run = Run(text.name, settings)
    size = draft.config.block_size
    place = 0
    fixed = settings.train in OUTSIDE or not settings.rate  # hidden states are the same in every run
    first = text.answers[0][0]
    drafter.context.append(text.features[None, :first])
    drafter.context.prefill([0], first, torch.zeros(1, 1, dtype=torch.long))
    read = first
    for start, stop in text.answers:
        place += 1  # the first token comes from the prompt's forward
        while start < stop - 1:
            # 1. Draft from the features of all tokens before the anchor.
            clock = time.process_time()
            looked_up = [] if lookup is None else lookup.after(text.ids, start + 1, size - 1)
            key = (settings.window, start)
            if looked_up:
                drafted = looked_up
            elif key in text.hidden and fixed:
                drafter.hidden = text.hidden[key]
                drafted = drafter.decode_block(text.tokens[None, start], drafter.hidden)[0, 1:].tolist()
            else:
                if read < start:
                    drafter.context.read(text.features[None, read:start], Acceptance.from_counts([start - read]))
                drafted = drafter.draft_block(text.tokens[None, start]).tokens[0, 1:].tolist()
                read = start
                run.drafts += 1
                run.draft_seconds += time.process_time() - clock
                if fixed:
                    text.hidden[key] = drafter.hidden
            # 2. Accept what the text has, plus one token of its own.
            agreed = 0
            while agreed < min(len(drafted), stop - 2 - start) and drafted[agreed] == text.ids[start + 1 + agreed]:
                agreed += 1
            run.rounds.append((place, agreed + 1, not looked_up))
            # 3. Learn.
            if learner is not None and not looked_up and start + size <= len(text.ids):
                tokens = text.tokens[start : start + size]
                teacher = text.teacher[start : start + size - 1]
                finished = Round(start, agreed + 1, tokens, teacher, drafter.hidden[0], drafter.block_logits[0])
                learner.observe(finished, text.features)
            start = start + agreed + 1
            place = place + agreed + 1
            if most is not None and place >= most:
                break
        if most is not None and place >= most:
            break
    if learner is not None:
        run.step_seconds = learner.seconds
        run.steps = learner.steps
    return run


BINS = (0, 500, 1000, 2000, 4001)


def tau(rounds, low: int = 0, high: int = 1 << 30) -> float:
    lengths = [committed for place, committed, _ in rounds if low <= place < high]
    return sum(lengths) / len(lengths) if lengths else float("nan")


def summary(runs: list[Run]) -> str:
    """One line: tau by place in the output and in all, and milliseconds of a draft and a step."""
    rounds = [drafted_round for run in runs for drafted_round in run.rounds]
    bins = " ".join(f"{tau(rounds, *pair):.3f}" for pair in zip(BINS, BINS[1:]))
    draft = sum(run.draft_seconds for run in runs) / max(sum(run.drafts for run in runs), 1) * 1e3
    steps = sum(run.steps for run in runs)
    step = sum(run.step_seconds for run in runs) / max(steps, 1) * 1e3
    alone = sum(drafted for *_, drafted in rounds) / len(rounds)
    costs = f"draft {draft:.1f} ms, step {step:.1f} ms x {steps / len(rounds):.2f}"
    return f"{bins} | {tau(rounds):.3f} | {alone:.2f} drafted | {costs}"


def setting_of(words: str) -> Settings:
    """From `rate=1e-4 stride=4`."""
    kinds = {field.name: type(field.default) for field in fields(Settings)}
    pairs = [word.split("=") for word in words.split()]
    return Settings(**{k: v == "True" if kinds[k] is bool else kinds[k](v) for k, v in pairs})


def replays(work: Path, texts: list[str], lines: list[str], most: int | None):
    pair = load_pair("float32")
    recordings = [Recording(work / f"{name}.pt", pair.target, pair.draft) for name in texts]
    for line in lines:
        settings = setting_of(line)
        runs = []
        for text in recordings:
            read_before = len(text.hidden)
            runs.append(replay(pair, text, settings, most))
            if len(text.hidden) > read_before:
                torch.save(text.hidden, text.drafts)
        print(f"{str(settings):60} | {summary(runs)}", flush=True)
        with open(work / "runs.jsonl", "a") as file:
            for run in runs:
                file.write(json.dumps(asdict(run) | {"most": most}) + "\n")


def check(work: Path):
    """That a replay without updates accepts what decoding does, and milliseconds of a round by context."""
    pair = load_pair("float32")
    config = pair.target.config
    text = Recording(work / "chat 0.pt", pair.target, pair.draft)
    start, stop = text.answers[0]
    options = {"do_sample": False, "return_dict_in_generate": True}
    options["assistant_model"] = with_decoding_config(pair.draft, block_size=pair.draft.config.block_size)
    decoded = pair.target.generate(text.tokens[None, :start], max_new_tokens=stop - start, **options)
    replayed = replay(pair, text, Settings(), most=stop - start)
    same = decoded.acceptance_lengths[0] == [committed for _, committed, _ in replayed.rounds]
    print(f"{len(replayed.rounds)} rounds, {'equal' if same else 'DIFFERENT'} acceptance lengths", flush=True)
    for packed in (False, True):
        with packed_weights(pair.target, pair.draft) if packed else nullcontext():
            for context in (125, 1000, 2000):
                cache = DynamicCache()  # the time does not depend on its values
                for layer in range(config.num_hidden_layers):
                    cache.update(*torch.zeros(2, 1, config.num_key_value_heads, context, config.head_dim), layer)
                ids = torch.randint(3, 40000, (1, context + 1))
                clock = time.process_time()
                output = pair.target.generate(ids, max_new_tokens=24, **{CACHE_NAME: cache}, **options)
                spent = (time.process_time() - clock) / (len(output.acceptance_lengths[0]) + 1)
                print(f"{'packed' * packed} context {context}: {spent * 1e3:.1f} ms a round", flush=True)


def table(work: Path, verify: float, draft: float):
    """
    tau by place, and the speed relative to no updates, if a round takes `verify` milliseconds besides the draft, a
    draft `draft` milliseconds and a step what it took.
    """
    runs: dict[str, dict[str, dict]] = {}
    for run in read_json_lines(work / "runs.jsonl"):
        part = f" (first {run['most']})" if run["most"] < 2000 else ""
        run["settings"] = str(Settings(**run["settings"])) + part
        runs.setdefault(run["text"], {})[run["settings"]] = run
    for text, by_settings in runs.items():
        base = None
        for settings, run in by_settings.items():
            rounds = run["rounds"]
            seconds = sum(verify + draft * drafted for *_, drafted in rounds) / 1e3 + run["step_seconds"]
            speed = sum(committed for _, committed, _ in rounds) / seconds
            if settings.startswith("no updates"):
                base = speed
            bins = " | ".join(f"{tau(rounds, *pair):.2f}" for pair in zip(BINS, BINS[1:]))
            print(f"| {text} | {settings} | {bins} | {tau(rounds):.2f} | {speed / base:.2f}x |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["record", "check", "replay", "table"])
    parser.add_argument("work", type=Path)
    parser.add_argument("settings", nargs="*", help='"rate=1e-4 stride=4"; see Settings')
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--texts", nargs="+")
    parser.add_argument("--verify", type=float, default=60.0, help="ms of a round besides the draft; see check")
    parser.add_argument("--draft", type=float, default=10.9, help="ms of a draft; see replay")
    arguments = parser.parse_args()
    if arguments.part == "record":
        record(arguments.work, arguments.tokens, arguments.texts)
    elif arguments.part == "check":
        check(arguments.work)
    elif arguments.part == "table":
        table(arguments.work, arguments.verify, arguments.draft)
    else:
        replays(arguments.work, arguments.texts, arguments.settings, arguments.tokens)


if __name__ == "__main__":
    main()
