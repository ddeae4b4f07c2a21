"""Rules that read a row's own text: rows keep their own pace, and write what they write without a drafter."""

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import ragged_prompts
from support.scripted_draft import scripted
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteria


RULES = [
    {"repetition_penalty": 1.4},
    {"min_new_tokens": 12, "eos_token_id": [7, 9, 11]},
    {"min_length": 25, "eos_token_id": [7, 9, 11]},
    {"bad_words_ids": [[5, 9], [17]]},
    {"sequence_bias": {(11,): 2.0, (5, 6): -3.0}},
    {"exponential_decay_length_penalty": (5, 1.3), "eos_token_id": [7, 9]},
    {"forced_eos_token_id": 3},
    {"begin_suppress_tokens": [4, 6, 8]},
    {"repetition_penalty": 1.2, "do_sample": True, "top_k": 9},
]


@pytest.mark.parametrize("options", RULES, ids=str)
@pytest.mark.parametrize("nodes", [None, 9])
def test_rows_keep_their_own_pace(options, nodes):
    target, (inputs, _) = make_target(dtype=torch.float64), ragged_prompts(4)
    options = {**inputs, "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, **options}
    torch.manual_seed(3)
    expected = target.generate(**options)
    draft = scripted(make_draft(target, block_size=6), expected, error_rate=0.2, ranks=1 if nodes is None else 2)
    draft.decoding_config.tree_nodes = nodes
    torch.manual_seed(3)
    output = target.generate(**options, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert max(map(max, output.acceptance_lengths)) > 2 and min(map(len, output.acceptance_lengths)) < 29
    assert len(set(map(tuple, output.acceptance_lengths))) > 1, "the rows advanced in step"


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
}


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("settings", [{}, {"block_size": 3}, {"tree_nodes": 10}, {"block_size": None}], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_criteria_end_texts_as_without_a_drafter(rows, settings, criterion):
    target = make_target()
    options = {**ragged_prompts(rows)[0], "max_new_tokens": 40, "do_sample": False}
    draft = scripted(make_draft(target, block_size=6), target.generate(**options), error_rate=0.1)
    for name, value in settings.items():
        setattr(draft.decoding_config, name, value)
    written = [
        target.generate(**options, stopping_criteria=[CRITERIA[criterion]()], assistant_model=assistant).tolist()
        for assistant in (None, draft)
    ]
    assert written[0] == written[1]
    assert written[0] != target.generate(**options).tolist() or criterion == "an end token without a dimension"
