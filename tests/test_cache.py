"""KVCache: what it holds after each operation, what attend makes of it, and that errors change nothing."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import reference
from npattn import scaled_dot_product_attention as sdpa
from plain_cache import (
    CACHE_DTYPES,
    DIM,
    KV_HEADS,
    VALUE_DIM,
    assert_attends,
    cache_of,
    filled,
    held,
    plain_arrays,
    queries,
    tokens,
)
from shapes import layouts_of, pattern
from support import DTYPES, assert_same_bits, assert_within, tolerances_of

# --- what it holds ---


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("steps", [[0], [1, 1], [31, 1, 1], [32, 33], [63, 2, 200], [500, 1, 0, 3]], ids=str)
def test_holds_what_was_appended(isa: str, steps: list[int], dtype: str) -> None:
    cache = cache_of(3, dtype=CACHE_DTYPES[dtype])
    parts = [tokens(3, count, seed, CACHE_DTYPES[dtype]) for seed, count in enumerate(steps)]
    for part in parts:
        cache.append(*part)
    for found, plain in ((cache.keys, 0), (cache.values, 1)):
        assert_same_bits(
            found, np.concatenate([held(part[plain], CACHE_DTYPES[dtype]) for part in parts], axis=2)
        )
    assert cache.lengths.tolist() == [sum(steps)] * 3
    assert len(cache) == sum(steps)


def test_any_memory_layout(isa: str) -> None:
    for count in (1, 5, 70):
        key, value = tokens(2, count)
        for (name, k), (_, v) in zip(layouts_of(key), layouts_of(value), strict=True):
            cache = cache_of()
            cache.append(*tokens(2, 30, 5))
            cache.append(k, v)
            assert_same_bits(cache.keys[:, :, 30:], key)
            assert_same_bits(cache.values[:, :, 30:], value), name


def test_bits_are_kept() -> None:
    """Signed zeros, NaNs with payloads and infinities too."""
    bits = np.random.default_rng(0).integers(0, 2**32, (1, 1, 70, 24), dtype=np.uint32)
    bits[..., :4] = [0x80000000, 0x7FC12345, 0x7F800001, 0xFF800000]
    key = bits.view(np.float32)
    cache = npattn.KVCache(1, 1, 24)
    cache.append(key[:, :, :37], key[:, :, :37])
    cache.append(key[:, :, 37:], key[:, :, 37:])
    assert_same_bits(cache.keys, key)
    assert_same_bits(cache.values, key)


def test_ragged_rows_are_not_looked_at(isa: str) -> None:
    cache, plain = filled([3, 0, 40])
    key, value = tokens(3, 6, 1)
    counts = [2, 0, 6]
    key[0, :, 2:], value[0, :, 2:], key[1], value[1] = np.nan, np.nan, np.nan, np.nan
    cache.append(key, value, counts=counts)
    for i, count in enumerate(counts):
        plain[i].append(key[i, :, :count], value[i, :, :count])
    assert cache.lengths.tolist() == [5, 0, 46]
    for found, wanted in zip((cache.keys, cache.values), plain_arrays(plain), strict=True):
        assert_same_bits(found, wanted)


def test_it_owns_its_tokens() -> None:
    cache = cache_of()
    key, value = tokens(2, 3)
    cache.append(key, value)
    keys = cache.keys
    before = keys.copy()
    key[...] = 9
    cache.append(key, value)
    assert_same_bits(keys, before)
    keys[...] = 5
    assert_same_bits(cache.keys[:, :, :3], before)


def test_a_large_append_uses_threads() -> None:
    """The same pages whatever the number of threads."""
    rng = np.random.default_rng(0)
    key, value = (rng.standard_normal((1, 3, 5000, 40), dtype=np.float32) for _ in range(2))
    for threads in (1, 2, 5):
        with npattn.threads(threads):
            cache = npattn.KVCache(1, 3, 40)
            cache.append(key[:, :, :17], value[:, :, :17])
            cache.append(key[:, :, 17:], value[:, :, 17:])
            assert_same_bits(cache.keys, key)
            assert_same_bits(cache.values, value)


# --- what attend makes of it ---


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("lengths", [[1], [5, 5], [64, 1, 130], [31, 32, 33], [300, 7]], ids=str)
def test_attends_to_the_last_tokens(isa: str, lengths: list[int], dtype: str) -> None:
    cache, plain = filled(lengths, dtype=CACHE_DTYPES[dtype])
    for count in (1, min(lengths)):
        for heads in (2, 8):
            query = queries(len(lengths), count, heads, CACHE_DTYPES[dtype])
            for is_causal in (True, False):
                assert_attends(cache.attend, plain, query, dtype=CACHE_DTYPES[dtype], is_causal=is_causal)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "bool mask": lambda: {"attn_mask": pattern((3, 1, 1, 70), 31, 5) > -0.5},
    "float mask": lambda: {"attn_mask": pattern((4, 6, 70), 29, 7, np.float32)},
    "bias": lambda: {"bias": pattern((3, 4, 6, 70), 41, 3, np.float32)},
    "window": lambda: {"window": (9, None)},
    "both sides": lambda: {"window": (9, 2), "is_causal": False},
    "scale": lambda: {"scale": -0.4},
    "softcap": lambda: {"softcap": 1.5},
    "sinks": lambda: {"sinks": np.array([0.5, -np.inf, 3.0, -1.0])},
    "alibi": lambda: {"alibi_slopes": np.array([0.5, 0.1, 0.02, 0.0])},
    "alibi per sequence": lambda: {"alibi_slopes": pattern((3, 4), 29, 3) ** 2},
}


@pytest.mark.parametrize(
    "ring", [{}, {"sliding_window": 12}, {"sliding_window": 12, "sink_tokens": 3}], ids=str
)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(isa: str, option: str, ring: dict[str, Any]) -> None:
    cache, plain = filled([70, 6, 33], **ring)
    for counts in (None, [6, 0, 2]):
        assert_attends(cache.attend, plain, queries(3, 6), counts, **OPTIONS[option]())


def test_steps_equal_one_call(isa: str) -> None:
    """Prefill, chunks and single tokens: the rows of causal attention over all of them."""
    key, value = tokens(2, 100)
    query = queries(2, 100)
    whole = sdpa(query, key, value, is_causal=True)
    within = tolerances_of(query, key, value).output
    for chunks in ([100], [60, 39, 1], [1] * 33 + [67]):
        cache, done = cache_of(), 0
        for count in chunks:
            part = np.s_[:, :, done : done + count]
            cache.append(key[part], value[part])
            assert_within(cache.attend(query[part]), whole[part], 2 * within)
            done += count


def test_results_go_where_they_are_asked_for(isa: str) -> None:
    cache, _ = filled([40, 9])
    query = queries(2, 5)
    expected = cache.attend(query, counts=[5, 2])
    out = np.full((2, 4, VALUE_DIM, 5), np.nan, np.float32).swapaxes(2, 3)
    assert cache.attend(query, counts=[5, 2], out=out) is out
    assert_same_bits(out, expected)
    assert not expected[1, :, 2:].any()
    square = npattn.KVCache(1, 1, 4)
    square.append(*[pattern((1, 1, 9, 4), 29, 7, np.float32)] * 2)
    rows = pattern((1, 3, 9, 4), 37, 5, np.float32)
    wanted = square.attend(rows)
    assert_same_bits(square.attend(rows, out=rows), wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_queries(isa: str, dtype: str) -> None:
    cache, _ = filled([40, 9])
    query = queries(2, 3).astype(DTYPES[dtype])
    output, lse = cache.attend(query, return_lse=True)
    wide, wide_lse = cache.attend(query.astype(np.float32), return_lse=True)
    assert_same_bits(output, wide.astype(DTYPES[dtype]))
    assert_same_bits(lse, wide_lse)


def test_float32_queries_of_a_float64_cache(isa: str) -> None:
    cache, _ = filled([40, 9], dtype=np.float64)
    query = queries(2, 3)
    output, lse = cache.attend(query, return_lse=True)
    assert output.dtype == lse.dtype == np.float32
    assert_same_bits(output, cache.attend(query.astype(np.float64)).astype(np.float32))


def test_cross_attention(isa: str) -> None:
    """Without causal, window and slopes a place means nothing: any number of queries."""
    cache, _ = filled([3, 3])
    query = queries(2, 10)
    key, value = tokens(2, 3)
    assert_within(cache.attend(query, is_causal=False), sdpa(query, key, value), 1e-6)
    with pytest.raises(ValueError, match="sequence 0 has 3 tokens and 10 queries"):
        cache.attend(query)


def test_nothing_at_all(isa: str) -> None:
    empty = cache_of(0)
    empty.append(*tokens(0, 3))
    assert empty.attend(queries(0, 2)).shape == (0, 4, 2, VALUE_DIM)
    assert empty.keys.shape == (0, KV_HEADS, 0, DIM)
    assert len(empty) == 0
    cache = cache_of()
    assert cache.attend(queries(2, 0)).shape == (2, 4, 0, VALUE_DIM)
    output, weights, lse = cache.attend(queries(2, 1), counts=0, return_weights=True, return_lse=True)
    assert not output.any()
    assert weights.shape == (2, 4, 1, 0)
    assert (lse == -np.inf).all()


def test_memory_of_pages_never_shows(isa: str) -> None:
    """What slots held before, NaN here, is hidden behind the length."""
    cache = cache_of()
    bad = [np.full_like(array, np.nan) for array in tokens(2, 128)]
    cache.append(*bad)
    cache.crop(0)
    cache.append(*tokens(2, 37))
    fresh = cache_of()
    fresh.append(*tokens(2, 37))
    for count in (1, 37):
        assert_same_bits(cache.attend(queries(2, count)), fresh.attend(queries(2, count)))


# --- copies ---


def copies(cache: npattn.KVCache) -> dict[str, npattn.KVCache]:
    return {
        "copy": cache.copy(),
        "copy.copy": copy.copy(cache),
        "deepcopy": copy.deepcopy(cache),
        "pickle": pickle.loads(pickle.dumps(cache)),
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": np.float64},
        {"dtype": np.float16},
        {"dtype": DTYPES["bfloat16"], "sliding_window": 20},
        {"dtype": np.int8, "rope": {}},
        {"dtype": np.int8, "sliding_window": 20, "sink_tokens": 2, "capacity": 320},
        {"capacity": 300},
        {"sliding_window": 20, "sink_tokens": 2},
        {"sliding_window": 20, "capacity": 320},
        {"rope": {"base": 500.0}},
    ],
    ids=str,
)
def test_copies_go_their_own_way(settings: dict[str, Any]) -> None:
    cache, _ = filled([150, 40, 0], **settings)
    dtype = cache.dtype
    cache.append(*tokens(3, 1, dtype=dtype))
    cache.reorder([0, 0, 1])
    before = seen(cache)
    one, many = tokens(3, 1, 3, dtype), tokens(3, 70, 4, dtype)
    query = queries(3, 1, dtype=dtype)
    others = copies(cache)
    for other in others.values():
        assert seen(other) == before
    cache.append(*one)
    for name, other in others.items():
        assert seen(other) == before, name
        other.append(*one)
        assert_same_bits(other.attend(query), cache.attend(query))
        after = seen(cache)
        other.append(*many)
        assert seen(cache) == after, name


def seen(cache: npattn.KVCache) -> list[Any]:
    """What a cache holds, apart from the memory it holds it in."""
    told = repr(cache).split("nbytes")[0]
    return [told, cache.lengths.tolist(), cache.keys.tobytes(), cache.values.tobytes()]


def test_a_pickle_holds_plain_arrays() -> None:
    cache, _ = filled([70, 3])
    state = cache.__getstate__()
    keys, values = state["contents"][:2]
    assert keys.shape == (3, KV_HEADS, 64, DIM)
    assert_same_bits(keys[0], cache.keys[0, :, :64])
    assert_same_bits(values[1, :, :6], cache.values[0, :, 64:70])
    assert not keys[2, :, 3:].any()


def test_shared_pages_stay_shared_in_copies() -> None:
    cache, _ = filled([6400, 1])
    cache.reorder([0, 0])
    for name, other in copies(cache).items():
        assert other.nbytes < 1.2 * 6400 * KV_HEADS * (DIM + VALUE_DIM) * 4, name


# --- what it tells ---


def test_repr() -> None:
    cache, _ = filled([5, 3], sliding_window=4, rope={"base": 100.0})
    told = repr(cache)
    assert told.startswith("KVCache(batch=2, num_kv_heads=2, head_dim=8, value_dim=5, sliding_window=4,")
    assert f"rope={{'base': 100.0}}, lengths=[5, 3], dtype=float32, nbytes={cache.nbytes})" in told
    assert "lengths=1..40" in repr(filled([1, 40] * 8)[0])
    with cache._writing:
        assert "being changed" in repr(cache)


def test_html_is_escaped() -> None:
    cache = cache_of(rope={"scaling": {"rope_type": "linear", "factor": 2.0}})
    table = cache._repr_html_()
    assert "&#x27;rope_type&#x27;" in table
    assert "'" not in table
    assert table.count("<tr>") == len(cache._facts())


def test_more_queries_than_tokens(isa: str) -> None:
    """Where nothing asks for places, as in attention to another text; else they are the last tokens."""
    cache, _ = filled([40, 3])
    query = queries(2, 50)
    output, lse = cache.attend(query, is_causal=False, softcap=2.0, return_lse=True)
    for i, length in enumerate((40, 3)):
        key, value = cache.keys[i, :, :length], cache.values[i, :, :length]
        options = {"softcap": 2.0, "return_lse": True}
        wanted, wanted_lse = reference.scaled_dot_product_attention(query[i], key, value, **options)
        within = tolerances_of(query[i], key, value)
        assert_within(output[i], wanted, within.output)
        assert_within(lse[i], wanted_lse, within.lse)
    for options in (
        {},
        {"is_causal": False, "window": (5, 5)},
        {"is_causal": False, "alibi_slopes": np.ones(4)},
    ):
        with pytest.raises(ValueError, match="sequence 0 has 40 tokens and 50 queries"):
            cache.attend(query, **options)
    for settings in ({"rope": {}}, {"sliding_window": 60}):
        with pytest.raises(ValueError, match="sequence 0 has 40 tokens and 50 queries"):
            filled([40, 3], **settings)[0].attend(query, is_causal=False)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_layout(dtype: Any) -> None:
    """BSHD has the heads behind the rows in query, out and output; weights and lse are as ever."""
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 2, 2, 70, 16)).astype(dtype)
    query = rng.standard_normal((2, 4, 5, 16)).astype(dtype)
    swapped = np.ascontiguousarray(query.swapaxes(1, 2))
    cache, paged = npattn.KVCache(2, 2, 16, dtype=dtype), npattn.PagedKVCache(8, 32, 2, 16, dtype=dtype)
    ids = [paged.add_sequence(), paged.add_sequence()]
    cache.append(key, value)
    paged.append(ids, key, value)
    for attend in (cache.attend, functools.partial(paged.attend, ids)):
        for options in ({}, {"is_causal": False, "sinks": np.ones(4)}):
            expected = attend(query, return_weights=True, return_lse=True, **options)
            found = attend(swapped, layout="BSHD", return_weights=True, return_lse=True, **options)
            assert_same_bits(found[0], np.ascontiguousarray(expected[0].swapaxes(1, 2)))
            assert found[0].flags.c_contiguous
            for one, other in zip(found[1:], expected[1:], strict=True):
                assert_same_bits(one, other)
            for out in (np.empty_like(swapped), np.empty((2, 5, 4, 32), dtype)[..., ::2], swapped.copy()):
                read = out if out.flags.c_contiguous and np.array_equal(out, swapped) else swapped
                assert attend(read, layout="BSHD", out=out, **options) is out
                assert_same_bits(np.ascontiguousarray(out), found[0])
        with pytest.raises(ValueError, match="layout must be"):
            attend(query, layout="BHDS")
        with pytest.raises(ValueError, match=r"expected \(2, queries, heads, 16\)"):
            attend(query[0], layout="BSHD")
