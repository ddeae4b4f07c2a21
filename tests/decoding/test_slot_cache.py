"""The slot cache by itself: what queries see, writes, growth, rings, and conversion from and to an ordinary cache."""

import itertools
import random

import pytest
import torch
from support.trees import tree_of
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from dflash_hf.decoding import slots as slots_module
from dflash_hf.decoding.acceptance import Block
from dflash_hf.decoding.masks import LayerMaskRule, is_within, verification_mask
from dflash_hf.decoding.slots import Ring, SlotCache


class RecordedCache:
    """A cache of one layer whose keys are numbers, and a record of which number is which token of which row."""

    def __init__(self, prompt: int, padding: list[int], window: int | None, largest: int):
        self.padding = padding
        self.count = 0
        self.source = DynamicCache()
        self.source.layers = [DynamicLayer() if window is None else DynamicSlidingWindowLayer(sliding_window=window)]
        numbers = self.numbers(len(padding), prompt)
        self.source.update(*self.states(numbers), 0)
        self.texts = [row[pad:] for row, pad in zip(numbers.tolist(), padding, strict=True)]
        self.cache = SlotCache.adopt(self.source, padding, largest)

    def numbers(self, rows: int, tokens: int) -> torch.Tensor:
        self.count += rows * tokens
        return torch.arange(self.count - rows * tokens, self.count).view(rows, tokens) + 1

    @staticmethod
    def states(numbers):
        keys = numbers[:, None, :, None].double().expand(-1, 2, -1, 4)
        return keys, -keys

    def verify(self, draft, window, chunk):
        """Write a draft, and return its numbers and, for each of its tokens, the numbers `[R][n]` that it sees."""
        rows, size = draft.tokens.shape
        lengths = torch.tensor([len(text) for text in self.texts])
        self.cache.reserve(int(lengths.max()) + size)
        slots = lengths[:, None] + torch.arange(size)
        numbers = self.numbers(rows, size)
        self.cache.set_next_indices(slots)
        keys, values = self.cache.update(*self.states(numbers), 0)
        assert torch.equal(keys, -values)
        mask = verification_mask(self.cache, slots, LayerMaskRule(window, chunk), torch.float64, draft)
        assert mask.shape == (rows, 1, size, keys.shape[2])
        stored = keys[:, 0, :, 0].long()
        seen = [[sorted(stored[row][mask[row, 0, node] == 0].tolist()) for node in range(size)] for row in range(rows)]
        return numbers.tolist(), seen


def drafted(kind: str, rows: int, size: int):
    if kind == "block":
        return Block(torch.zeros(rows, size, dtype=torch.long))
    log_probs, ids = torch.randn(rows, 5, 50).log_softmax(-1).topk(8)
    return tree_of(torch.zeros(rows, dtype=torch.long), ids, log_probs, size - 1)


WINDOWS = [(None, None), (7, None), (1, None), (None, 4)]  # and chunks
SEEN = [
    (None, None, "block", [0]),
    (7, None, "tree", [0]),
    (1, None, "block", [0]),
    (None, 4, "tree", [0]),
]
SEEN += [(window, chunk, kind, [0, 3, 8]) for window, chunk in WINDOWS for kind in ("block", "tree")]


@pytest.mark.parametrize(("window", "chunk", "kind", "padding"), SEEN, ids=str)
def test_queries_see_exactly_their_context(window, chunk, kind, padding, monkeypatch):
    """Row by row, token by token, over many rounds: rejected tokens, trees, rows that end, rings that go round."""
    monkeypatch.setattr(slots_module, "MIN_RING_MARGIN", 5)
    torch.manual_seed(0)
    draws = random.Random(0)
    recorded = RecordedCache(11, padding, window or chunk, largest=13)
    for step in range(40):
        draft = drafted(kind, len(padding), draws.randint(2, 13))
        size = draft.tokens.shape[1]
        starts = [len(text) for text in recorded.texts]
        numbers, seen = recorded.verify(draft, window, chunk)
        for row, node in itertools.product(range(len(padding)), range(size)):
            depths = range(size) if kind == "block" else draft.depths[row].tolist()
            sees = [other <= node if kind == "block" else draft.ancestors[row, node, other] for other in range(size)]
            start = starts[row]
            text = recorded.texts[row]
            keys = [*enumerate(text), *((start + depths[i], numbers[row][i]) for i in range(size) if sees[i])]
            query = start + depths[node]
            expected = [
                number
                for place, number in keys
                if (window is None or query - place < window) and (chunk is None or query // chunk == place // chunk)
            ]
            assert seen[row][node] == sorted(expected), (step, row, node)
        paths = []
        for row in range(len(padding)):
            node = draws.randrange(size)
            path = [*range(node + 1)]
            if kind == "tree":
                path = draft.ancestors[row, node].nonzero()[:, 0].tolist()
            ended = row == 1 and step > 15
            paths.append([] if ended else path)
            recorded.texts[row] += [numbers[row][place] for place in paths[-1]]
        if kind == "tree":
            most = max(map(len, paths))
            path = torch.tensor([path + [0] * (most - len(path)) for path in paths])
            start = torch.tensor(starts)[:, None]
            recorded.cache.copy_tokens(start + path, start + torch.arange(most))
    columns = max(len(text) + pad for text, pad in zip(recorded.texts, padding, strict=True))
    layer = recorded.cache.write_back(recorded.source, padding, columns).layers[0]
    assert recorded.source.get_seq_length() == columns
    for row, pad in enumerate(padding):
        expected_keys = [0] * pad + recorded.texts[row] + [0] * columns
        stored = layer.keys[row, 0, :, 0].long().tolist()
        first = columns - len(stored)
        assert (first == 0) == (layer.is_sliding is False or columns < layer.sliding_window)
        for column in range(max(first, pad), len(recorded.texts[row]) + pad):
            # Row 1 has ended: its window is another.
            assert stored[column - first] == expected_keys[column] or row == 1


@pytest.mark.parametrize("causal", [True, False])
def test_mask_of_a_block_may_look_ahead(causal):
    slots = torch.tensor([[5, 6, 7], [0, 1, 2]])
    slots_of_keys = torch.arange(9)
    last = slots if causal else slots[:, -1:].expand_as(slots)
    seen = (slots_of_keys <= last[:, :, None]) & is_within(slots_of_keys, slots[:, :, None], 4)
    for row, i, key in itertools.product(range(2), range(3), range(9)):
        query = int(slots[row, i])
        expected = key <= (query if causal else int(slots[row, -1])) and query - key < 4
        assert bool(seen[row, i, key]) == expected


@pytest.mark.parametrize("sink", [0, 3])
def test_ring_holds_the_last_tokens_and_the_first(sink):
    ring = Ring(10, 10, sink)
    slots = {}
    for token in range(45):
        slots[int(ring.slots(torch.tensor(token)))] = token
        tokens = ring.indices(16, torch.tensor([[token]]))[0].tolist()
        expected = [slots.get(slot, -1) for slot in range(16)]
        assert [max(number, -1) if number <= token else -1 for number in tokens] == expected


@pytest.mark.parametrize("rows", [1, 3])
def test_later_slot_groups_overwrite_earlier_ones(rows):
    cache = SlotCache(rows, 20)
    recorded = torch.arange(9)[None, None, :, None].float().expand(rows, 2, 9, 4)
    cache.reserve(7)
    cache.set_next_indices(torch.arange(4).expand(rows, 4), torch.arange(2, 7).expand(rows, 5))
    keys, values = cache.update(recorded, -recorded, 0)
    assert keys.shape == (rows, 2, 8, 4) and torch.equal(keys, -values)
    assert keys[0, 0, :8, 0].tolist() == [0, 1, 4, 5, 6, 7, 8, 0]


def test_dropped_tokens_are_never_seen():
    cache = SlotCache(1, 20)
    cache.reserve(19)
    cache.set_next_indices(torch.tensor([[-1, 4, -1]]))
    keys, _ = cache.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), 0)
    assert keys[0, 0, :, 0].nonzero().flatten().tolist() == [4] and keys.shape[2] < cache.capacity


def test_layers_of_other_heads_and_widths_share_slots():
    cache = SlotCache(3, 20)
    slots = torch.tensor([[0, 4], [7, 2], [3, 9]])
    source = torch.tensor([[4, 0], [2, 2], [9, 3]])
    goal = torch.tensor([[5, 6], [11, 12], [0, 1]])
    cache.reserve(13)
    cache.set_next_indices(slots)
    for layer, (heads, width, of_values) in enumerate(((2, 4, 4), (5, 3, 6), (1, 8, 2))):
        written = torch.randn(3, heads, 2, width), torch.randn(3, heads, 2, of_values)
        read = cache.update(*written, layer)
        for states, new in zip(read, written, strict=True):
            expected = torch.zeros_like(states)
            for row, head, token in itertools.product(range(3), range(heads), range(2)):
                expected[row, head, slots[row, token]] = new[row, head, token]
            assert torch.equal(states, expected)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    cache.copy_tokens(source, goal)
    for layer, old in zip(cache.layers, before, strict=True):
        for states, expected in zip((layer.keys, layer.values), old, strict=True):
            for row, token in itertools.product(range(3), range(2)):
                expected[row, :, goal[row, token]] = expected[row, :, source[row, token]].clone()
            assert torch.equal(states, expected)
