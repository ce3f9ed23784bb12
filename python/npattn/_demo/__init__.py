"""`python -m npattn demo`: what attention is, step by step, with npattn doing the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from .._terminal import Terminal
from . import eight_heads, html, one_head, png, speed
from .report import Section, write_section

_SECTIONS: tuple[Callable[[], Section], ...] = (
    one_head.section,
    eight_heads.layer_section,
    eight_heads.order_section,
    speed.section,
)


def run(stream: TextIO, *, html_path: str | None = None, png_path: str | None = None) -> None:
    """Write the demo to `stream` section by section, then, if asked, as a page and as a picture."""
    for path in filter(None, (html_path, png_path)):
        if not Path(path).absolute().parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: its directory does not exist")
        if Path(path).is_dir():
            raise IsADirectoryError(f"cannot write {path}: it is a directory")
    if png_path:
        png.require_matplotlib()

    terminal = Terminal(stream)
    sections = []
    for make_section in _SECTIONS:
        sections.append(make_section())
        write_section(terminal, sections[-1])
    terminal.line()
    if html_path:
        Path(html_path).write_text(html.render("npattn: attention, step by step", sections), encoding="utf-8")
        terminal.line(f"Page: {html_path}")
    if png_path:
        png.save(png_path, sections)
        terminal.line(f"Picture: {png_path}")
    terminal.line("Next: python -m npattn bench")
