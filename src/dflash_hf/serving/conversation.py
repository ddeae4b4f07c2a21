"""Several turns with a target and its drafter."""

from dataclasses import dataclass, field

import torch

from dflash_hf.configs import positions_of
from dflash_hf.data.encode import RowEncoder
from dflash_hf.data.prompts import ids_of_prompt
from dflash_hf.serving.pieces import PieceStreamer


@dataclass
class Conversation:
    """
    What was said so far, and the cache of it. Conversations in several threads may share both models.

    The cache of a turn serves the next one where the template gives back what was written, token for token; of the
    turns before, the drafter then sees nothing but what the target makes of them. Where a template changes earlier
    turns, or an answer was interrupted, everything is read again.

    Args:
        target (`PreTrainedModel`): Who answers.
        tokenizer (`PreTrainedTokenizerBase`): Its, with a chat template.
        draft (`DFlashDraftModel`, *optional*): A drafter; may change between turns.
        template (`dict`): Arguments of the chat template.
        options (`dict`): Of `generate`.
        messages (`list[dict]`): What was said.
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
            streamer ([`PieceStreamer`]): Gets the answer; what it raises ends it.

        Raises:
            `ValueError`: there is no room for an answer.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = ids_of_prompt(RowEncoder(self.tokenizer, chat_template_kwargs=self.template), asked)
        options = {
            **self.options,
            "max_new_tokens": room_for_answer(self.target, len(ids), self.options["max_new_tokens"]),
        }
        if self.read and ids[: len(self.read)] == self.read and len(ids) > len(self.read):
            options["past_key_values"] = self.cache
        self.cache, self.read = None, []
        input_ids = torch.tensor([ids], device=self.target.device)
        try:
            output = self.target.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                assistant_model=self.draft,
                streamer=streamer,
                return_dict_in_generate=True,
                **options,
            )
            self.cache, self.read = output.past_key_values, output.sequences[0, :-1].tolist()
            return output
        finally:
            if streamer.text:  # what an interruption has left of it, too
                self.messages = [*asked, {"role": "assistant", "content": streamer.text}]


def room_for_answer(target, prompt: int, wanted: int | None) -> int | None:
    """
    Tokens that an answer may have.

    Args:
        target (`PreTrainedModel`): Who answers.
        prompt (`int`): Tokens that it is given.
        wanted (`int`, *optional*): At most so many.

    Raises:
        `ValueError`: there is no room at all, or none is wanted.
    """
    if wanted is not None and wanted < 1:
        raise ValueError(f"An answer of {wanted} tokens is none; 1 is the least.")
    limit = positions_of(target.config.get_text_config(decoder=True).to_dict())
    if limit is None:
        return wanted
    if prompt >= limit:
        raise ValueError(f"The prompt has {prompt} tokens; {limit} are the most that fit, answer included.")
    return min(wanted or limit, limit - prompt)
