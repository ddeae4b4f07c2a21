"""Ways of calling `generate` that broke other implementations."""

import gc
import weakref
from threading import Thread

import pytest
import torch
from support.pairs import VOCAB, make_draft, make_target
from support.rows import ragged_prompts
from support.scripted_draft import scripted
from support.tiny_chat import make_tokenizer
from torch._subclasses.fake_tensor import FakeTensor
from transformers import DynamicCache, TextIteratorStreamer, TextStreamer, pipeline
from transformers.generation import GenerationConfig

from dflash_hf.evaluation.divergence import WRONG, judge, summary
from dflash_hf.modeling.cache_dflash import SlotCache
from dflash_hf.modeling.recurrent_dflash import recurrent_states
from dflash_hf.modeling.sessions_dflash import SlotSession
from dflash_hf.modeling.target_dflash import CACHE_NAME


PROMPT = torch.tensor([[5, 9, 17, 33, 5, 9, 17, 33, 5, 9]])


def both(target, draft, *args, **options):
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    expected = target.generate(*args, **options)
    return expected, target.generate(*args, **options, assistant_model=draft)


def test_inputs_embeds(target, draft):
    embeds = target.get_input_embeddings()(PROMPT)
    expected, output = both(target, draft, inputs_embeds=embeds)
    assert torch.equal(output, expected)
    expected, output = both(target, draft, PROMPT, inputs_embeds=embeds)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_token_types_go_on_as_the_prompt_ended(rows):
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


@pytest.mark.parametrize("hidden", [slice(6, 10), slice(3, 5)], ids=["on the right", "a gap"])
def test_masks_that_leave_out_more_than_padding_on_the_left(hidden, target, draft):
    ids, mask = PROMPT.repeat(2, 1), torch.ones(2, 10, dtype=torch.long)
    mask[1, hidden] = 0
    expected, output = both(target, draft, ids, attention_mask=mask, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected.sequences) and output.acceptance_lengths == [[], []]
    assert not torch.equal(expected.sequences[0], expected.sequences[1]), "the mask changes nothing"


def test_positions_never_pass_the_targets_length():
    """Learned positions end: a block may not reach past them, in a batch either."""
    target = make_target("gpt2", n_positions=32)
    draft = make_draft(target, block_size=16)
    expected, output = both(target, draft, PROMPT, max_new_tokens=22)
    assert torch.equal(output, expected)
    ids, mask = PROMPT.repeat(3, 1), torch.ones(3, 10, dtype=torch.long)
    ids[1, :4], mask[1, :4], ids[2, :7], mask[2, :7] = 0, 0, 0, 0
    stop = target.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)[0, -1].item()
    expected, output = both(target, draft, ids, attention_mask=mask, max_new_tokens=22, eos_token_id=stop)
    assert torch.equal(output, expected)
    assert torch.equal(*both(target, draft, PROMPT, max_new_tokens=7.0))


def test_the_mask_token_is_an_ordinary_token_of_the_text(target):
    """Nothing is trimmed, stopped or compared by the mask id."""
    text = target.generate(PROMPT, max_new_tokens=24, do_sample=False)
    draft = make_draft(target)
    draft.config.mask_token_id = text[0, 15].item()
    draft = scripted(draft, text)
    assert torch.equal(target.generate(PROMPT, max_new_tokens=24, do_sample=False, assistant_model=draft), text)


def test_num_return_sequences_samples_rows(target, draft):
    torch.manual_seed(0)
    output = target.generate(
        PROMPT, do_sample=True, num_return_sequences=4, max_new_tokens=12, assistant_model=draft, temperature=1.5
    )
    assert output.shape == (4, 22) and len({tuple(row) for row in output.tolist()}) == 4


def test_a_users_cache_is_continued_and_filled(target, draft):
    """The features of a prefilled prefix were never seen: drafting starts late, the text is the same."""
    for with_mask in (False, True):
        caches = [DynamicCache(config=target.config) for _ in range(2)]
        for cache in caches:
            target(PROMPT[:, :6], **{CACHE_NAME: cache}, use_cache=True)
        options = {"attention_mask": torch.ones_like(PROMPT)} if with_mask else {}
        expected = target.generate(PROMPT, **{CACHE_NAME: caches[0]}, max_new_tokens=20, do_sample=False, **options)
        draft = scripted(draft, expected)
        output = target.generate(
            PROMPT, **{CACHE_NAME: caches[1]}, max_new_tokens=20, do_sample=False, assistant_model=draft, **options
        )
        assert torch.equal(output, expected)
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == 29
        torch.testing.assert_close(caches[0].layers[2].keys, caches[1].layers[2].keys, atol=1e-4, rtol=1e-4)


def test_generation_config_and_chunked_prefill(target, draft):
    config = GenerationConfig(max_new_tokens=18, do_sample=False, pad_token_id=0, prefill_chunk_size=3)
    expected = target.generate(PROMPT, generation_config=config)
    draft = scripted(draft, expected)
    output = target.generate(PROMPT, generation_config=config, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected) and max(output.acceptance_lengths[0]) > 1


def test_chunked_prefill_drafts_what_whole_prefill_drafts(target, draft, monkeypatch):
    drafted = []
    monkeypatch.setattr(draft, "target_ids", lambda draft_ids: drafted.append(draft_ids) or draft_ids)
    options = {"max_new_tokens": 5, "do_sample": False, "assistant_model": draft}
    target.generate(PROMPT, **options)
    whole, drafted[:] = [block.tolist() for block in drafted], []
    target.generate(PROMPT, prefill_chunk_size=3, **options)
    assert [block.tolist() for block in drafted] == whole


def test_max_time_stops_after_a_round(target, draft):
    output = target.generate(PROMPT, max_new_tokens=200, max_time=1e-9, do_sample=False, assistant_model=draft)
    assert 11 <= output.shape[1] <= 15


def test_half_precision_differs_at_near_ties_only():
    """bf16 is not bitwise lossless in any speculative decoder, but only rounding separates the texts."""
    target = make_target(dtype=torch.bfloat16)
    draft = make_draft(target)
    prompts = torch.randint(2, VOCAB - 1, (16, 1, 9), generator=torch.Generator().manual_seed(0))
    texts = [[text[0, 9:].tolist() for text in both(target, draft, prompt)] for prompt in prompts]
    own, drafted = zip(*texts, strict=True)
    assert sum(map(list.__eq__, own, drafted)) >= 8 and len({*map(tuple, own)}) == 16
    found, _ = judge(target, prompts[:, 0].tolist(), own, {"dflash": drafted}, draft.config.block_tokens)
    assert summary(found, "dflash") != WRONG, found


def test_under_autocast(target, draft):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = target.generate(PROMPT, max_new_tokens=12, do_sample=False, assistant_model=draft)
    assert output.shape == (1, 22)


@pytest.fixture(scope="module")
def talking():
    """A target whose tokens are letters, its drafter and its tokenizer."""
    target = make_target(vocab_size=280)
    return target, make_draft(target), make_tokenizer()


def test_streamers_of_text(talking, capsys):
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


def test_stop_strings_stop_exactly(talking):
    target, draft, tokenizer = talking
    inputs = tokenizer("Once", return_tensors="pt", return_token_type_ids=False)
    letters = set(tokenizer("abcdefghijklmnopqrstuvwxyz")["input_ids"])
    others = [token for token in range(280) if token not in letters]
    options = {"max_new_tokens": 40, "do_sample": False, "tokenizer": tokenizer, "suppress_tokens": others}
    text = target.generate(**inputs, **options)
    stop = tokenizer.decode(text[0, 4 + 13 : 4 + 15])
    expected = target.generate(**inputs, **options, stop_strings=[stop])
    assert expected.shape[1] < text.shape[1]
    draft = scripted(draft, text)
    output = target.generate(**inputs, **options, stop_strings=[stop], assistant_model=draft)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("eos", [None, 11])
def test_rows_that_a_stop_string_ends(talking, eos):
    """With an end-of-sequence token they are padded; without, the target goes on writing them until all have ended."""
    target, draft, tokenizer = talking
    inputs, _ = ragged_prompts(3)
    options = {"max_new_tokens": 40, "do_sample": False, "tokenizer": tokenizer, "pad_token_id": 0}
    options |= {"eos_token_id": eos}
    free = target.generate(**inputs, **options)[:, -40:].tolist()
    options["stop_strings"] = [tokenizer.decode(free[row][place : place + 2]) for row, place in ((0, 5), (1, 20))]
    expected = target.generate(**inputs, **options)
    assert (expected[0, -5:] == 0).all() == (eos is not None)
    draft = scripted(draft, expected, error_rate=0.2)
    output = target.generate(**inputs, **options, assistant_model=draft)
    assert torch.equal(output, expected)


def test_pipeline(talking):
    target, draft, tokenizer = talking
    options = {"max_new_tokens": 12, "do_sample": False, "return_tensors": True}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    rounds = []
    handle = draft.register_forward_hook(lambda *_: rounds.append(1))
    assert drafted("Once", **options) == plain("Once", **options)
    handle.remove()
    assert rounds


def test_pipeline_takes_a_drafter_by_its_name(talking, tmp_path):
    """With other special tokens than the target's, which upstream takes for another tokenizer."""
    target, draft, tokenizer = talking
    target.config.eos_token_id, before = 7, target.config.eos_token_id
    draft.save_pretrained(tmp_path)
    options = {"max_new_tokens": 12, "do_sample": False, "return_tensors": True}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    for assistant in (str(tmp_path), draft):
        drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=assistant)
        assert isinstance(drafted.assistant_model, type(draft)) and drafted.assistant_tokenizer is None
        assert drafted("Once", **options) == plain("Once", **options)
    target.config.eos_token_id = before


def test_settings_of_other_assistants_are_followed_or_named(target, draft, caplog):
    """`num_assistant_tokens` drafted tokens are verified; what a drafter cannot follow is said once."""
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(PROMPT, **options)
    draft = scripted(draft, expected.sequences, error_rate=0.0)
    output = target.generate(PROMPT, **options, assistant_model=draft, num_assistant_tokens=2)
    assert torch.equal(output.sequences, expected.sequences) and max(output.acceptance_lengths[0]) == 3
    output = target.generate(PROMPT, **options, assistant_model=draft, prompt_lookup_num_tokens=3)
    assert torch.equal(output.sequences, expected.sequences)
    assert any("drafter ignores prompt_lookup_num_tokens=3" in record.getMessage() for record in caplog.records)
    draft.decoding_config.look_ahead = 4
    output = target.generate(PROMPT, **options, assistant_model=draft, assistant_confidence_threshold=0.7)
    assert torch.equal(output.sequences, expected.sequences)
    assert any("run ahead of the host" in record.getMessage() for record in caplog.records)


def test_a_misspelt_setting_is_an_error_with_the_nearest_name(draft):
    with pytest.raises(AttributeError, match="no field 'tree_node': did you mean 'tree_nodes'"):
        draft.decoding_config.tree_node = 9
    with pytest.raises(AttributeError, match="the fields are block_size, draft_temperature"):
        draft.decoding_config.pack_my_things = True


def test_dola_is_refused(target, draft):
    with pytest.raises(ValueError, match="dola_layers"):
        target.generate(PROMPT, max_new_tokens=5, dola_layers="low", assistant_model=draft)


@pytest.mark.parametrize("place", ["processor", "criterion", "streamer"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "jamba"])
def test_a_cache_after_an_interruption_equals_that_without_a_drafter(family, rows, place):
    """A Jamba goes on from a cache in single tokens only: one that lacks several is of no use."""
    target = make_target(family, attn=None, dtype=torch.float64 if family == "jamba" else torch.float32)
    inputs = {"input_ids": PROMPT.repeat(rows, 1) + torch.arange(rows)[:, None]}
    options = {**inputs, "max_new_tokens": 20, "do_sample": False}
    draft = scripted(make_draft(target, 6), target.generate(**options), error_rate=0.1)
    for nodes in (None, 8):
        draft.decoding_config.tree_nodes = nodes
        for after in (1, 2, 5, 9):
            caches = []
            for assistant in (None, draft):
                cache, interruption = DynamicCache(config=target.config), Interruption(KeyError, after, rows)
                own: dict = {"streamer": interruption}
                if place == "processor":
                    own = {"logits_processor": [lambda ids, scores, stop=interruption: stop() or scores]}
                elif place == "criterion":
                    nobody = torch.zeros(rows, dtype=torch.bool)
                    own = {"stopping_criteria": [lambda ids, scores, stop=interruption, no=nobody: stop() or no]}
                with pytest.raises(KeyError):
                    target.generate(**options, **own, **{CACHE_NAME: cache}, assistant_model=assistant)
                caches.append(cache)
            held = [
                [getattr(layer, name) for layer in cache.layers for name in ("keys", "values") if hasattr(layer, name)]
                + recurrent_states(cache.layers)
                for cache in caches
            ]
            assert all(torch.allclose(ours, theirs, atol=1e-4) for theirs, ours in zip(*held, strict=True))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_an_interruption_leaves_the_callers_cache_whole(family):
    """
    Stopped inside a block, the cache holds what it holds without a drafter: all tokens that were shown, but the last.
    It used to hold the rest of the block, so that a text that went on after the last shown token was another one.
    """

    class Interrupted:
        def __init__(self, after):
            self.after, self.tokens = after, []

        def put(self, value):
            if value.numel() > 1:
                return
            self.tokens.append(int(value))
            if len(self.tokens) == self.after:
                raise KeyboardInterrupt

    target = make_target(family)
    draft = make_draft(target, block_size=8)
    expected = target.generate(PROMPT, max_new_tokens=24, do_sample=False)
    draft = scripted(draft, expected, error_rate=0.1)
    for after in (4, 7, 11):
        cache, streamer = DynamicCache(config=target.config), Interrupted(after)
        options = {"max_new_tokens": 24, "do_sample": False, CACHE_NAME: cache}
        with pytest.raises(KeyboardInterrupt):
            target.generate(PROMPT, **options, streamer=streamer, assistant_model=draft)
        assert streamer.tokens == expected[0, 10 : 10 + after].tolist()
        length = cache.get_seq_length()
        assert length == 10 + after - 1
        whole = DynamicCache(config=target.config)
        target(expected[:, :length], **{CACHE_NAME: whole}, use_cache=True)
        options = {"max_new_tokens": 3, "do_sample": False}
        texts = [
            target.generate(expected[:, : length + 1], **{CACHE_NAME: held}, **options) for held in (cache, whole)
        ]
        assert torch.equal(*texts)


@pytest.mark.slow
def test_ten_thousand_tokens_in_constant_memory():
    """Beyond the cache nothing grows with the text."""

    class Meter:
        """Resident megabytes after so many tokens."""

        def __init__(self):
            self.tokens, self.resident = 0, {}

        def put(self, value):
            self.tokens += value.numel()
            if self.tokens % 1000 == 0:
                with open("/proc/self/statm", encoding="ascii") as statm:
                    self.resident[self.tokens] = int(statm.read().split()[1]) * 4096 / 2**20

        def end(self):
            pass

    target = make_target(max_position_embeddings=16384)
    draft, meter = make_draft(target, block_size=16), Meter()
    expected = target.generate(PROMPT, max_new_tokens=10_000, do_sample=False)
    draft = scripted(draft, expected, error_rate=0.02)
    output = target.generate(PROMPT, max_new_tokens=10_000, do_sample=False, assistant_model=draft, streamer=meter)
    assert torch.equal(output, expected)
    # Keys and values of 8,000 tokens in 4 + 2 layers, in buffers with a quarter to spare, moved when they grow.
    cache = 8000 * 2 * (4 * 2 * 8 + 2 * 2 * 8) * 4 / 2**20
    assert meter.resident[10_000] - meter.resident[2000] < 2.5 * cache + 10, meter.resident


class Interruption:
    """Raises `error` when it is reached for the `nth` time, at one place of a call of `generate`."""

    def __init__(self, error, nth, rows=1):
        self.error, self.left, self.rows = error, nth, rows

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise self.error

    def put(self, value):
        if value.numel() == self.rows:
            self()


@pytest.mark.parametrize("error", [KeyboardInterrupt, FloatingPointError])
@pytest.mark.parametrize("place", ["prefill", "draft", "verify", "commit", "streamer", "processor", "criterion"])
def test_an_interruption_anywhere_leaves_nothing_behind(place, error, target, draft, monkeypatch):
    """Both models decode as before, no hook stays, and no cache of the call is alive."""
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = target.generate(PROMPT, **options)
    draft = scripted(draft, expected)
    assert torch.equal(target.generate(PROMPT, **options, assistant_model=draft), expected)

    def hooks():
        modules = [*target.modules(), *draft.modules()]
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]

    before, caches, original = hooks(), [], SlotCache.__init__

    def remember(self, *args, **kwargs):
        original(self, *args, **kwargs)
        caches.append(weakref.ref(self))

    interruption, own = Interruption(error, 2 if place in ("streamer", "processor", "criterion") else 1), {}
    with monkeypatch.context() as patch:
        patch.setattr(SlotCache, "__init__", remember)
        if place in ("verify", "commit"):
            patch.setattr(SlotSession, place, lambda self, *args: interruption())
        elif place == "draft":
            patch.setattr(draft, "draft_logits", lambda *args: interruption())
        elif place == "prefill":  # behind the tap of a first layer
            interruption.left = 0
            handle = target.model.layers[2].register_forward_hook(lambda *args: interruption())
            target.generate(PROMPT, **options, assistant_model=draft)  # a target with a new hook is tried out
            caches.clear()
            interruption.left = 1
        elif place == "streamer":
            own = {"streamer": interruption}
        elif place == "processor":
            own = {"logits_processor": [lambda ids, scores: interruption() or scores]}
        else:
            own = {"stopping_criteria": [lambda ids, scores: interruption() or torch.zeros(1, dtype=torch.bool)]}
        with pytest.raises(error):
            target.generate(PROMPT, **options, **own, assistant_model=draft)
        if place == "prefill":
            handle.remove()
    assert hooks() == before
    assert (caches or place == "prefill") and all(cache() is None or not cache().layers for cache in caches)
    assert torch.equal(target.generate(PROMPT, **options, assistant_model=draft), expected)


@pytest.mark.parametrize("backend", [False, "eager"])
def test_many_calls_leave_nothing_behind(backend):
    """Over pairs that come and go: as many living tensors after many calls as after some, and none of a dead pair."""
    gc.freeze()  # what was there before is not looked through again and again, nor later

    def living() -> int:
        gc.collect()
        # Fake tensors are a compiler's notes; they hold no values.
        return sum(isinstance(thing, torch.Tensor) and type(thing) is not FakeTensor for thing in gc.get_objects())

    def calls(seed: int) -> tuple[int, int]:
        target = make_target(seed=seed)
        draft = make_draft(target, seed=seed + 1)
        draft.decoding_config.compile = backend
        counts = []
        for call in range(10 if backend else 30):
            target.generate(PROMPT[:, : 4 + call % 5], max_new_tokens=4, do_sample=False, assistant_model=draft)
            counts.append(living() if call in (4, 9, 29) else None)  # every length of the prompt was seen
        return counts[4], counts[-1]

    torch._dynamo.reset()
    after = [living()]
    for seed in range(3):
        first, last = calls(seed)
        assert last <= first
        torch._dynamo.reset()
        after.append(living())
    assert after[3] <= after[1] <= after[0] + 10
