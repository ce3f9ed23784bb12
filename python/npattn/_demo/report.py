"""What the demo says, apart from how it is shown: sections of text, lines and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .._terminal import Terminal, display_width, pad


@dataclass(frozen=True)
class Text:
    """A paragraph, one sentence or clause a line."""

    text: str


@dataclass(frozen=True)
class Lines:
    """Rows of cells to be aligned in columns; with `header` the first row names them."""

    rows: Sequence[Sequence[str]]
    header: bool = False


@dataclass(frozen=True)
class Matrix:
    """A table of numbers (len(rows), len(columns)); the values of a shaded one are weights in [0, 1]."""

    caption: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: NDArray[np.floating]
    decimals: int = 3
    shaded: bool = False


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: Sequence[Text | Lines | Matrix]


def write_section(terminal: Terminal, section: Section) -> None:
    """Write one section as text."""
    terminal.heading(section.title)
    for block in section.blocks:
        if isinstance(block, Text):
            for sentence in block.text.splitlines():
                terminal.line(sentence)
        elif isinstance(block, Lines):
            _write_lines(terminal, block)
        else:
            terminal.line()
            terminal.line(block.caption)
            terminal.matrix(
                block.values, block.rows, block.columns, decimals=block.decimals, shaded=block.shaded
            )
    terminal.stream.flush()


def _write_lines(terminal: Terminal, block: Lines) -> None:
    rows = [[terminal.plain(cell) for cell in row] for row in block.rows]
    widths = [
        max(display_width(row[column]) for row in rows if column < len(row))
        for column in range(max(map(len, rows)))
    ]
    for row in rows:
        terminal.line("  " + "  ".join(map(pad, row, widths)).rstrip())
