"""The README's first section has exactly its two commands, its example runs, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import npattn
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")

GUIDE = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")

FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_first_section_installs_runs_and_tests():
    first = README.split("\n## ")[0]
    assert "python -m venv" in first
    assert FENCE.findall(first) == [
        ("sh", "pip install .\npython -m npattn demo\n"),
        ("sh", 'pip install ".[test]"\npython -m pytest\n'),
    ]
    assert [kind for kind, _ in FENCE.findall(README)].count("sh") == 2


def test_python_examples_run(capsys):
    examples = [code for kind, code in FENCE.findall(README) if kind == "python"]
    assert len(examples) == 1
    assert 15 <= sum(1 for line in examples[0].splitlines() if line.strip()) <= 20
    exec(compile(examples[0], "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["我", "喜欢", "深度", "学习"]


def _plain(query, key, value, allowed, bias=0.0):
    """Attention over (batch, heads, length, width) as NumPy users write it."""
    scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5 + bias
    weights = np.where(allowed, np.exp(scores), 0.0)
    return weights / weights.sum(axis=-1, keepdims=True) @ value


def test_calls_of_other_libraries():
    (code,) = (code for kind, code in FENCE.findall(GUIDE) if kind == "python")
    calls = {}
    exec(compile(code, "index.md", "exec"), calls)
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 4, 7, 8))
    key, value = key[..., :5, :], value[..., :5, :]
    swapped = [array.swapaxes(1, 2) for array in (query, key, value)]
    i, j = np.mgrid[:7, :5]

    actual = calls["torch_sdpa"](query, key, value, is_causal=True)
    np.testing.assert_allclose(actual, _plain(query, key, value, j <= i), rtol=1e-12, atol=1e-14)

    bias = rng.standard_normal((7, 5))
    mask = (i + j) % 3 != 0
    actual = calls["jax_dot_product_attention"](*swapped, bias, mask).swapaxes(1, 2)
    np.testing.assert_allclose(actual, _plain(query, key, value, mask, bias), rtol=1e-12, atol=1e-14)

    query, swapped[0] = query[..., :3, :], swapped[0][:, :3]
    place = np.arange(3)[:, None] + 2
    slopes = npattn.alibi_slopes(4)
    actual = calls["flash_attn_func"](*swapped, causal=True, window_size=(2, -1), alibi_slopes=slopes)
    distance = np.abs(place - np.arange(5))
    allowed = (np.arange(5) <= place) & (np.arange(5) >= place - 2)
    expected = _plain(query, key, value, allowed, -slopes[:, None, None] * distance)
    np.testing.assert_allclose(actual.swapaxes(1, 2), expected, rtol=1e-12, atol=1e-14)


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
