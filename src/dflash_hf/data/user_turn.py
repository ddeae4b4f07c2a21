"""Where a user's text begins and ends in a chat template."""

from dataclasses import dataclass


_SENTINEL = "Xq7"  # plain letters: a template may trim or escape anything else


@dataclass(frozen=True)
class UserTurn:
    """The text that a chat template puts before and after a user's text."""

    before: str
    behind: str

    @classmethod
    def of(cls, tokenizer, system: str | None = None, chat_template_kwargs: dict | None = None) -> "UserTurn":
        """
        Find the user's turn by rendering a conversation with a recognisable text.

        Raises:
            `ValueError`: there is no chat template, or it changes the text.
        """
        from jinja2 import TemplateError

        if not tokenizer.chat_template:
            raise ValueError(
                "The tokenizer has no chat template, which marks where a user's text begins; choose a target "
                "that was trained to chat."
            )
        turns = set()
        for text in (_SENTINEL, f"{_SENTINEL} {_SENTINEL[::-1]}"):
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": text})
            options = {"tokenize": False, "add_generation_prompt": True, **(chat_template_kwargs or {})}
            try:
                rendered = tokenizer.apply_chat_template(messages, **options)
            except TemplateError as error:
                raise ValueError(
                    f"The chat template rejects {messages} ({error}); leave out `system`, or give the "
                    "tokenizer another chat template."
                ) from error
            before, found, behind = rendered.partition(text)
            if not found or text in behind or not before.strip():
                raise ValueError(
                    f"The chat template has no beginning of a user's turn: {text!r} was rendered as {rendered!r}, not "
                    "once and after text of the template. Give the tokenizer another chat template."
                )
            turns.add(cls(before, behind))
        if len(turns) > 1:
            raise ValueError(
                "The chat template's beginning of a user's turn depends on its text: "
                f"{' or '.join(sorted(map(repr, turns)))}. Give the tokenizer another chat template."
            )
        return turns.pop()

    def stop_id(self, tokenizer) -> int | None:
        """The token that ends a user's turn, or `None` if it ends with plain text."""
        ids = tokenizer(self.behind, add_special_tokens=False)["input_ids"]
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        return ids[0] if ids and ids[0] in special else None
