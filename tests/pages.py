"""The code blocks of the documentation's pages, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read(page: str) -> str:
    """The text of a page, named from the root of the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def python_blocks(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return [code for kind, code in FENCE.findall(read(page)) if kind == "python"]


def names_of(page: str) -> dict[str, Any]:
    """What the Python blocks of a page define when they are run one after the other."""
    names: dict[str, Any] = {}
    for block in python_blocks(page):
        exec(compile(block, page, "exec"), names)
    return {name: value for name, value in names.items() if name != "__builtins__"}
