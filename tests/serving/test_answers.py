"""What is added to upstream's answers."""

from types import SimpleNamespace

import pytest
from transformers.utils.import_utils import is_serve_available


if not is_serve_available():
    pytest.skip("serving needs `pip install '.[serving]'`", allow_module_level=True)
from dflash_hf.serving.answers import AnswerCompleter
from dflash_hf.serving.options import Options
from dflash_hf.serving.request import RequestStatus


class Entries:
    """Log-probabilities of one token."""

    def __init__(self):
        self.entries = [{"token": "a"}]

    def pop_entries(self, is_chat: bool):
        entries = self.entries
        self.entries = []
        return {"content": entries} if entries else None


def completer(**more) -> AnswerCompleter:
    counts = {"cached_tokens": 2, "accepted": 3, "drafted": 5, "rounds": 2, "committed": 5}
    request = SimpleNamespace(status=RequestStatus.FINISHED_STOPPED, stop_strings=[], **counts)
    options = Options(stream_options={"include_usage": True})
    return AnswerCompleter(request, options, **more)


def usage() -> dict:
    return {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}


def test_piece_without_choices_is_completed():
    """OpenAI's piece with the usage has no choices: an `IndexError`, so the stream ended in the middle."""
    logprobs = Entries()
    (piece,) = completer(logprobs=logprobs, echo="Say").complete_piece({"choices": [], "usage": usage()})
    assert piece["choices"] == []
    assert piece["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    details = piece["usage"]["completion_tokens_details"]
    assert details["rejected_prediction_tokens"] == 2
    assert (details["verifications"], details["verified_tokens"]) == (2, 5)
    assert logprobs.entries  # for the next piece with a choice


def test_usage_is_a_piece_of_its_own():
    piece = {"choices": [{"index": 0, "text": "b"}], "usage": usage()}
    with_text, with_usage = completer(echo="Say").complete_piece(piece)
    assert with_text["usage"] is None
    assert with_text["choices"][0]["text"] == "Sayb"
    assert with_usage["choices"] == []
    assert with_usage["usage"]["total_tokens"] == 10
