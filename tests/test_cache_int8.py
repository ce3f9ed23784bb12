"""Caches of int8: a scale for each token and head, attention over what is held, a known error."""

from __future__ import annotations

import pickle
from typing import Any

import npattn
import numpy as np
import pytest
from plain_cache import assert_attends, cache_of, filled, held, queries, state_of, tokens
from shapes import Array, layouts_of
from support import DTYPES, assert_same_bits, assert_within, int8_tolerances_of
from tolerances import INT8_STEP


def normal(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def quantised(x: Array) -> Array:
    return held(x.astype(np.float32), np.int8)


@pytest.mark.parametrize("given", ["float32", "float16", "bfloat16"])
def test_tokens_of_any_layout(isa: str, given: str) -> None:
    key, value = (x.astype(DTYPES[given]) for x in tokens(2, 70))
    for (name, k), (_, v) in zip(layouts_of(key), layouts_of(value), strict=True):
        cache = cache_of(dtype=np.int8)
        cache.append(k[:, :, :37], v[:, :, :37])
        cache.append(k[:, :, 37:], v[:, :, 37:])
        assert_same_bits(cache.keys, quantised(key))
        assert_same_bits(cache.values, quantised(value)), name


def test_wide_tokens(isa: str) -> None:
    """Wider than a block of the quantising kernel, and by threads."""
    for width in (1, 3, 1024, 1025, 2051):
        key, value = normal(1, 2, 70, width), normal(1, 2, 70, width)[::-1]
        for threads in (1, 2):
            with npattn.threads(threads):
                cache = npattn.KVCache(1, 2, width, dtype=np.int8)
                cache.append(key, value)
            assert_same_bits(cache.keys, quantised(key))
            assert_same_bits(cache.values, quantised(value))


def test_tokens_of_all_kinds(isa: str) -> None:
    """Constant, zero, tiny and huge tokens: within half a step of their scale, and attended to."""
    rows = np.array([1, 0, -0.0, 1e-3, 1e-38, 1e-44, 3e38, 1e30, -7], np.float32)[:, None] * np.ones(
        20, np.float32
    )
    rows = np.concatenate([rows, rows * normal(*rows.shape).clip(-1, 1)])
    cache = npattn.KVCache(1, 1, 20, dtype=np.int8)
    cache.append(rows[None, None], rows[None, None])
    for found in (cache.keys[0, 0], cache.values[0, 0]):
        step = np.abs(rows).max(axis=-1, keepdims=True).astype(float) / 127
        assert (np.abs(found.astype(float) - rows) <= step * 0.501 + 1.5e-44 * 64).all()
        assert_within(found[:9], rows[:9], 64 * 1.5e-45, 1e-6)
    cache = npattn.KVCache(1, 1, 20, dtype=np.int8)
    moderate = rows[np.abs(rows).max(axis=-1) < 1e9]
    cache.append(moderate[None, None], moderate[None, None] * np.float32(1e25))
    output = cache.attend(np.full((1, 2, 1, 20), 0.1, np.float32))
    wide = npattn.KVCache(1, 1, 20)
    wide.append(cache.keys, cache.values)
    assert np.isfinite(output).all()
    # The weights of values this large are rounded to steps of the largest.
    within = 6 * INT8_STEP * np.abs(output).max()
    assert_within(output, wide.attend(np.full((1, 2, 1, 20), 0.1, np.float32)), within)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_tokens_that_are_not_finite(isa: str, bad: float) -> None:
    """They become NaN, whole, and spoil the rows that see them alone."""
    cache, plain = filled([40], dtype=np.int8)
    key, value = tokens(1, 60, 3)
    value[0, 1, 40, 2] = bad
    cache.append(key, value)
    plain[0].append(quantised(key[0]), quantised(np.where(np.isfinite(value), value, 0)[0]))
    assert np.isnan(cache.values[0, 1, 80]).all()
    assert np.isfinite(np.delete(cache.values[0], 80, axis=1)).all()
    shown = np.arange(100) != 80
    for count in (1, 50):
        expected = plain[0].attend(
            queries(1, count)[0], attn_mask=shown & np.ones((count, 100), bool), is_causal=True
        )[0]
        found = cache.attend(queries(1, count), attn_mask=shown)[0]
        assert_within(found, expected, int8_tolerances_of(queries(1, count), key, value, np.ones(1)).output)
    spoilt = np.isnan(cache.attend(queries(1, 50))[0]).any(axis=-1)
    assert not spoilt[:2].any()
    assert not spoilt[:, :30].any()
    assert spoilt[2:, 30:].all()


def test_attention_over_what_is_held(isa: str) -> None:
    """That of a float32 cache of the same numbers, for widths, groups and rows that take every path."""
    for dim, value_dim, heads, rows in ((64, 64, 8, 1), (33, 100, 2, 5), (300, 1, 4, 30), (8, 20, 2, 130)):
        cache = npattn.KVCache(2, 2, dim, value_dim=value_dim, dtype=np.int8)
        cache.append(normal(2, 2, 600, dim), normal(2, 2, 600, value_dim), counts=[600, 140])
        wide = npattn.KVCache(2, 2, dim, value_dim=value_dim)
        wide.append(cache.keys, cache.values, counts=cache.lengths)
        query = normal(2, heads, rows, dim)
        for options in ({}, {"attn_mask": normal(2, heads, rows, 600) > -1}):
            asked: dict[str, Any] = {**options, "return_weights": True, "return_lse": True}
            expected = wide.attend(query, **asked)
            allowed = int8_tolerances_of(query, cache.keys, cache.values, expected[1])
            for found, wanted, within in zip(
                cache.attend(query, **asked),
                expected,
                (allowed.output, allowed.weights, allowed.lse),
                strict=True,
            ):
                assert_within(found, wanted, within)


WIDTHS = [(40, 40), (64, 64), (80, 80), (128, 128), (256, 256), (64, 100), (128, 40)]
ROWS = [(2, 1), (8, 1), (8, 20), (8, 40)]  # query heads of 2 kv heads, and queries: 1, 4, 80 and 160 rows


@pytest.mark.parametrize(("dim", "value_dim"), WIDTHS)
def test_it_is_near_float32(isa: str, dim: int, value_dim: int) -> None:
    """Cosine similarity on unit normal data, of each row of the output."""
    key, value = normal(1, 2, 1000, dim), normal(1, 2, 1000, value_dim)[:, :, ::-1]
    caches = [npattn.KVCache(1, 2, dim, value_dim=value_dim, dtype=dtype) for dtype in (np.float32, np.int8)]
    for cache in caches:
        cache.append(key, value)
    for heads, count in ROWS:
        query = normal(1, heads, count, dim)
        exact, near = (cache.attend(query).astype(float) for cache in caches)
        cosine = (exact * near).sum(-1) / np.linalg.norm(exact, axis=-1) / np.linalg.norm(near, axis=-1)
        assert 0.9995 < cosine.min() < 1


@pytest.mark.parametrize(("dim", "value_dim"), WIDTHS)
@pytest.mark.parametrize("token", [0.0, -7.0, -1e-44, 1e30, 3e38])
def test_constant_tokens_give_numbers(isa: str, token: float, dim: int, value_dim: int) -> None:
    """Zero and huge ones too: the output is the mean of the values, as all scores are alike."""
    key, value = np.full((1, 2, 300, dim), token, np.float32), normal(1, 2, 300, value_dim)
    cache = npattn.KVCache(1, 2, dim, value_dim=value_dim, dtype=np.int8)
    cache.append(key, value)
    spoilt = npattn.KVCache(1, 2, dim, value_dim=value_dim, dtype=np.int8)
    spoilt.append(normal(1, 2, 300, dim), np.full_like(value, token))
    for heads, count in ROWS:
        query = normal(1, heads, count, dim) * np.float32(1 / dim / max(1, abs(token)))
        mean = np.repeat(value.mean(-2, keepdims=True), heads // 2, axis=1)
        output = cache.attend(query, is_causal=False)
        assert_within(output, np.broadcast_to(mean, output.shape), 0.1)
        assert not np.isnan(spoilt.attend(query)).any()


def test_rope_turns_before_rounding(isa: str) -> None:
    for given in ("float32", "bfloat16"):
        key, value = (x.astype(DTYPES[given]) for x in tokens(1, 50))
        cache = cache_of(1, dtype=np.int8, rope={"base": 100.0})
        cache.append(key, value)
        cos, sin = npattn.rope_cos_sin(50, cache.head_dim, base=100.0)
        assert_same_bits(cache.keys, quantised(npattn.rotary_embedding(key.astype(np.float32), cos, sin)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_queries(isa: str, dtype: str) -> None:
    cache, _ = filled([40, 9], dtype=np.int8)
    query = queries(2, 3).astype(DTYPES[dtype])
    assert_same_bits(cache.attend(query), cache.attend(query.astype(np.float32)).astype(query.dtype))


def test_the_bits_of_pages_and_prefixes(isa: str) -> None:
    plain = npattn.KVCache(7, 1, 40, dtype=np.int8)
    cache = npattn.PagedKVCache(80, 32, 1, 40, dtype=np.int8)
    key, value = normal(1, 1, 1100, 40), normal(1, 1, 1100, 40)[..., ::-1]
    first = cache.add_sequence()
    cache.append([first], key, value)
    plain.append(*(np.broadcast_to(x, (7, 1, 1100, 40)) for x in (key, value)))
    ids = [first, *(cache.add_sequence(prefix=first) for _ in range(6))]
    for one in (cache, pickle.loads(pickle.dumps(cache))):
        one.append(ids, normal(7, 1, 3, 40), normal(7, 1, 3, 40))
    plain.append(normal(7, 1, 3, 40), normal(7, 1, 3, 40))
    query = normal(7, 8, 3, 40)
    expected = plain.attend(query)
    assert_same_bits(cache.attend(ids, query), expected)
    assert_same_bits(pickle.loads(pickle.dumps(cache)).attend(ids, query), expected)


def test_memory_of_pages_never_shows(isa: str) -> None:
    """Nor do scales that slots had before, NaN here."""
    cache, _ = filled([200], dtype=np.int8)
    cache.append(*(np.full_like(x, np.nan) for x in tokens(1, 128)))
    cache.crop(0)
    key, value = tokens(1, 37)
    cache.append(key, value)
    fresh, plain = filled([37], dtype=np.int8)
    for count in (1, 37):
        assert_attends(cache.attend, plain, queries(1, count), dtype=np.int8)
        assert_same_bits(cache.attend(queries(1, count)), fresh.attend(queries(1, count)))


def test_errors_change_nothing() -> None:
    cache, _ = filled([40, 9], dtype=np.int8)
    before = state_of(cache)
    key, value = tokens(2, 3)
    for wrong in (np.float64, np.int8, bool):
        with pytest.raises(
            TypeError, match=r"key has dtype .*the cache holds int8 and takes float32.*astype"
        ):
            cache.append(key.astype(wrong), value)
    with pytest.raises(TypeError, match=r"key has dtype int64.* float32, .*np.asarray\(key, np.float32\)$"):
        cache.append(np.ones_like(key, int).tolist(), value)
    with pytest.raises(TypeError, match=r"query has dtype float64.*np.asarray\(query, np"):
        cache.attend(queries(2, 3).tolist())
    with pytest.raises(
        TypeError, match=r"query has dtype float64, the cache holds int8.*astype\(np.float32\)"
    ):
        cache.attend(queries(2, 3).astype(float))
    assert state_of(cache) == before


def test_a_quarter_of_the_bytes_and_the_scales() -> None:
    sizes = [npattn.KVCache(2, 2, 64, capacity=640, dtype=dtype).nbytes for dtype in (np.int8, np.float32)]
    assert sizes[0] == pytest.approx(sizes[1] / 4 + 2 * 2 * 640 * 2 * 4, rel=0.01)


def test_what_rounding_of_queries_and_weights_costs(isa: str) -> None:
    """Little beside what the cache itself rounds: cosine similarity to exact attention over what is held."""
    for rows in (1, 12, 13, 97):
        cache = npattn.KVCache(1, 2, 128, dtype=np.int8)
        cache.append(normal(1, 2, 700, 128), normal(1, 2, 700, 128)[:, :, ::-1])
        wide = npattn.KVCache(1, 2, 128, dtype=np.float64)
        wide.append(cache.keys.astype(float), cache.values.astype(float))
        query = normal(1, 4, rows, 128)
        found, exact = cache.attend(query).astype(float), wide.attend(query.astype(float))
        cosine = (exact * found).sum(-1) / np.linalg.norm(exact, axis=-1) / np.linalg.norm(found, axis=-1)
        assert cosine.min() > 1 - 1e-6


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_hidden_values_change_no_bit(isa: str, rows: int) -> None:
    """NaN, behind a mask, in the place of numbers."""
    key, value = tokens(1, 300)
    shown = np.ones(300, bool)
    shown[101:150] = False
    results = []
    for bad in (np.nan, 1.0):
        cache = cache_of(1, dtype=np.int8)
        cache.append(key, np.where(shown[:, None], value, np.float32(bad)))
        results.append(cache.attend(queries(1, rows), attn_mask=shown))
    assert np.isfinite(results[0]).all()
    assert_same_bits(*results)


@pytest.mark.parametrize("dim", [40, 300])
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_large_queries(isa: str, rows: int, dim: int) -> None:
    """What is summed before the scale of a key is applied does not overflow where the score does not."""
    query = np.full((1, 1, rows, dim), 1e36, np.float32)
    query[:, :, ::2] = 7e37  # beside others
    key = np.full((1, 1, 3, dim), 1e-37, np.float32)
    key[0, 0, 1] = 3e-38
    value = np.arange(1, 13, dtype=np.float32).reshape(1, 1, 3, 4)
    caches = [npattn.KVCache(1, 1, dim, value_dim=4, dtype=dtype) for dtype in (np.int8, np.float32)]
    for cache in caches:
        cache.append(key, value)
    found, expected = (cache.attend(query, is_causal=False, scale=0.01) for cache in caches)
    np.testing.assert_allclose(found, expected, rtol=2e-2)


@pytest.mark.parametrize("rows", [1, 130])
def test_large_queries_of_large_keys(isa: str, rows: int) -> None:
    """Each has zeros where the other has not: the score is 0."""
    query, key = np.zeros((2, 1, 1, rows, 64), np.float32)
    query[..., 0], key[..., 1] = 1e38, 1e38
    cache = npattn.KVCache(1, 1, 64, dtype=np.int8)
    cache.append(key, np.ones_like(key))
    np.testing.assert_allclose(cache.attend(query), 1, rtol=1e-6)
