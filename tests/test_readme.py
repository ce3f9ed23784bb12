"""The README's first section has exactly its two commands, its example runs, and its links lead somewhere."""

from __future__ import annotations

import re

import npattn
import pytest
from pages import FENCE, ROOT, python_blocks

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")


def test_first_section_installs_runs_and_tests():
    first = README.split("\n## ")[0]
    assert "python -m venv" in first
    assert FENCE.findall(first) == [
        ("sh", "pip install .\npython -m npattn demo\n"),
        ("sh", 'pip install ".[test]"\npython -m pytest\n'),
    ]
    assert [kind for kind, _ in FENCE.findall(README)].count("sh") == 2


def test_python_examples_run(capsys):
    examples = python_blocks("README.md")
    assert len(examples) == 1
    assert 15 <= sum(1 for line in examples[0].splitlines() if line.strip()) <= 20
    exec(compile(examples[0], "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["我", "喜欢", "深度", "学习"]


def test_every_name_in_the_table_exists():
    table = README.split("## What it does")[1].split("\n\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = re.findall(r"`([\w.]+)`", " ".join(cells))
    assert len(names) > 20
    for name in names:
        if name == "models.minilm":
            from npattn.models import minilm

            assert callable(minilm.load)
            continue
        value = npattn
        for part in name.split("."):
            value = getattr(value, part)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
