"""Anchors, blocks and masks: element-wise oracles, leaks, and the shapes that go wrong silently."""

import pytest
import torch
from support.pairs import make_draft, make_target

from dflash_hf.modeling.modeling_dflash import additive_mask, raw_embedding
from dflash_hf.training.anchors import example_seeds, sample_anchors
from dflash_hf.training.block_mask import block_groups, block_mask, flex_mask
from dflash_hf.training.blocks import build_blocks


LENGTH = 20
BLOCK = 4


def draft_blocks(target, draft, input_ids, features, anchors, valid=None, attention_mask=None, flex=False):
    """The drafter's hidden states `[N, A, B, H]` of one training forward."""
    config = draft.config
    valid = torch.ones_like(anchors, dtype=torch.bool) if valid is None else valid
    attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    blocks = build_blocks(input_ids, attention_mask, anchors, valid, config.block_size, config.mask_token_id)
    masks = {}
    for i, kind in enumerate(config.layer_types):
        window = config.sliding_window if kind == "sliding_attention" else None
        rule = (anchors, attention_mask, config.block_size, window, config.layer_is_causal(i))
        masks[kind] = flex_mask(*rule) if flex else additive_mask(block_mask(*rule), draft.dtype)
    hidden = draft(
        noise_embeds=raw_embedding(target, blocks.input_ids),
        context_hidden_states=features,
        attention_mask=masks,
        position_ids=blocks.position_ids,
    ).last_hidden_state
    return hidden.view(*anchors.shape, config.block_size, -1)


@pytest.fixture(scope="module")
def sequences(target):
    random = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, 90, (2, LENGTH), generator=random)
    features = torch.randn(2, LENGTH, 3 * target.config.hidden_size, generator=random)
    return input_ids, features


LAYERS = {
    "full": {},
    "sliding_causal": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6},
    "sliding_bidirectional": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "is_causal": False},
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
}


@pytest.fixture(params=LAYERS, scope="module")
def any_draft(request, target):
    return make_draft(target, block_size=BLOCK, **LAYERS[request.param])


# ------------------------------------------------------------------------------------------------------------ anchors


def test_anchor_has_context_and_a_supervised_token():
    loss_mask = torch.tensor([[1, 1, 1, 0, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]])
    anchors, valid = sample_anchors(loss_mask, 5, torch.Generator().manual_seed(0))
    assert anchors.tolist() == [[1, 4, 0, 0, 0], [8, 0, 0, 0, 0]]
    assert valid.tolist() == [[True, True, False, False, False], [True, False, False, False, False]]


@pytest.mark.parametrize("num_anchors", [1, 7, 40])
def test_slots_are_constant_and_anchors_distinct(num_anchors):
    loss_mask = torch.ones(3, LENGTH)
    loss_mask[2] = 0
    anchors, valid = sample_anchors(loss_mask, num_anchors)
    assert anchors.shape == valid.shape == (3, num_anchors)
    assert valid.sum(1).tolist() == [min(num_anchors, LENGTH - 2)] * 2 + [0]
    for row, mask in zip(anchors, valid, strict=True):
        assert row[mask].tolist() == sorted(set(row[mask].tolist()))
        assert not row[~mask].any()


def test_regular_anchors_divide_each_answer():
    """Against an element-wise rule: an anchor at the first token of an answer, and after each further block."""
    masks = torch.tensor(
        [[0, 0, 1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 1, 1, 1, 1, 0, 1], [0, 1, 0, 1, 1, 0, 0, 0, 0, 0]]
    )
    for every in (1, 2, 3):
        anchors, valid = sample_anchors(masks, 10, every=every)
        for mask, positions in zip(masks.tolist(), [row[keep].tolist() for row, keep in zip(anchors, valid)]):
            expected = []
            for position in range(1, len(mask) - 1):
                start = position
                while start > 0 and mask[start - 1]:
                    start -= 1
                if mask[position] and mask[position + 1] and (position - start) % every == 0:
                    expected.append(position)
            assert positions == expected
    some, valid = sample_anchors(masks, 1, every=2)
    assert valid.all() and {some[0, 0].item()} <= {2, 4, 6}


def test_anchors_are_drawn_uniformly():
    rows = 6000
    anchors, _ = sample_anchors(torch.ones(1, 12).expand(rows, -1), 3, torch.Generator().manual_seed(0))
    counts = torch.bincount(anchors.flatten(), minlength=12)
    assert counts[0] == counts[11] == 0
    expected = rows * 3 / 10
    assert (counts[1:11] - expected).abs().max() < 4 * (expected * 0.7) ** 0.5
    pairs = {(a, b) for a, b, _ in anchors.tolist()}
    assert len(pairs) == 36  # every a < b with room for a third


def test_example_draws_the_same_anchors_in_any_batch():
    input_ids = torch.randint(0, 90, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(input_ids)
    in_batch, _ = sample_anchors(ones, 5, seeds=example_seeds(input_ids, ones, seed=3, step=7))
    for row in range(4):
        padded = torch.nn.functional.pad(input_ids[row : row + 1], (0, 9), value=row)
        mask = torch.nn.functional.pad(ones[:1], (0, 9))
        alone, _ = sample_anchors(mask, 5, seeds=example_seeds(padded, mask, seed=3, step=7))
        assert torch.equal(alone, in_batch[row : row + 1])
    for seed, step in ((4, 7), (3, 8)):
        other, _ = sample_anchors(ones, 5, seeds=example_seeds(input_ids, ones, seed, step))
        assert not (other == in_batch).all(1).any()
    swapped = example_seeds(input_ids.flip(1), ones, seed=3, step=7)
    assert not torch.equal(swapped, example_seeds(input_ids, ones, seed=3, step=7))


# ------------------------------------------------------------------------------------------------------------- blocks


def test_block_equals_one_written_by_hand():
    """Slot k predicts the token at a + k: nothing is shifted, neither labels against ids nor ids against the mask."""
    input_ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    loss_mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    anchors = torch.tensor([[2, 4, 0]])
    valid = torch.tensor([[True, True, False]])
    blocks = build_blocks(input_ids, loss_mask, anchors, valid, block_size=3, mask_token_id=99)
    assert blocks.input_ids.tolist() == [[12, 99, 99, 14, 99, 99, 10, 99, 99]]
    assert blocks.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 2, 3, 4, 4, 5, 6, 0, 1, 2]]
    assert blocks.counted.tolist() == [[[False, True, True], [False, True, False], [False, False, False]]]
    assert blocks.labels[blocks.counted].tolist() == [13, 14, 15]


def test_only_response_tokens_count():
    input_ids = torch.arange(10)[None]
    anchors = torch.tensor([[1, 2]])
    valid = torch.ones(1, 2, dtype=torch.bool)
    gap = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 1, 1]])
    blocks = build_blocks(input_ids, gap, anchors, valid, BLOCK, 99)
    assert blocks.counted.tolist() == [[[False, True, False, True], [False, False, True, True]]]


# --------------------------------------------------------------------------------------------------------------- mask


def mask_oracle(anchors, attention_mask, block_size, window, causal):
    """Every query and key one by one, in the words of the paper."""
    rows, num_anchors = anchors.shape
    length = attention_mask.shape[1]
    visible = torch.zeros(rows, 1, num_anchors * block_size, length + num_anchors * block_size, dtype=torch.bool)
    for row in range(rows):
        for i in range(num_anchors):
            for k in range(block_size):
                query = i * block_size + k
                anchor = int(anchors[row, i])
                for p in range(length):
                    sees = p < anchor and bool(attention_mask[row, p])
                    if window is not None:
                        sees = sees and p > anchor + k - window
                    visible[row, 0, query, p] = sees
                for other_k in range(block_size):
                    sees = not causal or other_k <= k
                    if window is not None:
                        sees = sees and other_k > k - window
                    visible[row, 0, query, length + i * block_size + other_k] = sees
    return visible


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("case", ["plain", "padded"])
def test_mask_equals_the_oracle(case, window, causal):
    anchors = torch.tensor([[1, 6, 9], [3, 12, 0]])
    attention_mask = torch.ones(2, 14)
    if case == "padded":
        attention_mask[0, :4] = 0
        attention_mask[1, 10:] = 0
    rule = (anchors, attention_mask, BLOCK, window, causal)
    expected = mask_oracle(*rule)
    mask = block_mask(*rule)
    assert torch.equal(mask, expected)
    assert mask.any(-1).all()
    assert torch.equal(flex_visible(*rule, *expected.shape[2:]), expected)
    from_groups = torch.zeros_like(expected)  # the groups, put together
    start = 0
    for context, group_mask in block_groups(*rule, queries=2 * BLOCK).groups:
        end = start + group_mask.shape[2]
        from_groups[:, :, start:end, :context] = group_mask[..., :context]
        from_groups[:, :, start:end, 14 + start : 14 + end] = group_mask[..., context:]
        start = end
    assert torch.equal(from_groups, expected)


def flex_visible(anchors, attention_mask, block_size, window, causal, queries, keys):
    """What flex attention's rule says of the first `queries` and `keys`, asked one by one as its kernels do."""
    rule = flex_mask(anchors, attention_mask, block_size, window, causal).mask_mod
    row, query, key = torch.meshgrid(
        torch.arange(len(anchors)), torch.arange(queries), torch.arange(keys), indexing="ij"
    )
    return rule(row, torch.zeros_like(row), query, key)[:, None]


def test_flex_mask_is_false_past_the_end():
    """Its tiles are 128 wide: no index may leave its tensor, and no query sees what lies past the end."""
    anchors = torch.tensor([[1, 6, 9], [3, 12, 0]])
    attention_mask = torch.ones(2, 14)
    wide = flex_visible(anchors, attention_mask, BLOCK, 7, True, 128, 128)
    assert torch.equal(wide[:, :, :12, :26], block_mask(anchors, attention_mask, BLOCK, 7, True))
    assert not wide[:, :, :12, 26:].any()
    assert not wide[:, :, 12:, 14:26].any()
    mask = flex_mask(anchors, attention_mask, BLOCK)
    assert mask.shape == (2, 1, 12, 26)
    assert mask.kv_num_blocks.tolist() == [[[1]], [[1]]]


# -------------------------------------------------------------------------------------------------------------- leaks


def test_block_reads_context_before_its_anchor_only(target, any_draft, sequences):
    input_ids, features = sequences
    anchors = torch.tensor([[5, 11], [5, 11]])
    with torch.no_grad():
        before = draft_blocks(target, any_draft, input_ids, features, anchors)
        changed = features.clone()
        changed[:, 11:] += 1
        after = draft_blocks(target, any_draft, input_ids, changed, anchors)
        assert torch.equal(after, before)
        changed = features.clone()
        changed[:, 10] += 1
        after = draft_blocks(target, any_draft, input_ids, changed, anchors)
    assert torch.equal(after[:, 0], before[:, 0])
    assert ((after - before)[:, 1].abs().amax(-1) > 1e-4).all()  # every slot of the block at 11


def test_block_reads_no_token_after_its_anchor(target, any_draft, sequences):
    input_ids, features = sequences
    anchors = torch.tensor([[5], [5]])
    changed = input_ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 90
    with torch.no_grad():
        before = draft_blocks(target, any_draft, input_ids, features, anchors)
        assert torch.equal(draft_blocks(target, any_draft, changed, features, anchors), before)
        changed[:, 5] = (changed[:, 5] + 1) % 90
        assert not torch.allclose(draft_blocks(target, any_draft, changed, features, anchors), before, atol=1e-3)


def test_trained_block_is_the_decoded_block(target, any_draft, sequences):
    """
    The training forward at anchor `a` equals one block after a context of `a` tokens, by the drafter's own masks:
    blocks that overlap do not see each other.
    """
    input_ids, features = sequences
    anchors = torch.tensor([[2, 9, 10, 14], [2, 9, 10, 14]])
    with torch.no_grad():
        trained = draft_blocks(target, any_draft, input_ids, features, anchors)
        for i, anchor in enumerate(anchors[0].tolist()):
            ids = torch.full((2, BLOCK), any_draft.config.mask_token_id)
            ids[:, 0] = input_ids[:, anchor]
            decoded = any_draft(raw_embedding(target, ids), features[:, :anchor]).last_hidden_state
            torch.testing.assert_close(trained[:, i], decoded, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["plain", "padded", "autocast"])
def test_flex_attention_equals_the_dense_mask(case, target, any_draft, sequences, uncompiled_flex):
    """Blocks fill no whole tile, one anchor is invalid, and a row may be padding alone."""
    input_ids, features = sequences
    attention_mask = torch.ones_like(input_ids)
    if case == "padded":
        attention_mask[0, 15:] = 0
        attention_mask[1] = 0
    anchors = torch.tensor([[2, 9, 14, 0], [1, 5, 17, 0]])
    valid = anchors > 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        dense, flex = (
            draft_blocks(target, any_draft, input_ids, features, anchors, valid, attention_mask, flex=flex)
            for flex in (False, True)
        )
    assert flex.isfinite().all()
    tolerance = 0.1 if case == "autocast" else 1e-5
    torch.testing.assert_close(flex[valid], dense[valid], atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("layers", LAYERS)
def test_compiled_flex_attention_has_dense_gradients(layers, sequences):
    target = make_target(hidden_size=64, head_dim=16).cuda()
    draft = make_draft(target, block_size=BLOCK, **LAYERS[layers]).cuda().train()
    input_ids = sequences[0].cuda()
    features = torch.randn(2, LENGTH, 3 * 64, generator=torch.Generator().manual_seed(0)).cuda()
    anchors = torch.tensor([[2, 9, 14, 0], [1, 5, 17, 0]]).cuda()
    gradients = []
    for flex in (False, True):
        draft.zero_grad()
        hidden = draft_blocks(target, draft, input_ids, features, anchors, anchors > 0, flex=flex)
        hidden[anchors > 0].square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in draft.parameters()])
    for dense, flexible in zip(*gradients, strict=True):
        torch.testing.assert_close(flexible, dense, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_invalid_anchors_and_padding_stay_finite(attn, sequences):
    target = make_target(attn=attn)
    draft = make_draft(target, block_size=BLOCK).train()
    draft.set_attn_implementation(attn)
    input_ids, features = sequences
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1] = 0  # a row of padding alone
    loss_mask = attention_mask.clone()
    loss_mask[0, :16] = 0
    anchors, valid = sample_anchors(loss_mask, 4)
    assert valid.sum(1).tolist() == [3, 0]
    hidden = draft_blocks(target, draft, input_ids, features, anchors, valid, attention_mask)
    hidden.square().sum().backward()
    assert hidden.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in draft.parameters())
