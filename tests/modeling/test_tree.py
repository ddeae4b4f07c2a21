"""Draft trees: the likeliest paths, who sees whom, the way the target takes, and texts that are its own."""

import itertools
import math

import pytest
import torch
from support.drafting import proposed
from support.pairs import VOCAB, make_draft, make_draft2, make_target, shallow_pair
from support.rows import ragged_prompts
from support.sampling import STEPS, assert_follows, exact_distribution, sample
from support.scripted_draft import scripted
from support.trees import best_first, paths_of
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from dflash_hf.modeling.accept_dflash import Draft, Verdict
from dflash_hf.modeling.cache_dflash import slot_mask
from dflash_hf.modeling.drafting_dflash import DFlashCandidateGenerator
from dflash_hf.modeling.sessions_dflash import SlotSession
from dflash_hf.modeling.target_dflash import CACHE_NAME
from dflash_hf.modeling.tree_dflash import chained_paths, every_path, independent_paths, likeliest_tree


CPU = torch.device("cpu")


@pytest.mark.parametrize(("nodes", "depth"), [(1, 3), (7, 3), (16, 7), (40, 15), (64, 2), (30, 1)])
@pytest.mark.parametrize("sharpness", [0.3, 3.0])
def test_the_likeliest_paths_are_those_of_a_best_first_search(nodes, depth, sharpness):
    torch.manual_seed(nodes)
    rows, top_k = 3, 8
    log_probs, ids = (sharpness * torch.randn(rows, depth, 50)).log_softmax(-1).topk(top_k, dim=-1)
    paths = every_path(nodes, depth, top_k, CPU)
    tree = likeliest_tree(torch.tensor([90, 91, 92]), *independent_paths(ids, log_probs, paths), paths)
    for row in range(rows):
        listed = log_probs[row].clamp(-20, -1e-3).tolist()

        def likely(prefix, row=row, listed=listed):
            return list(zip(ids[row, len(prefix)].tolist(), listed[len(prefix)], strict=True))

        expected = best_first(likely, nodes, depth)
        assert paths_of(tree, row) == expected and tree.tokens.shape[1] == len(expected) + 1
        assert tree.tokens[row, 0] == 90 + row


@pytest.mark.parametrize(("nodes", "depth", "top_k"), [(7, 4, 3), (10, 3, 4), (30, 5, 3)])
def test_no_path_is_weighed_that_cannot_be_among_the_likeliest(nodes, depth, top_k):
    """What is no less likely, with likelier tokens in some slots, and its beginnings, must be in the tree too."""
    every = [path for slots in range(1, depth + 1) for path in itertools.product(range(top_k), repeat=slots)]

    def before(path):
        shorter = [other for other in every if len(other) <= len(path)]
        return sum(all(mine <= its for mine, its in zip(other, path, strict=False)) for other in shorter)

    cells = every_path(nodes, depth, top_k, CPU).cells.tolist()
    found = [tuple(cell % top_k for cell in row if cell < depth * top_k) for row in cells]
    assert sorted(found) == sorted(path for path in every if before(path) <= nodes)


@pytest.mark.parametrize(("nodes", "depth", "candidates"), [(7, 3, 5), (24, 7, 16), (9, 1, 4)])
def test_chained_paths_are_those_of_a_best_first_search(nodes, depth, candidates):
    torch.manual_seed(depth)
    rows, top_k = 2, 4
    ids = torch.stack([torch.randperm(VOCAB)[:candidates] for _ in range(rows * depth)]).view(rows, depth, candidates)
    first = (2 * torch.randn(rows, candidates)).log_softmax(-1)
    transitions = (2 * torch.randn(rows, depth - 1, candidates, candidates)).log_softmax(-1)
    paths = every_path(nodes, depth, top_k, CPU)
    tree = likeliest_tree(torch.zeros(rows, dtype=torch.long), *chained_paths(ids, first, transitions, paths), paths)
    for row in range(rows):

        def likely(prefix, row=row):
            slot = len(prefix)
            scores = first[row]
            if slot:
                scores = transitions[row, slot - 1, ids[row, slot - 1].tolist().index(prefix[-1])]
            best, order = scores.clamp(-20, -1e-3).topk(top_k)
            return list(zip(ids[row, slot, order].tolist(), best.tolist(), strict=True))

        assert paths_of(tree, row) == best_first(likely, nodes, depth)


@pytest.mark.parametrize("peak", [0.0, -1e-7, -math.inf])
def test_a_tree_holds_all_that_its_paths_begin_with(peak):
    """Tokens that are certain, all alike, or impossible: sums are equal then, or equal but for rounding."""
    ids = torch.arange(8).expand(1, 15, 8)
    log_probs = torch.full((1, 15, 8), peak if peak else -30.0)
    log_probs[..., 0] = 0.0 if peak == -math.inf else peak
    paths = every_path(64, 15, 8, CPU)
    tree = likeliest_tree(torch.tensor([5]), *independent_paths(ids, log_probs, paths), paths)
    depths, parents = tree.depths[0].tolist(), tree.parents[0].tolist()
    assert all(parent < node for node, parent in enumerate(parents) if node)
    assert all(depths[node] == depths[parent] + 1 for node, parent in enumerate(parents) if node)
    assert len(paths_of(tree)) == 64 and max(depths) > 1


NOT_NUMBERS = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}


@pytest.mark.parametrize("value", NOT_NUMBERS.values(), ids=NOT_NUMBERS)
@pytest.mark.parametrize("nodes", [3, 15, 64])
def test_a_tree_over_what_is_no_number_is_a_tree(nodes, value):
    """In every slot, in some, and in one likely token; `topk` holds NaN for the greatest."""
    torch.manual_seed(0)
    log_probs, ids = torch.randn(3, 7, VOCAB).log_softmax(-1).topk(8, dim=-1)
    log_probs[0], log_probs[1, 2:4], log_probs[2, 3, 0] = value, value, value
    paths = every_path(nodes, 7, 8, CPU)
    first, transitions = log_probs[:, 0], log_probs[:, 1:, None].expand(-1, -1, 8, -1)
    for way in (independent_paths(ids, log_probs, paths), chained_paths(ids, first, transitions, paths)):
        tree = likeliest_tree(torch.arange(3), *way, paths)
        for row in range(3):
            depths, parents = tree.depths[row].tolist(), tree.parents[row].tolist()
            assert all(parent < node for node, parent in enumerate(parents) if node)
            assert all(depths[node] == depths[parent] + 1 for node, parent in enumerate(parents) if node)
            assert len(paths_of(tree, row)) == nodes


def random_tree(rows, nodes, depth, seed=0):
    torch.manual_seed(seed)
    log_probs, ids = torch.randn(rows, depth, VOCAB).log_softmax(-1).topk(8, dim=-1)
    paths = every_path(nodes, depth, 8, CPU)
    return likeliest_tree(torch.arange(rows) + 3, *independent_paths(ids, log_probs, paths), paths)


def test_who_sees_whom():
    tree = random_tree(2, 20, 5)
    for row in range(2):
        parents = tree.parents[row].tolist()
        for node in range(21):
            seen, at = {node, 0}, node
            while at:
                at = parents[at]
                seen.add(at)
            assert set(tree.ancestors[row, node].nonzero().flatten().tolist()) == seen
            assert tree.depths[row, node] == len(seen) - 1


@pytest.mark.parametrize("seed", range(8))
def test_the_way_is_walked_as_far_as_the_target_agrees(seed):
    tree = random_tree(3, 20, 5, seed)
    tokens = torch.randint(VOCAB, tree.tokens.shape)
    for row in range(3):  # make the target agree with some child of most nodes
        for node in range(1, 21):
            if torch.rand(()) < 0.6:
                tokens[row, tree.parents[row, node]] = tree.tokens[row, node]
    way, counts = tree.walk(tokens)
    assert way.shape == (3, 6)
    for row in range(3):
        expected, at = [0], 0
        while True:
            children = [
                n for n in range(1, 21) if tree.parents[row, n] == at and tree.tokens[row, n] == tokens[row, at]
            ]
            if not children:
                break
            (at,) = children
            expected.append(at)
        assert way[row].tolist() == expected + [0] * (6 - len(expected)) and counts[row] == len(expected)
        if row == 0:
            found = [0]
            while (child := tree.child(found[-1], int(tokens[0, found[-1]]))) is not None:
                found.append(child)
            assert found == expected


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (3, None), (None, 4)])
def test_mask_against_an_element_wise_oracle(window, chunk):
    tree = random_tree(2, 12, 4)
    start = torch.tensor([9, 2])
    slots = start[:, None] + torch.arange(13)
    mask = slot_mask(slots, slots, 64, window, chunk, torch.float64, tree)
    assert mask.shape == (2, 1, 13, 64)
    for row in range(2):
        for node in range(13):
            query = int(start[row] + tree.depths[row, node])
            for slot in range(64):
                other = slot - int(start[row])
                if other < 0:
                    key, seen = slot, True
                elif other < 13:
                    key, seen = int(start[row] + tree.depths[row, other]), bool(tree.ancestors[row, node, other])
                else:
                    key, seen = slot, False
                seen = seen and (window is None or query - key < window)
                seen = seen and (chunk is None or query // chunk == key // chunk)
                assert bool(mask[row, 0, node, slot] == 0) == seen


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "deepseek_v3", "gpt2"])
@torch.no_grad()
def test_logits_of_a_node_are_those_of_its_path(family):
    target = make_target(family, torch.float64)
    inputs, pads = ragged_prompts(2)
    ids = inputs["input_ids"]
    tree = random_tree(2, 14, 5)
    cache = DynamicCache(config=target.config)
    offset = torch.zeros(2, 1, dtype=torch.long)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    target(input_ids=ids, attention_mask=inputs["attention_mask"], position_ids=positions, **{CACHE_NAME: cache})
    session = SlotSession(target, cache, pads, 64, offset, {})
    start = torch.tensor([ids.shape[1] - pad for pad in pads])
    session.cache.reserve(40)
    logits = session.verify(Draft(tree.tokens, tree=tree), start).logits
    way = torch.zeros(2, 6, dtype=torch.long)
    for row in range(2):
        deepest = int(tree.depths[row].argmax())
        for node in range(15):
            nodes = [n for n in range(15) if tree.ancestors[row, node, n]]
            text = torch.cat([ids[row, pads[row] :], tree.tokens[row, nodes]])[None]
            torch.testing.assert_close(logits[row, node], target(text).logits[0, -1], atol=1e-6, rtol=1e-6)
            if node == deepest:
                way[row, : len(nodes)] = torch.tensor(nodes)
    # Put straight, the deepest path is what the next token sees.
    session.commit(start, Verdict(way, way[:, 0], way[:, 0], way[:, 0] == 0, path=way))
    depths = [int(tree.depths[row].max()) for row in range(2)]
    logits = session.verify(Draft(torch.tensor([[7], [8]])), start + torch.tensor(depths) + 1).logits
    for row in range(2):
        path = tree.tokens[row, way[row, : depths[row] + 1]]
        text = torch.cat([ids[row, pads[row] :], path, torch.tensor([7 + row])])[None]
        torch.testing.assert_close(logits[row, 0], target(text).logits[0, -1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3", "gemma4", "gpt_oss", "mistral_sliding", "qwen3_moe", "deepseek_v3"]
)
@pytest.mark.parametrize("nodes", [3, 20])
def test_texts_are_equal(family, nodes):
    target = make_target(family, torch.float64, attn=None)
    draft = make_draft(target, block_size=8)
    draft.decoding_config.tree_nodes = nodes
    inputs, _ = ragged_prompts(3)
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(**inputs, **options)
    draft = scripted(draft, expected.sequences, error_rate=0.2, ranks=3)
    output = target.generate(**inputs, **options, assistant_model=draft)
    assert torch.equal(output.sequences, expected.sequences)
    lengths = {n for row in output.acceptance_lengths for n in row}
    assert {1, 2, 3} <= lengths and (nodes == 3 or max(lengths) > 4)
    # The cache holds the accepted path, and goes on without a drafter.
    for ours, theirs in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
        if theirs.is_initialized:
            kept = ours.keys.shape[2]
            torch.testing.assert_close(ours.keys[0], theirs.keys[0, :, -kept:], atol=1e-8, rtol=1e-6)


def test_a_tree_accepts_what_a_block_cannot(target):
    """The script has the right token in any of three places: a block, which takes the first, is mostly wrong."""
    prompt = torch.tensor([[5, 9, 17, 33]])
    options = {"max_new_tokens": 120, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(prompt, **options).sequences
    draft = make_draft(target, block_size=8)
    draft.decoding_config.tree_nodes = 64
    draft = scripted(draft, expected, error_rate=0.0, ranks=3)
    lengths = target.generate(prompt, **options, assistant_model=draft).acceptance_lengths[0]
    draft.decoding_config.tree_nodes = 7
    fewer = target.generate(prompt, **options, assistant_model=draft).acceptance_lengths[0]
    assert sum(lengths) == sum(fewer) == 119 and len(lengths) < len(fewer) < 80


@pytest.mark.parametrize("make", [make_draft, make_draft2])
@pytest.mark.parametrize("ahead", [None, 3])
def test_a_drafter_s_own_trees(make, ahead, target):
    draft = make(target, block_size=6)
    draft.decoding_config.tree_nodes, draft.decoding_config.look_ahead = 12, ahead
    inputs, _ = ragged_prompts(3)
    expected = target.generate(**inputs, max_new_tokens=25, do_sample=False)
    assert torch.equal(target.generate(**inputs, max_new_tokens=25, do_sample=False, assistant_model=draft), expected)


def test_a_tree_over_a_handful_of_tokens(target):
    draft = make_draft(target, block_size=5, draft_vocab_size=3)
    draft.decoding_config.tree_nodes = 12
    prompt = torch.tensor([[5, 9, 17, 33]])
    expected = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=draft), expected)


def overflowing(draft, where: str, value: float):
    """The drafter, with logits that are no numbers: in all slots, in every other one, for one token."""
    logits_of = draft.draft_logits

    def draft_logits(hidden, head):
        logits = logits_of(hidden, head).clone()
        places = {"all": (...,), "slots": (..., slice(0, None, 2), slice(None)), "a token": (..., 7)}
        logits[places[where]] = value
        return logits

    draft.draft_logits = draft_logits
    return draft


def make_markov(target, **fields):
    return make_draft(target, markov_rank=6, **fields)


def make_domino(target, **fields):
    return make_draft(target, gru_hidden_dim=9, emb_dim=7, **fields)


# Each drafter with each place, each of both with both values.
NO_NUMBERS = [
    (make, where, math.nan if (i + j) % 2 else math.inf)
    for i, make in enumerate((make_draft, make_draft2, make_markov, make_domino))
    for j, where in enumerate(("all", "slots", "a token"))
]


@pytest.mark.parametrize(("make", "where", "value"), NO_NUMBERS)
def test_drafts_of_no_numbers_change_no_text(make, where, value, target):
    """A drafter in half precision may overflow; the target is healthy."""
    inputs, _ = ragged_prompts(3)
    for row, asked in (
        (slice(None), {"do_sample": False}),
        (slice(0, 1), {"do_sample": True, "top_k": 20}),
        (slice(None), {"do_sample": True, "top_k": 1}),
    ):
        options = {**{name: given[row] for name, given in inputs.items()}, "max_new_tokens": 14, **asked}
        torch.manual_seed(2)
        expected = target.generate(**options)
        for fields in (
            {},
            {"tree_nodes": 3},
            {"tree_nodes": 15},
            {"tree_nodes": 64, "look_ahead": 3},
            {"draft_temperature": 1.0},
        ):
            draft = make(target, block_size=8)
            if make is make_draft:
                draft = scripted(draft, expected, error_rate=0.2, ranks=3)
            draft = overflowing(draft, where, value)
            for name, field in fields.items():
                setattr(draft.decoding_config, name, field)
            torch.manual_seed(2)
            output = target.generate(**options, assistant_model=draft)
            # What was drawn follows the target, but is another sample than without drafts.
            drawn = asked.get("top_k") == 20 and (make is not make_draft or "draft_temperature" in fields)
            assert output.shape == expected.shape if drawn else torch.equal(output, expected), (asked, fields)


@torch.no_grad()
def test_the_first_path_of_a_selector_s_tree_is_its_walk(target):
    """Through candidates that it is sure of, the likeliest path is what the greedy walk takes."""
    draft = make_draft2(target, block_size=5)
    with torch.no_grad():
        draft.candidate_selector.successor_codebook.mul_(30.0)
    generator = DFlashCandidateGenerator(draft, target)
    drafts = []
    for plan in (generator.plan(5, 12), generator.plan(5)):
        generator.open([0], 0, 64, torch.zeros(1, 1, dtype=torch.long))
        anchors, start = torch.tensor([11]), torch.tensor([0])
        generator.cache.reserve(8)
        drafts.append(proposed(generator, anchors, start, plan))
    paths = paths_of(drafts[0].tree)
    block = tuple(drafts[1].tokens[0, 1:].tolist())
    assert {block[:n] for n in range(1, 5)} <= paths


@pytest.mark.parametrize(("rows", "temperature", "top_p"), [(1, 1.0, 0.9), (250, 0.7, 1.0), (250, 1.0, 0.9)])
def test_samples_follow_the_target(small, rows, temperature, top_p):
    prompt = [3, 1, 4]
    expected = exact_distribution(small, prompt, temperature, top_p)
    likely = torch.tensor([[*prompt, *max(expected, key=expected.get), 0]] * rows)
    draft = make_draft(small, block_size=4)
    draft.decoding_config.tree_nodes = 9
    counts, accepted, draws = dict.fromkeys(expected, 0), set(), 500 if rows == 1 else 12_000
    torch.manual_seed(0)
    for number in range(draws // rows):
        draft = scripted(draft, likely, error_rate=0.2, ranks=3, seed=number)
        output = sample(small, draft, prompt, rows, temperature, top_p)
        accepted.update(n for lengths in output.acceptance_lengths for n in lengths)
        for text in output.sequences[:, 3:].tolist():
            counts[tuple(text)] += 1
    assert accepted == set(range(1, STEPS))
    assert_follows(counts, expected)


def test_one_row_gives_the_same_sample_for_the_same_seed(target, draft):
    prompt = torch.tensor([[5, 9, 17, 33]])
    draft.decoding_config.tree_nodes = 10
    for options in ({}, {"top_k": 5, "repetition_penalty": 1.3}):
        torch.manual_seed(7)
        expected = target.generate(prompt, do_sample=True, max_new_tokens=40, **options)
        draft = scripted(draft, expected, error_rate=0.2, ranks=3)
        torch.manual_seed(7)
        options |= {"assistant_model": draft, "return_dict_in_generate": True}
        output = target.generate(prompt, do_sample=True, max_new_tokens=40, **options)
        assert torch.equal(output.sequences, expected) and max(output.acceptance_lengths[0]) > 1


class Unchanged(LogitsProcessor):
    """Somebody's own: it is shown each committed text, one after the other."""

    def __call__(self, input_ids, scores):
        return scores


def test_token_by_token_the_same_way_is_taken(target):
    draft = make_draft(target, block_size=8)
    draft.decoding_config.tree_nodes = 20
    prompt = torch.tensor([[5, 9, 17, 33]])
    options = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    expected, lengths = target.generate(prompt, **options).sequences, []
    for processors in ([], [Unchanged()]):
        draft = scripted(draft, expected, error_rate=0.1, ranks=3)
        options["logits_processor"] = LogitsProcessorList(processors)
        output = target.generate(prompt, **options, assistant_model=draft)
        assert torch.equal(output.sequences, expected)
        lengths.append(output.acceptance_lengths[0])
    assert lengths[0] == lengths[1] and max(lengths[0]) > 3


def test_compiled_rounds_draft_trees():
    torch._dynamo.reset()
    target, draft = shallow_pair()
    draft.decoding_config.compile, draft.decoding_config.tree_nodes = "aot_eager", 12
    for length in (5, 40):
        prompt = (torch.arange(length) * 7 % 90 + 2)[None]
        expected = target.generate(prompt, max_new_tokens=20, do_sample=False)
        output = target.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=draft)
        assert torch.equal(output, expected)
        torch.manual_seed(5)  # token by token, with the way walked on the host
        expected = target.generate(prompt, max_new_tokens=20, do_sample=True, top_k=3)
        torch.manual_seed(5)
        output = target.generate(prompt, max_new_tokens=20, do_sample=True, top_k=3, assistant_model=draft)
        assert torch.equal(output, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["lfm2", "mpt"])
def test_targets_that_cannot_follow_a_tree_verify_blocks(family):
    """A recurrent state follows one path; MPT's bias counts the places of keys in the cache."""
    target = make_target(family, torch.float64, attn=None)
    draft = make_draft(target, block_size=8)
    draft.decoding_config.tree_nodes = 12
    prompts = torch.randint(3, 90, (4, 6), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(prompts, **options)
    draft = scripted(draft, expected.sequences, error_rate=0.2, ranks=3)
    output = target.generate(prompts, **options, assistant_model=draft)
    assert torch.equal(output.sequences, expected.sequences)
    assert max(max(row) for row in output.acceptance_lengths) > 1


def test_trees_are_not_drawn(target, draft):
    draft.decoding_config.tree_nodes, draft.decoding_config.draft_temperature = 8, 0.7
    with pytest.raises(ValueError, match="tree_nodes=8 drafts the likeliest tokens.*draft_temperature=0.7"):
        target.generate(torch.tensor([[5, 9]]), max_new_tokens=4, do_sample=True, assistant_model=draft)
