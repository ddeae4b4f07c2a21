"""From rows to ids and a loss mask: exactly what the target writes is supervised, whatever the template does."""

import pytest
from support.tiny_chat import CHATML, CROOKED, END, GENERATION, THINKING, THINKING_GENERATION, make_tokenizer

from dflash_hf.data.encode import RowEncoder, UnusableRow


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
TWO_TURNS = [USER, ANSWER, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


def encoder(template, max_length=None, mask_token_id=None, vocab_size=None, **template_kwargs):
    return RowEncoder(make_tokenizer(template), max_length, template_kwargs, mask_token_id, vocab_size)


def supervised(encode, example):
    """Its supervised stretches, as text."""
    stretches, ids, mask = [], example["input_ids"], example["loss_mask"]
    assert len(ids) == len(mask) and set(mask) <= {0, 1}
    for i, value in enumerate(mask):
        if value and (i == 0 or not mask[i - 1]):
            stretches.append([])
        if value:
            stretches[-1].append(ids[i])
    return [encode.tokenizer.decode(stretch) for stretch in stretches]


def text(encode, example):
    return encode.tokenizer.decode(example["input_ids"])


@pytest.mark.parametrize("template", [CHATML, GENERATION], ids=["prefixes", "generation"])
def test_every_turn_of_the_assistant_is_supervised_with_its_end(template):
    encode = encoder(template)
    (example,) = encode({"messages": TWO_TURNS})
    assert supervised(encode, example) == ["Hello.<|im_end|>", "So.<|im_end|>"]
    assert text(encode, example).startswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    )
    # Nothing is learned of what comes after the last turn.
    (longer,) = encode({"messages": [*TWO_TURNS, {"role": "user", "content": "Bye"}]})
    assert longer == example


def test_both_ways_find_the_same_tokens():
    one, other = (encoder(template)({"messages": TWO_TURNS}) for template in (CHATML, GENERATION))
    assert one == other


def test_an_empty_thought_that_the_template_inserts_is_not_supervised():
    """Otherwise a drafter learns to write what the target never writes (NVIDIA-NeMo/Automodel#3738)."""
    row = {"messages": [USER, ANSWER]}
    for thinking in (True, False):
        encode = encoder(THINKING, enable_thinking=thinking)
        (example,) = encode(row)
        assert "<think>\n\n</think>\n\nHello." in text(encode, example)
        assert supervised(encode, example) == ["Hello.<|im_end|>"]
    encode = encoder(THINKING_GENERATION)
    (example,) = encode(row)
    assert "<think>\n\n</think>\n\nHello." in text(encode, example)
    assert supervised(encode, example) == ["Hello.<|im_end|>"]


def test_thoughts_of_the_target_are_supervised():
    encode = encoder(THINKING)
    reasoned = {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."}
    (example,) = encode({"messages": [USER, reasoned]})
    assert supervised(encode, example) == ["<think>\nA greeting.\n</think>\n\nHello.<|im_end|>"]
    for thought in ("<think>\nA greeting.\n</think>\n\n", "<think>\n\n</think>\n\n"):
        written = {"role": "assistant", "content": thought + "Hello."}
        (example,) = encode({"messages": [USER, written]})
        assert supervised(encode, example) == [thought + "Hello.<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_gives_an_example_for_each():
    """As the target reads them when it writes each turn."""
    encode = encoder(THINKING)
    first = {"role": "assistant", "content": "<think>\nOh.\n</think>\n\nHello."}
    one, two = encode({"messages": [USER, first, *TWO_TURNS[2:]]})
    assert supervised(encode, one) == ["<think>\nOh.\n</think>\n\nHello.<|im_end|>"]
    assert text(encode, one) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" + supervised(encode, one)[0]
    assert supervised(encode, two) == ["So.<|im_end|>"]
    assert "Oh." not in text(encode, two) and "assistant\nHello.<|im_end|>" in text(encode, two)


def test_a_turn_that_does_not_follow_its_prompt_is_refused():
    with pytest.raises(UnusableRow, match="generation prompt do not begin"):
        encoder(CROOKED)({"messages": TWO_TURNS})


def test_template_arguments_and_tools_reach_the_template():
    encode = encoder("{{ style }}|{{ tools | length if tools else 0 }}|" + CHATML, style="plain")
    (example,) = encode({"messages": [USER, ANSWER], "tools": [{"type": "function", "function": {"name": "f"}}]})
    assert text(encode, example).startswith("plain|1|<|im_start|>")


def test_prompt_and_completion():
    encode = encoder(CHATML)
    (example,) = encode({"prompt": "1 + 1 =", "completion": " 2"})
    assert (text(encode, example), supervised(encode, example)) == ("1 + 1 = 2", [" 2"])
    (chat,) = encode({"messages": [USER, ANSWER]})
    assert encode({"prompt": [USER], "completion": [ANSWER]}) == [chat]
    assert encode({"prompt": [USER], "completion": "Hello."}) == [chat]
    for template in (CHATML, GENERATION):  # answers that are part of the prompt are only read
        encode = encoder(template)
        (example,) = encode({"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]})
        assert supervised(encode, example) == ["So.<|im_end|>"]
    with pytest.raises(ValueError, match="`prompt` is text but `completion` is not"):
        encode({"prompt": "Hi", "completion": [ANSWER]})


def test_ids_with_a_mask_or_labels():
    encode = RowEncoder()
    expected = [{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0]}]
    assert encode({"input_ids": [5, 6, 7, 8], "loss_mask": [False, True, True, False]}) == expected
    assert encode({"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, -100], "messages": None}) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [5, 6, 7]}, "need a `loss_mask`"),
        ({"input_ids": [5, 6, 7], "loss_mask": [1, 1]}, "3 input_ids but 2 loss_mask"),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}, "the loss_mask supervise none of 3 tokens"),
        ({"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}, "labels supervise none"),
        ({"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}, "all ones"),
        ({"input_ids": [5, 6, 7], "labels": [-100, 7, 7]}, r"labels\[1\]=7 is not input_ids\[1\]=6"),
        (
            {"input_ids": [5, 6, 99], "loss_mask": [0, 1, 1]},
            "Token 99 is outside the target's embedding, which has 50",
        ),
        ({"input_ids": [5, -6, 7], "loss_mask": [0, 1, 1]}, "Token -6 of input_ids is negative"),
        ({"input_ids": [[5, 6], [7]], "loss_mask": [0, 1]}, r"`input_ids` is \[\[5, 6\], \[7\]\]; give a flat list"),
        ({"input_ids": [5, None, 7], "loss_mask": [0, 1, 1]}, r"`input_ids` is \[5, None, 7\]"),
        ({"input_ids": 5, "loss_mask": 1}, "`input_ids` is 5; give"),
        ({"input_ids": [5, 6], "loss_mask": [[0], [1]]}, r"`loss_mask` is \[\[0\], \[1\]\]"),
        ({"input_ids": [5, 6], "labels": [[-100], [6]]}, r"`labels` is \[\[-100\], \[6\]\]"),
        ({"text": "Hi"}, r"only \['text'\]; give `messages`"),
        ({"prompt": "Hi", "completion": None}, r"only \['prompt'\]"),
    ],
)
def test_wrong_rows_are_errors(row, message):
    with pytest.raises(ValueError, match=f"(?i){message}") as error:
        RowEncoder(vocab_size=50)(row)
    assert not isinstance(error.value, UnusableRow)


def test_a_template_that_marks_everything_is_refused():
    """Silently, the prompt would be learned as well (NVIDIA-NeMo/Megatron-Bridge#3359)."""
    everything = "{% generation %}" + CHATML.replace("<|im_end|>\n", "<|im_end|>") + "{% endgeneration %}"
    with pytest.raises(ValueError, match="all ones"):
        encoder(everything)({"messages": TWO_TURNS})
    with pytest.raises(ValueError, match="no chat template"):
        encoder(None)({"messages": TWO_TURNS})


@pytest.mark.parametrize(
    ("row", "settings", "reason"),
    [
        ({"messages": [USER]}, {}, "no assistant message"),
        ({"messages": [ANSWER]}, {}, "begins with an assistant message"),
        ({"prompt": [USER, ANSWER], "completion": [USER]}, {}, "no assistant message"),
        ({"messages": [USER, ANSWER]}, {"max_length": 20}, "begins beyond max_length=20"),
        ({"messages": [USER, ANSWER]}, {"mask_token_id": END}, f"holds the mask token {END}"),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}, {}, "no response of two tokens"),
        ({"messages": [USER, {"role": "robot", "content": "x"}, ANSWER]}, {"strict": True}, "refuses it .Who."),
        ({"messages": [{**USER, "content": [{"type": "text", "text": "Hi"}]}, ANSWER]}, {"strict": True}, "render it"),
    ],
)
def test_rows_that_are_left_out_have_a_reason(row, settings, reason):
    template = CHATML
    if settings.pop("strict", False):
        template = (
            "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('Who?') }}{% endif %}"
            "{% if '' + m.content %}{% endif %}{% endfor %}" + CHATML
        )
    with pytest.raises(UnusableRow, match=reason):
        encoder(template, **settings)(row)


@pytest.mark.parametrize("template", [CHATML, GENERATION], ids=["prefixes", "generation"])
def test_the_end_of_a_turn_that_was_cut_off_is_not_the_target_s(template):
    encode = encoder(template)
    (example,) = encode({"messages": TWO_TURNS, "finish_reason": "length"})
    assert supervised(encode, example) == ["Hello.<|im_end|>", "So."]
    (example,) = encode({"messages": TWO_TURNS, "finish_reason": "stop"})
    assert supervised(encode, example) == ["Hello.<|im_end|>", "So.<|im_end|>"]


def test_what_is_too_long_is_cut_at_its_end():
    (whole,) = encoder(CHATML)({"messages": TWO_TURNS})
    (cut,) = encoder(CHATML, max_length=30)({"messages": TWO_TURNS})
    assert cut == {name: values[:30] for name, values in whole.items()}


def test_ids_that_the_target_answered_are_learned_as_they_are():
    """Decoded and encoded again, an answer may become other tokens than those that were written."""
    tokenizer = make_tokenizer(CHATML)
    messages = [{"role": "user", "content": "Say 1"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    (example,) = RowEncoder(tokenizer)({"messages": messages, "response_ids": [5, 6, 7], "kind": "chat"})
    assert example == {"input_ids": [*prompt, 5, 6, 7], "loss_mask": [0] * len(prompt) + [1] * 3}
