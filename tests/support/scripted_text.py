"""One prompt, its text with and without a drafter, and a drafter that knows the text."""

import torch

from support.scripted_draft import recognising


PROMPT = torch.tensor([[5, 9, 17, 33, 5, 9, 17, 33, 5, 9]])


def text(target, draft=None, prompt=PROMPT, **options):
    """Text and acceptance lengths; without a drafter, the text."""
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    output = target.generate(prompt, **options, assistant_model=draft, return_dict_in_generate=True)
    return output.sequences.tolist(), getattr(output, "acceptance_lengths", None)


def drafter(target):
    return recognising(target, [torch.tensor(text(target)[0][0])], 6)


def drafted(target, draft) -> None:
    """Equal texts, of drafts that are accepted."""
    written, lengths = text(target, draft)
    assert written == text(target)[0] and max(lengths[0]) > 3
