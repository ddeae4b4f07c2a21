"""The content of a row of a dataset, in one form for all layouts: what [`~dflash_hf.data.row_layouts`] returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_hf.data.messages import as_text, images_in, with_arguments


Prompt = str | list[dict]  # a text that the target continues, or messages that it answers

# Arguments of `apply_chat_template` itself, not of templates.
_CALL_ARGUMENTS = {
    "conversation",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "padding",
    "truncation",
    "max_length",
}


@dataclass(frozen=True)
class TokenizedText:
    """
    A row that comes as token ids.

    Args:
        ids (`np.ndarray`): `[T]`.
        mask (`np.ndarray`, *optional*): `[T]`, true on the supervised tokens; `None` if the row does not say which.
        document_ids (`np.ndarray`, *optional*): `[T]`, another number for each example of the row.
        images (`Sequence[str]`): Paths or `data:` URIs of the images among the ids.
    """

    ids: np.ndarray
    mask: np.ndarray | None = None
    document_ids: np.ndarray | None = None
    images: Sequence[str] = ()

    @property
    def prompt_ids(self) -> list[int]:
        """The ids before the first supervised one; all of them without a mask."""
        if self.mask is None or not self.mask.any():
            return self.ids.tolist()
        return self.ids[: int(self.mask.argmax())].tolist()


@dataclass(frozen=True)
class Conversation:
    """
    The content of a row, in the same form for all layouts. It has messages, a text, both (a text that is a user's
    message under a chat template), or ids.

    Args:
        messages (`Sequence[dict]`): As [`~dflash_hf.data.messages.messages_of`] returns them, with the answers. In a
            row of ids, the messages with its images, if there are any.
        text (`str`, *optional*): The prompt as text, for targets without a chat template.
        completion (`str`, *optional*): Text that continues `text`; supervised.
        tokens (`TokenizedText`, *optional*): The ids of the whole row, which are used unchanged.
        supervised (`Sequence[int]`): Indices of the supervised messages.
        finish_reasons (`Sequence[str | None]`): Why each of these ended, such as `length`.
        answer_ids (`np.ndarray`, *optional*): `[T]`, the exact ids of the target's answer to `messages`, which alone
            are supervised.
        is_plain_text (`bool`): `text` is continued without the chat template, even if there is one.
        tools (`list`, *optional*): Tools, for the chat template and for servers.
        template_kwargs (`dict`): The row's own arguments of the chat template.
    """

    messages: Sequence[dict] = ()
    text: str | None = None
    completion: str | None = None
    tokens: TokenizedText | None = None
    supervised: Sequence[int] = ()
    finish_reasons: Sequence[str | None] = ()
    answer_ids: np.ndarray | None = None
    is_plain_text: bool = False
    tools: list | None = None
    template_kwargs: dict = field(default_factory=dict)

    @property
    def images(self) -> Sequence[str]:
        """Paths or `data:` URIs of its images, in order."""
        return images_in(self.messages) if self.tokens is None else self.tokens.images

    def turns(self, as_chat: bool) -> Prompt:
        """
        The whole content, with the row's own answers: messages; or the text, if there are none or `as_chat` is false.
        Arguments of tool calls become JSON text, which servers expect and files can hold.
        """
        if self.text is not None and not (as_chat and self.messages):
            return self.text
        return [dict(with_arguments(message, as_text)) for message in self.messages]

    def prompt(self, as_chat: bool) -> Prompt:
        """As [`turns`], without assistant turns at the end."""
        turns = self.turns(as_chat)
        while isinstance(turns, list) and turns and turns[-1]["role"] == "assistant":
            turns.pop()
        return turns


def check_template_kwargs(kwargs: Mapping) -> None:
    """
    Raises:
        `ValueError`: arguments of the chat template set what is not the template's.
    """
    not_of_templates = kwargs.keys() & _CALL_ARGUMENTS
    if not_of_templates:
        raise ValueError(
            f"chat_template_kwargs may not set {', '.join(sorted(not_of_templates))}: that is an argument of "
            "`apply_chat_template`, not of the template; leave it out."
        )
