"""What `decode` asks of a draft policy: in which order, and what its summary may hold."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from support.pairs import make_draft, make_target
from transformers.generation.streamers import BaseStreamer

from dflash_hf import DraftPolicy
from dflash_hf.decoding.adaptive import AdaptiveLength
from dflash_hf.decoding.timing import TimedStreamer


ROW = torch.tensor([[5, 9, 17, 33]])
NEW = 6


class Recording(DraftPolicy):
    """Notes what is called, and returns the summary that the test sets."""

    calls: list[str] = []
    result: object = {}

    def __init__(self, call, drafter):
        super().__init__(call, drafter)
        self.calls.clear()

    def get_candidates(self, state):
        self.calls.append("get")
        return super().get_candidates(state)

    def update_candidate_strategy(self, state, candidates, acceptance):
        self.calls.append("update")

    def finish(self):
        self.calls.append("finish")

    def summary(self):
        self.calls.append("summary")
        return self.result


def call(policy, **options):
    target = make_target()
    draft = make_draft(target, block_size=4)
    draft.decoding_config.policy = policy
    return target.generate(ROW, max_new_tokens=NEW, do_sample=False, assistant_model=draft, **options)


def test_policy_is_asked_in_turn_and_finishes_once():
    call(Recording, return_dict_in_generate=True)
    rounds = Recording.calls.count("get")
    assert rounds > 0 and Recording.calls == ["get", "update"] * rounds + ["finish", "summary"]


def test_summary_is_asked_for_outputs_only():
    call(Recording)
    assert Recording.calls[-1] == "finish" and "summary" not in Recording.calls


def test_policy_sets_fields_of_the_output(monkeypatch):
    monkeypatch.setattr(Recording, "result", {"draft_sizes": [3]})
    output = call(Recording, return_dict_in_generate=True)
    assert output.draft_sizes == [3] and output.estimated_speedup is None


@pytest.mark.parametrize("result", [{"tokens_per_second": 3}, {"sequences": ROW}, None])
def test_unknown_summary_names_policy_and_fields(result, monkeypatch):
    """It was a `TypeError` of the output's constructor."""
    monkeypatch.setattr(Recording, "result", result)
    with pytest.raises(ValueError, match=r"Recording.summary\(\) returned .*draft_sizes.*estimated_speedup"):
        call(Recording, return_dict_in_generate=True)


def test_time_in_the_streamer_is_measured(monkeypatch):
    """A policy may subtract it; the caller's streamer is not replaced, and receives every token."""
    ticks = iter(range(1000))
    monkeypatch.setattr("dflash_hf.decoding.timing.clock", lambda device: next(ticks))
    streamers = []

    class Kept(DraftPolicy):
        def __init__(self, call, drafter):
            super().__init__(call, drafter)
            streamers.append(call.selector.streamer)

    class Collecting(BaseStreamer):
        def __init__(self):
            self.tokens = []
            self.ends = 0

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ends += 1

    collecting = Collecting()
    output = call(Kept, streamer=collecting)
    (timed,) = streamers
    assert isinstance(timed, TimedStreamer) and timed.streamer is collecting and timed.ends == 1
    assert timed.seconds == NEW + 1  # one tick for each token, and one for the end
    assert collecting.tokens == output[0].tolist()


class SlowStreamer(BaseStreamer):
    """Takes time in every method; nothing else does."""

    def __init__(self):
        self.seconds = 0.0

    def put(self, value):
        self.seconds += 1

    def next_round(self, num_drafted):
        self.seconds += 10

    def end(self):
        self.seconds += 100


def test_rounds_are_timed_without_the_streamer(monkeypatch):
    """The time of `next_round`, in which `dflash generate` writes text, made rounds with drafts look slow."""
    streamer = SlowStreamer()
    for module in ("timing", "latency"):
        monkeypatch.setattr(f"dflash_hf.decoding.{module}.clock", lambda device: streamer.seconds)
    policies = []

    class Kept(AdaptiveLength):
        def __init__(self, call, drafter):
            super().__init__(call, drafter)
            policies.append(self)

    call(Kept, streamer=streamer)
    (policy,) = policies
    assert policy.timer.rounds and not any(seconds for _, _, seconds in policy.timer.rounds)
    assert policy.call.selector.streamer.seconds == streamer.seconds - 1 > 100  # `generate` itself puts the prompt


def test_timed_streamer_can_be_copied():
    """A copy asks for attributes before it has any, which was an endless recursion."""
    streamer = SlowStreamer()
    copied = copy.copy(TimedStreamer(streamer, torch.device("cpu")))
    assert copied.streamer is streamer and not hasattr(copied, "missing")


@pytest.mark.parametrize("chunk", [None, 3])
def test_prompt_leaves_the_calls_arguments_alone(chunk):
    """Policies read them: a Gemma with shared keys found another `logits_to_keep`, a prompt in chunks more keys."""
    arguments = []

    class Comparing(DraftPolicy):
        def __init__(self, call, drafter):
            super().__init__(call, drafter)
            arguments.append(dict(call.model_kwargs))

        def finish(self):
            arguments.append(dict(self.call.model_kwargs))

    target = make_target("gemma4", num_kv_shared_layers=1)
    draft = make_draft(target, target_layer_ids=[0, 1])
    draft.decoding_config.policy = Comparing
    target.generate(ROW, assistant_model=draft, max_new_tokens=6, do_sample=False, prefill_chunk_size=chunk)
    before, after = arguments
    assert before.keys() == after.keys() and "logits_to_keep" in before
    assert all(before[name] is after[name] for name in before)


@pytest.mark.parametrize(
    ("positions", "generated", "room", "trees"),
    [
        (math.inf, 5, 25, True),  # no limit
        (40, 5, 25, True),  # beyond the text
        (29, 5, 25, True),  # the text ends at the last position
        (28, 5, 24, False),
        (5, 5, 1, False),  # the anchor has the last position
        (4, 5, 25, True),  # the text has passed them
        (-3, 5, 25, True),  # the prompt had
    ],
)
def test_room_ends_at_the_last_position(positions, generated, room, trees):
    """The first of 30 tokens is in the position after the prompt, and the anchor is the last that was generated."""
    capabilities = SimpleNamespace(trees=True)
    call = SimpleNamespace(positions_after_prompt=positions, capabilities=capabilities)
    policy = DraftPolicy(call, SimpleNamespace(graph=None, block_tokens=4))
    state = SimpleNamespace(longest=generated, remaining_tokens=30 - generated)
    assert policy.room(state) == room and policy.supports_trees(state) == trees
    capabilities.trees = False
    assert not policy.supports_trees(state)
