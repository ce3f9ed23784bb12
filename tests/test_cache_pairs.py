"""bfloat16 queries over bfloat16 caches: near the reference, and which calls have the same bits.

One instruction set multiplies them as they are, the others in float32; the promises are the same.
"""

from __future__ import annotations

from typing import Any

import npattn
import numpy as np
import pytest
from plain_cache import PlainSequence, assert_attends
from shapes import Array
from support import assert_same_bits
from tolerances import BFLOAT16

KV_HEADS = 2
TILE = 12  # rows that are multiplied with the pages as they are


def normal(*shape: int) -> Array:
    rng = np.random.default_rng(shape)
    return rng.standard_normal(shape, dtype=np.float32).astype(BFLOAT16)


def filled(lengths: list[int], dim: int, value_dim: int) -> tuple[npattn.KVCache, list[PlainSequence]]:
    cache = npattn.KVCache(len(lengths), KV_HEADS, dim, value_dim=value_dim, dtype=BFLOAT16)
    key = normal(len(lengths), KV_HEADS, max(lengths), dim)
    value = normal(len(lengths), KV_HEADS, max(lengths), value_dim)
    cache.append(key, value, counts=lengths)
    rows = zip(key, value, lengths, strict=True)
    return cache, [PlainSequence(k[:, :n], v[:, :n]) for k, v, n in rows]


def queries(batch: int, group: int, rows: int, dim: int) -> Array:
    return normal(batch, group * KV_HEADS, rows, dim)


def paged(
    key: Array, value: Array, page_size: int, *, sequences: int = 1
) -> tuple[npattn.PagedKVCache, list[int]]:
    """Sequences that share the pages of one (1, Hkv, n, E)."""
    pages = (key.shape[2] + page_size - 1) // page_size + 4 * sequences
    cache = npattn.PagedKVCache(
        pages, page_size, KV_HEADS, key.shape[3], value_dim=value.shape[3], dtype=BFLOAT16
    )
    ids = [cache.add_sequence()]
    cache.append(ids, key, value)
    ids += [cache.add_sequence(prefix=ids[0]) for _ in range(sequences - 1)]
    return cache, ids


@pytest.mark.parametrize("group", [1, 3, 4, 8, TILE, TILE + 1, 25])
@pytest.mark.parametrize("dims", [(64, 64), (33, 45), (1, 70), (128, 1)], ids=str)
def test_near_the_reference(isa: str, group: int, dims: tuple[int, int]) -> None:
    """Lengths round a panel, a page, a block and a part; a row, and several of which some are none."""
    cache, plain = filled([2, 31, 33, 64, 65, 257, 515], *dims)
    batch = len(plain)
    assert_attends(cache.attend, plain, queries(batch, group, 1, dims[0]), dtype=BFLOAT16)
    counts = [2, 5, 0, 1, 4, 5, 3]
    assert_attends(cache.attend, plain, queries(batch, group, 5, dims[0]), counts, dtype=BFLOAT16)


@pytest.mark.parametrize(("group", "rows"), [(1, 1), (4, 2), (4, 30), (2, 70)])
def test_wide_heads_near_the_reference(isa: str, group: int, rows: int) -> None:
    """Head dims beyond a row of copied queries, odd ones too."""
    for dims in ((512, 40), (513, 300), (1100, 33)):
        cache, plain = filled([rows + 40], *dims)
        assert_attends(cache.attend, plain, queries(1, group, rows, dims[0]), dtype=BFLOAT16)


@pytest.mark.parametrize(("group", "rows"), [(1, 1), (4, 3), (4, 20), (2, 60)])
def test_options_near_the_reference(isa: str, group: int, rows: int) -> None:
    cache, plain = filled([300, 77], 40, 35)
    query = queries(2, group, rows, 40)
    shape = (2, group * KV_HEADS, rows, 300)
    rng = np.random.default_rng(0)
    masks: list[dict[str, Any]] = [
        {"attn_mask": rng.random(shape) < 0.6},
        {"bias": rng.standard_normal(shape, dtype=np.float32)},
        {"sinks": rng.standard_normal(shape[1], dtype=np.float32)},
        {"softcap": 1.5},
        {"scale": -0.3},
        {"window": (40, None)},
        {"is_causal": False},
        {"alibi_slopes": np.full(shape[1], 0.05, np.float32)},
    ]
    for options in masks:
        counts = [rows, max(rows - 1, 0)]
        assert_attends(cache.attend, plain, query, counts, dtype=BFLOAT16, **options)


@pytest.mark.parametrize("group", [1, 4, TILE + 1])
def test_the_bits_of_threads_batches_and_pages(isa: str, group: int) -> None:
    key, value = normal(1, KV_HEADS, 1100, 40), normal(1, KV_HEADS, 1100, 33)
    own = normal(5, KV_HEADS, 3, 40), normal(5, KV_HEADS, 3, 33)
    cache = npattn.KVCache(5, KV_HEADS, 40, value_dim=33, dtype=BFLOAT16)
    cache.append(*(np.repeat(x, 5, axis=0) for x in (key, value)))
    cache.append(*own)
    for rows in (1, 3):
        query = queries(5, group, rows, 40)
        asked: dict[str, Any] = {"return_weights": True, "return_lse": True}
        results = [cache.attend(query, **asked)]
        for threads in (1, 3):
            with npattn.threads(threads):
                results.append(cache.attend(query, **asked))
        for page_size in (32, 96, 256):
            pool, ids = paged(key, value, page_size, sequences=5)
            pool.append(ids, *own)
            results.append(pool.attend(ids, query, **asked))
            alone = [pool.attend([s], query[i : i + 1], **asked) for i, s in enumerate(ids)]
            results.append(tuple(np.concatenate(parts) for parts in zip(*alone, strict=True)))
        for found in results[1:]:
            for array, wanted in zip(found, results[0], strict=True):
                assert_same_bits(array, wanted)
        assert_same_bits(cache.attend(query), results[0][0])


@pytest.mark.parametrize("group", [1, 4])
def test_the_bits_of_chunks(isa: str, group: int) -> None:
    """Up to 96 rows: on pages as they are or on panels. More: their own."""
    length = 420
    key, value = normal(1, KV_HEADS, length, 40), normal(1, KV_HEADS, length, 33)
    query = queries(1, group, length, 40)

    def attended(chunk: int) -> Array:
        cache = npattn.KVCache(1, KV_HEADS, 40, value_dim=33, dtype=BFLOAT16)
        outputs = []
        for first in range(0, length, chunk):
            part = np.s_[:, :, first : first + chunk]
            cache.append(key[part], value[part])
            outputs.append(cache.attend(query[part]))
        return np.concatenate(outputs, axis=2)[:, :, 96:]

    few = [attended(rows // group) for rows in (4, TILE, TILE + 4, 96)]
    for output in few[1:]:
        assert_same_bits(output, few[0])
    many = [attended(chunk) for chunk in (140, 210, length)]
    for output in many[1:]:
        assert_same_bits(output, many[0])


@pytest.mark.parametrize(("group", "rows"), [(1, 1), (3, 3), (4, 20), (1, 130)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_hidden_changes_no_bit(isa: str, group: int, rows: int, bad: float) -> None:
    """Behind a mask, in slots that were written before, and one of a pair of keys."""
    key, value = normal(1, KV_HEADS, 301, 33), normal(1, KV_HEADS, 301, 45)
    shown = np.ones(301, bool)
    shown[100:150] = shown[1:80:3] = False
    query = queries(1, group, rows, 33)
    results = []
    for filling in (bad, 0.25):
        cache = npattn.KVCache(1, KV_HEADS, 33, value_dim=45, dtype=BFLOAT16)
        cache.append(*(np.full((1, KV_HEADS, 400, width), filling, BFLOAT16) for width in (33, 45)))
        cache.crop(0)
        cache.append(*(np.where(shown[:, None], x, BFLOAT16.type(filling)) for x in (key, value)))
        results.append(cache.attend(query, attn_mask=shown, return_weights=True, return_lse=True))
    assert np.isfinite(results[0][0].astype(np.float32)).all()
    for found, wanted in zip(*results, strict=True):
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("group", [1, 4])
def test_unwritten_slots_and_what_comes_later(isa: str, group: int) -> None:
    """NaN behind an odd length, and in a token that the last row alone sees."""
    cache, plain = filled([91], 17, 21)
    cache.append(*(np.full((1, KV_HEADS, 8, width), np.nan, BFLOAT16) for width in (17, 21)))
    cache.crop(91)
    for rows in (1, 3, 40):
        assert_attends(cache.attend, plain, queries(1, group, rows, 17), dtype=BFLOAT16)
    query = queries(1, group, 3, 17)
    cache.append(normal(1, KV_HEADS, 1, 17), np.full((1, KV_HEADS, 1, 21), np.nan, BFLOAT16))
    spoilt = np.isnan(cache.attend(query).astype(np.float32))
    assert spoilt[:, :, -1].all()
    assert not spoilt[:, :, :-1].any()


def test_an_infinite_value_without_a_partner(isa: str) -> None:
    """The last of an odd number of keys is no partner of its own: infinity stays infinity."""
    for rows in (1, 14):
        key, value = normal(1, 1, 33, 8), normal(1, 1, 33, 4)
        value[0, 0, 32, 1] = np.inf
        cache = npattn.KVCache(1, 1, 8, value_dim=4, dtype=BFLOAT16)
        cache.append(key, value)
        output = cache.attend(normal(1, rows, 1, 8)).astype(np.float32)
        assert (output[..., 1] == np.inf).all()
        assert np.isfinite(np.delete(output, 1, axis=3)).all()


def test_what_rounding_of_weights_costs(isa: str) -> None:
    """RMS error, with that of the output's rounding alone, of normal numbers that are bfloat16."""
    cache, plain = filled([1000], 64, 64)
    for group, rows in ((8, 8), (40, 4)):
        query = queries(1, group, rows, 64)
        exact = plain[0].attend(query[0], is_causal=True)[0]
        found = cache.attend(query)[0].astype(float)
        rounded = exact.astype(BFLOAT16).astype(float)
        rms = [np.sqrt(np.mean((x - exact) ** 2)) for x in (found, rounded)]
        assert rms[0] < 1.5 * rms[1]
