"""
How many bytes a round reads and writes, for texts of 1,000 to 128,000 tokens.

    OMP_NUM_THREADS=1 python examples/benchmarks/bytes_moved.py > examples/benchmarks/results/bytes_moved.md

A round of speculative decoding should cost about as much memory traffic as one token of the target: its weights, and
the keys and values of the text, once. Nothing is computed here: Qwen3-8B and its drafter of five layers have shapes
and no data (the device `meta`), and every operator is counted with the bytes of the tensors that it reads and writes.
Views move nothing; what picks rows out of a tensor moves these rows; attention is one kernel, which reads queries,
keys, values and mask once.
"""

import datetime
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import transformers
from random_pairs import SHAPES
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Cache, DynamicCache, StaticCache

from dflash_hf.decoding import draft_context, draft_session
from dflash_hf.decoding.acceptance import Acceptance, Block
from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.decoding.session import SlotSession
from dflash_hf.decoding.trees import Tree
from dflash_hf.drafter import DFlashDraftModel
from dflash_hf.layouts.configuration import DFlashDraftConfig
from dflash_hf.modeling import modeling_dflash
from dflash_hf.targets import features


SHAPE = "qwen3-8b"
CONTEXTS = (1024, 4096, 16384, 65536, 131072)
BLOCK = 16
TREE = 63
DTYPE = torch.bfloat16
GIGABYTE = 1e9


# ------------------------------------------------------------------------------------------------------------ counting


def bytes_of(tensor: torch.Tensor) -> int:
    """Of the memory behind a tensor: what is broadcast is there once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return math.prod(sizes) * tensor.element_size()


class _Operators(TorchDispatchMode):
    """Counts the bytes of every operator but attention."""

    # They read as many elements of their first tensor as they return.
    PICKING = ("index_select", "gather", "embedding", "index", "take_along_dim")
    # They write the elements of their last tensor into the first.
    WRITING = ("index_copy_", "copy_", "scatter_", "index_put_")
    ALLOCATING = ("empty", "new_empty", "empty_like", "empty_strided")

    def __init__(self):
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in self.ALLOCATING and not _is_view(func):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            if name in self.WRITING:
                self.moved += 2 * bytes_of(tensors[-1])
            elif name in self.PICKING:
                self.moved += 2 * sum(map(bytes_of, results)) + sum(map(bytes_of, tensors[1:]))
            else:
                self.moved += sum(map(bytes_of, tensors)) + sum(map(bytes_of, results))
        return output


def _is_view(func) -> bool:
    """Whether an operator returns a part of its argument."""
    returned = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


class _Attention(TorchFunctionMode):
    """Counts attention as one kernel."""

    def __init__(self, operators: _Operators):
        super().__init__()
        self.operators = operators

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args[:3]
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        self.operators.moved += sum(map(bytes_of, (query, key, value)))
        if type(mask) is torch.Tensor:  # else it is a bias without values
            self.operators.moved += bytes_of(mask)
        output = query.new_empty(*query.shape[:3], value.shape[3])
        self.operators.moved += bytes_of(output)
        return output


@contextmanager
def counting() -> Iterator[_Operators]:
    """Counts, in the attribute `moved` of what it yields, the bytes that are moved inside."""
    with _Operators() as operators, _Attention(operators):
        yield operators


# ---------------------------------------------------------------------------------------------------------------- pair


def target_and_draft():
    """A pair of shapes without data."""
    shape = SHAPES[SHAPE]
    config = shape["config_class"](
        **shape["target"],
        max_position_embeddings=1 << 20,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    draft_config = DFlashDraftConfig.for_target(
        config, config.vocab_size - 1, num_hidden_layers=shape["draft_layers"], block_size=BLOCK
    )
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
        draft = DFlashDraftModel(draft_config).to(DTYPE).eval()
    return target, draft


@contextmanager
def without_data() -> Iterator[None]:
    """Inside, models without data may run: elsewhere they are refused."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for module in (features, draft_context, draft_session, modeling_dflash):
            stack.enter_context(mock.patch.object(module, "execution_device", lambda module: torch.device("meta")))
        embed = mock.patch.object(modeling_dflash, "raw_embedding", _embed)  # it takes such weights for offloaded ones
        stack.enter_context(embed)
        yield


def _embed(target, input_ids: torch.LongTensor) -> torch.Tensor:
    return torch.nn.functional.embedding(input_ids, target.get_input_embeddings().weight)


def weights_of(model) -> int:
    """Bytes of the weights that a forward reads: of the embedding it reads a few rows only."""
    embedding = model.get_input_embeddings()
    weights = {id(weight): bytes_of(weight) for weight in model.parameters()}
    if embedding is not None:
        weights.pop(id(embedding.weight), None)
    return sum(weights.values())


def states_of(config, layers: int, rows: int, length: int) -> int:
    """Bytes of the keys and values of `rows` texts."""
    return 2 * rows * layers * config.num_key_value_heads * config.head_dim * length * DTYPE.itemsize


def filled(cache: Cache, config, rows: int, length: int) -> Cache:
    """A cache with `length` tokens of each row."""
    shape = (rows, config.num_key_value_heads, length, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.empty(2, *shape, dtype=DTYPE, device="meta"), layer)
    return cache


# ---------------------------------------------------------------------------------------------------------------- ways


def one_token(target, rows: int, length: int) -> int:
    """The target alone, with the cache of `generate`, which is copied to a new place for each token."""
    cache = filled(DynamicCache(config=target.config), target.config, rows, length)
    ids = torch.zeros(rows, 1, dtype=torch.long, device="meta")
    with counting() as counted:
        target(input_ids=ids, position_ids=ids, past_key_values=cache)
    return counted.moved


def upstream_block(target, rows: int, length: int) -> int:
    """A block that upstream's own attention verifies, over a cache that is written in place."""
    cache = filled(StaticCache(config=target.config, max_cache_len=length + BLOCK), target.config, rows, length)
    ids = torch.zeros(rows, BLOCK, dtype=torch.long, device="meta")
    mask = torch.zeros(rows, 1, BLOCK, length + BLOCK, dtype=DTYPE, device="meta")
    with counting() as counted:
        target(input_ids=ids, position_ids=ids, past_key_values=cache, attention_mask=mask)
    return counted.moved


def slots_of(target, rows: int, length: int, omits_masks: bool) -> SlotSession:
    """A session after a text of `length` tokens."""
    positions = torch.zeros(rows, 1, dtype=torch.long, device="meta")
    cache = filled(DynamicCache(config=target.config), target.config, rows, length)
    return SlotSession(target, cache, [0] * rows, positions, {}, omits_masks=omits_masks)


def block(target, rows: int, length: int, omits_masks: bool) -> int:
    """A block that this package verifies and commits half of."""
    session = slots_of(target, rows, length, omits_masks)
    candidates = Block(torch.zeros(rows, BLOCK, dtype=torch.long, device="meta"))
    acceptance = Acceptance.from_counts([BLOCK // 2] * rows, "meta")
    session.cache.reserve(length + BLOCK)  # buffers grow every 64 tokens; not in this round
    with counting() as counted:
        session.verify(candidates)
        session.keep(acceptance)
    return counted.moved


def tree(target, rows: int, length: int) -> int:
    """A draft tree, of which a path of eight nodes is kept."""
    session = slots_of(target, rows, length, omits_masks=True)
    ids = torch.zeros(rows, TREE + 1, dtype=torch.long, device="meta")
    ancestors = torch.ones(rows, TREE + 1, TREE + 1, dtype=torch.bool, device="meta")
    candidates = Tree(ids, ids, ancestors, ids, ids.float(), slots=BLOCK - 1)
    paths = [list(range(0, 16, 2))] * rows
    acceptance = Acceptance(paths, ids[:, 0], ids[:, :8])
    session.cache.reserve(length + TREE + 1)
    with counting() as counted:
        session.verify(candidates)
        session.keep(acceptance)
    return counted.moved


def drafted_block(target, draft, length: int) -> int:
    """The drafter's forward over a block, with the features of eight tokens that it has not read yet."""
    session = DraftSession(draft, target)
    context = session.context
    width = len(draft.config.target_layer_ids) * target.config.hidden_size
    context.append(torch.empty(1, length, width, dtype=DTYPE, device="meta"))
    context.prefill([0], length, torch.zeros(1, 1, dtype=torch.long))
    accepted_features = torch.empty(1, BLOCK // 2, width, dtype=DTYPE, device="meta")
    context.read(accepted_features, Acceptance.from_counts([BLOCK // 2]))
    context.cache.reserve(length + 2 * BLOCK)
    anchors = torch.zeros(1, dtype=torch.long, device="meta")
    with counting() as counted:
        session.decode_block(anchors, session.hidden_states(anchors))
    return counted.moved


# Forwards of the target over candidates: rows, and a function of target and context that counts their bytes.
VERIFICATIONS: dict[str, tuple[int, Callable]] = {
    "one token, the cache of `generate`": (1, lambda target, length: one_token(target, 1, length)),
    "block of 16, upstream's attention": (1, lambda target, length: upstream_block(target, 1, length)),
    "block of 16, no mask": (1, lambda target, length: block(target, 1, length, omits_masks=True)),
    "block of 16, mask": (1, lambda target, length: block(target, 1, length, omits_masks=False)),
    "block of 16, four rows": (4, lambda target, length: block(target, 4, length, omits_masks=True)),
    "tree of 63": (1, lambda target, length: tree(target, 1, length)),
}


def verification_ratio(name: str, target, length: int) -> float:
    """Bytes that a forward of [`VERIFICATIONS`] moves, by the least that one token of the target needs."""
    rows, moved = VERIFICATIONS[name]
    return moved(target, length) / least_of_target(target, rows, length)


def least_of_target(target, rows: int, length: int) -> int:
    """Bytes of the target's weights, and of the keys and values of `rows` texts."""
    return weights_of(target) + states_of(target.config, target.config.num_hidden_layers, rows, length)


def growth_ratio(name: str, target) -> float:
    """Bytes that a forward moves more for each further token of context, by the keys and values of the token."""
    rows, moved = VERIFICATIONS[name]
    first = CONTEXTS[0]
    last = CONTEXTS[-1]
    least = least_of_target(target, rows, last) - least_of_target(target, rows, first)
    return (moved(target, last) - moved(target, first)) / least


def draft_ratio(target, draft, length: int) -> float:
    """Bytes that drafting a block moves, by the weights, keys and values of the drafter, and the target's head."""
    least = weights_of(draft) + states_of(draft.config, draft.config.num_hidden_layers, 1, length)
    return drafted_block(target, draft, length) / (least + bytes_of(target.get_output_embeddings().weight))


def main():
    target, draft = target_and_draft()
    print(HEAD.format(date=datetime.date.today(), transformers=transformers.__version__, torch=torch.__version__))
    print(f"| | {' | '.join(f'{length:,}' for length in CONTEXTS)} | a further token |")
    print("|---" * (len(CONTEXTS) + 2) + "|")
    with without_data():
        least = [f"{least_of_target(target, 1, length) / GIGABYTE:.1f} GB" for length in CONTEXTS]
        print(f"| least for one row | {' | '.join(least)} | |")
        for name in VERIFICATIONS:
            ratios = [f"{verification_ratio(name, target, length):.3f}" for length in CONTEXTS]
            print(f"| {name} | {' | '.join(ratios)} | {growth_ratio(name, target):.3f} |", flush=True)
        ratios = [f"{draft_ratio(target, draft, length):.3f}" for length in CONTEXTS]
        print(f"| a drafted block, by the drafter's least | {' | '.join(ratios)} | |")


HEAD = """# Bytes that a round moves

Qwen3-8B in bf16 and a drafter of five layers, as shapes without data: bytes that the operators of a forward read and
write, attention as one kernel, by the least that one token of the target needs, which is its weights, and the keys and
values of all rows, once. Above 1: activations, of which 64 candidates have four times those of 16 and which a GPU's
cache may hold; masks; and what is copied. Columns: tokens of context in each row; and what each further token of
context adds, by its keys and values.

```
OMP_NUM_THREADS=1 python examples/benchmarks/bytes_moved.py > examples/benchmarks/results/bytes_moved.md
```

{date}, transformers {transformers}, torch {torch}.
"""


if __name__ == "__main__":
    main()
