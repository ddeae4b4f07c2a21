"""What a round reads and writes is little more than one token of the target does, for short texts and long ones."""

import bytes_moved
import pytest


# Of a forward as a whole; 64 candidates have four times the activations of 16.
LIMITS = {
    "block of 16, no mask": 1.1,
    "block of 16, mask": 1.1,
    "block of 16, four rows": 1.2,
    "tree of 63": 1.2,
}


@pytest.fixture(scope="module")
def pair():
    return bytes_moved.target_and_draft()


@pytest.mark.parametrize("length", [1024, 131072])
@pytest.mark.parametrize("name", LIMITS)
def test_verification_moves_weights_and_keys_once(name, length, pair):
    with bytes_moved.without_data():
        assert bytes_moved.verification_ratio(name, pair[0], length) < LIMITS[name]


@pytest.mark.parametrize("name", LIMITS)
def test_further_context_is_read_once(name, pair):
    """Besides keys and values there is only the mask: of 64 nodes for four heads, an eighth of a token's states."""
    limit = 1.2 if name.startswith("tree") else 1.1
    with bytes_moved.without_data():
        assert bytes_moved.growth_ratio(name, pair[0]) < limit


@pytest.mark.parametrize("length", [1024, 131072])
def test_drafting_moves_weights_and_keys_once(length, pair):
    with bytes_moved.without_data():
        assert bytes_moved.draft_ratio(*pair, length) < 1.1


def test_keys_that_are_repeated_are_counted(pair):
    """Upstream's attention copies all keys to all query heads: the benchmark would see it if this package did."""
    with bytes_moved.without_data():
        assert bytes_moved.verification_ratio("block of 16, upstream's attention", pair[0], 131072) > 5
