"""Calls of `generate` that broke other implementations."""

import contextlib
import copy
import gc
from threading import Thread

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import ragged_prompts
from support.scripted_draft import scripted
from support.tiny_chat import make_tokenizer
from torch import nn
from transformers import DynamicCache, TextIteratorStreamer, TextStreamer, pipeline

from dflash_hf.decoding import recurrent
from dflash_hf.decoding.acceptance import Acceptance
from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.decoding.slots import SlotCache, SlotLayer, recurrent_states
from dflash_hf.targets.features import cache_argument


PROMPT = torch.tensor([[5, 9, 17, 33, 5, 9, 17, 33, 5, 9]])


def filled() -> list[SlotCache]:
    """The slot caches of this process that hold anything."""
    return [cache for cache in gc.get_objects() if isinstance(cache, SlotCache) and cache.layers]


def both(target, draft, *args, **options):
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    expected = target.generate(*args, **options)
    return expected, target.generate(*args, **options, assistant_model=draft)


@pytest.mark.parametrize("rows", [1, 3])
def test_token_types_continue_from_the_prompts_end(rows):
    """GPT-2 adds an embedding for them, to generated tokens too."""
    target = make_target("gpt2")
    draft = make_draft(target)
    ids = PROMPT.repeat(rows, 1)
    types = torch.arange(rows)[:, None] + torch.tensor([3] * 4 + [7] * 6)
    options = {"max_new_tokens": 24, "do_sample": False, "token_type_ids": types}
    expected = target.generate(ids, **options)
    assert not torch.equal(expected, target.generate(ids, max_new_tokens=24, do_sample=False)), "types change nothing"
    draft = scripted(draft, expected)
    output = target.generate(ids, **options, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert len({n for row in output.acceptance_lengths for n in row}) >= 3


def test_mask_token_in_the_text_changes_nothing(target):
    """Nothing is trimmed, stopped or compared by the mask id."""
    text = target.generate(PROMPT, max_new_tokens=24, do_sample=False)
    draft = make_draft(target)
    draft.config.mask_token_id = text[0, 15].item()
    draft = scripted(draft, text)
    assert torch.equal(target.generate(PROMPT, max_new_tokens=24, do_sample=False, assistant_model=draft), text)


@pytest.fixture(scope="module")
def talking():
    """A target whose tokens are letters, its drafter and its tokenizer."""
    target = make_target(vocab_size=280)
    return target, make_draft(target), make_tokenizer()


def test_text_streamers_get_the_same_pieces(talking, capsys):
    target, draft, tokenizer = talking
    inputs = tokenizer("Once", return_tensors="pt", return_token_type_ids=False)
    options = {"max_new_tokens": 20, "do_sample": False}
    written = []
    for assistant in (None, draft):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        call = {**inputs, **options, "streamer": streamer, "assistant_model": assistant}
        thread = Thread(target=target.generate, kwargs=call)
        thread.start()
        pieces = list(streamer)
        thread.join()
        target.generate(**inputs, **options, streamer=TextStreamer(tokenizer), assistant_model=assistant)
        written.append((pieces, capsys.readouterr().out))
    assert written[0] == written[1] and len(written[0][0]) > 5


@pytest.mark.parametrize(("rows", "eos"), [(1, None), (3, None), (3, 11)])
def test_stop_strings_end_rows(talking, rows, eos):
    """With an end-of-sequence token they are padded; without, the target goes on writing them until all have ended."""
    target, draft, tokenizer = talking
    inputs, _ = ragged_prompts(rows)
    options = {"max_new_tokens": 40, "do_sample": False, "tokenizer": tokenizer, "pad_token_id": 0}
    options |= {"eos_token_id": eos}
    free = target.generate(**inputs, **options)[:, -40:].tolist()
    places = ((0, 5), (1, 20))[:rows]
    options["stop_strings"] = [tokenizer.decode(free[row][place : place + 2]) for row, place in places]
    expected = target.generate(**inputs, **options)
    assert (expected[0, -5:] == 0).all() == (eos is not None) and (rows > 1 or expected.shape[1] < 51)
    draft = scripted(draft, expected, error_rate=0.2)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=draft), expected)


def test_pipeline_takes_a_drafter_or_its_name(talking, tmp_path):
    """With other special tokens than the target's, which upstream takes for another tokenizer."""
    target, draft, tokenizer = talking
    before = target.config.eos_token_id
    target.config.eos_token_id = 7
    draft.save_pretrained(tmp_path)
    options = {"max_new_tokens": 12, "do_sample": False, "return_tensors": True}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    for assistant in (str(tmp_path), draft):
        drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=assistant)
        rounds = []
        assert isinstance(drafted.assistant_model, type(draft)) and drafted.assistant_tokenizer is None
        drafted.assistant_model.decoding_config.block_size = (
            draft.config.max_block_tokens
        )  # a random drafter would not be used
        drafted.assistant_model.register_forward_hook(lambda *_, rounds=rounds: rounds.append(1))
        assert drafted("Once", **options) == plain("Once", **options) and rounds
    target.config.eos_token_id = before


def test_assistant_settings_are_followed_or_named(target, draft, caplog):
    """`num_assistant_tokens` drafted tokens are verified; what a drafter cannot follow is warned of once."""
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(PROMPT, **options)
    draft = scripted(draft, expected.sequences, error_rate=0.0)
    output = target.generate(PROMPT, **options, assistant_model=draft, num_assistant_tokens=2)
    assert torch.equal(output.sequences, expected.sequences) and max(output.acceptance_lengths[0]) == 3
    for name, value in (("prompt_lookup_num_tokens", 3), ("assistant_confidence_threshold", 0.7)):
        output = target.generate(PROMPT, **options, assistant_model=draft, **{name: value})
        assert torch.equal(output.sequences, expected.sequences) and max(output.acceptance_lengths[0]) == 4
        assert f"drafter ignores {name}={value}" in caplog.text


def test_default_draft_count_is_followed_if_requested(target, draft):
    """Upstream fills in 20 drafted tokens where nobody asks for any; then sizes are chosen."""
    draft.decoding_config.block_size = None
    options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(PROMPT, **options)
    draft = scripted(draft, expected.sequences, error_rate=0.0)
    assert target.generate(PROMPT, **options, assistant_model=draft).draft_sizes is not None
    settings = copy.deepcopy(target.generation_config)
    settings.update(**options, num_assistant_tokens=20)
    for asked in ({**options, "num_assistant_tokens": 20}, {"generation_config": settings}):
        output = target.generate(PROMPT, **asked, assistant_model=draft)
        assert torch.equal(output.sequences, expected.sequences)
        assert output.draft_sizes is None and set(output.acceptance_lengths[0][:-1]) == {draft.config.block_size}


def test_misspelt_setting_names_the_fields(draft):
    with pytest.raises(AttributeError, match="no field 'tree_node'; its fields are block_size, window, tree_nodes"):
        draft.decoding_config.tree_node = 9


def test_dola_is_refused(target, draft):
    with pytest.raises(ValueError, match="dola_layers"):
        target.generate(PROMPT, max_new_tokens=5, dola_layers="low", assistant_model=draft)


class Interruption:
    """Raises `error` when it is reached for the `nth` time, at one place of a call of `generate`."""

    def __init__(self, error, nth):
        self.error = error
        self.left = nth

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise self.error

    def put(self, value):
        if value.numel() == 1:
            self()

    def at(self, place: str) -> dict:
        """The argument of `generate` with which it is reached."""
        if place == "streamer":
            return {"streamer": self}
        if place == "processor":
            return {"logits_processor": [lambda ids, scores: self() or scores]}
        return {"stopping_criteria": [lambda ids, scores: self() or torch.zeros(len(ids), dtype=torch.bool)]}


@pytest.mark.parametrize(
    ("family", "place"),
    [
        ("qwen3", "processor"),
        ("gemma3", "criterion"),
        ("gemma3", "streamer"),
        ("falcon_h1", "processor"),
        ("falcon_h1", "streamer"),
        ("mamba2", "criterion"),
    ],
)
def test_interrupted_cache_equals_the_plain_one(family, place):
    """It holds all tokens that were shown but the last, and recurrent states after them."""
    target = make_target(family, attn=None, dtype=torch.float32 if family in ("qwen3", "gemma3") else torch.float64)
    options = {"inputs": PROMPT, "max_new_tokens": 20, "do_sample": False}
    draft = scripted(make_draft(target, 6), target.generate(**options), error_rate=0.1)
    for nodes, after in ((8, 1), (None, 2), (8, 5), (None, 9)):
        draft.decoding_config.tree_nodes = nodes
        states_of_calls = []
        for assistant in (None, draft):
            cache = DynamicCache(config=target.config)
            own = Interruption(KeyError, after).at(place)
            own[cache_argument(target)] = cache
            with pytest.raises(KeyError):
                target.generate(**options, **own, assistant_model=assistant)
            layers = [layer for layer in cache.layers if hasattr(layer, "keys")]
            states_of_calls.append([layer.keys for layer in layers] + [layer.values for layer in layers])
            states_of_calls[-1] += recurrent_states(cache.layers)
        for plain_states, drafted_states in zip(*states_of_calls, strict=True):
            torch.testing.assert_close(
                drafted_states, plain_states, rtol=0.0, atol=1e-4 * max(1.0, float(plain_states.abs().max()))
            )
    output = target.generate(**options, assistant_model=draft, return_dict_in_generate=True)
    assert max(output.acceptance_lengths[0]) > 3


@pytest.mark.parametrize(
    ("family", "error"),
    [("qwen3", KeyboardInterrupt), ("gemma3", torch.OutOfMemoryError), ("falcon_h1", torch.OutOfMemoryError)],
)
def test_failed_slot_allocation_keeps_the_cache(family, error, monkeypatch):
    """Whichever buffer of whichever layer it fails at, the caller's cache holds what it held."""
    target = make_target(family, attn=None)
    prompt = torch.randint(5, 90, (2, 9))
    mask = torch.ones_like(prompt)
    draft = make_draft(target)
    make = SlotLayer._buffer
    mask[0, :3] = 0

    def read(assistant=None):
        cache = DynamicCache(config=target.config)
        options = {"attention_mask": mask, "max_new_tokens": 1, cache_argument(target): cache}
        with contextlib.suppress(error):
            target.generate(prompt, **options, assistant_model=assistant)
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        parts = []
        for keys, values in layers:
            parts += [keys[0, :, 3:], keys[1], values[0, :, 3:], values[1]]
        return parts

    expected = read()
    read(draft)  # the target is probed now
    for place in range(1, len(expected) + 1):
        failing = Interruption(error, place)
        monkeypatch.setattr(SlotLayer, "_buffer", lambda *args, failing=failing: failing() or make(*args))
        for plain_states, drafted_states in zip(expected, read(draft), strict=True):
            assert torch.equal(drafted_states, plain_states)
        assert failing.left <= 0 or 2 * place > len(expected)


@pytest.mark.parametrize("place", [1, 2, 4, 7])
def test_interrupted_rollback_keeps_recurrent_states(place, monkeypatch):
    """They were left after tokens that the cache did not hold, and the next turn was another text."""
    target = make_target("falcon_h1", attn=None, dtype=torch.float64)
    text = target.generate(PROMPT, max_new_tokens=30, do_sample=False)
    draft = scripted(make_draft(target, 6), text, error_rate=0.4)
    options = {"do_sample": False, "assistant_model": draft}
    assert torch.equal(target.generate(PROMPT, max_new_tokens=30, **options), text)  # and the target was probed
    cache = DynamicCache(config=target.config)
    failing = Interruption(KeyboardInterrupt(), place)
    copied = recurrent._copy_states
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recurrent, "_copy_states", lambda *args: failing() or copied(*args))
        target.generate(PROMPT, max_new_tokens=30, **options, **{cache_argument(target): cache})
    length = cache.get_seq_length()
    continued = {"max_new_tokens": text.shape[1] - length - 1, "do_sample": False, cache_argument(target): cache}
    assert length >= PROMPT.shape[1] and torch.equal(target.generate(text[:, : length + 1], **continued), text)


class Interrupting(nn.Module):
    """A layer of a target, which may be interrupted."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.reached = lambda: None

    def forward(self, *args, **kwargs):
        self.reached()
        return self.layer(*args, **kwargs)


@pytest.mark.parametrize("place", ["prefill", "verify", "draft", "streamer", "processor", "criterion"])
def test_interruption_leaves_no_hook_and_no_cache(place):
    """Both models decode as before, no hook stays, and no cache of the call is kept."""
    target = make_target()
    target.model.norm = Interrupting(target.model.norm)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = target.generate(PROMPT, **options)
    draft = scripted(make_draft(target), expected).train()
    assert torch.equal(target.generate(PROMPT, **options, assistant_model=draft), expected)

    def hooks():
        modules = [*target.modules(), *draft.modules()]
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]

    before = hooks()
    own = {}
    error = KeyboardInterrupt if place in ("verify", "streamer") else FloatingPointError
    interruption = Interruption(error, 1 if place in ("prefill", "draft") else 2)
    if place in ("prefill", "verify"):
        target.model.norm.reached = interruption
    elif place == "draft":
        handle = draft.register_forward_hook(interruption)
    else:
        own = interruption.at(place)
    earlier = filled()  # by fixtures of other tests: conversations that may continue
    with pytest.raises(error):
        target.generate(PROMPT, **options, **own, assistant_model=draft)
    assert interruption.left == 0
    if place == "draft":
        handle.remove()
    assert hooks() == before and draft.training
    assert not [cache for cache in filled() if not any(cache is other for other in earlier)]
    assert torch.equal(target.generate(PROMPT, **options, assistant_model=draft), expected)


def test_many_calls_leave_no_tensors_behind():
    """As many tensors after many calls as after some, and none of a pair that was freed."""
    gc.freeze()  # what was there before is not looked through again and again, nor later

    def living() -> int:
        gc.collect()
        return sum(isinstance(living_object, torch.Tensor) for living_object in gc.get_objects())

    def calls(seed: int) -> tuple[int, int]:
        target = make_target(seed=seed)
        draft = make_draft(target, seed=seed + 1)
        counts = []
        for call in range(20):
            target.generate(PROMPT[:, : 4 + call % 5], max_new_tokens=4, do_sample=False, assistant_model=draft)
            counts.append(living() if call in (4, 19) else None)  # every length of the prompt was seen
        return counts[4], counts[-1]

    after = [living()]
    for seed in range(3):
        first, last = calls(seed)
        assert last <= first
        after.append(living())
    assert after[3] <= after[1] <= after[0] + 10


def test_context_is_cut_with_its_cache(target, draft):
    """Features that were pending when the conversation was cut lay past the slots of the context."""
    features = torch.randn(1, 80, draft.fc.in_features, generator=torch.Generator().manual_seed(0))
    offset = torch.zeros(1, 1, dtype=torch.long)
    cache = DynamicCache()

    def opened(columns: int, past: int, continued=None) -> DraftSession:
        drafter = DraftSession(draft, target)
        drafter.context.append(features[:, past:columns])
        drafter.context.prefill([0], columns, offset, continued)
        return drafter

    before = opened(56, 0).context
    before.read(features[:, 56:71], Acceptance.from_counts([15]))
    before.keep_for(cache)
    after = opened(44, 40, cache)
    expected = opened(44, 0)
    for drafter in (after, expected):
        drafter.context.read(features[:, 71:73], Acceptance.from_counts([2]))
    anchor = torch.tensor([7])
    torch.testing.assert_close(after.hidden_states(anchor), expected.hidden_states(anchor))
    assert after.context.lengths.on_host == expected.context.lengths.on_host == [46]


def test_spec_generate_is_the_references_call(target):
    """Scripts for the reference implementation call it; the target's own `top_k` does not truncate its samples."""
    draft = make_draft(target).train()
    target.generation_config.update(top_k=1, repetition_penalty=3.0, eos_token_id=None)
    plain = {"max_new_tokens": 24, "repetition_penalty": 1.0}
    text = target.generate(PROMPT, **plain, do_sample=False)
    stop = text[0, 20].item()
    call = {"input_ids": PROMPT, "max_new_tokens": 24, "target": target}
    assert torch.equal(draft.spec_generate(**call, temperature=0.0), text) and not draft.training
    end = text[0, PROMPT.shape[1] :].tolist().index(stop) + 1
    stopped = draft.spec_generate(**call, temperature=0.0, stop_token_ids=[stop, 1])
    assert stopped.tolist() == text[:, : PROMPT.shape[1] + end].tolist()
    torch.manual_seed(3)
    sample = target.generate(PROMPT, **plain, do_sample=True, temperature=1.5, top_k=0, top_p=1.0)
    torch.manual_seed(3)
    assert torch.equal(draft.spec_generate(**call, temperature=1.5), sample) and not torch.equal(sample, text)
