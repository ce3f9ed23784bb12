"""The demo's report as one self-contained page: no script, no network, light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from .report import Lines, Matrix, Section, Text

_CHINESE = re.compile("[\u4e00-\u9fff]+")

# The shade is an overlay of at most 55 % blue, so that text keeps a contrast above 7:1 in both schemes.
_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #16181d; --rule: #c9ced6; --shade: 47, 111, 219; }
@media (prefers-color-scheme: dark) { :root { --page: #14161a; --ink: #eceef2; --rule: #444a55; } }
body { background: var(--page); color: var(--ink); font: 1rem/1.6 system-ui, sans-serif; max-width: 46rem;
       margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.25; } h2 { margin-top: 2.5rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .4rem; }
th, td { border: 1px solid var(--rule); padding: .25rem .7rem; text-align: right; font-weight: normal; }
th[scope=row] { text-align: left; } thead th { font-weight: 600; }
.lines th, .lines td { border: 0; padding: .1rem 1.2rem .1rem 0; text-align: left; white-space: nowrap; }
.lines td { font-family: ui-monospace, monospace; }
.shaded td { background: rgba(var(--shade), calc(var(--weight) * .55)); }
""".strip()


def render(title: str, sections: Iterable[Section]) -> str:
    """The whole page."""
    body = "\n".join(_section(section) for section in sections)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    blocks = "\n".join(_block(block) for block in section.blocks)
    return f"<section>\n<h2>{_inline(section.title)}</h2>\n{blocks}\n</section>"


def _block(block: Text | Lines | Matrix) -> str:
    if isinstance(block, Text):
        return f"<p>{_inline(block.text)}</p>"
    if isinstance(block, Lines):
        names = block.rows[0][1:] if block.header else []
        rows = [
            _row(label, "".join(f"<td>{_inline(cell)}</td>" for cell in cells))
            for label, *cells in block.rows[bool(block.header) :]
        ]
        return _table("lines", "", names, rows)
    rows = [
        _row(label, "".join(_number(block, value) for value in values))
        for label, values in zip(block.rows, block.values.tolist(), strict=True)
    ]
    return _table("shaded" if block.shaded else "plain", block.caption, block.columns, rows)


def _table(kind: str, caption: str, columns: Sequence[str], rows: Sequence[str]) -> str:
    title = f"<caption>{_inline(caption)}</caption>\n" if caption else ""
    names = "".join(f'<th scope="col">{_inline(column)}</th>' for column in columns)
    header = f"<thead><tr><td></td>{names}</tr></thead>\n" if columns else ""
    body = "\n".join(rows)
    return (
        f'<div class="scroll"><table class="{kind}">\n{title}{header}'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _row(label: str, cells: str) -> str:
    return f'<tr><th scope="row">{_inline(label)}</th>{cells}</tr>'


def _number(block: Matrix, value: float) -> str:
    shade = f' style="--weight: {value:.3f}"' if block.shaded else ""
    return f"<td{shade}>{value:.{block.decimals}f}</td>"


def _inline(text: str) -> str:
    """Escaped, with the Chinese words marked as such for screen readers and fonts."""
    return _CHINESE.sub(r'<span lang="zh">\g<0></span>', escape(text))
