"""One pair for all that the doctor is shown, whose answers are generated once."""

import pytest
from support.chat_pair import chat_tokenizer, train_chat_draft, train_chat_target

from dflash_hf import doctor


@pytest.fixture(scope="session")
def chat_pair(tmp_path_factory):
    """Target, drafter and tokenizer; see `support.chat_pair`."""
    tokenizer = chat_tokenizer()
    target = train_chat_target(tokenizer)
    draft = train_chat_draft(target, tokenizer, tmp_path_factory.mktemp("draft"))
    return target, draft, tokenizer


@pytest.fixture(scope="session", autouse=True)
def answers():
    generate, known = doctor.generate_responses, {}

    def once(target, prompts, *settings):
        key = (target, str(prompts), settings[0])
        if key not in known:
            known[key] = generate(target, prompts, *settings)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "generate_responses", once)
        yield
