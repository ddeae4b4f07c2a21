"""Which arguments of the chat template are taken, and from whom."""

import json
from types import SimpleNamespace

import pytest

from dflash_hf.data.prompts import template_kwargs


OFF = {"enable_thinking": False}
ON = {"enable_thinking": True}


def drafter(kwargs):
    return SimpleNamespace(dflash_config={} if kwargs is None else {"chat_template_kwargs": kwargs})


@pytest.mark.parametrize(
    ("user_kwargs", "data", "trained", "expected", "source"),
    [
        (None, None, None, {}, None),
        (None, None, OFF, OFF, "as the drafter was trained"),
        (ON, None, OFF, ON, "as given"),
        ({}, None, OFF, {}, "as given"),
        (None, OFF, ON, OFF, "data.jsonl was made"),
        (OFF, OFF, None, OFF, "as given"),
        (None, {}, None, {}, None),
    ],
)
def test_users_template_arguments_override_the_datas(user_kwargs, data, trained, expected, source, tmp_path):
    path = tmp_path / "data.jsonl"
    lines = []
    if data is not None:
        (tmp_path / "data.jsonl.settings.json").write_text(json.dumps({"chat_template_kwargs": data}))
    assert template_kwargs(user_kwargs, path, draft_config=drafter(trained), say=lines.append) == expected
    if source is not None:
        assert lines[0].startswith(f"arguments of the chat template: {json.dumps(expected)}, as ")
        assert lines.pop(0).endswith(source)
    worse = trained is not None and expected != trained
    assert lines == [f"the drafter was trained with {json.dumps(trained)}: expect lower acceptance"] * worse


def test_damaged_settings_are_named(tmp_path):
    """Only the place in the file was."""
    (tmp_path / "data.jsonl.settings.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="data.jsonl.settings.json is not JSON"):
        template_kwargs(None, tmp_path / "data.jsonl")
