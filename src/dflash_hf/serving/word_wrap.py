"""Lines of streamed text on a terminal, broken between words."""

import shutil
import unicodedata


class WordWrap:
    """
    Breaks lines between words. A word arrives in pieces, so it may turn out not to fit when its beginning is already
    shown: it is then erased and written again on the next line.

    Args:
        width (`int`, *optional*): Columns of a line. Default: the terminal's, without the last, behind which the
            cursor of a terminal waits.
    """

    def __init__(self, width: int | None = None):
        self.width = width or max(shutil.get_terminal_size().columns - 1, 1)
        self.column = 0
        self._word: list[tuple[str, int]] = []  # since the last space: the characters with colour; their columns

    def __call__(self, text: str, color: str = "") -> str:
        """What to write for a piece of text in one colour, an escape sequence."""
        shown = [color]
        for char in text:
            columns = columns_of(char, self.column)
            if char == "\n":
                self.column, self._word = 0, []
            elif self.column + columns <= self.width:
                self.column += columns
                self._word = [] if char.isspace() or columns == 2 else [*self._word, (color + char, columns)]
            elif char.isspace():  # the line break takes its place
                char, self.column, self._word = "\n", 0, []
            else:
                begun = sum(columns for _, columns in self._word)
                if begun == self.column:  # the word fills the line
                    begun, self._word = 0, []
                back = f"\x1b[{begun}D\x1b[K" if begun else ""
                shown.append(f"{back}\n{''.join(one for one, _ in self._word)}{color}")
                self.column = begun + columns
                self._word.append((color + char, columns))
            shown.append(char)
        return "".join(shown)


def columns_of(char: str, column: int = 0) -> int:
    """The columns of a character on a terminal: 2 for an East Asian wide one, after which a line may break."""
    if char == "\t":
        return 8 - column % 8
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
