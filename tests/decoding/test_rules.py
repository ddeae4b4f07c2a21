"""Criteria and warpers of a caller do what they do without a drafter."""

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import ragged_prompts
from support.scripted_draft import scripted
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    TemperatureLogitsWarper,
)


class SoftLimit(MaxLengthCriteria):
    """Ends a text later than it says."""

    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids[:, 30:], scores, **kwargs)


class Counting(MaxTimeCriteria):
    """Ends a text after so many calls."""

    def __init__(self):
        super().__init__(1e6)
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= 12)


class Writes(StoppingCriteria):
    """Ends nothing, and replaces a token."""

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == 18:
            input_ids[:, -1] = 7
        return torch.zeros(len(input_ids), dtype=torch.bool)


CRITERIA = {
    "a shorter limit": lambda: MaxLengthCriteria(15),
    "a longer limit, which wins": lambda: MaxLengthCriteria(70),
    "a limit that ends a text later": lambda: SoftLimit(20),
    "a limit of calls": Counting,
    "one that writes": Writes,
    "an end token without a dimension": lambda: EosTokenCriteria(torch.tensor(41)),
    "a second end token": lambda: EosTokenCriteria(torch.tensor([30, 77, 58, 13])),
}


SETTINGS = [{}, {"block_size": 3}, {"tree_nodes": 10}, {"block_size": None}]
CASES = [  # one row with two of the settings, three rows with one
    (rows, SETTINGS[(number + step) % 4], name)
    for number, name in enumerate(CRITERIA)
    for rows, step in ((1, 0), (1, 2), (3, 1))
]


@pytest.mark.parametrize(("rows", "settings", "criterion"), CASES, ids=str)
def test_criteria_end_texts_as_without_a_drafter(rows, settings, criterion):
    target = make_target()
    options = {**ragged_prompts(rows)[0], "max_new_tokens": 40, "do_sample": False, "eos_token_id": 88}
    free = target.generate(**options)
    draft = scripted(make_draft(target, block_size=6), free, error_rate=0.1)
    for name, value in settings.items():
        setattr(draft.decoding_config, name, value)
    written = [
        target.generate(**options, stopping_criteria=[CRITERIA[criterion]()], assistant_model=assistant).tolist()
        for assistant in (None, draft)
    ]
    assert written[0] == written[1]
    assert written[0] != free.tolist() or criterion == "an end token without a dimension"


class Reads(TemperatureLogitsWarper):
    """Reads the text, unlike the warper that it is made from."""

    def __call__(self, input_ids, scores):
        return scores.roll(int(input_ids[0, -1]), dims=-1)


def test_warper_of_a_caller_may_read_the_text():
    target = make_target()
    options = {"inputs": torch.tensor([[5, 9, 17]]), "max_new_tokens": 20, "do_sample": False}
    options["logits_processor"] = [Reads(1.0)]
    expected = target.generate(**options)
    draft = scripted(make_draft(target), expected)
    assert torch.equal(target.generate(**options, assistant_model=draft), expected)
