"""One pair for all that the doctor is shown."""

import pytest
from support.chat_pair import chat_tokenizer, train_chat_draft, train_chat_target

from dflash_hf.doctor.texts import Writer


@pytest.fixture(scope="session")
def chat_pair(tmp_path_factory):
    """Target, drafter, tokenizer, and a writer of the target's texts; see `support.chat_pair`."""
    tokenizer = chat_tokenizer()
    target = train_chat_target(tokenizer)
    draft = train_chat_draft(target, tokenizer, tmp_path_factory.mktemp("draft"))
    return target, draft, tokenizer, Writer(target, draft.config.block_size, max_new_tokens=40, batch_size=40)
