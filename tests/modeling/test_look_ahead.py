"""Rounds that are started before the host looks: the same texts and counts, and nothing of a round waits for it."""

import pytest
import torch
from support.pairs import make_draft, make_target, shallow_pair
from support.scripted_draft import recognising, scripted
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import DynamicCache, GenerationConfig, TextStreamer
from transformers.generation import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from dflash_hf.modeling.accept_dflash import Judge
from dflash_hf.modeling.drafting_dflash import DFlashCandidateGenerator
from dflash_hf.modeling.generation_dflash import one_round
from dflash_hf.modeling.prefill_dflash import Pair
from dflash_hf.modeling.sessions_dflash import SlotSession
from dflash_hf.modeling.target_dflash import CACHE_NAME, FeatureTap
from dflash_hf.modeling.text_dflash import Continuation, HostView, Writer
from dflash_hf.modeling.tree_dflash import every_path


@pytest.fixture
def looks(monkeypatch):
    """How many rounds the host looked at, each time it did."""
    seen, original = [], HostView.sync

    def look(self):
        seen.append(len(self.pending))
        original(self)

    monkeypatch.setattr(HostView, "sync", look)
    return seen


def ragged():
    pads, longest = [0, 4, 2], 9
    prompt = torch.arange(3 * longest).view(3, longest) * 7 % 90 + 2
    mask = torch.ones_like(prompt)
    for row, pad in enumerate(pads):
        prompt[row, :pad], mask[row, :pad] = 0, 0
    return prompt, mask, pads


# Each family with each number of rounds, each of both with stop tokens and without.
AHEAD = [
    (family, ahead, (i + j) % 2 == 0)
    for i, family in enumerate(("qwen3", "gemma3", "gpt2"))
    for j, ahead in enumerate((2, 3, 50))
]


@pytest.mark.parametrize(("family", "ahead", "stops"), AHEAD)
def test_texts_and_counts_are_the_same(family, ahead, stops, looks):
    target = make_target(family, attn=None, **({"n_positions": 50} if family == "gpt2" else {}))
    draft = make_draft(target, block_size=4)
    prompt, mask, pads = ragged()
    options = {"attention_mask": mask, "max_new_tokens": 41, "do_sample": False, "return_dict_in_generate": True}
    if stops:
        free = target.generate(prompt, **options).sequences
        options["eos_token_id"] = [int(free[0, 30]), int(free[1, 20])]
    expected = target.generate(prompt, **options)
    outputs = []
    for count in (1, ahead):
        draft = scripted(draft, expected.sequences)
        draft.decoding_config.look_ahead = count
        looks.clear()
        outputs.append(target.generate(prompt, **options, assistant_model=draft))
    at_once, later = outputs
    assert torch.equal(later.sequences, expected.sequences)
    assert later.acceptance_lengths == at_once.acceptance_lengths
    assert len({n for row in later.acceptance_lengths for n in row}) >= 3
    assert max(looks) > 1 and sum(looks) <= ahead + 1 + max(len(row) for row in later.acceptance_lengths)
    # The cache goes on from the last token, not from what was computed in vain.
    for layer, other in zip(later.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert layer.keys.shape == other.keys.shape


def test_a_compiled_round_runs_ahead_too(looks):
    torch._dynamo.reset()
    target, draft = shallow_pair()
    draft.decoding_config.compile, draft.decoding_config.look_ahead = "eager", 4
    prompt, mask, _ = ragged()
    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False}
    assert torch.equal(target.generate(prompt, **options, assistant_model=draft), target.generate(prompt, **options))
    assert max(looks) == 4


@pytest.mark.parametrize("more", [{"max_time": 100.0}, {"streamer": True}, {"repetition_penalty": 1.2}])
def test_where_each_token_is_asked_for_every_round_is_looked_at(more, target, draft, looks):
    draft.decoding_config.look_ahead = 8
    prompt, streamed = torch.tensor([[5, 9, 17, 33]]), []
    if "streamer" in more:

        class Streamer(TextStreamer):
            def __init__(self):
                pass

            def put(self, value):
                streamed.extend(value.flatten().tolist())

            def end(self):
                pass

        more = {"streamer": Streamer()}
    output = target.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=draft, **more)
    expected = target.generate(prompt, max_new_tokens=20, do_sample=False, **(more if not streamed else {}))
    assert torch.equal(output, expected)
    assert set(looks) <= {1} and streamed in ([], output[0].tolist())


@pytest.mark.parametrize("nodes", [0, 6])
def test_nothing_of_a_round_waits_for_the_host(nodes):
    """Fake tensors have shapes and no values: whatever reads one raises."""
    rows, columns = 2, 7
    target = make_target()
    draft = make_draft(target)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        ids = torch.ones(rows, columns, dtype=torch.long)
        config = GenerationConfig(max_length=60, do_sample=False)
        config._pad_token_tensor = None
        criteria = StoppingCriteriaList([MaxLengthCriteria(60), EosTokenCriteria(torch.tensor([3, 4]))])
        judge = Judge(rows, (LogitsProcessorList(), criteria, config))
        text = Continuation(ids, judge, Writer(ids, judge.pad, config), 60 - columns, look_ahead=4)
        drafter = DFlashCandidateGenerator(draft, target)
        offset = torch.zeros(rows, 1, dtype=torch.long)
        plan = drafter.plan(4, nodes)
        with FeatureTap(target, draft.config.target_layer_ids, consume=drafter.absorb) as tap:
            cache = DynamicCache(config=target.config)
            logits = target(input_ids=ids, **{CACHE_NAME: cache}, use_cache=True).logits[:, -1:]
            tap.consume = None
            drafter.open([0, 2], columns, 64, offset)
            session = SlotSession(target, cache, [0, 2], 64, offset, {}, last_slot=60)
            pair = Pair(drafter, session, tap, text, columns)
            text.commit(text.judge(None, logits))
            start = torch.full((rows,), columns)
            context = drafter.no_features(start, 4)
            for _ in range(2):
                pair.reserve(nodes + 4)
                verdict, context = one_round(pair, start, context, plan)
                assert verdict.tokens.shape == (rows, 4) and context.features.shape[1] == 4
                text.commit(verdict)
                start = start + verdict.counts
            every_path.cache_clear()  # of tables without values
            assert len(text.host.pending) == 3
            with pytest.raises(DataDependentOutputException):
                text.host.sync()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("nodes", [None, 6])
def test_a_gpu_is_waited_for_once_in_so_many_rounds(compiled, nodes, looks, monkeypatch):
    target = make_target().cuda()
    draft = make_draft(make_target()).cuda()
    draft.decoding_config.compile, draft.decoding_config.look_ahead = compiled, 4
    draft.decoding_config.tree_nodes = nodes
    prompt = torch.tensor([[5, 9, 17, 33]], device="cuda")
    expected = target.generate(prompt, max_new_tokens=60, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=60, do_sample=False, assistant_model=draft), expected)
    look, accept = HostView.sync, Continuation.judge

    def loud(self, *args):
        torch.cuda.set_sync_debug_mode("error")
        return accept(self, *args)

    def quiet(self):
        torch.cuda.set_sync_debug_mode("default")
        look(self)
        torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(Continuation, "judge", loud)
    monkeypatch.setattr(HostView, "sync", quiet)
    try:
        target.generate(prompt, max_new_tokens=60, do_sample=False, assistant_model=draft)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("look_ahead", 0),
        ("look_ahead", "4"),
        ("block_size", 5),
        ("block_size", 0),
        ("block_size", True),
        ("draft_temperature", -1.0),
        ("tree_nodes", 0),
        ("tree_nodes", 129),
        ("tree_nodes", 8.0),
        ("window", 0),
        ("window", 256.0),
    ],
)
def test_what_no_drafter_can_follow_is_refused(field, value, target, draft):
    setattr(draft.decoding_config, field, value)
    with pytest.raises(ValueError, match=f"decoding_config.{field}={value!r} must be"):
        target.generate(torch.tensor([[5, 9]]), max_new_tokens=4, assistant_model=draft)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_call_that_begins_at_rest_loses_no_features(rows):
    """The host has not seen the first rounds when their features are kept."""
    target = make_target()
    prompts = [torch.randint(2, 90, (1, 20), generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)]
    hard, easy = (prompt.expand(rows, -1) for prompt in prompts)
    options = {"max_new_tokens": 80, "do_sample": False}
    expected = target.generate(easy, **options)
    draft = recognising(target, [expected[0]], block_size=6, error_rate=0.0)
    draft.decoding_config.block_size, draft.decoding_config.look_ahead = None, 4
    rounds = []
    for prompt in (hard, easy, easy, easy):
        output = target.generate(prompt, **options, assistant_model=draft, return_dict_in_generate=True)
        rounds.append(len(output.acceptance_lengths[0]))
    assert rounds[0] > 70 and rounds[-1] < 25, "hard text, then the drafter's own"
