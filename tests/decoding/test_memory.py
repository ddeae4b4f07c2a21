"""What a drafter may add to a call's peak, counted to the byte: see `examples/benchmarks/prompt_memory.py`."""

import gc

import pytest
import torch
from prompt_memory import LiveBytes
from support.pairs import VOCAB, make_draft, make_target
from support.scripted_draft import scripted
from transformers import DynamicCache

from dflash_hf.decoding.slots import SlotCache


ROWS = 2
TOKENS = 512
WIDTH = 32
HIDDEN = ROWS * TOKENS * WIDTH * 4  # bytes of one hidden state for each token of a prompt


@pytest.mark.parametrize("chunk", [None, 128])
def test_prompt_adds_a_hidden_state_per_token(chunk):
    """
    Until the target's forward is over: neither the drafter's keys and values, here three times as large, nor raw
    features, here three.
    """
    target = make_target(num_hidden_layers=8, intermediate_size=96, max_position_embeddings=1024)
    draft = make_draft(target, num_hidden_layers=3, target_layer_ids=[1, 3, 5])
    ids = torch.randint(2, VOCAB - 1, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 2, "do_sample": False, "prefill_chunk_size": chunk}
    target.generate(ids[:, :9], **options, assistant_model=draft)  # probes
    peaks = []
    for assistant in (None, draft):
        with LiveBytes() as counted:
            target.generate(ids, **options, assistant_model=assistant)
        peaks.append(counted.peak)
        assert counted.now < HIDDEN / 10  # all is gone afterwards but the text
    assert peaks[1] - peaks[0] < 1.5 * HIDDEN, (peaks, HIDDEN)


@pytest.mark.parametrize("padding", [[0], [0, 3]])
def test_moving_a_cache_copies_one_tensor_at_a_time(padding):
    """Neither a layer nor the cache: to slots when decoding starts, back when it ends."""
    config = make_target(num_hidden_layers=6).config
    with LiveBytes() as counted:
        cache = DynamicCache(config=config)
        for layer in range(6):
            cache.update(*(torch.randn(len(padding), 2, 1024, 8) for _ in "kv"), layer)
        prompt = counted.now
        of_one_tensor = prompt / 12 * 1.3  # with slots to spare
        slots = SlotCache.adopt(cache, padding)
        assert prompt < counted.now < prompt * 1.3 and counted.peak < prompt * 1.3 + of_one_tensor
        of_slots = counted.now
        counted.peak = 0
        slots.write_back(cache, padding, 1034)
        assert (
            counted.peak < of_slots + 2.1 * of_one_tensor
        )  # a row's padding is put before it, then rows are put together
        assert counted.now < of_slots * 1.01


def bytes_of(cache) -> int:
    return sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values))


def test_windows_keep_a_calls_cache_small():
    """Five of six layers of a Gemma 3 see 512 tokens; a drafted call kept all tokens of them."""
    target = make_target(
        "gemma3",
        num_hidden_layers=6,
        sliding_window=512,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        max_position_embeddings=2**15,
    )
    ids = torch.randint(2, VOCAB - 1, (1, 2**14), generator=torch.Generator().manual_seed(0))
    outputs = []
    sizes = []

    class Streamer:
        """Weighs the slots when each token is written."""

        def put(self, value):
            slot_caches = [value for value in gc.get_objects() if isinstance(value, SlotCache)]
            caches = [slot_cache for slot_cache in slot_caches if len(slot_cache.layers) == 6]
            sizes.extend(map(bytes_of, caches))

        def end(self):
            pass

    for drafted in (False, True):
        cache = DynamicCache(config=target.config)  # of all but the last tokens, as if it had read them
        torch.manual_seed(0)
        for layer in range(6):
            cache.update(*torch.randn(2, 1, 2, 2**14 - 4, 8), layer)
        options: dict = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
        if drafted:
            draft = scripted(make_draft(target), outputs[0].sequences, error_rate=0.0)
            options |= {"assistant_model": draft, "streamer": Streamer()}
        outputs.append(target.generate(ids, past_key_values=cache, **options))
    plain, drafted = outputs
    assert torch.equal(drafted.sequences, plain.sequences) and sum(drafted.acceptance_lengths[0]) == 7
    own = bytes_of(plain.past_key_values)
    assert len(sizes) == 8 and own < sizes[-1] < 1.2 * own and bytes_of(drafted.past_key_values) == own
