"""The contract of a head, held by heads that the package does not have, each of one file, and by those it has."""

import json
import math
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare
from support.guides import ROOT, blocks_of
from support.pairs import SWITCHES, VOCAB, make_draft, make_draft2, make_target, shallow_pair
from support.recurrent_head import SIZES, RecurrentHead, use_heads
from support.reference import gru_step, markov_bias
from support.rows import counting_rows, ragged_prompts
from support.runs import make_trainer
from support.sampling import assert_follows, exact_distribution, sample, small_target
from support.scripted_draft import scripted
from support.trees import best_first, paths_of

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.convert import convert
from dflash_hf.hub.check import check
from dflash_hf.modeling.drafting_dflash import DFlashCandidateGenerator
from dflash_hf.modeling.head_dflash import Head
from dflash_hf.modeling.layouts_dflash import is_drafter_config
from dflash_hf.modeling.tree_dflash import beam_tree, every_path
from dflash_hf.training.start import with_parts


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def heads(monkeypatch):
    use_heads(monkeypatch, RecurrentHead)


def recurrent(target, trained=True, **overrides):
    """A drafter with a recurrent head; `trained` makes it matter."""
    draft = make_draft(target, **{**SIZES, **overrides})
    if trained:
        random = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in draft.named_parameters():
                if name.startswith("memory."):
                    parameter += 1.5 * torch.randn(parameter.shape, generator=random)
    return draft


def published(target, trained=True, **fields):
    """A drafter with a head of the package; `trained` makes it matter."""
    draft = make_draft(target, **fields)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if trained and name.startswith(("markov_head.", "prefix_gru.", "embed_proj.")):
                parameter += 1.5 * torch.randn(parameter.shape, generator=random)
    return draft


SURE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
vanilla = partial(published, markov_rank=6, sample_from_anchor=True, block_size=3)
gated = partial(published, markov_rank=6, markov_head_type="gated", **SURE)
rnn = partial(published, markov_rank=6, markov_head_type="rnn", **SURE)
domino = partial(published, gru_hidden_dim=9, emb_dim=7)
late = partial(published, gru_hidden_dim=9, emb_dim=7, pure_draft_prefix_len=1, sample_from_anchor=True)
PUBLISHED = {"vanilla": vanilla, "gated": gated, "rnn": rnn, "domino": domino, "late": late}
EVERY = {"recurrent": recurrent, **PUBLISHED}


def reduced(target, make=recurrent, **overrides):
    """The same over the even tokens alone."""
    draft = make(target, draft_vocab_size=VOCAB // 2, **overrides)
    with torch.no_grad():
        draft.d2t.copy_(torch.arange(VOCAB // 2))
        draft.lm_head.weight.copy_(target.lm_head.weight[::2])
    return draft


own_table, sure = partial(make_draft, has_embed_tokens=True), partial(published, enable_confidence_head=True)
reduced_gated = partial(reduced, make=gated)
TABLES = [make_draft, own_table, make_draft2, sure, *EVERY.values()]


def slow_log_probs(draft, target, anchor: int, hidden: torch.Tensor, prefix: tuple[int, ...]) -> torch.Tensor:
    """`[V]`, over the target's ids: what the head says after a path, written out from its parameters."""
    config, embedding, h = draft.config, target.get_input_embeddings().weight, hidden[len(prefix)]
    if config.head is RecurrentHead:
        memory, size = draft.memory, config.hidden_size
        state = torch.zeros(1, config.memory_width, dtype=draft.dtype)
        for token in (anchor, *prefix):
            state = memory.cell(embedding[token][None], state)
        weight = memory.query.weight
        query = torch.nn.functional.silu(weight[:, :size] @ h + weight[:, size:] @ state[0] + memory.query.bias)
        bias = memory.tokens.weight @ query
    elif config.head.family == "DSpark":
        state = torch.zeros(config.markov_rank, dtype=draft.dtype)
        for slot, token in enumerate((anchor, *prefix)):
            bias, state = markov_bias(draft.state_dict(), vars(config), state, token, hidden[slot])
    else:
        state = torch.zeros(config.gru_hidden_dim, dtype=draft.dtype)
        for token in (anchor, *prefix):
            state = gru_step(draft.state_dict(), state, embedding[token])
        mixed = torch.nn.functional.silu(draft.embed_proj[0].weight @ torch.cat([h, state]))
        bias = draft.embed_proj[2].weight @ mixed * (len(prefix) >= config.pure_draft_prefix_len)
    own = draft.lm_head if config.has_own_head else target.lm_head
    logits = own.weight @ h + bias
    ids = torch.arange(len(logits))
    scores = torch.full((draft.config.vocab_size,), -math.inf, dtype=logits.dtype)
    scores[ids + draft.d2t if draft.config.has_own_head else ids] = logits
    return scores.log_softmax(-1)


def generator_of(draft, target):
    generator = DFlashCandidateGenerator(draft, target)
    return generator


def tree_from(generator, anchors, hidden, nodes, depth):
    """The tree from hidden states that the test knows."""
    return generator.tree(anchors, hidden, generator.plan(depth + 1, nodes).paths)


# ------------------------------------------------------------------------------------------------------------ drafting


def resized(rows: int, make, **overrides):
    """A pair whose target's table was resized after the drafter's training; new tokens are as likely as others."""
    target = make_target(dtype=torch.float64)
    draft = make(target, **overrides)
    draft.config.mask_token_id = VOCAB - 10
    target.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        target.lm_head.weight[VOCAB:] = target.lm_head.weight[: max(rows - VOCAB, 0)].roll(1, dims=1)
    return target, draft


@pytest.mark.parametrize("rows", [VOCAB + 8, VOCAB - 6])
@pytest.mark.parametrize("make", [*TABLES, reduced_gated])
def test_a_resized_target_is_drafted_for(make, rows, monkeypatch):
    """Drafters with a head were refused for grown tables, all drafters for tables without the padding rows."""
    target, draft = resized(rows, make)
    if draft.config.has_own_head:
        draft.d2t.clamp_(max=40)  # the tokens 0, 2, ..., 80, 81, ..., 87
    propose, drafted = DFlashCandidateGenerator.propose, []

    def recorded(*args):
        drafted.append(propose(*args))
        return drafted[-1]

    monkeypatch.setattr(DFlashCandidateGenerator, "propose", recorded)
    inputs, _ = ragged_prompts(2)
    inputs["input_ids"] %= rows - 8
    one = {"input_ids": inputs["input_ids"][:1], "attention_mask": inputs["attention_mask"][:1]}
    for tree in (None, 6):
        draft.decoding_config.tree_nodes = tree
        for arguments in (inputs, {**one, "do_sample": True, "top_k": 0}):
            arguments = {"do_sample": False, "max_new_tokens": 12, **arguments}
            torch.manual_seed(3)
            expected = target.generate(**arguments)
            torch.manual_seed(3)
            assert torch.equal(target.generate(**arguments, assistant_model=draft), expected)
    draft.decoding_config.tree_nodes, draft.decoding_config.draft_temperature = None, 1.0
    target.generate(**inputs, do_sample=True, max_new_tokens=20, assistant_model=draft)
    known = torch.stack([one.tokens[:, 1:].max() for one in drafted])
    assert len(known) > 9 and known.max() < min(VOCAB, rows)
    draft.decoding_config.draft_temperature = None
    expected = target.generate(**one, do_sample=False, max_new_tokens=20)
    scripted_one, options = scripted(draft, expected), {"do_sample": False, "return_dict_in_generate": True}
    output = target.generate(**one, **options, max_new_tokens=20, assistant_model=scripted_one)
    assert torch.equal(output.sequences, expected) and max(output.acceptance_lengths[0]) > 1


@pytest.mark.parametrize("rows", [VOCAB + 8, VOCAB - 6])
@pytest.mark.parametrize("make", [*TABLES, reduced_gated])
def test_a_drafter_is_trained_for_a_resized_target(make, rows, tmp_path):
    """Tokens that it does not know teach nothing, as those outside a reduced vocabulary."""
    target, draft = resized(rows, make)
    draft.d2t.clamp_(max=40) if draft.config.has_own_head else None
    data = counting_rows(4, modulus=rows)
    assert max(max(row["input_ids"]) for row in data) >= rows - 2
    for loss_type in ("ce", "kl", "tv"):
        trainer = make_trainer(tmp_path / loss_type, target, data, draft.float(), loss_type=loss_type)
        trainer.train()
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        assert math.isfinite(loss) and loss > 0


def test_a_vocabulary_past_a_shrunk_table_is_refused():
    target, draft = resized(VOCAB - 6, reduced)
    with pytest.raises(ValueError, match="drafts tokens up to 94 .draft_vocab_size=48.* resize its embedding to 95"):
        target.generate(torch.tensor([[5, 9]]), max_new_tokens=5, assistant_model=draft)


def test_a_drafter_of_unknown_vocabulary_draws():
    """Muse's files have no `vocab_size`: it ended in a TypeError where drafts were drawn or judged."""
    target = make_target()
    draft = make_draft(target)
    draft.config.vocab_size, draft.decoding_config.draft_temperature = None, 1.0
    options = {"max_new_tokens": 9, "do_sample": True, "return_dict_in_generate": True}
    assert target.generate(torch.tensor([[5, 9, 17]]), **options, assistant_model=draft).acceptance_lengths[0]


@pytest.mark.parametrize("make", [*EVERY.values(), reduced, partial(reduced, make=gated)])
@torch.no_grad()
def test_the_walk_goes_on_from_all_tokens_before(make):
    target = make_target(dtype=torch.float64)
    draft = make(target)
    anchors, hidden = torch.tensor([17, 40, 3]), 0.2 * torch.randn(3, 3, 32, dtype=torch.float64)
    block, proposal = generator_of(draft, target).walk(anchors, hidden, temperature=0.0)
    assert proposal is None
    plain = draft.target_ids(draft.draft_logits(hidden, target.lm_head).argmax(-1))
    for row in range(3):
        path = ()
        for _ in range(3):
            log_probs = slow_log_probs(draft, target, int(anchors[row]), hidden[row], path)
            path = (*path, int(log_probs.argmax()))
        assert tuple(block[row, 1:].tolist()) == path
    assert not torch.equal(block[:, 1:], plain), "the head changed nothing: nothing was tested"


@pytest.mark.parametrize("make", [recurrent, gated, rnn, late])
@torch.no_grad()
def test_drawn_tokens_follow_the_head(make):
    """20,000 draws of three slots against the head's own probabilities after the tokens that were drawn before."""
    target = make_target(vocab_size=8, bos_token_id=None, dtype=torch.float64)
    draft, rows = make(target, seed=2), 20_000
    hidden = 0.05 * torch.randn(1, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    anchors = torch.full((rows,), 5)
    block, proposal = generator_of(draft, target).walk(anchors, hidden.expand(rows, -1, -1), temperature=0.7)
    tested = 0
    for slot in range(3):
        for prefix in {tuple(row) for row in block[:, 1 : slot + 1].tolist()}:
            where = (block[:, 1 : slot + 1] == torch.tensor(prefix)).all(-1)
            count = int(where.sum())
            if count < 400:
                continue
            wanted = (slow_log_probs(draft, target, 5, hidden[0], prefix) / 0.7).softmax(-1)
            observed = torch.bincount(block[where, slot + 1], minlength=8)
            assert chisquare(observed.numpy(), (wanted * count).numpy()).pvalue > 1e-4
            torch.testing.assert_close(proposal.probabilities[where, slot][0], wanted.float(), atol=1e-5, rtol=1e-4)
            tested += 1
    assert tested >= 4


@pytest.mark.parametrize("make", [*EVERY.values(), reduced])
@pytest.mark.parametrize(("nodes", "depth"), [(1, 3), (7, 3), (14, 5), (16, 1)])
@torch.no_grad()
def test_a_wide_beam_finds_what_a_best_first_search_finds(make, nodes, depth):
    """No more nodes than the beam is wide: the tree is that of a search through every path."""
    target = make_target(dtype=torch.float64)
    draft = make(target, block_size=6)
    anchors = torch.tensor([17, 40])
    hidden = 0.03 * torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(nodes))
    generator = generator_of(draft, target)
    tree = tree_from(generator, anchors, hidden, nodes, depth)
    for row in range(2):

        def likely(prefix, row=row):
            log_probs = slow_log_probs(draft, target, int(anchors[row]), hidden[row], prefix)
            best, ids = log_probs.float().topk(8)
            return list(zip(ids.tolist(), best.clamp(-20, -1e-3).tolist(), strict=True))

        assert paths_of(tree, row) == best_first(likely, nodes, depth)
        assert int(tree.tokens[row, 0]) == int(anchors[row])
        assert all(parent < node for node, parent in enumerate(tree.parents[row].tolist()) if node)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_narrow_beam_takes_the_best_of_what_it_finds(width):
    """Against lists of paths: at each depth the likeliest go on, and the likeliest of all that were seen are kept."""
    depth, ways, nodes, rows = 4, 3, 11, 2
    table = (2 * torch.randn(rows, depth, 50, 50, generator=torch.Generator().manual_seed(0))).log_softmax(-1)

    def after(slot, state, before):  # the state is the sum of the tokens so far
        state = state + before
        scores = table[torch.arange(rows).repeat_interleave(len(before) // rows), slot, state % 50]
        best, ids = scores.topk(ways)
        return ids, best, state

    anchors = torch.tensor([7, 30])
    tree = beam_tree(anchors, torch.zeros(rows, dtype=torch.long), after, every_path(nodes, depth, ways, CPU), width)
    for row in range(rows):
        beam, seen = [((), 0.0)], []
        for slot in range(depth):
            longer = []
            for path, total in beam:
                best, ids = table[row, slot, (int(anchors[row]) + sum(path)) % 50].topk(ways)
                steps = zip(ids.tolist(), best.clamp(-20, -1e-3).tolist(), strict=True)
                longer += [((*path, token), total + one) for token, one in steps]
            seen += longer
            beam = sorted(longer, key=lambda one: -one[1])[:width]
        best = sorted(seen, key=lambda one: -one[1])[:nodes]
        assert paths_of(tree, row) == {path for path, _ in best}


@pytest.mark.parametrize("make", [*EVERY.values(), reduced, partial(published, sample_from_anchor=True)])
@pytest.mark.parametrize("settings", [{}, {"tree_nodes": 12}, {"block_size": None}, {"look_ahead": 3}], ids=str)
def test_texts_are_the_target_s(make, settings):
    target = make_target()
    draft = make(target)
    inputs, _ = ragged_prompts(3)
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = target.generate(**inputs, **options)
    draft.decoding_config.block_size = None if "tree_nodes" in settings else draft.config.block_tokens
    for key, value in settings.items():
        setattr(draft.decoding_config, key, value)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=draft), expected)


@pytest.mark.parametrize(("make", "nodes"), [(recurrent, None), (vanilla, 12), (rnn, None), (late, 12)])
def test_compiled_texts_are_the_target_s(make, nodes, caplog):
    torch._dynamo.reset()
    target, draft = shallow_pair(make)
    draft.decoding_config.block_size = None if nodes else draft.config.block_tokens
    draft.decoding_config.tree_nodes, draft.decoding_config.compile = nodes, "eager"
    inputs, _ = ragged_prompts(2)
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = target.generate(**inputs, **options)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=draft), expected)
    assert "cannot be compiled" not in caplog.text


@pytest.mark.parametrize("make", [vanilla, late, partial(published, sample_from_anchor=True)])
def test_every_slot_of_an_anchor_first_block_is_drafted(make, monkeypatch):
    """A whole block is accepted: its tokens, and one of the target's own; Domino's last slot is left out."""
    target, seen = make_target(), []
    draft = make(target)
    draft.decoding_config.block_size = None
    options = {"max_new_tokens": 25, "do_sample": False, "return_dict_in_generate": True}
    prompt = torch.tensor([[5, 7, 9, 11]])
    text = target.generate(prompt, **options).sequences[0]

    def right(self, anchors, hidden, temperature, judged):
        seen.append(hidden.shape[1])
        start = int(self.test_start)
        tokens = text[start : start + hidden.shape[1] + 1]
        return torch.nn.functional.pad(tokens, (0, hidden.shape[1] + 1 - len(tokens)))[None], None

    hidden_states = DFlashCandidateGenerator._hidden_states
    monkeypatch.setattr(DFlashCandidateGenerator, "walk", right)
    monkeypatch.setattr(
        DFlashCandidateGenerator,
        "_hidden_states",
        lambda self, anchors, start, *rest: (
            setattr(self, "test_start", start),
            hidden_states(self, anchors, start, *rest),
        )[1],
    )
    draft.decoding_config.block_size = draft.config.block_tokens
    output = target.generate(prompt, **options, assistant_model=draft)
    drafts = draft.config.block_size - (draft.config.head.family == "Domino")
    assert torch.equal(output.sequences[0], text)
    assert set(seen) == {drafts} and max(output.acceptance_lengths[0]) == drafts + 1
    assert set(output.acceptance_lengths[0][:-1]) == {drafts + 1}


@pytest.mark.parametrize("make", [recurrent, vanilla, rnn, late, pytest.param(domino, marks=pytest.mark.slow)])
def test_samples_follow_the_target(make):
    target = small_target()
    draft = make(target)
    prompt, counts, accepted = [3, 1, 4], {}, set()
    expected = exact_distribution(target, prompt, 0.9, 1.0)
    counts = dict.fromkeys(expected, 0)
    torch.manual_seed(0)
    for _ in range(12):
        output = sample(target, draft, prompt, 1000, 0.9, 1.0)
        accepted.update(n for lengths in output.acceptance_lengths for n in lengths)
        for text in output.sequences[:, 3:].tolist():
            counts[tuple(text)] += 1
    assert {1, 2} <= accepted
    assert_follows(counts, expected)


FRESH = {
    "recurrent": SIZES,
    "selector": {"selector_rank": 6, "selector_top_k": 5},
    "vanilla": {"markov_rank": 6, **SURE},
    "gated": {"markov_rank": 6, "markov_head_type": "gated"},
    "rnn": {"markov_rank": 6, "markov_head_type": "rnn"},
    "confidence alone": {"enable_confidence_head": True},
    "Domino": {"gru_hidden_dim": 9, "emb_dim": 7, "pure_draft_prefix_len": 1},
}


@pytest.mark.parametrize("fields", FRESH.values(), ids=FRESH)
@torch.no_grad()
def test_a_head_added_fresh_changes_no_bit(fields):
    """Of what is drafted: the hidden states, the scores of tokens, and what is accepted."""
    target = make_target()
    plain = make_draft(target)
    fresh = with_parts(plain, fields)
    assert fresh.config.head is not plain.config.head
    inputs = torch.randn(2, 4, 32), torch.randn(2, 9, 96)
    states = [draft.eval()(*inputs).last_hidden_state for draft in (plain, fresh)]
    assert torch.equal(*states)
    generators = [DFlashCandidateGenerator(draft, target) for draft in (plain, fresh)]
    anchors = torch.tensor([5, 9])
    assert torch.equal(*(one.walk(anchors, states[0], temperature=0.0)[0] for one in generators))
    torch.manual_seed(0)
    block, drawn = generators[1].walk(anchors, states[0], temperature=1.0)
    logits = plain.draft_logits(states[0], target.lm_head).gather(-1, drawn.ids.expand_as(drawn.probabilities))
    assert torch.equal(drawn.probabilities, logits.softmax(-1)) and block.shape == (2, 5)
    prompts, _ = ragged_prompts(3)
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    ours, theirs = (target.generate(**prompts, **options, assistant_model=draft) for draft in (fresh, plain))
    assert ours.acceptance_lengths == theirs.acceptance_lengths


@torch.no_grad()
def test_forced_queries_are_those_of_single_steps():
    """A head without a state is asked about all slots at once, another slot by slot."""
    target = make_target(dtype=torch.float64)
    before, hidden = torch.randint(2, 90, (2, 3, 4)), torch.randn(2, 3, 4, 32, dtype=torch.float64)
    embed = partial(torch.nn.functional.embedding, weight=target.get_input_embeddings().weight)
    known = torch.rand(2, 3, 4) < 0.7
    known[..., 0] = False
    for draft in (recurrent(target), make_draft2(target), gated(target), rnn(target), domino(target)):
        head = draft.config.head(draft, embed)
        queries, rows = head.forced(before, hidden, known), iter(range(int(known.sum())))
        for i in range(2):
            for j in range(3):
                state = head.start(before[i, j, 1:2])
                for slot in range(1, 4):
                    query, state = head.step(state, before[i, j, slot : slot + 1], hidden[i, j, slot : slot + 1])
                    if known[i, j, slot]:
                        torch.testing.assert_close(queries[next(rows)], query[0])


# ----------------------------------------------------------------------------------------------------- files, engines


def test_saved_and_loaded_under_any_name(tmp_path):
    target = make_target()
    draft = recurrent(target, memory_share=0.25)
    draft.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["RecurrentDraftModel"] and is_drafter_config(
        {"architectures": ["RecurrentDraftModel"]}
    )
    assert written["dflash_config"].items() >= {**SIZES, "memory_share": 0.25}.items() and "memory_rank" not in written
    again = DFlashDraftModel.from_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name for name in tensors if name.startswith("memory.")} == {
        f"memory.{name}" for name in draft.memory.state_dict()
    }
    # Another's spelling of a field, and of tensors.
    written["memories"] = written["dflash_config"].pop("memory_width")
    (tmp_path / "config.json").write_text(json.dumps(written))
    renamed = {name.replace("memory.", "memories."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for one in (again, DFlashDraftModel.from_pretrained(tmp_path)):
        assert one.config.head is RecurrentHead and one.config.memory_share == 0.25
        for name, tensor in draft.state_dict().items():
            assert torch.equal(tensor, one.state_dict()[name]), name
    smaller = DFlashDraftConfig.from_pretrained(tmp_path, memory_rank=3)
    assert smaller.memory_rank == 3 and smaller.dflash_config["memory_rank"] == 3


def test_engines_that_do_not_know_a_head_are_named(tmp_path):
    recurrent(make_target()).save_pretrained(tmp_path)
    found = {(one.severity, one.engines, one.key) for one in check(tmp_path) if one.severity == "error"}
    assert found == {("error", ("vllm", "sglang"), "memory_width")}
    (one,) = (one for one in check(tmp_path) if one.key == "memory_width")
    assert one.message == "8: no engine has a recurrent head; decode with transformers' generate()."
    with pytest.raises(ValueError, match="memory_width=8, which the native model does not have"):
        convert(tmp_path, tmp_path / "native", to="native")


def test_a_head_over_few_tokens_cannot_share_the_targets(tmp_path):
    """It ended in torch's own list of sizes."""
    reduced(make_target()).save_pretrained(tmp_path / "few")
    with pytest.raises(ValueError, match="memory.tokens.weight only covers the 48 tokens of the drafter"):
        convert(tmp_path / "few", tmp_path / "whole", share_head=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_rank": None}, "memory_width=8 and memory_rank=None belong together"),
        ({"memory_rank": -1}, "memory_rank=-1 must be a positive integer"),
        ({"memory_share": 2.0}, "memory_share=2.0 must lie between 0 and 1"),
        (SWITCHES, "selector_rank and memory_width are set, but a drafter has one head: path selector or recurrent"),
    ],
)
def test_errors_name_field_and_value(fields, message):
    with pytest.raises(ValueError, match=message):
        recurrent(make_target(), **fields)


def test_without_its_fields_a_drafter_has_no_head():
    target = make_target()
    draft = make_draft(target, memory_width=0, memory_rank=0)
    assert draft.config.head is Head and not hasattr(draft, "memory")
    assert set(draft.config.to_dict()["dflash_config"]) == {"block_size", "mask_token_id", "target_layer_ids"}
    assert make_draft2(target).config.head.name == "path selector"


def test_the_architecture_is_that_of_the_head():
    """Of a convolution alone it is DFlash 2's."""
    target, convolution = make_target(), {"conv_kernel_size": 2, "conv_group_size": 4}
    for fields, name in (({}, "DFlashDraftModel"), (SIZES, "RecurrentDraftModel")):
        assert make_draft(target, **fields).config.to_dict()["architectures"] == [name]
    for fields, name in (({}, "DFlash2DraftModel"), (SIZES, "RecurrentDraftModel")):
        assert make_draft(target, **fields, **convolution).config.to_dict()["architectures"] == [name]


def test_a_head_that_is_read_is_no_longer_refused(monkeypatch):
    config = make_draft(make_target()).config.to_dict()
    files = [
        {**config, "architectures": ["LiLiCorrDraftModel"]},
        {**config, "dflash_config": {**config["dflash_config"], "projector_type": "lilicorr"}},
    ]
    for file in files:
        with pytest.raises(ValueError, match="is a LiLiCorr drafter, not a DFlash one"):
            DFlashDraftConfig.from_dict(file)
    monkeypatch.setattr(RecurrentHead, "family", "LiLiCorr")
    for file in files:
        DFlashDraftConfig.from_dict(file)


# ------------------------------------------------------------------------------------------------------ as documented


def test_the_guide_s_head_is_a_head(monkeypatch, tmp_path):
    """The file of `add_a_head.md` as it stands: drafts, trees, training, files, and what is tried on the page."""
    file, tried = (block.text for block in blocks_of(ROOT / "examples" / "guides" / "add_a_head.md"))
    namespace = {"__package__": "dflash_hf.modeling", "__name__": "dflash_hf.modeling.bigram_dflash"}
    exec(compile(file, "bigram_dflash.py", "exec"), namespace)
    use_heads(monkeypatch, namespace["BigramHead"])
    target = make_target()
    draft = make_draft(target, bigram_rank=4, block_size=5)
    with torch.no_grad():
        draft.bigram.after.weight.normal_(std=30.0, generator=torch.Generator().manual_seed(0))

    # 1. The walk, and a tree that needs no more paths than the beam holds.
    anchors = torch.tensor([11, 40])
    hidden = 0.05 * torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1))
    generator = generator_of(draft, target)
    block, _ = generator.walk(anchors, hidden, temperature=0.0)
    tree = tree_from(generator, anchors, hidden, 12, 4)
    changed = 0
    for row in range(2):

        def scores(prefix, row=row):
            before = (int(anchors[row]), *prefix)[-1]
            h = hidden[row, len(prefix)]
            bias = draft.bigram.after.weight @ draft.bigram.before.weight[before]
            return (target.lm_head.weight @ h + bias).detach()

        def likely(prefix, scores=scores):
            best, ids = scores(prefix).log_softmax(-1).topk(8)
            return list(zip(ids.tolist(), best.clamp(-20, -1e-3).tolist(), strict=True))

        path = ()
        for slot in range(4):
            path = (*path, int(scores(path).argmax()))
            changed += path[-1] != int((target.lm_head.weight @ hidden[row, slot]).argmax())
        assert tuple(block[row, 1:].tolist()) == path
        assert paths_of(tree, row) == best_first(likely, 12, 4)
    assert changed, "the head changed nothing: nothing was tested"

    # 2. It learns, all of it, and is found again in a file that engines do not read.
    draft = make_draft(target, bigram_rank=4)
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    make_trainer(tmp_path / "run", target, counting_rows(4), draft, warmup_steps=0, max_steps=2).train()
    assert not [name for name, parameter in draft.named_parameters() if torch.equal(parameter, before[name])]
    draft.save_pretrained(tmp_path / "saved")
    again = DFlashDraftModel.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert {one.key for one in check(tmp_path / "saved") if one.severity == "error"} == {"bigram_rank"}

    # 3. What the page tries.
    target.save_pretrained(tmp_path / "target")
    make_draft(target).save_pretrained(tmp_path / "my-drafter")
    monkeypatch.chdir(tmp_path)
    exec(compile(tried, "add_a_head.md", "exec"), {})
    written = json.loads((tmp_path / "my-bigram-drafter" / "config.json").read_text())
    assert written["architectures"] == ["BigramDraftModel"] and written["dflash_config"]["bigram_rank"] == 8
