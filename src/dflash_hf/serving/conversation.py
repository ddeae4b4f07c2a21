"""Several turns with a target and its drafter."""

from dataclasses import dataclass, field

from dflash_hf.configs import positions_of
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import ids_of_prompt
from dflash_hf.modeling.target_dflash import CACHE_NAME
from dflash_hf.responses import generate_one
from dflash_hf.serving.pieces import PieceStreamer


@dataclass
class Conversation:
    """
    The messages so far, and their cache. Conversations in several threads may share both models.

    A turn reuses the cache of the turn before if the template reproduces the conversation token for token; the drafter
    then sees earlier turns only through the target's features. If a template changes earlier turns, or an answer was
    interrupted, the whole conversation is processed again.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer; needs a chat template.
        draft (`DFlashDraftModel`, *optional*): A drafter; may change between turns.
        template (`dict`): Arguments of the chat template.
        options (`dict`): Arguments of `generate`.
        messages (`list[dict]`): The conversation so far.
    """

    target: object
    tokenizer: object
    draft: object = None
    template: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    messages: list[dict] = field(default_factory=list)
    cache: object = None
    read: list[int] = field(default_factory=list)  # the tokens that the cache holds

    def reset(self) -> None:
        """Forget everything."""
        self.messages, self.cache, self.read = [], None, []

    def answer(self, text: str, streamer: PieceStreamer):
        """
        One turn; returns the output of `generate`.

        Args:
            text (`str`): The user's message.
            streamer ([`PieceStreamer`]): Receives the answer; an exception that it raises ends it.

        Raises:
            `ValueError`: there is no room for an answer.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = ids_of_prompt(RowEncoder(self.tokenizer, chat_template_kwargs=self.template), asked)
        room = room_for_answer(self.target, len(ids), self.options["max_new_tokens"])
        options = {**self.options, "max_new_tokens": room}
        if self.read and ids[: len(self.read)] == self.read and len(ids) > len(self.read):
            options[CACHE_NAME] = self.cache
        self.cache, self.read = None, []
        try:
            output = generate_one(self.target, ids, assistant_model=self.draft, streamer=streamer, **options)
            self.cache, self.read = output[CACHE_NAME], output.sequences[0, :-1].tolist()
            return output
        finally:
            if streamer.text or self.read:  # even if it was interrupted, or is empty
                self.messages = [*asked, {"role": "assistant", "content": streamer.text}]


def room_for_answer(target, prompt: int, wanted: int | None) -> int | None:
    """
    Maximum number of tokens of an answer.

    Args:
        target (`PreTrainedModel`): The target.
        prompt (`int`): Tokens of the prompt.
        wanted (`int`, *optional*): Maximum number of new tokens.

    Raises:
        `ValueError`: there is no room for an answer, or `wanted` is less than 1.
    """
    if wanted is not None and wanted < 1:
        raise ValueError(f"max_new_tokens={wanted} must be at least 1.")
    limit = positions_of(target.config.get_text_config(decoder=True).to_dict())
    if limit is None:
        return wanted
    if prompt >= limit:
        raise ValueError(f"The prompt has {prompt} tokens; prompt and answer together may have at most {limit}.")
    return min(wanted or limit, limit - prompt)
