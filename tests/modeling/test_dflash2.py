"""DFlash 2: the convolution, the path selector, and drafts that are drawn instead of taken."""

import itertools

import pytest
import torch
from scipy.stats import chisquare
from support.drafting import proposed
from support.pairs import SWITCHES, VOCAB, make_draft, make_draft2, make_target, shallow_pair
from support.reference import convolve
from support.rows import ragged_prompts
from support.sampling import STEPS, assert_follows, exact_distribution, small_target

from dflash_hf import DFlashDraftModel
from dflash_hf.modeling.accept_dflash import Proposal, sample_tokens
from dflash_hf.modeling.cache_dflash import additive
from dflash_hf.modeling.drafting_dflash import DFlashCandidateGenerator
from dflash_hf.modeling.modeling_dflash import BlockConvolution
from dflash_hf.training.blocks import block_mask


# ------------------------------------------------------------------------------------------------------- convolution


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [4, 12, 3], ids=["one block", "three blocks", "part of a block"])
@torch.no_grad()
def test_convolution_equals_the_element_wise_oracle(taps, length):
    target = make_target()
    draft = make_draft2(target, conv_kernel_size=taps)
    convolution = draft.layers[0].attention_conv
    x, output = torch.randn(2, length, 32), torch.randn(2, length, 32)
    before, after = convolution.corrections(x)
    kernel = (convolution.kernel_projection.weight, convolution.base_kernel)
    for row, start in itertools.product(range(2), range(0, length, 4)):
        part = slice(start, start + 4)  # a block of its own
        expected = convolve(x[row, part], x[row, part], *kernel, 0, 4, taps)
        torch.testing.assert_close(convolution(x, before, after=False)[row, part], expected, atol=1e-5, rtol=1e-5)
        # After the sublayer its output is convolved, with corrections that come from its input.
        expected = convolve(output[row, part], x[row, part], *kernel, 1, 4, taps)
        torch.testing.assert_close(convolution(output, after, after=True)[row, part], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_convolution_never_crosses_the_edge_of_a_block():
    draft = make_draft2(make_target(), conv_kernel_size=3)
    convolution = draft.layers[0].mlp_conv
    x = torch.randn(1, 12, 32)
    y = convolution(x, convolution.corrections(x)[0], after=False)
    for slot in range(12):
        moved = x.clone()
        moved[0, slot] += 1.0
        changed = (convolution(moved, convolution.corrections(moved)[0], after=False) != y).any(-1)[0]
        reached = [t for t in range(slot, 12) if t // 4 == slot // 4 and t - slot < 3]
        assert changed.nonzero().flatten().tolist() == reached
    with pytest.raises(ValueError, match="10 slots"):
        convolution(x[:, :10], convolution.corrections(x[:, :10])[0], after=False)


@torch.no_grad()
def test_many_blocks_in_one_forward_are_each_on_their_own():
    """Training's layout `[context | A blocks]` gives what each block gives by itself."""
    draft = make_draft2(make_target())
    features, noise = torch.randn(1, 10, 96), torch.randn(1, 12, 32)
    anchors = torch.tensor([[3, 6, 9]])
    mask = additive(block_mask(anchors, torch.ones(1, 10), 4), torch.float32)
    positions = torch.cat([torch.arange(10)[None], (anchors[..., None] + torch.arange(4)).view(1, -1)], dim=1)
    together = draft(noise, features, attention_mask=mask, position_ids=positions).last_hidden_state
    for i, anchor in enumerate(anchors[0].tolist()):
        part = slice(4 * i, 4 * i + 4)
        alone = draft(noise[:, part], features[:, :anchor]).last_hidden_state
        torch.testing.assert_close(together[:, part], alone, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------- initialisation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@torch.no_grad()
def test_a_fresh_drafter_is_dflash_bit_for_bit(dtype):
    target = make_target(dtype=dtype)
    plain, fresh = make_draft(target), make_draft2(target, trained=False)
    assert {name for name, _ in fresh.named_parameters()} > {name for name, _ in plain.named_parameters()}
    fresh.load_state_dict(plain.state_dict(), strict=False)
    noise, features = torch.randn(3, 4, 32, dtype=dtype), torch.randn(3, 9, 96, dtype=dtype)
    assert torch.equal(fresh(noise, features).last_hidden_state, plain(noise, features).last_hidden_state)
    inputs, _ = ragged_prompts(3)
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    ours, theirs = (target.generate(**inputs, **options, assistant_model=draft) for draft in (fresh, plain))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.acceptance_lengths == theirs.acceptance_lengths


def test_initial_parameters():
    draft = make_draft2(make_target(), trained=False)
    for module in draft.modules():
        if isinstance(module, BlockConvolution):
            assert module.base_kernel[:, 0].eq(1).all() and module.base_kernel[:, 1:].eq(0).all()
            assert module.kernel_projection.weight.eq(0).all()
    selector = draft.candidate_selector
    assert selector.successor_codebook.eq(0).all()
    assert 0.01 < selector.predecessor_codebook.std() < 0.03 and 0.01 < selector.hidden_projection.weight.std() < 0.03


def test_saved_and_loaded(tmp_path):
    draft = make_draft2(make_target(), output_multiplier=0.5, final_logit_softcapping=7.0)
    draft.save_pretrained(tmp_path)
    again = DFlashDraftModel.from_pretrained(tmp_path)
    for (name, ours), (_, theirs) in zip(draft.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert again.config.to_dict()["dflash_config"] == draft.config.to_dict()["dflash_config"]
    assert again.config.to_dict()["dflash_config"].items() >= {**SWITCHES, "output_multiplier": 0.5}.items()


# --------------------------------------------------------------------------------------------------------------- walk


def opened(draft, target, rows=1, length=9, seed=1):
    """A candidate generator with a context, and the arguments of a draft."""
    generator = DFlashCandidateGenerator(draft, target)
    random = torch.Generator().manual_seed(seed)
    generator.absorb(torch.randn(rows, length, 96, generator=random).to(target.dtype))
    generator.open([0] * rows, length, 64, torch.zeros(rows, 1, dtype=torch.long))
    generator.cache.reserve(length + draft.config.block_size)
    anchors = torch.randint(2, 90, (rows,), generator=random)
    return generator, (anchors, torch.full((rows,), length))


@torch.no_grad()
def test_rows_of_a_batch_walk_by_themselves():
    target = make_target()
    draft = make_draft2(target)
    generator, (anchors, start) = opened(draft, target, rows=4)
    blocks = proposed(generator, anchors, start).tokens
    assert len({tuple(block) for block in blocks[:, 1:].tolist()}) >= 3
    hidden = torch.randn(4, 3, 32)
    together, _ = generator.walk(anchors, hidden, temperature=0.0)
    for row in range(4):
        alone, _ = generator.walk(anchors[row : row + 1], hidden[row : row + 1], temperature=0.0)
        assert torch.equal(alone[0], together[row])


@torch.no_grad()
def test_the_walk_takes_the_best_successor_of_each_token():
    """Against all paths written out: each step maximises `U + <A[a] * W h, C[b]>` over the likeliest tokens."""
    target = make_target()
    draft = make_draft2(target, output_multiplier=0.3, final_logit_softcapping=4.0)
    generator, (anchors, _) = opened(draft, target)
    selector, hidden = draft.candidate_selector, torch.randn(1, 3, 32)
    block, _ = generator.walk(anchors, hidden, temperature=0.0)
    before, plain = int(anchors), []
    for slot in range(3):
        h = hidden[0, slot]
        unary = 4.0 * torch.tanh(target.lm_head.weight @ h * 0.3 / 4.0)
        plain.append(int(unary.argmax()))
        best = {
            int(b): float(unary[b])
            + float((selector.predecessor_codebook[before] * (selector.hidden_projection.weight @ h)).dot(c))
            for b, c in ((b, selector.successor_codebook[b]) for b in unary.topk(5).indices)
        }
        before = max(best, key=best.get)
        assert int(block[0, slot + 1]) == before
    assert block[0, 1:].tolist() != plain, "the selector changed nothing: nothing was tested"


@torch.no_grad()
def test_a_selector_over_a_reduced_vocabulary_goes_by_the_targets_ids(monkeypatch):
    """Blocks, draws and trees are those of a drafter that has all tokens and thinks nothing of the others."""
    target = make_target()
    few = make_draft2(target, draft_vocab_size=VOCAB // 2)
    few.d2t.copy_(torch.arange(VOCAB // 2) + 1)  # the odd tokens
    few.lm_head.weight.copy_(target.lm_head.weight[1::2])
    whole = make_draft2(target)
    assert not whole.load_state_dict(few.state_dict(), strict=False).missing_keys
    even = torch.arange(VOCAB) % 2 == 0
    all_logits = whole.draft_logits
    monkeypatch.setattr(whole, "draft_logits", lambda *args: all_logits(*args).masked_fill(even, -1e9))
    drafted = []
    for draft in (whole, few):
        generator, context = opened(draft, target, rows=4)
        tree, block = proposed(generator, *context, generator.plan(4, 9)).tree, proposed(generator, *context).tokens
        torch.manual_seed(0)
        generator.temperature = 0.8
        drawn, proposal, _ = proposed(generator, *context)
        drafted.append([block, drawn, proposal.ids, proposal.probabilities, tree.tokens, tree.parents])
        assert (block[:, 1:] % 2 == 1).all() and (tree.tokens[:, 1:] % 2 == 1).all()
    for ours, theirs in zip(*drafted, strict=True):
        torch.testing.assert_close(ours, theirs)


@torch.no_grad()
def test_drawn_candidates_follow_the_selector():
    """20,000 draws of a slot against `softmax(S / T)` over its candidates, given each token before."""
    target = make_target()
    draft = make_draft2(target)
    rows = 20_000
    generator, _ = opened(draft, target)
    hidden = 0.02 * torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(2))
    anchors = torch.full((rows,), 17)
    torch.manual_seed(0)
    block, proposal = generator.walk(anchors, hidden.expand(rows, -1, -1), temperature=0.7)
    logits = draft.draft_logits(hidden, target.lm_head)
    head = generator.slot_head
    ids, unary = head.candidates(logits)  # [1, 2, 5]
    assert torch.equal(proposal.ids, ids.expand(rows, -1, -1))
    for before, drawn in [(17, block[:, 1])] + [(int(a), block[block[:, 1] == a, 2]) for a in ids[0, 0]]:
        slot = 0 if before == 17 and len(drawn) == rows else 1
        if len(drawn) < 200:
            continue
        query, _ = head.step(None, torch.tensor([before]), hidden[:, slot])
        scores = head.scores(query, ids[:, slot], unary[:, slot])
        wanted = (scores[0].double() / 0.7).softmax(-1)
        observed = torch.stack([(drawn == b).sum() for b in ids[0, slot]])
        assert observed.sum() == len(drawn)
        assert chisquare(observed.numpy(), (wanted * len(drawn)).numpy()).pvalue > 1e-3
        torch.testing.assert_close(proposal.probabilities[block[:, slot] == before, slot][0], wanted.float())


# ------------------------------------------------------------------------------------------------- the rejection rule


def random_case(vocab_size, candidates, seed):
    random = torch.Generator().manual_seed(seed)
    scores = 1.5 * torch.randn(vocab_size, generator=random)
    ids = torch.randperm(vocab_size, generator=random)[:candidates]
    return scores, ids, torch.randn(candidates, generator=random).softmax(-1)


@pytest.mark.parametrize("candidates", [1, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_kept_and_rejected_tokens_follow_the_target(candidates, seed):
    scores, ids, q = random_case(8, candidates, seed)
    draws = 40_000
    torch.manual_seed(seed)
    drafted = ids[torch.multinomial(q, draws, replacement=True)][:, None]  # [draws, 1]
    proposal = Proposal(ids.expand(draws, 1, -1), q.expand(draws, 1, -1))
    tokens = sample_tokens(scores.expand(draws, 2, -1), drafted, proposal)  # [draws, 2]
    p = scores.double().softmax(-1)
    for column in (0, 1):  # the judged position, and the one after the block
        observed = torch.bincount(tokens[:, column], minlength=8)
        assert chisquare(observed.numpy(), (p * draws).numpy()).pvalue > 1e-3
    # As many are kept as can be: the overlap of p and q.
    overlap = float(torch.minimum(p[ids], q.double()).sum())
    kept = float((tokens[:, 0] == drafted[:, 0]).double().mean())
    assert abs(kept - overlap) < 5 * (overlap * (1 - overlap) / draws) ** 0.5 + 1e-3


def test_a_drafter_that_equals_the_target_is_never_rejected():
    scores = torch.randn(64, 3, 10)
    q = scores[:, :2].softmax(-1)
    drafted = torch.multinomial(q.reshape(-1, 10), 1).view(64, 2)
    proposal = Proposal(torch.arange(10).expand(64, 2, 10), q)
    assert torch.equal(sample_tokens(scores, drafted, proposal)[:, :2], drafted)


DRAWING = {
    "DFlash 2": (SWITCHES, None),
    "DFlash 2, its likeliest path": (SWITCHES, 0.0),
    "DFlash": ({}, 0.8),
    "reduced vocabulary": ({"draft_vocab_size": 4}, 1.3),
    "DFlash 2, reduced vocabulary": ({**SWITCHES, "draft_vocab_size": 4, "selector_top_k": 3}, None),
}


# One row is sampled step by step, where a path selector and a plain drafter draw alike.
ALONE = [
    ("DFlash 2", 1),
    ("reduced vocabulary", 1),
    *(
        pytest.param(kind, 1, marks=pytest.mark.slow)
        for kind in DRAWING
        if kind not in ("DFlash 2", "reduced vocabulary")
    ),
]


@pytest.mark.parametrize(("kind", "rows"), [*((kind, 250) for kind in DRAWING), *ALONE])
def test_texts_follow_the_target(kind, rows):
    """Chi-square of whole texts of three tokens over a vocabulary of eight, with real drafts."""
    target = small_target()
    switches, temperature = DRAWING[kind]
    draft = (make_draft2 if "selector_rank" in switches else make_draft)(target, **switches)
    if "draft_vocab_size" in switches:
        with torch.no_grad():
            draft.d2t.copy_(torch.arange(4))  # the even tokens
            draft.lm_head.weight.normal_(generator=torch.Generator().manual_seed(4))
    draft.decoding_config.draft_temperature = temperature
    prompt = [3, 1, 4]
    expected = exact_distribution(target, prompt, 0.9, 1.0)
    counts, accepted = dict.fromkeys(expected, 0), []
    torch.manual_seed(0)
    draws = 300 if rows == 1 else 12_000
    for _ in range(draws // rows):
        output = target.generate(
            torch.tensor([prompt] * rows),
            max_new_tokens=STEPS,
            do_sample=True,
            temperature=0.9,
            top_k=0,
            assistant_model=draft,
            return_dict_in_generate=True,
        )
        accepted += [n for lengths in output.acceptance_lengths for n in lengths]
        for text in output.sequences[:, 3:].tolist():
            counts[tuple(text)] += 1
    assert set(accepted) >= {1, 2}
    assert_follows(counts, expected)


def test_step_by_step_rows_follow_the_target_too():
    """A processor that keeps state forces one call for each token; drawn drafts are judged there by the same rule."""
    target = small_target()
    draft = make_draft2(target)
    expected = exact_distribution(target, [3, 1, 4], 1.0, 1.0)
    counts = dict.fromkeys(expected, 0)
    torch.manual_seed(0)
    draws, rows = 6000, 50
    for _ in range(draws // rows):
        output = target.generate(
            torch.tensor([[3, 1, 4]] * rows),
            max_new_tokens=3,
            do_sample=True,
            top_k=0,
            assistant_model=draft,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for text in output.sequences[:, 3:].tolist():
            counts[tuple(text)] += 1
    common = [text for text, p in expected.items() if p * draws >= 5]
    observed, wanted = [counts[text] for text in common], [expected[text] * draws for text in common]
    observed, wanted = [*observed, draws - sum(observed)], [*wanted, draws - sum(wanted)]
    assert chisquare(observed, wanted).pvalue > 1e-3


def test_one_row_gives_the_same_sample_when_drafts_are_not_drawn():
    target = make_target()
    draft = make_draft2(target)
    draft.decoding_config.draft_temperature = 0.0
    prompt = torch.tensor([[5, 9, 17, 33]])
    texts = []
    for assistant in (None, draft):
        torch.manual_seed(7)
        texts.append(target.generate(prompt, do_sample=True, max_new_tokens=40, assistant_model=assistant))
    assert torch.equal(*texts)


@pytest.mark.parametrize("temperature", [-0.5, float("nan"), float("inf")])
def test_a_wrong_draft_temperature_is_named(temperature):
    target = make_target()
    draft = make_draft2(target)
    draft.decoding_config.draft_temperature = temperature
    with pytest.raises(ValueError, match="draft_temperature"):
        target.generate(torch.tensor([[5, 9]]), do_sample=True, max_new_tokens=4, assistant_model=draft)


# ----------------------------------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_lossless(family, rows):
    target = make_target(family)
    draft = make_draft2(target, layer_types=["sliding_attention", "full_attention"], sliding_window=6)
    inputs, _ = ragged_prompts(rows)
    expected = target.generate(**inputs, max_new_tokens=30, do_sample=False)
    assert len(set(expected[:, 11:].flatten().tolist())) > 10
    assert torch.equal(target.generate(**inputs, max_new_tokens=30, do_sample=False, assistant_model=draft), expected)


KINDS = [("DFlash 2", 1), ("DFlash 2", 3), ("sinks, reduced vocabulary", 2), ("DFlash 2, reduced vocabulary", 2)]


@pytest.mark.parametrize(("kind", "rows"), KINDS)
def test_compiled_round_gives_the_same_tokens(kind, rows):
    """One graph without breaks, the walk included."""
    switches = {"draft_vocab_size": VOCAB // 4} if "reduced" in kind else {}
    switches |= {"attention_sink_bias": True} if "sinks" in kind else {"make": make_draft2}
    target, draft = shallow_pair(**switches)
    torch._dynamo.reset()
    inputs, _ = ragged_prompts(rows)
    options = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, "assistant_model": draft}
    eager = target.generate(**inputs, **options)
    draft.decoding_config.compile = "aot_eager"
    compiled = target.generate(**inputs, **options)
    assert torch.equal(compiled.sequences, eager.sequences)
    assert compiled.acceptance_lengths == eager.acceptance_lengths


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"conv_group_size": None}, "conv_group_size=None"),
        ({"conv_group_size": 5}, "conv_group_size=5"),
        ({"conv_kernel_size": 5}, "conv_kernel_size=5"),
        ({"selector_rank": None}, "selector_rank=None"),
        ({"selector_top_k": 97}, "selector_top_k=97"),
        ({"draft_vocab_size": 4}, "selector_top_k=5 exceeds draft_vocab_size=4"),
        ({"draft_vocab_size": 97}, "draft_vocab_size=97"),
        ({"output_multiplier": -1.0}, "output_multiplier=-1.0"),
        ({"final_logit_softcapping": float("nan")}, "final_logit_softcapping=nan"),
    ],
)
def test_errors_name_key_and_value(changes, named):
    with pytest.raises(ValueError) as error:
        make_draft2(make_target(), **changes)
    assert named in str(error.value)
