"""The table of row layouts: which one a row has, what is read of it, and how a new one is added."""

import json
import subprocess
import sys

import pytest
from support.guides import ROOT, blocks_of
from support.tiny_chat import CHATML, make_tokenizer

from dflash_hf.data import row_layouts
from dflash_hf.data.conversation import Conversation
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.messages import UnusableRow
from dflash_hf.data.prepare import prepare_dataset
from dflash_hf.data.prompts import prompt_ids
from dflash_hf.data.row_layouts import ROW_LAYOUTS, conversation_of
from dflash_hf.data.template import ChatTemplate
from dflash_hf.synthetic.tasks import make_task


datasets = pytest.importorskip("datasets")
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello."}


def test_layout_of_the_guide_is_read_everywhere(monkeypatch):
    """One entry of the table is all that a layout needs."""
    (block,) = [block for block in blocks_of(ROOT / "examples" / "guides" / "data.md") if "RowLayout" in block.text]
    names: dict = {}
    exec(block.text, names)
    row = names["row"]
    with pytest.raises(UnusableRow, match=r"only \['dialogue'\]; give `messages`"):
        conversation_of(row)
    monkeypatch.setattr(row_layouts, "ROW_LAYOUTS", (*ROW_LAYOUTS, names["layout"]))

    messages = [USER, ANSWER, {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "See you."}]
    encoder = RowEncoder(ChatTemplate(make_tokenizer(CHATML)))
    expected = encoder({"messages": messages})
    assert encoder(row) == expected
    assert list(prepare_dataset(datasets.Dataset.from_list([row]), encoder)[0]) == expected
    assert prompt_ids(encoder, row) == prompt_ids(encoder, {"messages": messages})
    conversation = conversation_of(row, answers=False, ids=False)
    assert make_task(conversation, 0, True).prompts == [messages[:3]]
    assert make_task(conversation, 0, True, every_turn=True).prompts == [messages[:1], messages[2:3]]
    with pytest.raises(UnusableRow, match="`question` and `answer`, `dialogue`, or `input_ids` with"):
        conversation_of({"text": "Hi"})
    with pytest.raises(UnusableRow, match="`instruction`, `question` or `dialogue`"):
        conversation_of({"text": "Hi"}, answers=False)


def test_no_layout_hides_a_later_one():
    for index, layout in enumerate(ROW_LAYOUTS):
        row = dict.fromkeys(layout.columns, "")
        assert not [earlier.columns for earlier in ROW_LAYOUTS[:index] if earlier.fits(row)]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"messages": [USER], "conversations": [ANSWER], "prompt": "no", "instruction": "no"}, "messages"),
        ({"conversations": [USER], "prompt": "no", "question": "no"}, "conversations"),
        ({"prompt": [USER], "instruction": "no", "question": "no"}, "prompt"),
        ({"instruction": "Hi", "question": "no"}, "instruction"),
        ({"input_ids": [5], "messages": [USER]}, "messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_first_layout_that_fits_is_read(row, column):
    assert list(conversation_of(row, answers=False, ids=False).messages) == [USER]
    without_column = {**row, column: None}
    assert len(row) == 2 or conversation_of(without_column, answers=False, ids=False).turns(True) != [USER]


@pytest.mark.parametrize(
    "columns",
    [
        {"answered": True},
        {"given": "Ann"},
        {"response_ids": "x"},
        {"finish_reason": 3},
        {"completion": []},
        {"loss_mask": "x", "labels": "x", "document_ids": "x"},
    ],
    ids=lambda columns: next(iter(columns)),
)
@pytest.mark.parametrize("name", ["messages", "conversations", "prompt"])
def test_prompt_does_not_read_columns_of_answers(name, columns):
    """Other data have columns of these names, and the target answers anew."""
    row = {name: [USER, ANSWER], **columns}
    conversation = conversation_of(row, answers=False)
    assert conversation.prompt(as_chat=True) == [USER]
    assert conversation == conversation_of({name: [USER, ANSWER]}, answers=False)


def test_conversation_marks_what_is_supervised():
    messages = [USER, ANSWER, USER, ANSWER]
    conversation = conversation_of({"messages": messages, "finish_reason": "length"})
    assert conversation == Conversation(messages, supervised=[1, 3], finish_reasons=[None, "length"])
    assert conversation_of({"messages": messages, "given": 2}).supervised == [3]
    assert conversation_of({"messages": messages, "answered": [1]}).supervised == [1]
    completed = conversation_of({"prompt": messages[:3], "completion": "Hello.", "given": 0})
    assert completed == Conversation(messages, supervised=[3], finish_reasons=[None])


@pytest.mark.parametrize("name", ["messages", "conversations", "prompt"])
@pytest.mark.parametrize("beside", ["### Human: hi", "[not JSON", [], ["hi"], None, 3, {"a": 1}, True])
def test_columns_beside_input_ids_are_ignored(beside, name):
    """Text left such a row out; a number or a mapping ended the run with a `TypeError` or a `KeyError`."""
    row = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], name: beside}
    encoder = RowEncoder(ChatTemplate(make_tokenizer(CHATML)))
    assert encoder(row) == [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}]
    assert prompt_ids(encoder, row) == [5]


def test_request_beside_a_completion_stays_a_chat():
    """`eval` read it without the chat template, while training reads it with it."""
    encoder = RowEncoder(ChatTemplate(make_tokenizer(CHATML)))
    row = {"instruction": "Add.", "input": "1, 2", "output": "3."}
    assert prompt_ids(encoder, {**row, "completion": "4."}) == prompt_ids(encoder, row)


def test_shifted_labels_have_no_prompt():
    """`eval` measured another prompt than the one that was answered."""
    encoder = RowEncoder(ChatTemplate(make_tokenizer(CHATML)))
    with pytest.raises(ValueError, match=r"labels\[1\]=7 is not input_ids\[1\]=6: labels must not be shifted"):
        prompt_ids(encoder, {"input_ids": [5, 6, 7, 8], "labels": [-100, 7, 8, -100]})


def test_arrays_of_ids_have_a_prompt():
    """Columns of a dataset in NumPy's format were an error: the truth value of an array is ambiguous."""
    encoder = RowEncoder(ChatTemplate(make_tokenizer(CHATML)))
    for column, values in {"labels": [-100, 6, 7], "loss_mask": [0, 1, 1]}.items():
        rows = datasets.Dataset.from_list([{"input_ids": [5, 6, 7], column: values}])
        assert prompt_ids(encoder, rows.with_format("numpy")[0]) == [5]


def test_encoding_rows_imports_no_decoding_code():
    """Reading rows imported all that makes decoding fast."""
    code = (
        "import json, sys\n"
        "import dflash_hf.data.prepare, dflash_hf.data.prompts\n"
        "print(json.dumps(sorted(name for name in sys.modules if name.startswith('dflash_hf'))))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = json.loads(process.stdout)
    assert "dflash_hf.data.row_layouts" in modules
    assert not [name for name in modules if "decoding" in name or "modeling" in name or "responses" in name]
