"""Recorded faults of other systems: caches that overflow, pages that are read wrongly."""

from __future__ import annotations

from typing import Any

import npattn
import numpy as np
import pytest
from npattn import scaled_dot_product_attention as sdpa
from plain_cache import state_of
from shapes import Array, pattern
from support import assert_case, assert_same_bits

pytestmark = pytest.mark.usefixtures("isa")


def pair(
    count: int, batch: int = 1, heads: int = 2, dim: int = 4, dtype: Any = np.float32
) -> tuple[Array, Array]:
    shape = (batch, heads, count, dim)
    return pattern(shape, 53, 11 + count, dtype), pattern(shape, 71, 3 + count, dtype)


def test_KV_02() -> None:
    cache = npattn.KVCache(1, 2, 4, capacity=4)
    parts = [pair(3)]
    cache.append(*parts[0])
    for tokens, fits in ((2, False), (1, True), (1, False)):
        before = state_of(cache)
        if fits:
            parts.append(pair(tokens))
            cache.append(*parts[-1])
        else:
            with pytest.raises(ValueError, match="capacity is 4"):
                cache.append(*pair(tokens))
            assert state_of(cache) == before
    assert cache.lengths.tolist() == [4]
    for held, number in ((cache.keys, 0), (cache.values, 1)):
        assert_same_bits(held, np.concatenate([part[number] for part in parts], axis=2))


def test_KV_02_growing() -> None:
    cache = npattn.KVCache(1, 2, 4)
    parts = [pair(3), pair(2)]
    for part in parts:
        cache.append(*part)
    assert cache.lengths.tolist() == [5]
    key, value = (np.concatenate([part[number] for part in parts], axis=2) for number in (0, 1))
    assert_same_bits(cache.keys, key)
    assert_same_bits(cache.values, value)
    query = pattern((1, 4, 5, 4), 37, 5, np.float32)
    assert_case(cache.attend(query), sdpa(query, key, value, is_causal=True))


def test_KV_02_mismatches() -> None:
    cache = npattn.KVCache(1, 2, 4, capacity=4)
    cache.append(*pair(3))
    before = state_of(cache)
    wrong = [pair(1, heads=3), pair(1, heads=1), pair(1, dim=5), pair(1, batch=2), (pair(1)[0], pair(2)[1])]
    for key, value in wrong:
        with pytest.raises(ValueError):
            cache.append(key, value)
    with pytest.raises(TypeError, match="float64"):
        cache.append(*pair(1, dtype=np.float64))
    assert state_of(cache) == before


def test_KV_02_it_owns_its_data() -> None:
    key, value = pair(10)
    cache = npattn.KVCache(1, 2, 4, capacity=4)
    cache.append(key[:, :, 2:5], value[:, :, 2:5])
    before = state_of(cache)
    keys, values = cache.keys, cache.values
    assert_same_bits(keys, key[:, :, 2:5])
    key[...], value[...] = 9, 9
    assert state_of(cache) == before
    cache.append(*pair(1))  # arrays returned earlier are copies
    assert_same_bits(cache.keys[:, :, :3], keys)
    assert_same_bits(cache.values[:, :, :3], values)


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
@pytest.mark.parametrize("page_size", [32, 64, 96])
def test_KV_04(page_size: int, length: int) -> None:
    """Pages handed out in reverse order, unused slots NaN: the bits of the cache without pages."""
    scales = np.array([1, 1000], np.float32)[:, None, None]
    key, value = (x * scales for x in pair(length, dim=8))
    pages = npattn.PagedKVCache(4, page_size, 2, 8)
    nothing = np.full((1, 2, page_size, 8), np.nan, np.float32)
    before = [pages.add_sequence() for _ in range(4)]
    for sequence in before:
        pages.append([sequence], nothing, nothing)
    for sequence in before:
        pages.free(sequence)
    sequence = pages.add_sequence()
    pages.append([sequence], key, value)
    tables = pages._store.dump(pages._store.slots_of([sequence]), 1)[2]
    assert len(tables[0]) == -(-length // page_size)
    contiguous = npattn.KVCache(1, 2, 8)
    contiguous.append(key, value)
    for rows in (1, length):
        query = pattern((1, 4, rows, 8), 37, 5, np.float32) / 1000
        result = pages.attend([sequence], query)
        assert_same_bits(result, contiguous.attend(query))
        assert_case(result / 1000, sdpa(query, key, value, is_causal=True, query_offset=length - rows) / 1000)


@pytest.mark.parametrize("page_size", [1, 3, 8, 16])
def test_KV_04_unsupported_sizes_are_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"page_size must be a multiple of 32, got {page_size}"):
        npattn.PagedKVCache(4, page_size, 2, 8)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_KV_04_quantised(length: int) -> None:
    """int8: each element within half the scale of its own token and head, paged or not."""
    scales = np.array([1, 1000], np.float32)[:, None, None]
    key, value = (x * scales for x in pair(length, dim=8))
    cache = npattn.KVCache(1, 2, 8, dtype=np.int8)
    cache.append(key, value)
    for given, held in ((key, cache.keys), (value, cache.values)):
        scale = np.abs(given.astype(np.float64)).max(axis=-1, keepdims=True) / 127
        assert held.dtype == np.float32
        assert (np.abs(held - given.astype(np.float64)) <= 0.5 * scale * (1 + 1e-5)).all()
    pages = npattn.PagedKVCache(2, 32, 2, 8, dtype=np.int8)
    sequence = pages.add_sequence()
    pages.append([sequence], key, value)
    query = pattern((1, 4, 1, 8), 37, 5, np.float32) / 1000
    assert_same_bits(pages.attend([sequence], query), cache.attend(query))
