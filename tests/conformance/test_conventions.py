"""The rest of docs/conventions.md, against plain NumPy: flash-attention needs a GPU, the others are NumPy."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import npattn
import numpy as np
import pytest
from pages import read

Array = np.ndarray


def plain(q: Array, k: Array, v: Array, allowed: Any = True, bias: Any = 0.0, scale: Any = None) -> Array:
    """Attention over (..., heads, length, width) as NumPy users write it, heads repeated, empty rows 0."""
    k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    weights = np.where(allowed, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1.0, total) @ v


def seen_by_flash(query_len: int, key_len: int, causal: bool, window: tuple[int, int]) -> Array:
    """The masks of flash-attention's documentation, from the lower right corner."""
    i, j = np.mgrid[:query_len, :key_len]
    place = i + key_len - query_len
    left, right = window
    allowed = (j <= place) if causal else np.ones_like(j, bool)
    allowed &= (left < 0) | (j >= place - left)
    return allowed & ((right < 0) | (j <= place + right))


def test_the_masks_in_flash_attentions_documentation() -> None:
    assert seen_by_flash(2, 5, True, (-1, -1)).astype(int).tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    tall = [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]
    assert seen_by_flash(5, 2, True, (-1, -1)).astype(int).tolist() == tall


FLASH = [
    {},
    {"causal": True},
    {"window_size": (2, 1)},
    {"causal": True, "window_size": (3, 5), "alibi": True},
    {"window_size": (-1, 2), "softmax_scale": 0.4, "alibi": True},
    {"causal": True, "alibi": True, "per_batch": True},
]


def slopes_of(options: dict[str, Any], batch: int, heads: int) -> Array | None:
    if not options.pop("alibi", False):
        return None
    slopes = npattn.alibi_slopes(heads)
    return slopes * np.linspace(1, 2, batch)[:, None] if options.pop("per_batch", False) else slopes


def alibi_of(slopes: Array | None, query_len: int, key_len: int) -> Array | float:
    if slopes is None:
        return 0.0
    i, j = np.mgrid[:query_len, :key_len]
    return -slopes[..., None, None] * abs(i + key_len - query_len - j)


@pytest.mark.parametrize("lengths", [(6, 6), (3, 11), (9, 4)])
@pytest.mark.parametrize("options", FLASH)
def test_flash_attn_func(lengths: tuple[int, int], options: dict[str, Any], recipes: SimpleNamespace) -> None:
    options = dict(options)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, lengths[0], 8))
    k, v = rng.standard_normal((2, 2, 2, lengths[1], 8))
    slopes = slopes_of(options, 2, 4)
    allowed = seen_by_flash(*lengths, options.get("causal", False), options.get("window_size", (-1, -1)))
    expected = plain(q, k, v, allowed, alibi_of(slopes, *lengths), options.get("softmax_scale"))
    swapped = (x.swapaxes(1, 2) for x in (q, k, v))
    actual = recipes.flash_attn_func(*swapped, **options, alibi_slopes=slopes)
    np.testing.assert_allclose(actual.swapaxes(1, 2), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", FLASH)
def test_flash_attn_varlen_func(options: dict[str, Any], recipes: SimpleNamespace) -> None:
    options = dict(options)
    rng = np.random.default_rng(1)
    query_starts, key_starts = np.array([0, 3, 3, 8, 12]), np.array([0, 5, 9, 11, 15])
    q = rng.standard_normal((12, 4, 8))
    k, v = rng.standard_normal((2, 15, 2, 8))
    slopes = slopes_of(options, 4, 4)
    actual = recipes.flash_attn_varlen_func(
        q, k, v, query_starts.astype(np.int32), key_starts.astype(np.int32), **options, alibi_slopes=slopes
    )
    alone = dict(options)
    for n in range(4):
        queries, keys = slice(*query_starts[n : n + 2]), slice(*key_starts[n : n + 2])
        if slopes is not None:
            alone["alibi_slopes"] = slopes[n] if slopes.ndim == 2 else slopes
        parts = (q[None, queries], k[None, keys], v[None, keys])
        expected = recipes.flash_attn_func(*parts, **alone)
        np.testing.assert_allclose(actual[None, queries], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 0)}])
def test_flash_attn_with_kvcache(options: dict[str, Any], recipes: SimpleNamespace) -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((3, 2, 4, 8))
    k, v = rng.standard_normal((2, 3, 20, 2, 8))
    lengths = np.array([20, 7, 2])
    actual = recipes.flash_attn_with_kvcache(q, k, v, lengths, **options)
    for n, length in enumerate(lengths):
        alone = recipes.flash_attn_func(q[[n]], k[[n], :length], v[[n], :length], **options)
        np.testing.assert_allclose(actual[[n]], alone, rtol=0, atol=1e-14)


def test_flash_softcap_comes_before_alibi(recipes: SimpleNamespace) -> None:
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((3, 1, 2, 5, 8))
    slopes = npattn.alibi_slopes(2)
    capped = 0.5 * np.tanh(q @ k.swapaxes(-1, -2) / 8**0.5 / 0.5)
    expected = plain(q, k, v, True, capped + alibi_of(slopes, 5, 5), scale=0.0)
    swapped = (x.swapaxes(1, 2) for x in (q, k, v))
    actual = recipes.flash_attn_func(*swapped, softcap=0.5, alibi_slopes=slopes).swapaxes(1, 2)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("hidden", [-np.inf, -1e9])
def test_numpy_line(hidden: float, recipes: SimpleNamespace) -> None:
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((3, 2, 3, 6, 8))
    mask = np.triu(np.full((6, 6), hidden), 1)
    np.testing.assert_allclose(recipes.numpy_line(q, k, v, mask), plain(q, k, v, bias=mask), atol=1e-13)
    np.testing.assert_allclose(recipes.numpy_line(q, k, v), plain(q, k, v), atol=1e-13)


def test_picogpt(recipes: SimpleNamespace) -> None:
    """Its mask adds -1e10 above the diagonal."""
    rng = np.random.default_rng(5)
    x, n_head = rng.standard_normal((7, 24)), 3
    c_attn = {"w": rng.standard_normal((24, 72)), "b": rng.standard_normal(72)}
    c_proj = {"w": rng.standard_normal((24, 24)), "b": rng.standard_normal(24)}
    q, k, v = (x @ c_attn["w"] + c_attn["b"]).reshape(7, 3, n_head, 8).transpose(1, 2, 0, 3)
    heads = plain(q, k, v, bias=(1 - np.tri(7)) * -1e10)
    expected = heads.swapaxes(0, 1).reshape(7, 24) @ c_proj["w"] + c_proj["b"]
    np.testing.assert_allclose(recipes.picogpt_mha(x, c_attn, c_proj, n_head), expected, rtol=0, atol=1e-11)


def test_llama3np(recipes: SimpleNamespace) -> None:
    """A prompt of five tokens, then two more, one at a time; the class's caches and rotary tables."""
    rng = np.random.default_rng(6)
    width, heads, kv_heads, head_dim, longest = 32, 4, 2, 8, 9
    weights = [rng.standard_normal((width, n * head_dim)) for n in (heads, kv_heads, kv_heads)]
    attention = SimpleNamespace(
        head_dim=head_dim,
        q_weight=weights[0],
        k_weight=weights[1],
        v_weight=weights[2],
        o_weight=rng.standard_normal((width, width)),
        cache_k=np.zeros((2, longest, kv_heads, head_dim)),
        cache_v=np.zeros((2, longest, kv_heads, head_dim)),
    )
    angles = np.outer(np.arange(longest), 1.0 / 10000.0 ** (np.arange(0, head_dim, 2) / head_dim))
    x = rng.standard_normal((2, 7, width))

    def turned(part: Array) -> Array:
        pairs = part.reshape(*part.shape[:-1], -1, 2)
        turns = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles[:7, None])
        return np.stack([turns.real, turns.imag], axis=-1).reshape(part.shape)

    q, k, v = ((x @ weight).reshape(2, 7, -1, head_dim) for weight in weights)
    q, k, v = (part.swapaxes(1, 2) for part in (turned(q), turned(k), v))
    expected = plain(q, k, v, np.tri(7, dtype=bool)).swapaxes(1, 2).reshape(2, 7, -1) @ attention.o_weight

    for start, end in ((0, 5), (5, 6), (6, 7)):
        tables = np.cos(angles[start:end]), np.sin(angles[start:end])
        actual = recipes.llama3np_attention(attention, x[:, start:end], start, None, *tables)
        np.testing.assert_allclose(actual, expected[:, start:end], rtol=0, atol=1e-10)


def test_every_function_of_the_page_is_tested_here(request: pytest.FixtureRequest) -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in request.path.parent.glob("test_*.py"))
    functions = re.findall(r"^def (\w+)\(", read("docs/conventions.md"), re.MULTILINE)
    assert {name for name in functions if f"recipes.{name}" not in tests} == {"window_of"}


def test_the_calls_in_one_line_run() -> None:
    """The right column of the second table, with arrays it could mean."""
    table = read("docs/conventions.md").split("## In one line")[1].split("\n## ")[0]
    calls = re.findall(r"`((?:scaled_dot_product|varlen)_attention\(.*?\))` *[|,]", table)
    assert len(calls) == 9
    rng = np.random.default_rng(7)
    values: dict[str, Any] = {"np": np, "w": 2, "Lq": 4, "Lk": 4, "past_len": 0, "n": np.array([2, 4])}
    values |= {"mask": rng.standard_normal((4, 4)) > -1, "bias": np.zeros((4, 4))}
    values |= {"cu_q": np.array([0, 2, 5]), "cu_k": np.array([0, 3, 9])}
    values |= {name: getattr(npattn, name) for name in ("scaled_dot_product_attention", "varlen_attention")}
    for call in calls:
        shapes = [(5, 2, 8), (9, 2, 8)] if call.startswith("varlen") else [(2, 4, 4, 8)] * 2
        q, k, v = (rng.standard_normal(shape) for shape in (shapes[0], shapes[1], shapes[1]))
        assert np.isfinite(eval(call, values | {"q": q, "k": k, "v": v})).all(), call
