"""Features are read by hooks that act in their own call alone: threads, calls inside calls, interruptions, copies."""

import copy
import pickle

import pytest
import torch
from support.pairs import make_target
from support.scripted_draft import recognising
from support.stress_calls import at_once

from dflash_hf.modeling.target_dflash import FeatureTap


PROMPTS = [torch.tensor([[5, 9, 17, 33, 2]]), torch.tensor([[8, 70, 41, 3]])]
OPTIONS = {"max_new_tokens": 24, "do_sample": False}
FAMILIES = {"qwen3": torch.float32, "qwen3_5_text": torch.float64}  # by slots, and by replay


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """A target, its texts, and a drafter that knows them by their features: of other features it drafts nothing."""
    target = make_target(request.param, FAMILIES[request.param])
    texts = [target.generate(ids, **OPTIONS) for ids in PROMPTS]
    return target, recognising(target, [text[0] for text in texts]), texts


def check(target, draft, number, text, **options):
    """The target writes the text, and accepts drafts."""
    options = {**OPTIONS, "return_dict_in_generate": True, **options}
    output = target.generate(PROMPTS[number], **options, assistant_model=draft)
    assert torch.equal(output.sequences, text) and max(output.acceptance_lengths[0]) > 3


def hooks_of(target) -> int:
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in target.modules())


class Streamer:
    """Does something when the third token is written."""

    def __init__(self, do):
        self.do, self.tokens = do, 0

    def put(self, value):
        self.tokens += value.numel() == 1
        if self.tokens == 3:
            self.do()

    def end(self):
        pass


def test_threads_share_a_target(pair):
    """Two drafted calls and one without a drafter, again and again."""
    target, draft, texts = pair

    def drafted(number):
        for _ in range(4):
            check(target, draft, number, texts[number])

    def plain():
        for _ in range(6):
            assert torch.equal(target.generate(PROMPTS[0], **OPTIONS), texts[0])

    assert at_once(lambda: drafted(0), lambda: drafted(1), plain) == [None] * 3
    assert hooks_of(target) == 0


def test_calls_run_inside_calls(pair):
    """Drafted or plain calls, and forwards, of the same target in a streamer."""
    target, draft, texts = pair
    done = []

    def inside():
        check(target, draft, 1, texts[1])
        assert torch.equal(target.generate(PROMPTS[1], **OPTIONS), texts[1])
        target(PROMPTS[1])
        done.append(hooks_of(target))

    check(target, draft, 0, texts[0], streamer=Streamer(inside))
    assert done and done[0] > 0 and hooks_of(target) == 0


def test_interruption_leaves_no_hook(pair):
    target, draft, texts = pair

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        target.generate(PROMPTS[0], **OPTIONS, streamer=Streamer(stop), assistant_model=draft)
    assert hooks_of(target) == 0
    check(target, draft, 0, texts[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda target: pickle.loads(pickle.dumps(target))])
def test_copies_of_a_running_target_are_whole(pair, copied):
    """Made in the middle of a drafted call; the copy outlives it, and its text is drafted like the original's."""
    target, draft, texts = pair
    copies = []
    check(target, draft, 0, texts[0], streamer=Streamer(lambda: copies.append(copied(target))))
    assert hooks_of(target) == 0
    assert torch.equal(copies[0].generate(PROMPTS[1], **OPTIONS), texts[1])
    check(copies[0], draft, 1, texts[1])


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_foreign_hooks_see_no_drafts(pair, register, caplog):
    """A target with hooks of a caller decodes plainly: it sees the tokens that it sees without a drafter."""
    target, draft, texts = pair
    module, seen = target.get_input_embeddings(), []
    handle = getattr(module, register)(lambda layer, args, *output: seen.append(args[0].tolist()))
    expected = target.generate(PROMPTS[0], **OPTIONS)
    alone, seen[:] = [*seen], []
    output = target.generate(PROMPTS[0], **OPTIONS, assistant_model=draft, return_dict_in_generate=True)
    handle.remove()
    assert torch.equal(output.sequences, expected) and output.acceptance_lengths == [[]] and seen == alone
    assert f"a hook of {__name__} on a Embedding would see drafted tokens" in caplog.text
    check(target, draft, 0, texts[0])


def test_features_are_the_layers_own_outputs(pair):
    """`output_hidden_states=[i]` changed its meaning in 5.23, and upstream's last entry is after the final norm."""
    target = pair[0]
    with FeatureTap(target, [0, 2, 3]) as tap, tap.running():
        output = target(PROMPTS[0], output_hidden_states=True)
        features, every = tap.take(), output.hidden_states
    assert torch.equal(features[..., :64], torch.cat([every[1], every[3]], dim=-1))
    assert torch.equal(target.model.norm(features[..., 64:]), every[4])


def test_hooks_of_a_copy_act_once():
    """A copy made during a call keeps the hooks; a drafter that reads one layer got its features twice."""
    target = make_target()
    text = target.generate(PROMPTS[0], **OPTIONS)
    draft = recognising(target, [text[0]], target_layer_ids=[2])
    with FeatureTap(target, [2]):
        copied = copy.deepcopy(target)
    check(copied, draft, 0, text)
    assert hooks_of(copied) == 0
