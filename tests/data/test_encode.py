"""From rows to ids and a loss mask: exactly what the target writes is supervised, whatever the template does."""

import json

import pytest
from support.tiny_chat import CHATML, CROOKED, END, SPECIAL, START, THINKING, TOOLS, make_tokenizer
from tokenizers.processors import TemplateProcessing

from dflash_hf.data.encode import Example, RowEncoder
from dflash_hf.data.messages import UnusableRow
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.template import ChatTemplate


USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello."}
TWO_TURNS = [USER, ANSWER, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


def encoder(template, max_length=None, mask_token_id=None, vocab_size=None, **template_kwargs):
    return RowEncoder(ChatTemplate(make_tokenizer(template), template_kwargs), max_length, mask_token_id, vocab_size)


def supervised(encode, example):
    """Its supervised stretches, as text."""
    stretches = []
    ids = example["input_ids"]
    mask = example["loss_mask"]
    assert len(ids) == len(mask) and set(mask) <= {0, 1}
    for i, value in enumerate(mask):
        if value and (i == 0 or not mask[i - 1]):
            stretches.append([])
        if value:
            stretches[-1].append(ids[i])
    return [encode.template.tokenizer.decode(stretch) for stretch in stretches]


def text(encode, example):
    return encode.template.tokenizer.decode(example["input_ids"])


def test_every_turn_is_supervised_with_its_end():
    encode = encoder(CHATML)
    (example,) = encode({"messages": TWO_TURNS})
    assert supervised(encode, example) == ["Hello.<|im_end|>", "So.<|im_end|>"]
    assert text(encode, example).startswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    )
    # What comes after the last turn is not supervised.
    (longer,) = encode({"messages": [*TWO_TURNS, {"role": "user", "content": "Bye"}]})
    assert longer == example
    # Marks of the template change nothing.
    marked = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    assert encoder(marked)({"messages": TWO_TURNS}) == [example]


def test_inserted_empty_thought_is_not_supervised():
    """Otherwise a drafter learns to write what the target never writes (NVIDIA-NeMo/Automodel#3738)."""
    row = {"messages": [USER, ANSWER]}
    for thinking in (True, False):
        encode = encoder(THINKING, enable_thinking=thinking)
        (example,) = encode(row)
        assert "<think>\n\n</think>\n\nHello." in text(encode, example)
        assert supervised(encode, example) == ["Hello.<|im_end|>"]


def test_thoughts_of_the_target_are_supervised():
    encode = encoder(THINKING)
    reasoned = {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."}
    (example,) = encode({"messages": [USER, reasoned]})
    assert supervised(encode, example) == ["<think>\nA greeting.\n</think>\n\nHello.<|im_end|>"]
    for thought in ("<think>\nA greeting.\n</think>\n\n", "<think>\n\n</think>\n\n"):
        with_thought = {"role": "assistant", "content": thought + "Hello."}
        (example,) = encode({"messages": [USER, with_thought]})
        assert supervised(encode, example) == [thought + "Hello.<|im_end|>"]


def test_rewritten_turns_give_an_example_each():
    """As the target reads them when it writes each turn."""
    encode = encoder(THINKING)
    first_answer = {"role": "assistant", "content": "<think>\nOh.\n</think>\n\nHello."}
    first_example, second_example = encode({"messages": [USER, first_answer, *TWO_TURNS[2:]]})
    assert supervised(encode, first_example) == ["<think>\nOh.\n</think>\n\nHello.<|im_end|>"]
    assert (
        text(encode, first_example)
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" + supervised(encode, first_example)[0]
    )
    assert supervised(encode, second_example) == ["So.<|im_end|>"]
    assert "Oh." not in text(encode, second_example) and "assistant\nHello.<|im_end|>" in text(encode, second_example)


def test_turn_that_changes_its_prompt_is_left_out():
    with pytest.raises(UnusableRow, match="generation prompt are not a prefix"):
        encoder(CROOKED)({"messages": TWO_TURNS})


def test_template_gets_its_arguments_and_tools():
    encode = encoder("{{ style }}|{{ tools | length if tools else 0 }}|" + CHATML, style="plain")
    (example,) = encode({"messages": [USER, ANSWER], "tools": [{"type": "function", "function": {"name": "f"}}]})
    assert text(encode, example).startswith("plain|1|<|im_start|>")


def test_completion_alone_is_supervised():
    encode = encoder(CHATML)
    (example,) = encode({"prompt": "1 + 1 =", "completion": " 2"})
    assert (text(encode, example), supervised(encode, example)) == ("1 + 1 = 2", [" 2"])
    (chat,) = encode({"messages": [USER, ANSWER]})
    assert encode({"prompt": [USER], "completion": [ANSWER]}) == [chat]
    assert encode({"prompt": [USER], "completion": "Hello."}) == [chat]
    (example,) = encode({"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]})
    assert supervised(encode, example) == ["So.<|im_end|>"]  # answers that are part of the prompt are only read
    with pytest.raises(ValueError, match="`prompt` is text but `completion` is not"):
        encode({"prompt": "Hi", "completion": [ANSWER]})


def test_unusable_turn_leaves_the_others(monkeypatch):
    """Where a template drops thoughts, each turn is an example of its own; one too long took all with it."""
    encode = encoder(CHATML, max_length=6)
    turns = [Example([5, 6, 7], [0, 1, 1]), Example([5] * 8, [0] * 6 + [1, 1])]
    monkeypatch.setattr(RowEncoder, "_from_turns", lambda *args: turns)
    assert encode({"messages": TWO_TURNS}) == [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}]
    del turns[0]
    with pytest.raises(UnusableRow, match="begins beyond max_length=6"):
        encode({"messages": TWO_TURNS})


def test_mask_and_labels_mark_the_same_ids():
    encode = RowEncoder()
    expected = [{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0]}]
    assert encode({"input_ids": [5, 6, 7, 8], "loss_mask": [False, True, True, False]}) == expected
    assert encode({"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, -100], "messages": None}) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [5, 6, 7], "loss_mask": [1, 1]}, "3 input_ids but 2 loss_mask"),
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
        ({"messages": [USER, ANSWER], "answered": [0]}, r"`answered` is \[0\]; give indices .* are \[1\]"),
        ({"messages": [USER, ANSWER], "given": "1"}, "`given` is '1'; give the number of messages"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": [1]}, r"`chat_template_kwargs` is \[1\]; give a map"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"tools": 1}}, "may not set tools"),
        ({"input_ids": [5, 6], "loss_mask": [0, 1], "document_ids": [0]}, "2 input_ids but 1 document_ids"),
    ],
)
def test_malformed_rows_raise_errors(row, message):
    with pytest.raises(ValueError, match=f"(?i){message}") as error:
        RowEncoder(ChatTemplate(make_tokenizer()), vocab_size=50)(row)
    assert not isinstance(error.value, UnusableRow)


def test_messages_need_a_template():
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
        ({"messages": [{**USER, "size": 3}, ANSWER]}, {"strict": True}, "render it"),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}, {}, "its loss_mask supervise no token; mark the response"),
        ({"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}, {}, "its labels supervise no token"),
        ({"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}, {}, "its loss mask is all ones, the prompt included"),
        ({"input_ids": [], "loss_mask": []}, {}, "`input_ids` are empty"),
        ({"input_ids": None, "loss_mask": None}, {}, "all of its columns are null"),
        ({"input_ids": [5, 6, 7], "labels": None}, {}, "its `input_ids` need a `loss_mask`"),
        ({"prompt": "Hi", "completion": None}, {}, r"only \['prompt'\]; have the target answer"),
        ({"text": "Hi", "messages": None}, {}, r"only \['text'\]; give `messages`"),
        ({"prompt": "", "completion": "Yes."}, {}, "`prompt` is empty"),
        ({"prompt": "Hi", "completion": ""}, {}, "`completion` is empty"),
        ({"messages": "", "prompt": "Hi"}, {}, "`messages` is empty"),
        ({"messages": [USER, {}, ANSWER]}, {}, "a message in its `messages` is null or empty"),
        ({"messages": [{**USER, "content": []}, ANSWER]}, {}, "has no content"),
        ({"messages": [{**USER, "content": {"text": "Hi"}}, ANSWER]}, {}, "the content of a message is a dict"),
        ({"messages": [{**USER, "content": [None]}, ANSWER]}, {}, "a part of type 'NoneType' that is neither"),
        ({"messages": [USER, {**ANSWER, "tool_calls": "f()"}]}, {}, "are not a list of calls"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"function": "f"}]}]}, {}, "a tool call .* has no name"),
    ],
)
def test_rows_left_out_have_a_reason(row, settings, reason):
    template = CHATML
    if settings.pop("strict", False):
        template = (
            "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('Who?') }}{% endif %}"
            "{% if m.size and '' + m.size %}{% endif %}{% endfor %}" + CHATML
        )
    with pytest.raises(UnusableRow, match=reason):
        encoder(template, **settings)(row)


def test_end_of_unfinished_turn_is_not_supervised():
    encode = encoder(CHATML)
    for reason, end in {"length": "So.", "stop": "So.<|im_end|>"}.items():
        (example,) = encode({"messages": TWO_TURNS, "finish_reason": reason})
        assert supervised(encode, example) == ["Hello.<|im_end|>", end]


def test_empty_answer_that_was_cut_is_left_out():
    """Of a template whose prompt ends in a special token it ended the run: ids and mask had unlike lengths."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}user: <|im_start|>{{ m.content }}<|im_end|>{% else %}"
        "<|im_start|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    for reason in ("length", "stop"):
        with pytest.raises(UnusableRow, match="no response of two tokens"):
            encoder(template)({"messages": [USER, {**ANSWER, "content": ""}], "finish_reason": reason})


def test_long_example_is_cut_at_its_end():
    (uncut,) = encoder(CHATML)({"messages": TWO_TURNS})
    (cut,) = encoder(CHATML, max_length=30)({"messages": TWO_TURNS})
    assert cut == {name: values[:30] for name, values in uncut.items()}


def test_response_ids_are_supervised_unchanged():
    """Decoded and encoded again, an answer may become other tokens than those that were written."""
    tokenizer = make_tokenizer(CHATML)
    messages = [{"role": "user", "content": "Say 1"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    (example,) = RowEncoder(ChatTemplate(tokenizer))({"messages": messages, "response_ids": [5, 6, 7], "kind": "chat"})
    assert example == {"input_ids": [*prompt, 5, 6, 7], "loss_mask": [0] * len(prompt) + [1] * 3}


TEXTS = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
PARTS = CHATML.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
)
ONLY_PARTS = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
# As Llama 3.2 Vision's: parts are read in the user's messages only.
USERS_PARTS = CHATML.replace(
    "{{ m.content }}",
    "{% if m.role != 'user' or m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("template", "joined"),
    [
        (CHATML, {"system", "user", "assistant", "tool"}),
        (CHATML.replace("m.content", "m.content | trim"), {"system", "user", "assistant", "tool"}),
        (CHATML.replace("m.content", "m.content | tojson"), {"system", "user", "assistant", "tool"}),
        (USERS_PARTS, {"system", "assistant", "tool"}),
        (PARTS, set()),
        (ONLY_PARTS, set()),
    ],
    ids=["printed", "trimmed", "json", "users", "parts", "only parts"],
)
def test_text_parts_are_joined_to_text(template, joined, role):
    """Their Python source was supervised wherever a template prints `content`."""
    encode = encoder(template)
    messages = [USER, ANSWER, {"role": role, "content": TEXTS}, USER, ANSWER]
    expected = [
        {**message, "content": "Hi there" if role in joined else "Hithere"}
        if message["role"] == role and message["content"] == TEXTS
        else message
        for message in messages
    ]
    (example,) = encode({"messages": messages})
    (expected_example,) = encode({"messages": expected})
    assert example == expected_example and "'type'" not in text(encode, example)
    assert ("Hi there" if role in joined else "Hithere") in text(encode, example)


@pytest.mark.parametrize("arguments", ['{"x": null, "y": 1}', json.dumps('{"x": null, "y": 1}')])
@pytest.mark.parametrize(
    "answer",
    [
        '{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": ARGUMENTS}}]}',
        '{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ARGUMENTS}}]}',
        '{"role": "assistant", "content": [], "tool_calls": [{"name": "f", "arguments": ARGUMENTS}]}',
        '{"role": "assistant", "function_call": {"name": "f", "arguments": ARGUMENTS}}',
        '{"from": "gpt", "value": null, "tool_calls": [{"name": "f", "arguments": ARGUMENTS, "function": null}]}',
    ],
)
def test_tool_calls_are_supervised(answer, arguments):
    answer = json.loads(answer.replace("ARGUMENTS", arguments))
    encode = encoder(TOOLS)
    calls_as_text = (
        {"role": "assistant", "tool_calls": json.dumps(_calls_of(answer))},
        {"from": "function_call", "value": json.dumps(_calls_of(answer)[0])},
    )
    for form in (answer, *calls_as_text):
        (example,) = encode({"messages": [USER, form]})
        assert supervised(encode, example) == ["<call>f(x=null;y=1;)<|im_end|>"]


def _calls_of(answer):
    return answer.get("tool_calls") or [answer["function_call"]]


def framed_tokenizer(template, begin=True, end=True):
    """A tokenizer that puts tokens around each text."""
    tokenizer = make_tokenizer(template)
    tokenizer.bos_token = SPECIAL[START]
    single = f"{SPECIAL[START] if begin else ''} $A {SPECIAL[END] if end else ''}".strip()
    special = [(SPECIAL[i], i) for i in (START, END)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


@pytest.mark.parametrize(("begin", "end"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("bos_in_text", ["", SPECIAL[START]], ids=["plain", "written"])
def test_text_gets_one_bos_and_no_eos(begin, end, bos_in_text):
    """With a tokenizer that appends EOS all rows were left out; a second BOS passed in silence."""
    tokenizer = framed_tokenizer(CHATML, begin, end)
    encode = RowEncoder(ChatTemplate(tokenizer))
    unframed = make_tokenizer()
    (example,) = encode({"prompt": bos_in_text + "1 + 1 =", "completion": " 2 "})
    bos = [START] if begin or bos_in_text else []
    assert example["input_ids"] == [*bos, *unframed("1 + 1 = 2 ")["input_ids"]]
    assert supervised(encode, example) == [" 2 "]
    ids = prompt_ids(encode, {"prompt": bos_in_text + "1 + 1 ="}, raw=True)
    assert ids == [*bos, *unframed("1 + 1 =")["input_ids"]]


def test_ids_with_two_bos_tokens_are_left_out():
    encode = RowEncoder(ChatTemplate(framed_tokenizer(CHATML)))
    with pytest.raises(UnusableRow, match=r"begins with <\|im_start\|> twice"):
        encode({"input_ids": [START, START, 5, 6], "loss_mask": [0, 0, 1, 1]})


def test_encoder_has_the_same_state_after_use():
    """`datasets` finds encoded rows again by the encoder's state."""
    encode = encoder(CHATML)
    before = [*encode.__getstate__(), *encode.template.__getstate__()]
    encode({"messages": [{**USER, "content": TEXTS}, ANSWER]})
    assert [*encode.__getstate__(), *encode.template.__getstate__()] == before
