"""
The sizes that are chosen on a GPU, and what they bring: Qwen3-8B and its drafter of five layers and blocks of 16, on a
simulated H100, H200, RTX 4090 or A10.

    python examples/benchmarks/simulated_gpu.py

The policy is the package's own, with the costs of rounds given. Compare with the column of whole blocks. Simulated
are:

- costs: a forward takes as long as reading its weights and keys at 80 % of the data sheet's bandwidth or, if that is
  longer, its operations at 60 % of the dense bf16 peak, with tokens in tiles of 64 (flat up to there, steps after); no
  less than dispatching its kernels one by one (6 us each; 1 us in a CUDA graph). Kernels are counted in rounds of a
  model with as many layers, as PyTorch dispatches them.
- acceptance: a slot's likeliest token is right with a chance drawn for each slot, so that a block of 16 commits 6.5
  tokens (the paper's average for this target), the next seven with what makes a tree of 64 commit 7.5 (public figures
  of DDTree: 6.5 for blocks, 7.26, 7.48, 8.08 for trees of 32, 64, 128). Slots are independent, and the drafter's
  probabilities are these chances.

Times are sums of costs, not measurements of a GPU.
"""

import argparse
import random
import statistics
from pathlib import Path
from types import SimpleNamespace

import torch
from random_pairs import SHAPES, random_pair
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_hf.decoding.acceptance import Acceptance, Block
from dflash_hf.decoding.adaptive import AdaptiveLength, DraftStatistics
from dflash_hf.decoding.latency import DraftSize, LatencyModel
from dflash_hf.decoding.trees import draft_tree


LIKELY = 8  # tokens of a slot that the target may choose
RESULT = Path(__file__).parent / "results" / "simulated_gpu.md"
# Of data sheets: bytes and dense bf16 operations per second.
GPUS = {"H100": (3.35e12, 989e12), "H200": (4.8e12, 989e12), "RTX 4090": (1.008e12, 165e12), "A10": (0.6e12, 125e12)}
SHAPE = "qwen3-8b"
BLOCK = 16
TEXT = 1024
NEW = 512
ROWS = (1, 8, 64)
SIZES = (-1, 0, 1, 2, 4, 8, 16, 32, 64)  # that are known; -1 drafts nothing
VIEWS = {"view", "_unsafe_view", "t", "transpose", "expand", "slice", "select", "unsqueeze", "squeeze", "permute"}
VIEWS |= {"detach", "alias", "split", "split_with_sizes", "chunk", "as_strided", "unbind", "unflatten", "flatten"}
NO_KERNEL = VIEWS | {"reshape", "expand_as", "to"}  # of what inference mode does not take apart


class Kernels(TorchDispatchMode):
    """Counts what is dispatched, views left out."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ not in NO_KERNEL
        return function(*args, **(kwargs or {}))


def kernels() -> dict[str, float]:
    """Of a round without drafts, with a block, and with a tree: a tiny model of as many layers."""
    shape = SHAPES["tiny"]
    SHAPES["deep"] = {**shape, "target": {**shape["target"], "num_hidden_layers": 36}, "draft_layers": 5}
    target, draft, prompts = random_pair("deep", torch.float32, "cpu", 1)
    ids = torch.tensor(prompts)
    per_round = {}
    settings = {"alone": None, "nothing": {"block_size": 1}, "block": {"block_size": 8}, "tree": {"tree_nodes": 15}}
    for name, setting in settings.items():
        for field in ("block_size", "tree_nodes"):
            setattr(draft.decoding_config, field, (setting or {}).get(field))
        counts = []
        options = {"assistant_model": None if setting is None else draft, "return_dict_in_generate": True}
        target.generate(ids, max_new_tokens=4, do_sample=False, **options)  # what is found out once
        for new in (2, 34):
            with Kernels() as mode:
                output = target.generate(ids, max_new_tokens=new, do_sample=False, **options)
            rounds = new if setting is None else len(output.acceptance_lengths[0])
            counts.append((mode.count, rounds))
        (few, first), (many, last) = counts
        per_round[name] = (many - few) / (last - first)
    return per_round


class Costs:
    """Seconds of rounds on a simulated GPU."""

    def __init__(self, bandwidth: float, peak: float, launches: dict[str, float], launch: float):
        target = SHAPES[SHAPE]["target"]
        layers = SHAPES[SHAPE]["draft_layers"]
        hidden = target["hidden_size"]
        heads = target["num_attention_heads"] + 2 * target["num_key_value_heads"]
        attention = hidden * target["head_dim"] * (heads + target["num_attention_heads"])
        layer = attention + 3 * hidden * target["intermediate_size"]
        head = hidden * target["vocab_size"]
        self.target = target["num_hidden_layers"] * layer + head
        self.drafter = layers * layer + head
        self.keys = 4 * target["num_hidden_layers"] * target["num_key_value_heads"] * target["head_dim"] * TEXT
        self.bandwidth = 0.8 * bandwidth
        self.peak = 0.6 * peak
        self.launches = launches
        self.launch = launch

    def forward(self, weights: float, tokens: int, rows: int) -> float:
        """The cost of a forward pass over `tokens` tokens of `rows` rows."""
        tiles = -(-tokens // 64) * 64
        return max((2 * weights + rows * self.keys) / self.bandwidth, 2 * weights * tiles / self.peak)

    def round(self, rows: int, size: int, kind: str | None = None) -> float:
        """That verifies `size` drafted tokens; -1 drafts nothing."""
        kind = kind or ("nothing" if size < 0 else "tree")
        seconds = self.forward(self.target, rows * (max(size, 0) + 1), rows)
        if size >= 0:
            seconds += self.forward(self.drafter, rows * BLOCK, 0)
        least = self.launches[kind] * self.launch
        return seconds + least if self.launch < 2e-6 else max(seconds, least)


class World:
    """A drafter, as [`DraftSession`], and what the target says."""

    OTHERS = 500  # tokens that share what the candidates leave
    block_tokens = BLOCK
    token_head = SimpleNamespace(order=0)
    context = SimpleNamespace(device=torch.device("cpu"))
    draft = SimpleNamespace(config=SimpleNamespace(max_block_tokens=BLOCK), target_ids=lambda ids: ids)

    def __init__(self, sure: float, others: float, rows: int):
        self.sure = sure
        self.others = others
        self.rows = rows
        self.draws = random.Random(0)
        self.anchors = torch.zeros(rows, dtype=torch.long)

    def hidden_states(self, anchors) -> torch.Tensor:
        """`[R, D, k]`, chances of the candidates of each slot, tokens 1 to k."""
        certain = self.sure
        draws = self.draws
        first = [[0.99 if draws.random() < certain else draws.uniform(0.2, 0.95) for _ in range(BLOCK - 1)]
                 for _ in range(self.rows)]  # fmt: skip
        first = torch.tensor(first, dtype=torch.float64)
        shares = self.others * 0.5 ** torch.arange(1, LIKELY, dtype=torch.float64)
        self.chances = torch.cat([first[..., None], (1 - first)[..., None] * shares], dim=-1)
        return self.chances

    def run(self, anchors, choose, settings):
        """As `DraftSession.run`."""
        return choose(anchors, self.hidden_states(anchors))

    def logits(self, hidden) -> torch.Tensor:
        rest = (1 - hidden.sum(-1, keepdim=True)).clamp(min=1e-9) / self.OTHERS
        return torch.cat([rest, hidden, rest.expand(-1, -1, self.OTHERS - 1)], dim=-1).log()

    def block(self) -> Block:
        self.hidden_states(self.anchors)
        return Block(torch.cat([self.anchors[:, None], torch.ones(self.rows, BLOCK - 1, dtype=torch.long)], dim=1))

    def tree(self, nodes: int):
        return draft_tree(self, self.anchors, nodes)

    def verdict(self, draft) -> tuple[torch.LongTensor, torch.LongTensor | None]:
        """How far the target agrees with what was drafted last."""
        draws = torch.tensor([[self.draws.random() for _ in range(BLOCK - 1)] for _ in range(self.rows)])
        place = (draws[..., None] >= self.chances.cumsum(-1)).sum(-1)
        truth = torch.nn.functional.pad(torch.where(place < LIKELY, place + 1, -1), (0, 1), value=-1)  # [R, D + 1]
        # Each node asks for the target's token one slot further.
        depths = torch.arange(draft.tokens.shape[1]).expand(self.rows, -1) if draft.depths is None else draft.depths
        return draft.longest_match(truth.gather(1, depths))


def tau(make, *world: float) -> float:
    """What a round commits."""
    rows = World(*world, 50)
    return statistics.fmean(float(rows.verdict(make(rows))[0].double().mean()) for _ in range(40))


def solved(function, goal: float) -> float:
    """Where a rising function of 0 to 1 reaches `goal`."""
    low = 0.0
    high = 1.0
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < goal else (low, middle)
    return (low + high) / 2


def decode(costs, rows: int, sure: float, others: float, policy: AdaptiveLength | None = None) -> dict:
    """Rounds of `NEW` tokens for each row, of chosen sizes or of whole blocks."""
    world = World(sure, others, rows)
    left = [NEW] * rows
    if policy is not None:
        policy.draft_session = world
    spent = 0.0
    sizes = []
    tokens = 0.0
    plain = 0
    text = SimpleNamespace(
        unfinished=[True] * rows,
        lengths=[0] * rows,
        longest=0,
        remaining_tokens=NEW,
        done=False,
        anchors=world.anchors,
    )
    while not text.done:
        draft = world.block() if policy is None else policy.get_candidates(text)
        drafted = policy is None or policy.round.size.by_drafter
        counts, path = world.verdict(draft) if drafted else (torch.ones(rows, dtype=torch.long), None)
        if not drafted:
            size = -1
            kind = "nothing"
        else:
            size = draft.tokens.shape[1] - 1
            kind = "block" if path is None else "tree"
        spent += costs.round(rows, size, kind)
        counts = [min(count, rest) for count, rest in zip(counts.tolist(), left, strict=True)]
        drafting = sum(text.unfinished)
        left = [rest - count for rest, count in zip(left, counts, strict=True)]
        if size >= 0:
            sizes.append(size)
            tokens += sum(counts) / drafting
        else:
            plain += 1
        text.unfinished = [rest > 0 for rest in left]
        text.remaining_tokens = max(left)
        text.longest = NEW - min(left)
        text.lengths = [NEW - rest for rest in left]
        text.done = not any(text.unfinished)
        if policy is not None:
            text.committed = [[1] * count for count in counts]  # which ones decides nothing without prompt lookup
            nodes = [range(count) for count in counts] if path is None else path.tolist()
            paths = [list(row[:count]) for row, count in zip(nodes, counts, strict=True)]
            policy.update_candidate_strategy(text, draft, Acceptance.from_paths(paths))
    return {"seconds": spent, "sizes": sizes, "tau": tokens / max(len(sizes), 1), "plain": plain}


class Simulated(AdaptiveLength):
    """
    The policy of a call on that machine, without prompt lookup.

    Args:
        costs (`Costs`): The machine's.
        rows (`int`): Of the call.
        statistics (`DraftStatistics`): What calls learn.
    """

    def __init__(self, costs: Costs, rows: int, statistics: DraftStatistics):
        self.known = LatencyModel(costs.drafter / costs.target, "accelerator")
        rounds = [(TEXT, DraftSize(max(size, 0), size >= 0), costs.round(rows, size)) for size in SIZES]
        self.known.record(rows, rounds * LatencyModel.MIN_SAMPLES)
        text_config = SimpleNamespace(vocab_size=1 + LIKELY)
        target_config = SimpleNamespace(get_text_config=lambda decoder: text_config)
        call = SimpleNamespace(
            target=SimpleNamespace(device=torch.device("cuda"), config=target_config),
            draft=torch.nn.Module(),
            prompt=torch.zeros(rows, 1, dtype=torch.long),
            rows=rows,
            prompt_length=TEXT,
            selector=SimpleNamespace(max_new_tokens=NEW, streamer=None),
            config=SimpleNamespace(do_sample=False),
        )
        super().__init__(call, SimpleNamespace(block_tokens=BLOCK))
        self.lookups = []
        self.statistics = statistics  # not a copy: `finish`, which keeps it for later calls, is not called
        self.statistics.assume_unless_measured(self._latencies(0, drafted=True)[2])

    def _shared_latency_model(self) -> LatencyModel:
        return self.known

    def _shared_statistics(self) -> dict:
        return {}

    def room(self, state) -> int:
        return state.remaining_tokens

    def supports_trees(self, state) -> bool:
        return True


def table() -> list[str]:
    launches = kernels()
    sure = solved(lambda sure: tau(World.block, sure, 0.0), 6.5)
    others = solved(lambda others: tau(lambda one: one.tree(64), sure, others), 7.5)
    world = sure, others
    lines = [
        "# Sizes on a simulated GPU",
        "",
        __doc__.split("\n\n")[0].strip().replace("\n", " "),
        f"`python examples/benchmarks/simulated_gpu.py` says how. A block of 16 commits "
        f"{tau(World.block, *world):.2f} tokens, a tree of 64 {tau(lambda one: one.tree(64), *world):.2f}.",
        f"Kernels of a round: {launches['alone']:.0f} in `generate` without a drafter, {launches['nothing']:.0f} "
        f"where nothing is drafted, {launches['block']:.0f} with a block, {launches['tree']:.0f} with a tree.",
        "",
        "| GPU | rounds | rows | nothing drafted, ms | block of 16, ms | over the target alone | chosen: over "
        "the target alone | over a block of 16 | tokens verified, median (quartiles) | tau | rounds without drafts |",
        "|---" * 11 + "|",
    ]
    for gpu, (bandwidth, peak) in GPUS.items():
        for how, launch in (("eager", 6e-6), ("graphs", 1e-6)):
            costs = Costs(bandwidth, peak, launches, launch)
            for rows in ROWS:
                alone = NEW * costs.round(rows, -1, "alone")
                fixed = decode(costs, rows, *world)
                statistics_of_calls = DraftStatistics()
                for _ in range(3):  # calls, the last of which is shown
                    chosen = decode(costs, rows, *world, Simulated(costs, rows, statistics_of_calls))
                sizes = chosen["sizes"] or [0]
                quarters = statistics.quantiles(sizes, n=4) if len(sizes) > 1 else sizes * 3
                cells = [gpu, how, rows, f"{1e3 * costs.round(rows, -1):.2f}"]
                cells += [f"{1e3 * costs.round(rows, BLOCK - 1, 'block'):.2f}", f"{alone / fixed['seconds']:.2f}x"]
                cells += [f"{alone / chosen['seconds']:.2f}x", f"{fixed['seconds'] / chosen['seconds']:.2f}x"]
                cells += [f"{quarters[1]:.0f} ({quarters[0]:.0f}-{quarters[2]:.0f})", f"{chosen['tau']:.2f}"]
                lines.append(f"| {' | '.join(map(str, cells))} | {chosen['plain']} |")
                print(lines[-1], flush=True)
    return lines


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    RESULT.write_text("\n".join(table()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
