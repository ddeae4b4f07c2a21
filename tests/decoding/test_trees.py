"""Draft trees: the likeliest paths, who sees whom, which path is accepted, and texts that are the target's own."""

import math

import pytest
import torch
from support.heads import EVERY, PLAIN, SELECTORS, WITH_STATES, after_random_text, domino, log_probs_after, vanilla
from support.pairs import VOCAB, make_draft, make_draft2, make_target
from support.recurrent_head import RecurrentHead, use_heads
from support.rows import ragged_prompts
from support.scripted_draft import scripted
from support.trees import best_first, paths_of, tree_of
from transformers import DynamicCache, LogitsProcessor

from dflash_hf.decoding.acceptance import Acceptance, Block
from dflash_hf.decoding.calibration import HostTree
from dflash_hf.decoding.session import SlotSession
from dflash_hf.decoding.trees import draft_tree, grow_tree


ROW = torch.tensor([[5, 9, 17, 33]])


@pytest.fixture(autouse=True)
def heads(monkeypatch):
    use_heads(monkeypatch, RecurrentHead)


def assert_is_tree(tree, nodes: int):
    """Parents come before their children, siblings differ, and a node sees its ancestors, the anchor and itself."""
    for row, (parents, depths) in enumerate(zip(tree.parents.tolist(), tree.depths.tolist(), strict=True)):
        assert parents[0] == depths[0] == 0 and len(paths_of(tree, row)) == nodes == len(parents) - 1
        for node, parent in enumerate(parents):
            seen = {node, 0}
            at = node
            while at:
                assert parents[at] < at
                at = parents[at]
                seen.add(at)
            assert set(tree.ancestors[row, node].nonzero().flatten().tolist()) == seen
            assert depths[node] == len(seen) - 1 and (node == 0 or depths[node] == depths[parent] + 1)


def assert_finds_best_paths(tree, likely, nodes: int, depth: int):
    """The tree of a best-first search; `likely(row, path)` are log-probabilities of all tokens `[V]`."""
    for row in range(len(tree.tokens)):

        def following(path, row=row):
            best, ids = likely(row, path).float().sort(descending=True)
            return [pair for pair in zip(ids.tolist(), best.tolist(), strict=True) if pair[1] > -math.inf]

        assert paths_of(tree, row) == best_first(following, nodes, depth)


SIZES = [(1, 4), (14, 6), (16, 2)]
LARGE = [(64, 3), (255, 6)]
CASES = [(make, *SIZES[(i + j) % 3]) for i, make in enumerate(EVERY) for j in range(2)]
CASES += [(make, *LARGE[i % 2]) for i, make in enumerate((*PLAIN, *SELECTORS))]


@pytest.mark.parametrize(("make", "nodes", "block_size"), CASES)
@torch.no_grad()
def test_tree_holds_the_likeliest_paths(make, nodes, block_size):
    """As long as a beam of paths with states has a place for each node."""
    target = make_target(dtype=torch.float64)
    draft = EVERY[make](target, block_size=block_size, seed=nodes)
    drafter, anchors = after_random_text(draft, target)
    hidden = drafter.hidden_states(anchors)
    tree = draft_tree(drafter, anchors, nodes)

    def likely(row, path):
        return log_probs_after(draft, target, int(anchors[row]), hidden[row], path)

    assert tree.tokens[:, 0].tolist() == anchors.tolist()
    assert_finds_best_paths(tree, likely, nodes, hidden.shape[1])
    assert_is_tree(tree, min(nodes, len(paths_of(tree))))


@pytest.mark.parametrize("make", WITH_STATES)
@torch.no_grad()
def test_tree_wider_than_its_beam_is_a_tree(make):
    target = make_target()
    drafter, anchors = after_random_text(EVERY[make](target, block_size=16), target)
    assert_is_tree(draft_tree(drafter, anchors, 127), 127)


@torch.no_grad()
def test_tree_over_few_tokens_holds_all_paths():
    target = make_target()
    drafter, anchors = after_random_text(make_draft(target, block_size=3, draft_vocab_size=3), target)
    assert_is_tree(draft_tree(drafter, anchors, 99), 3 + 9)


@pytest.mark.parametrize(("nodes", "width"), [(11, 1), (120, 2), (11, 5), (120, 5), (120, 200)])
def test_beam_keeps_the_likeliest_of_each_depth(nodes, width):
    """Against lists of paths: at each depth the likeliest go on, and the likeliest of all that were seen are kept."""
    depth = 4
    choices = 3
    rows = 2
    table = (2 * torch.randn(rows, depth, 50, 50, generator=torch.Generator().manual_seed(0))).log_softmax(-1)
    anchors = torch.tensor([7, 30])
    sums = torch.tensor([[7], [30]])
    last_tokens = None

    def by_descending_total(scored_path):
        path, total = scored_path
        return -total

    def extend(slot, parents):  # what follows depends on the sum of all tokens before
        nonlocal sums, last_tokens
        if parents is not None:
            sums = sums.gather(1, parents // choices) + last_tokens.gather(1, parents)
        best, ids = table[torch.arange(rows)[:, None], slot, sums % 50].topk(choices)
        last_tokens = ids.flatten(1)
        return ids, best

    tree = grow_tree(anchors, extend, depth, nodes, width)
    for row in range(rows):
        beam = [((), 0.0)]
        seen = []
        for slot in range(depth):
            longer = []
            for path, total in beam:
                best, ids = table[row, slot, (int(anchors[row]) + sum(path)) % 50].topk(choices)
                steps = zip(ids.tolist(), best.clamp(-20, -1e-3).tolist(), strict=True)
                longer += [((*path, token), total + log_prob) for token, log_prob in steps]
            beam = sorted(longer, key=by_descending_total)[:width]
            seen += beam
        best = sorted(seen, key=by_descending_total)[:nodes]
        assert paths_of(tree, row) == {path for path, _ in best}


@pytest.mark.parametrize("value", [0.0, -1e-7, -30.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("nodes", [3, 64, 255])
def test_tree_over_extreme_numbers_is_a_tree(nodes, value):
    """In every slot, in some, in one likely token: certain, alike, impossible, or no numbers."""
    log_probs, ids = torch.randn(3, 15, VOCAB, generator=torch.Generator().manual_seed(0)).log_softmax(-1).topk(8)
    log_probs[0] = value
    log_probs[1, 2:4] = value
    log_probs[2, 3, 0] = value
    assert_is_tree(tree_of(torch.arange(3), ids, log_probs, nodes), nodes)


@pytest.mark.parametrize("settings", [{"block_size": 1}, {"num_assistant_tokens": 0}])
@pytest.mark.parametrize("make", [make_draft, make_draft2])
def test_trees_of_one_token_blocks_draft_nothing(make, settings, target):
    """With `tree_nodes` and a block that holds its anchor alone, growing a tree of no slots raised."""
    draft = make(target, block_size=6)
    draft.decoding_config.tree_nodes = 4
    draft.decoding_config.block_size = settings.get("block_size")
    options = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(ROW, **options).sequences
    options |= {name: value for name, value in settings.items() if name == "num_assistant_tokens"}
    output = target.generate(ROW, **options, assistant_model=draft)
    assert torch.equal(output.sequences, expected)
    assert output.acceptance_lengths == [[1] * 8]


def random_tree(rows: int, nodes: int, depth: int, seed: int = 0):
    """A tree of random tokens whose slots do not depend on each other."""
    random = torch.Generator().manual_seed(seed)
    log_probs, ids = torch.randn(rows, depth, VOCAB, generator=random).log_softmax(-1).topk(8)
    return tree_of(torch.arange(rows) + 3, ids, log_probs, nodes)


@pytest.mark.parametrize("seed", range(4))
def test_path_is_accepted_as_far_as_the_target_agrees(seed):
    tree = random_tree(3, 20, 5, seed)
    random = torch.Generator().manual_seed(seed)
    chosen = torch.randint(VOCAB, tree.tokens.shape, generator=random)
    for row in range(3):  # the target agrees with some child of most nodes
        for node in (node for node in range(1, 21) if torch.rand((), generator=random) < 0.6):
            chosen[row, tree.parents[row, node]] = tree.tokens[row, node]
    counts, path = tree.longest_match(chosen)
    accepted = [nodes[:count] for nodes, count in zip(path.tolist(), counts.tolist())]
    along = Acceptance.from_paths(accepted).select(torch.arange(21).expand(3, -1)[..., None])
    for row in range(3):
        children = tree.child_by_token(row)
        expected = [0]
        assert len(children) == 20
        assert all(tree.parents[row, node] == at and tree.tokens[row, node] == t for (at, t), node in children.items())
        child = children.get((0, int(chosen[row, 0])))
        while child is not None:
            expected.append(child)
            child = children.get((child, int(chosen[row, child])))
        assert counts[row] == len(expected) and path[row, : counts[row]].tolist() == expected
        assert along[row, : counts[row], 0].tolist() == expected  # features of the path that was accepted
        assert not path[row, counts[row] :].any()
    first = tree.first(9)
    assert_is_tree(first, 8)
    assert paths_of(first) < paths_of(tree)
    assert not HostTree.of(first).is_path(9) and HostTree.of(first).is_path(2)


@pytest.mark.parametrize(
    ("family", "nodes"),
    [("qwen3", 255), ("gemma3", 14), ("gemma3", 255), ("llama4_text", 14), ("deepseek_v3", 14), ("gpt2", 255)],
)
@torch.no_grad()
def test_logits_of_a_node_are_those_of_its_path(family, nodes):
    target = make_target(family, torch.float64, max_position_embeddings=512)
    inputs, pads = ragged_prompts(2)
    ids = inputs["input_ids"]
    tree = random_tree(2, nodes, 5)
    cache = DynamicCache(config=target.config)
    offset = torch.zeros(2, 1, dtype=torch.long)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    target(**inputs, position_ids=positions, past_key_values=cache)
    session = SlotSession(target, cache, pads, offset, {}, max_candidates=nodes + 1)
    logits = session.verify(tree)[0]
    deepest = [int(tree.depths[row].argmax()) for row in range(2)]
    prompts = [ids[row, pad:] for row, pad in enumerate(pads)]
    paths = [tree.ancestors[row, node].nonzero()[:, 0] for row, node in enumerate(deepest)]
    for row in range(2):
        for node in {*range(0, nodes, max(nodes // 14, 1)), nodes, deepest[row]}:
            text = torch.cat([prompts[row], tree.tokens[row, tree.ancestors[row, node]]])[None]
            torch.testing.assert_close(logits[row, node], target(text).logits[0, -1], atol=1e-5, rtol=1e-5)
    # The next token sees the deepest path alone.
    session.keep(Acceptance.from_paths([path.tolist() for path in paths]))
    logits, _ = session.verify(Block(torch.tensor([[7], [8]])))
    for row in range(2):
        text = torch.cat([prompts[row], tree.tokens[row, paths[row]], torch.tensor([7 + row])])[None]
        torch.testing.assert_close(logits[row, 0], target(text).logits[0, -1], atol=1e-5, rtol=1e-5)


class Unchanged(LogitsProcessor):
    """Somebody's own: tokens are judged one by one."""

    def __call__(self, input_ids, scores):
        return scores


def test_larger_trees_are_accepted_further(target):
    """The right token is in one of three places: a block, which takes the first, is mostly wrong."""
    options = {"max_new_tokens": 120, "do_sample": False, "return_dict_in_generate": True}
    options["input_ids"] = ROW
    expected = target.generate(**options).sequences
    rounds = {}
    draft = scripted(make_draft(target, block_size=8), expected, error_rate=0.0, ranks=3)
    for nodes in (7, 64, 255):
        draft.decoding_config.tree_nodes = nodes
        for processors in ([], [Unchanged()]):
            output = target.generate(**options, logits_processor=processors, assistant_model=draft)
            assert torch.equal(output.sequences, expected)
            assert rounds.setdefault(nodes, output.acceptance_lengths[0]) == output.acceptance_lengths[0]
    assert 80 > len(rounds[7]) > len(rounds[64]) > len(rounds[255])


# Each drafter with each place, each of both with both values.
NO_NUMBERS = [
    (make, where, math.nan if (i + j) % 2 else math.inf)
    for i, make in enumerate((make_draft, make_draft2, vanilla, domino))
    for j, where in enumerate(("all", "slots", "a token"))
]


@pytest.mark.parametrize(("make", "where", "value"), NO_NUMBERS)
def test_nan_or_infinite_drafts_change_no_text(make, where, value, target):
    """A drafter in half precision may overflow; the target is healthy."""
    inputs, _ = ragged_prompts(3)
    for asked, trees in (({"do_sample": False}, (None, 64)), ({"do_sample": True, "top_k": 20}, (None, 3))):
        options = {**inputs, "max_new_tokens": 9, **asked}
        torch.manual_seed(2)
        expected = target.generate(**options)
        for nodes in trees:
            draft = make(target, block_size=8)
            if make is make_draft:
                draft = scripted(draft, expected, error_rate=0.2, ranks=3)
            draft.decoding_config.block_size = draft.config.max_block_tokens
            draft.decoding_config.tree_nodes = nodes
            logits_of = draft.draft_logits

            def draft_logits(*args, logits_of=logits_of):
                logits = logits_of(*args).clone()
                places = {"all": (...,), "slots": (..., slice(0, None, 2), slice(None)), "a token": (..., 7)}
                logits[places[where]] = value
                return logits

            draft.draft_logits = draft_logits
            torch.manual_seed(2)
            assert torch.equal(target.generate(**options, assistant_model=draft), expected), (asked, nodes)
