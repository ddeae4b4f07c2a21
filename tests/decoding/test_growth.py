"""Long texts and no limits: what must neither raise nor cost memory before it is used."""

import resource
from pathlib import Path

import pytest
from prompt_memory import LiveBytes
from support.calls import Call, EveryOther, difference
from support.pairs import make_target
from support.rows import ragged_prompts
from support.scripted_draft import recognising

from dflash_hf import DFlashDecodingConfig


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def target(request):
    return make_target(request.param, max_position_embeddings=2048)


def known_text(target, rows: int, length: int, **options):
    """A call, its outcome without a drafter, and a drafter that knows its text."""
    options = {"do_sample": False, "max_new_tokens": length, "return_dict_in_generate": True, **options}
    call = Call(target, *ragged_prompts(rows, seed=rows), options)
    plain = call()
    return call, plain, recognising(target, call.texts(plain.sequences), error_rate=0.02)


@pytest.mark.parametrize("length", [300, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("rows", "own"), [(1, False), (3, False), (1, True)])
def test_slots_grow_with_the_text(rows, own, length, target):
    options = {"logits_processor": lambda call: [EveryOther()]} if own else {}
    call, plain, draft = known_text(target, rows, length, **options)
    draft.decoding_config.tree_nodes = 15
    drafted = call(draft)
    change = difference(plain, drafted)
    assert change is None, change
    assert max(map(max, drafted.lengths)) > 4


@pytest.fixture
def address_space():
    """A gigabyte more than the process has, so that a buffer for 10^9 tokens is refused and not waited for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize(("rows", "fields"), [(1, {"tree_nodes": 15}), (3, {})], ids=str)
def test_unlimited_length_reserves_no_memory(rows, fields, target, address_space):
    """10^9 new tokens and tokens that end the text is how callers say "until it stops"."""
    call, plain, draft = known_text(target, rows, 40)
    draft.decoding_config = DFlashDecodingConfig(**fields)
    peaks = []
    for limit in (100, 10**9):
        with LiveBytes() as counted:
            drafted = call(draft, eos_token_id=plain.sequences[:, 40].tolist(), max_new_tokens=limit)
        peaks.append(counted.peak)
        assert drafted.sequences.shape[1] <= 41
    assert peaks[1] < peaks[0] + 2**20, peaks
