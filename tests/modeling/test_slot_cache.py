"""The slot cache by itself: writes, order of writes, masks, growth, and the way from and to an ordinary cache."""

import itertools

import pytest
import torch
from support.pairs import make_draft, make_target
from support.scripted_draft import scripted
from transformers import DynamicCache

from dflash_hf.modeling.cache_dflash import SlotCache, can_adopt, slot_mask
from dflash_hf.modeling.target_dflash import CACHE_NAME


def states(rows, tokens, start=0):
    """Keys whose entries tell row and token."""
    values = torch.arange(start, start + tokens).float().expand(rows, tokens) + 1000 * torch.arange(rows)[:, None]
    return values[:, None, :, None].expand(rows, 2, tokens, 4).contiguous()


@pytest.mark.parametrize("rows", [1, 3])
def test_later_groups_cover_earlier_ones(rows):
    cache = SlotCache(rows, 20)
    context, block = torch.arange(4).expand(rows, 4), torch.arange(2, 7).expand(rows, 5)
    cache.reserve(7)
    cache.place(context, block)
    keys, values = cache.update(states(rows, 9), -states(rows, 9), 0)
    assert keys.shape == (rows, 2, 8, 4) and torch.equal(keys, -values)
    assert keys[0, 0, :8, 0].tolist() == [0, 1, 4, 5, 6, 7, 8, 0]


def test_rows_keep_their_own_places():
    cache = SlotCache(2, 20)
    cache.reserve(8)
    cache.place(torch.tensor([[0, 1, 2], [5, 6, 7]]))
    keys, _ = cache.update(states(2, 3), states(2, 3), 0)
    assert keys[0, 0, :8, 0].tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert keys[1, 0, :8, 0].tolist() == [0, 0, 0, 0, 0, 1000, 1001, 1002]


def test_layers_of_other_heads_and_widths_share_slots():
    cache, slots = SlotCache(3, 20), torch.tensor([[0, 4], [7, 2], [3, 9]])
    source, goal = torch.tensor([[4, 0], [2, 2], [9, 3]]), torch.tensor([[5, 6], [11, 12], [0, 1]])
    cache.reserve(13)
    cache.place(slots)
    for layer, (heads, width, of_values) in enumerate(((2, 4, 4), (5, 3, 6), (1, 8, 2))):
        written = torch.randn(3, heads, 2, width), torch.randn(3, heads, 2, of_values)
        read = cache.update(*written, layer)
        for states, new in zip(read, written, strict=True):
            expected = torch.zeros_like(states)
            for row, head, token in itertools.product(range(3), range(heads), range(2)):
                expected[row, head, slots[row, token]] = new[row, head, token]
            assert torch.equal(states, expected)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    cache.move(source, goal)
    for layer, old in zip(cache.layers, before, strict=True):
        for states, expected in zip((layer.keys, layer.values), old, strict=True):
            for row, token in itertools.product(range(3), range(2)):
                expected[row, :, goal[row, token]] = expected[row, :, source[row, token]].clone()
            assert torch.equal(states, expected)


def test_growing_keeps_what_is_there():
    cache = SlotCache(2, 30)
    assert cache.capacity == 64
    for start in range(0, 200, 10):
        cache.reserve(start + 10)
        cache.place(torch.arange(start, start + 10).expand(2, 10))
        keys, values = cache.update(states(2, 10, start), states(2, 10, start), 0)
        assert cache.capacity > start + 10 and keys.shape[2] >= start + 10
    assert keys[1, 1, :200, 3].tolist() == [1000.0 + i for i in range(200)]


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (3, None), (None, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_mask_against_an_element_wise_oracle(window, chunk, causal):
    slots = torch.tensor([[5, 6, 7], [0, 1, 2]])
    last = slots if causal else slots[:, -1:].expand_as(slots)
    mask = slot_mask(slots, last, 64, window, chunk, torch.float64)
    assert mask.shape == (2, 1, 3, 64) and mask.dtype == torch.float64
    for row in range(2):
        for i in range(3):
            query = int(slots[row, i])
            for key in range(64):
                seen = key <= (query if causal else int(slots[row, -1]))
                seen = seen and (window is None or query - key < window)
                seen = seen and (chunk is None or query // chunk == key // chunk)
                assert bool(mask[row, 0, i, key] == 0) == seen


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("padding", [[0], [0, 3]])
def test_there_and_back(family, padding):
    target = make_target(family)
    rows = len(padding)
    ids = torch.randint(2, 90, (rows, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(padding):
        mask[row, :pad] = 0
    cache = DynamicCache(config=target.config)
    target(ids, attention_mask=mask, **{CACHE_NAME: cache})
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    assert can_adopt(cache)
    slots = SlotCache.adopt(cache, padding, 20)
    assert all(layer.keys.numel() == 0 for layer in cache.layers)  # the prompt is held once
    back = slots.release(cache, padding, 12)
    assert back is cache and cache.get_seq_length() == 12
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        for row, pad in enumerate(padding):
            real = max(pad - (12 - keys.shape[2]), 0)
            assert torch.equal(layer.keys[row, :, real:], keys[row, :, real:])
            assert torch.equal(layer.values[row, :, real:], values[row, :, real:])


def test_a_long_text_outgrows_its_first_buffers():
    long = make_target(max_position_embeddings=1024)
    prompt = torch.tensor([[5, 9, 17, 33]])
    expected = long.generate(prompt, max_new_tokens=400, do_sample=False)
    draft = scripted(make_draft(long, block_size=16), expected, error_rate=0.02)
    assert torch.equal(long.generate(prompt, max_new_tokens=400, do_sample=False, assistant_model=draft), expected)
