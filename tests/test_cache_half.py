"""Caches of half precision: what they take and round, what attend makes of it, in which dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import npattn
import numpy as np
import pytest
from plain_cache import KV_HEADS, VALUE_DIM, cache_of, filled, held, queries, state_of, tokens
from shapes import Array, layouts_of
from support import DTYPES, assert_same_bits, multiplies_halves

HALVES = ("float16", "bfloat16")
TAKEN = ("float32", "float16", "bfloat16")


def wide_cache(cache: npattn.KVCache, **settings: Any) -> npattn.KVCache:
    """A float32 cache of the numbers that this one holds."""
    wide = npattn.KVCache(
        cache.batch, cache.num_kv_heads, cache.head_dim, value_dim=cache.value_dim, **settings
    )
    wide.append(cache.keys.astype(np.float32), cache.values.astype(np.float32), counts=cache.lengths)
    return wide


def normal(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("given", TAKEN)
@pytest.mark.parametrize("dtype", HALVES)
def test_tokens_are_rounded_once(isa: str, dtype: str, given: str) -> None:
    key, value = tokens(2, 70)
    key[0, 0, 0, :4] = [np.inf, 7e4, -1e-7, np.nan]
    with np.errstate(over="ignore"):
        key, value = key.astype(DTYPES[given]), value.astype(DTYPES[given])
        expected = [held(x.astype(np.float32), DTYPES[dtype]) for x in (key, value)]
    for (name, k), (_, v) in zip(layouts_of(key), layouts_of(value), strict=True):
        cache = cache_of(dtype=DTYPES[dtype])
        with np.errstate(over="ignore"):
            cache.append(k[:, :, :37], v[:, :, :37])
        cache.append(k[:, :, 37:], v[:, :, 37:])
        for found, wanted in zip((cache.keys, cache.values), expected, strict=True):
            np.testing.assert_array_equal(found.astype(float), wanted.astype(float), name)
            assert found.dtype == DTYPES[dtype]


@pytest.mark.parametrize("given", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", HALVES)
def test_tokens_beyond_its_range(isa: str, dtype: str, given: str) -> None:
    """NumPy warns, as its own astype does; tokens that are not real, and inf and NaN, are none of these."""
    largest = {"float16": np.float32(65519.99), "bfloat16": np.float32(2.0**127 * 1.99609)}[dtype]
    beyond = {"float16": np.float32(65520), "bfloat16": np.float32(2.0**127 * 1.99610)}[dtype]
    key, value = (x.astype(DTYPES[given]) for x in tokens(2, 70))
    key[0, 0, 0, :4] = [np.inf, -np.inf, np.nan, largest if given == "float32" else 0]
    value[1, 1, 69, 4] = beyond
    if np.isinf(value.astype(np.float32)).any():  # bfloat16 given has no such number
        return
    for rope in (None, {}):
        cache = cache_of(dtype=DTYPES[dtype], rope=rope)
        pool = npattn.PagedKVCache(20, 32, KV_HEADS, cache.head_dim, value_dim=VALUE_DIM, dtype=DTYPES[dtype])
        ids = [pool.add_sequence(), pool.add_sequence()]
        cache.append(key, value, counts=[70, 69])
        pool.append(ids, key, value, counts=[70, 69])
        before = state_of(cache)
        for append in (cache.append, partial(pool.append, ids)):
            with np.errstate(over="raise"), pytest.raises(FloatingPointError, match="overflow"):
                append(key, value)
        assert state_of(cache) == before
        assert pool.lengths(ids).tolist() == [70, 69]
        for append in (cache.append, partial(pool.append, ids)):
            with pytest.warns(RuntimeWarning, match="overflow encountered in cast"):
                append(key, value)
            with np.errstate(over="ignore"):
                append(-key, -value)
        assert cache.values[1, 1, [138, 208], 4].tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("dtype", HALVES)
def test_float32_tokens_are_those_rounded_beforehand(isa: str, dtype: str) -> None:
    """In pieces that begin and end within pages, ragged, by every way of calling, with any threads."""
    for dim, value_dim in ((8, 5), (1, 1), (130, 64)):
        caches = [npattn.KVCache(3, 2, dim, value_dim=value_dim, dtype=DTYPES[dtype]) for _ in range(2)]
        pools = [npattn.PagedKVCache(60, 32, 2, dim, value_dim=value_dim, dtype=DTYPES[dtype]) for _ in "12"]
        ids = [[pool.add_sequence() for _ in range(3)] for pool in pools]
        for n, threads in ((1, 1), (37, 3), (500, 3), (64, 2)):
            key, value = 2 * normal(n, 3, 2, dim).transpose(1, 2, 0, 3), normal(3, 2, n, value_dim)[:, ::-1]
            given = [(key, value), (key.astype(DTYPES[dtype]), value.astype(DTYPES[dtype]))]
            with npattn.threads(threads):
                for counts in (None, [n, n // 2, 0]):
                    for cache, arrays in zip(caches, given, strict=True):
                        cache.append(*arrays, counts=counts)
                for pool, sequences, arrays in zip(pools, ids, given, strict=True):
                    pool.append(sequences, *arrays, counts=[n, n // 3, 1])
            mixed = [(key, given[1][1]), (np.asfortranarray(key), value)]
            for arrays in mixed:
                caches[0].append(*arrays)
                caches[1].append(*given[1])
        assert_same_bits(caches[0].keys, caches[1].keys)
        assert_same_bits(caches[0].values, caches[1].values)
        query = normal(3, 4, 1, dim)
        assert_same_bits(caches[0].attend(query), caches[1].attend(query))
        assert_same_bits(pools[0].attend(ids[0], query), pools[1].attend(ids[1], query))


@pytest.mark.parametrize("dtype", HALVES)
def test_attention_over_what_is_held(isa: str, dtype: str) -> None:
    """The bits of a float32 cache of the same numbers, for widths, groups and rows that take every path."""
    for dim, value_dim, heads, rows in ((64, 64, 8, 1), (33, 100, 2, 5), (300, 1, 4, 30), (8, 20, 2, 130)):
        cache = npattn.KVCache(2, 2, dim, value_dim=value_dim, dtype=DTYPES[dtype])
        cache.append(normal(2, 2, 600, dim), normal(2, 2, 600, value_dim), counts=[600, 140])
        wide = wide_cache(cache)
        query = normal(2, heads, rows, dim)
        mask = normal(2, heads, rows, 600) > -1
        for options in ({}, {"attn_mask": mask}):
            expected = wide.attend(query, return_weights=True, return_lse=True, **options)
            for found, wanted in zip(
                cache.attend(query, return_weights=True, return_lse=True, **options), expected, strict=True
            ):
                assert_same_bits(found, wanted)
            assert_same_bits(cache.attend(query, **options), expected[0])


@pytest.mark.parametrize("query_dtype", HALVES)
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_half_queries(isa: str, dtype: str, query_dtype: str) -> None:
    """They count as they are, and the result is rounded once, where they are not multiplied as they are."""
    if multiplies_halves(isa) and dtype == query_dtype == "bfloat16":
        return  # test_cache_pairs.py
    cache, _ = filled([40, 9], dtype=DTYPES[dtype])
    query = queries(2, 3).astype(DTYPES[query_dtype])
    if {dtype, query_dtype} == set(HALVES):
        words = rf"float16 and bfloat16 do not mix \(query {query_dtype}, cache {dtype}\); convert"
        with pytest.raises(TypeError, match=words):
            cache.attend(query)
        with pytest.raises(TypeError, match=words):
            cache.attend(query, counts=[3, 2])
        return
    output, weights, lse = cache.attend(query, counts=[3, 2], return_weights=True, return_lse=True)
    wide = cache.attend(query.astype(np.float32), counts=[3, 2], return_weights=True, return_lse=True)
    assert_same_bits(output, wide[0].astype(query.dtype))
    assert_same_bits(weights, wide[1].astype(query.dtype))
    assert_same_bits(lse, wide[2])
    assert_same_bits(cache.attend(query), cache.attend(query.astype(np.float32)).astype(query.dtype))
    out = np.full((2, 4, 3, 2 * VALUE_DIM), np.nan, query.dtype)[..., ::2]
    assert cache.attend(query, counts=[3, 2], out=out) is out
    assert_same_bits(out, output)


@pytest.mark.parametrize("given", TAKEN)
@pytest.mark.parametrize("dtype", HALVES)
def test_rope_turns_before_rounding(isa: str, dtype: str, given: str) -> None:
    key, value = (x.astype(DTYPES[given]) for x in tokens(1, 50))
    cache = cache_of(1, dtype=DTYPES[dtype], rope={"base": 100.0})
    cache.append(key[:, :, :45], value[:, :, :45])
    cache.append(key[:, :, 45:], value[:, :, 45:])
    cos, sin = npattn.rope_cos_sin(50, cache.head_dim, base=100.0)
    turned = npattn.rotary_embedding(key.astype(np.float32), cos, sin)
    assert_same_bits(cache.keys, held(turned, DTYPES[dtype]))
    query = queries(1, 5)
    expected = wide_cache(cache).attend(npattn.rotary_embedding(query, cos[45:], sin[45:]))
    assert_same_bits(cache.attend(query), expected)
    halves = query.astype(DTYPES[dtype])
    expected = cache.attend(halves.astype(np.float32)).astype(halves.dtype)
    assert_same_bits(cache.attend(halves), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_hidden_values_are_not_touched(isa: str, dtype: str) -> None:
    """NaN before the window and behind the length, for few rows and for many."""
    key, value = tokens(1, 300)
    value[:, :, 100:150] = np.nan
    for rows in (1, 60):
        results = []
        for bad in (np.nan, 0.0):
            cache = cache_of(1, dtype=DTYPES[dtype])
            cache.append(*(np.full_like(x, np.nan) for x in (key, value)))
            cache.crop(0)
            cache.append(key, np.where(np.isnan(value), np.float32(bad), value))
            shown = np.ones(300, bool)
            shown[100:150] = False
            results.append(cache.attend(queries(1, rows), attn_mask=shown))
        assert_same_bits(*results)


@pytest.mark.parametrize("dtype", HALVES)
def test_errors(dtype: str) -> None:
    cache, _ = filled([40, 9], dtype=DTYPES[dtype])
    before = state_of(cache)
    key, value = tokens(2, 3)
    for wrong in (np.float64, np.int64, bool):
        message = f"key has dtype .*the cache holds {dtype} and takes float32, float16 and bfloat16.*float32"
        with pytest.raises(TypeError, match=message):
            cache.append(key.astype(wrong), value)
    with pytest.raises(ValueError, match="value has shape"):
        cache.append(key, value[..., :1])
    with pytest.raises(
        TypeError, match=rf"query has dtype float64, the cache holds {dtype}.*astype\(np.float32\)"
    ):
        cache.attend(queries(2, 3).astype(float))
    assert state_of(cache) == before


@pytest.mark.parametrize("dtype", HALVES)
def test_half_the_bytes(dtype: str) -> None:
    sizes = [
        npattn.KVCache(2, KV_HEADS, 64, capacity=640, dtype=d).nbytes for d in (DTYPES[dtype], np.float32)
    ]
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.01)  # what is known of the pages is no tokens


def test_a_layer_writes_to_it() -> None:
    """A float32 layer with a bfloat16 cache is near the same layer with one of float32."""
    layer = npattn.MultiHeadAttention.random(64, 4, rope={}, rng=0)
    x = normal(2, 40, 64)
    caches = [npattn.KVCache(2, 4, 16, dtype=dtype) for dtype in (np.float32, DTYPES["bfloat16"])]
    exact, near = (layer(x, cache=cache) for cache in caches)
    assert near.dtype == np.float32
    assert 0 < np.abs(near - exact).max() < 2e-2 * np.abs(exact).max()
