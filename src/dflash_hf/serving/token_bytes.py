"""The bytes of tokens, and texts without the character in which they were cut."""

import functools
import re
from collections.abc import Sequence


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """
    The byte that each character of a byte-level vocabulary stands for, as in GPT-2: a printable character stands for
    itself, and the other bytes are numbered from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + number): byte for number, byte in enumerate(others)}


class TokenBytes:
    """
    Bytes of a tokenizer's tokens. The text of a single token is not enough: it has a replacement character where a
    token is part of a character, and may lack the space before a word.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        self.special = set(tokenizer.all_special_ids)
        decoder = getattr(getattr(tokenizer, "_tokenizer", None), "decoder", None)
        state = "" if decoder is None else decoder.__getstate__().decode()
        self.byte_level = '"ByteLevel"' in state
        self.byte_fallback = '"ByteFallback"' in state
        self.metaspace = "▁" in state

    def __call__(self, token: int) -> bytes:
        """The bytes of a token id."""
        if token in self.added:
            return self.added[token].encode()
        text = self.tokenizer.convert_ids_to_tokens(token)
        if text is None:  # the embedding may have more rows than there are tokens
            return b""
        if self.byte_level and all(character in _byte_of_character() for character in text):
            return bytes(_byte_of_character()[character] for character in text)
        byte = _BYTE_TOKEN.fullmatch(text) if self.byte_fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if self.metaspace:
            return text.replace("▁", " ").encode()
        return self.tokenizer.decode([token]).encode()

    def shown(self, token: int) -> str:
        """A token's text; its bytes, as OpenAI writes them, where these are not UTF-8."""
        data = self(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def complete_text(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """The text of an answer, without the beginning of a character that was cut at its end."""
        tokens = [token for token in tokens if not (skip_special and token in self.special)]
        cut_bytes = _cut_bytes(b"".join(map(self, tokens[-4:])))  # a character has at most 4 bytes
        while tokens and cut_bytes and len(self(tokens[-1])) <= cut_bytes:
            cut_bytes -= len(self(tokens.pop()))
        text = self.tokenizer.decode(tokens, skip_special_tokens=skip_special)
        return text.removesuffix("\ufffd") if cut_bytes else text


def _cut_bytes(data: bytes) -> int:
    """The number of bytes at the end that begin a UTF-8 character which is not complete."""
    for count, byte in enumerate(reversed(data[-3:]), start=1):
        if byte < 0x80:
            return 0
        if byte >= 0xC0:
            if byte >= 0xF0:
                length = 4
            elif byte >= 0xE0:
                length = 3
            else:
                length = 2
            return count if count < length else 0
    return 0
