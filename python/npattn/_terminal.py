"""Plain text that lines up: wide characters, shading, colour only where it is welcome, any encoding."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

# What a terminal shows that cannot encode the left side: the demo's words in pinyin, signs in ASCII.
_PLAIN = {
    "喜欢": "xihuan",
    "深度": "shendu",
    "学习": "xuexi",
    "老鼠": "laoshu",
    "我": "wo",
    "猫": "mao",
    "追": "zhui",
    "√": "sqrt",
    "×": "x",
    "·": "*",
    "…": "...",
}
_BLOCKS = " ░▒▓█"
_ASCII_BLOCKS = " .:+#"


def display_width(text: str) -> int:
    """Columns a terminal gives to `text`: 2 for a wide character, 0 for a combining mark, else 1."""
    width = 0
    for character in text:
        if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
            continue
        width += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return width


def pad(text: str, width: int, *, right: bool = False) -> str:
    """`text` filled with spaces to `width` columns; `right` aligns it to the right."""
    space = " " * max(0, width - display_width(text))
    return space + text if right else text + space


class Terminal:
    """A text stream together with what it can show: its encoding, and colour if it is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        is_terminal = bool(getattr(stream, "isatty", lambda: False)())
        self.colour = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def can_show(self, text: str) -> bool:
        """Whether the stream's encoding holds every character of `text`."""
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            return False
        return True

    def plain(self, text: str) -> str:
        """`text` in characters the stream can encode."""
        if self.can_show(text):
            return text
        for word, substitute in _PLAIN.items():
            if not self.can_show(word):
                text = text.replace(word, substitute)
        return text.encode(self.encoding, "backslashreplace").decode(self.encoding)

    def line(self, text: str = "") -> None:
        """Write one line."""
        self.stream.write(self.plain(text) + "\n")

    def heading(self, text: str) -> None:
        """Write a heading: bold with colour, underlined without."""
        text = self.plain(text)
        if self.colour:
            self.stream.write(f"\n\x1b[1m{text}\x1b[0m\n")
        else:
            self.stream.write(f"\n{text}\n{'-' * display_width(text)}\n")

    def matrix(
        self,
        values: NDArray[np.floating],
        rows: Sequence[str],
        columns: Sequence[str],
        *,
        decimals: int = 3,
        shaded: bool = False,
    ) -> None:
        """Write `values` (len(rows), len(columns)) as an aligned table; `shaded` values lie in [0, 1]."""
        rows = [self.plain(row) for row in rows]
        columns = [self.plain(column) for column in columns]
        cells = [[f"{value:.{decimals}f}" for value in row] for row in values.tolist()]
        label_width = max((display_width(row) for row in rows), default=0)
        widths = [
            max(map(display_width, (column, *(row[index] for row in cells))))
            for index, column in enumerate(columns)
        ]
        with_blocks = shaded and not self.colour
        gap = "   " if with_blocks else " "
        header = gap.join(pad(name, width, right=True) for name, width in zip(columns, widths, strict=True))
        self.stream.write(f"  {' ' * label_width}  {header}".rstrip() + "\n")
        for label, texts, row_values in zip(rows, cells, values.tolist(), strict=True):
            shown = [pad(text, width, right=True) for text, width in zip(texts, widths, strict=True)]
            if with_blocks:
                shown = [text + self._blocks(value) for text, value in zip(shown, row_values, strict=True)]
            elif shaded:
                shown = [_painted(text, value) for text, value in zip(shown, row_values, strict=True)]
            self.stream.write(f"  {pad(label, label_width)}  {' '.join(shown)}".rstrip() + "\n")

    def _blocks(self, weight: float) -> str:
        blocks = _BLOCKS if self.can_show(_BLOCKS) else _ASCII_BLOCKS
        return blocks[_level(weight, len(blocks))] * 2


def _level(weight: float, levels: int) -> int:
    """The shade of a weight in [0, 1]: 0 for nearly nothing, levels - 1 from about 0.9 up. NaN is 0."""
    return min(levels - 1, max(0, round(weight * (levels - 0.5)))) if weight == weight else 0


def _painted(text: str, weight: float) -> str:
    """`text` on one of the 24 greys of a 256-colour terminal, dark to light, in a readable ink."""
    level = _level(weight, 24)
    ink = 232 if level > 11 else 255
    return f"\x1b[48;5;{232 + level}m\x1b[38;5;{ink}m{text}\x1b[0m"
