"""KVCache: what crop, reorder, windows, capacity and rope make of it."""

from __future__ import annotations

from typing import Any

import npattn
import numpy as np
import pytest
from plain_cache import (
    DIM,
    KV_HEADS,
    VALUE_DIM,
    PlainSequence,
    assert_attends,
    cache_of,
    filled,
    plain_arrays,
    queries,
    state_of,
    tokens,
)
from support import assert_same_bits, assert_within

PAGE_BYTES = 64 * KV_HEADS * (DIM + VALUE_DIM) * 4
PAGE_BYTES += -PAGE_BYTES % 256  # the part of a head begins on a cache line pair


def assert_holds(cache: npattn.KVCache, plain: list[PlainSequence]) -> None:
    for held, wanted in zip((cache.keys, cache.values), plain_arrays(plain), strict=True):
        assert_same_bits(held, wanted)
    assert cache.lengths.tolist() == [sequence.length for sequence in plain]


def append(cache: npattn.KVCache, plain: list[PlainSequence], count: int, seed: int = 1) -> None:
    key, value = tokens(len(plain), count, seed, cache.dtype)
    cache.append(key, value)
    for sequence, k, v in zip(plain, key, value, strict=True):
        sequence.append(k, v)


def pages_in_use(cache: npattn.KVCache) -> int:
    return cache._store.pages - cache._store.free_pages


# --- crop and reorder ---


@pytest.mark.parametrize("kept", [[0, 0], [1, 130], [64, 65], [150, 129], 40], ids=str)
def test_crop(isa: str, kept: Any) -> None:
    cache, plain = filled([150, 130])
    cache.crop(kept)
    for sequence, length in zip(plain, np.broadcast_to(kept, 2), strict=True):
        sequence.crop(length)
    assert_holds(cache, plain)
    append(cache, plain, 70)
    assert_holds(cache, plain)
    assert_attends(cache.attend, plain, queries(2, 70))


def test_reorder(isa: str) -> None:
    cache, plain = filled([70, 5, 64, 0])
    for indices in ([2, 0, 0, 1], [3, 2, 1, 0], [1, 1, 1, 1]):
        cache.reorder(indices)
        plain = [plain[index].fork() for index in indices]
        assert_holds(cache, plain)
        append(cache, plain, 3)
        assert_holds(cache, plain)
        assert_attends(cache.attend, plain, queries(4, 1))


def test_rows_of_one_page_at_different_lengths(isa: str) -> None:
    """Cropped forks write where the longest one holds tokens."""
    for lengths in ([50, 40, 30], [30, 40, 50], [40, 50, 40]):
        cache, plain = filled([50, 1, 1])
        cache.reorder([0, 0, 0])
        plain = [plain[0].fork() for _ in range(3)]
        cache.crop(lengths)
        for sequence, length in zip(plain, lengths, strict=True):
            sequence.crop(length)
        append(cache, plain, 5)
        assert_holds(cache, plain)
        append(cache, plain, 20)
        assert_holds(cache, plain)


def test_duplicates_cost_a_page_each() -> None:
    """Shared pages are copied only where they are written: one for each row but the last owner."""
    cache, plain = filled([6400 + 10, 1, 1, 1])
    cache.reorder([0, 0, 0, 0])
    plain = [plain[0].fork() for _ in range(4)]
    assert pages_in_use(cache) == 101
    append(cache, plain, 1)
    assert pages_in_use(cache) == 101 + 3
    append(cache, plain, 1)
    assert pages_in_use(cache) == 101 + 3
    cache.reorder([0, 0, 0, 0])
    assert pages_in_use(cache) == 101
    assert_holds(cache, [plain[0].fork() for _ in range(4)])


def test_an_append_touches_its_own_pages_only() -> None:
    """O(n) whatever the length: no page is taken, given back or copied but those that the tokens go to."""
    cache, _ = filled([40000])
    one = tokens(1, 1)
    for length in range(40000, 40200):
        before = cache._store.dump(cache._slots, 1)[2][0] if length % 64 == 0 else None
        cache.append(*one)
        assert pages_in_use(cache) == -(-(length + 1) // 64)
        if before is not None:
            assert cache._store.dump(cache._slots, 1)[2][0][: len(before)] == before
    assert cache.nbytes < 1.6 * 40200 / 64 * PAGE_BYTES


def test_memory_grows_geometrically() -> None:
    cache, sizes = cache_of(1), set()
    one = tokens(1, 64)
    for _ in range(300):
        cache.append(*one)
        sizes.add(cache.nbytes)
    assert cache._store.pages <= 1.5 * 300
    assert cache.nbytes < 1.02 * cache._store.pages * PAGE_BYTES
    assert len(sizes) < 30


# --- windows ---

RINGS: list[dict[str, Any]] = [
    {"sliding_window": 1},
    {"sliding_window": 20},
    {"sliding_window": 64},
    {"sliding_window": 100, "sink_tokens": 4},
    {"sliding_window": 7, "sink_tokens": 70},
]


@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_window(isa: str, ring: dict[str, Any]) -> None:
    cache, plain = filled([5, 90, 0], **ring)
    for seed, count in enumerate([1, 30, 1, 64, 200, 1, 1, 130]):
        append(cache, plain, count, seed)
        assert_holds(cache, plain)
        assert_attends(cache.attend, plain, queries(3, count))


@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_window_is_bounded(ring: dict[str, Any]) -> None:
    """Whatever was streamed: the pages of window, sinks and chunk, two that they share, one on its way."""
    cache = cache_of(2, **ring)
    kept = -(-ring["sliding_window"] // 64) - (-ring.get("sink_tokens", 0) // 64)
    for chunk in (1, 10):
        one = tokens(2, chunk)
        for _ in range(700):
            cache.append(*one)
    assert pages_in_use(cache) <= 2 * (kept + 2)
    assert cache._store.pages <= 1.5 * 2 * (kept + 3)
    assert len(cache) == 7700


@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_cropping_a_ring(isa: str, ring: dict[str, Any]) -> None:
    """Every length: refused exactly where the last token kept would see one that is gone."""
    for steps in ([3], [140], [100, 40], [150, 1, 12]):
        for length in range(sum(steps) + 1):
            cache, plain = filled([steps[0]], **ring)
            for count in steps[1:]:
                append(cache, plain, count)
            if not plain[0].may_crop(length):
                before = state_of(cache)
                with pytest.raises(ValueError, match="were let go"):
                    cache.crop(length)
                assert state_of(cache) == before
                continue
            cache.crop(length)
            plain[0].crop(length)
            assert_holds(cache, plain)
            if length % 37 == 1:
                assert_attends(cache.attend, plain, queries(1, 1))
                append(cache, plain, 3)
                assert_holds(cache, plain)
                assert_attends(cache.attend, plain, queries(1, 3))


def test_queries_of_a_ring_that_see_what_is_gone() -> None:
    cache, _ = filled([50], sliding_window=10)
    cache.append(*tokens(1, 4))
    cache.attend(queries(1, 4))
    with pytest.raises(ValueError, match=r"sees the tokens from 40 on, but those before 41 were let go"):
        cache.attend(queries(1, 5))


@pytest.mark.parametrize("ring", [*RINGS, {"sliding_window": 300, "sink_tokens": 5}], ids=str)
def test_a_narrower_window_of_queries_that_see_only_what_is_held(isa: str, ring: dict[str, Any]) -> None:
    """The first query at p = length - n sees p - left and later: that must be held."""
    cache, plain = filled([800, 60], **ring)
    append(cache, plain, 3)
    held_from = int(cache._store.firsts(cache._slots)[0])
    for count in (1, 4, 40):
        for left in (0, 2, ring["sliding_window"] - 1, ring["sliding_window"], 2**70):
            start = len(cache) - count - min(left, ring["sliding_window"] - 1)
            if max(start, ring.get("sink_tokens", 0)) >= held_from:
                assert_attends(cache.attend, plain, queries(2, count), window=(left, None))
                assert_attends(cache.attend, plain, queries(2, count), window=(left, 1), is_causal=False)
                continue
            with pytest.raises(ValueError, match=f"tokens from {start} on, but those before {held_from}"):
                cache.attend(queries(2, count), window=(left, None))
    query = queries(2, 3)
    narrow = cache.attend(query[:, :, -2:], window=(1, None))
    assert_same_bits(cache.attend(query, window=(1, None))[:, :, -2:], narrow)


# --- capacity ---


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({"capacity": 100}, [100, 0]),
        ({"capacity": 130}, [64, 66]),
        ({"capacity": 30, "sliding_window": 20, "sink_tokens": 3}, [30, 8, 8, 8, 1, 8]),
        ({"capacity": 300, "sliding_window": 130, "sink_tokens": 70}, [300, 101, 101, 50, 101]),
    ],
    ids=str,
)
def test_capacity(isa: str, settings: dict[str, Any], fits: list[int]) -> None:
    """The memory is taken at once, enough for what is promised and never more."""
    cache, plain = filled([0, 0, 0], **settings)
    pages = cache._store.pages
    assert cache.nbytes >= pages * PAGE_BYTES > 0
    for seed, count in enumerate(fits):
        if seed == 2:
            cache.reorder([2, 2, 0])
            plain = [plain[i].fork() for i in (2, 2, 0)]
        append(cache, plain, count, seed)
        room = cache._store.room(cache._slots)
        assert_holds(cache, plain)
        assert_attends(cache.attend, plain, queries(3, count))
        before = state_of(cache)
        for extra in (1, 64):
            with pytest.raises(ValueError, match=rf"capacity is {settings['capacity']} tokens"):
                cache.append(*tokens(3, int(room.max()) + extra))
        assert state_of(cache) == before
    assert cache._store.pages == pages


# --- rope ---


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"base": 500.0, "interleaved": True, "rotary_dim": 4},
        {"scaling": {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 16}},
        {"sections": [2, 1, 1]},
        {"rotary_dim": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rope(isa: str, rope: dict[str, Any], dtype: Any) -> None:
    """What it holds is apply_rope's key; queries are turned to the places of the last tokens."""
    cache, plain = cache_of(2, rope=rope, dtype=dtype), cache_of(2, dtype=dtype)
    for seed, (count, counts) in enumerate([(7, [7, 3]), (1, [1, 1]), (5, [0, 5]), (30, [30, 30])]):
        key, value = tokens(2, count, seed, dtype)
        query = queries(2, count, dtype=dtype)
        start = cache.lengths
        places = start[:, None] + np.minimum(np.arange(count), np.maximum(np.array(counts) - 1, 0)[:, None])
        sections = 3 if "sections" in rope else None
        places = places if sections is None else np.broadcast_to(places, (sections, *places.shape))
        turned_query, turned_key = npattn.apply_rope(query, key, places, **rope)
        cache.append(key, value, counts=counts)
        plain.append(turned_key, value, counts=counts)
        assert_same_bits(cache.keys, plain.keys)
        real = cache.attend(query, counts=counts), plain.attend(turned_query, counts=counts)
        assert_within(*real, 1e-6)
