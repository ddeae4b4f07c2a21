"""One pair for all that the doctor is shown, whose answers are generated once."""

import pytest
from support.chat_pair import chat_tokenizer, train_chat_draft, train_chat_target

from dflash_hf.doctor import case


@pytest.fixture(scope="session")
def chat_pair(tmp_path_factory):
    """Target, drafter and tokenizer; see `support.chat_pair`."""
    tokenizer = chat_tokenizer()
    target = train_chat_target(tokenizer)
    draft = train_chat_draft(target, tokenizer, tmp_path_factory.mktemp("draft"))
    return target, draft, tokenizer


@pytest.fixture(scope="session", autouse=True)
def answers():
    generate = case.generate_responses
    answers_of = {}

    def generate_once(target, prompts, *settings):
        max_new_tokens = settings[0]
        key = (target, str(prompts), max_new_tokens)
        if key not in answers_of:
            answers_of[key] = generate(target, prompts, *settings)
        return answers_of[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case, "generate_responses", generate_once)
        yield
