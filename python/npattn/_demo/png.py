"""The demo's weight tables as one picture; matplotlib (extra [plot]) is imported only here."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable
from typing import Any

from .._terminal import Terminal
from .report import Matrix, Section

_CJK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "SimHei",
    "Arial Unicode MS",
)


def require_matplotlib(module: str = "matplotlib") -> Any:
    """One of matplotlib's modules, or an ImportError that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError('a picture needs matplotlib: pip install "npattn[plot]"') from error


def save(path: str, sections: Iterable[Section]) -> None:
    """Draw every shaded table of the report side by side into a PNG file."""
    fonts_module = require_matplotlib("matplotlib.font_manager")
    figure_module = require_matplotlib("matplotlib.figure")

    installed = {font.name for font in fonts_module.fontManager.ttflist}
    cjk = [name for name in _CJK_FONTS if name in installed]
    # Without a font that has the characters the labels are spelled as on an ASCII terminal.
    spell = str if cjk else Terminal(io.TextIOWrapper(io.BytesIO(), encoding="ascii")).plain
    fonts = [*cjk[:1], "DejaVu Sans"]

    tables = [
        block
        for section in sections
        for block in section.blocks
        if isinstance(block, Matrix) and block.shaded
    ]
    figure = figure_module.Figure(figsize=(1 + 3.6 * len(tables), 5), layout="constrained")
    for axes, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
        axes.imshow(table.values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(table.columns)), map(spell, table.columns), family=fonts)
        axes.set_yticks(range(len(table.rows)), map(spell, table.rows), family=fonts)
        axes.set_title(spell(table.caption), family=fonts, fontsize=10, wrap=True)
        for (row, column), value in zip(_positions(table), table.values.ravel().tolist(), strict=True):
            ink = "white" if value > 0.55 else "black"
            axes.text(column, row, f"{value:.{table.decimals}f}", ha="center", va="center", color=ink)
    figure.savefig(path, dpi=150, format="png")


def _positions(table: Matrix) -> list[tuple[int, int]]:
    rows, columns = table.values.shape
    return [(row, column) for row in range(rows) for column in range(columns)]
