"""PagedKVCache: sequences that come, share pages, grow and go, in a fixed number of pages."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import npattn
import numpy as np
import pytest
from plain_cache import (
    CACHE_DTYPES,
    DIM,
    KV_HEADS,
    VALUE_DIM,
    PlainSequence,
    assert_attends,
    held,
    plain_arrays,
    queries,
    state_of,
    tokens,
)
from shapes import pattern
from support import assert_same_bits


def cache_of(num_pages: int = 40, page_size: int = 32, **settings: Any) -> npattn.PagedKVCache:
    return npattn.PagedKVCache(num_pages, page_size, KV_HEADS, DIM, value_dim=VALUE_DIM, **settings)


def filled(lengths: list[int], cache: npattn.PagedKVCache) -> tuple[list[int], list[PlainSequence]]:
    """The ids of new sequences of these lengths, and the same as plain arrays."""
    ids = [cache.add_sequence() for _ in lengths]
    key, value = tokens(len(lengths), max(lengths, default=0), dtype=cache.dtype)
    cache.append(ids, key, value, counts=lengths)
    rows = zip(held(key, cache.dtype), held(value, cache.dtype), lengths, strict=True)
    return ids, [PlainSequence(k[:, :n], v[:, :n]) for k, v, n in rows]


def append(
    cache: npattn.PagedKVCache, ids: list[int], plain: list[PlainSequence], count: int, seed: int = 1
) -> None:
    key, value = tokens(len(ids), count, seed, cache.dtype)
    cache.append(ids, key, value)
    for sequence, k, v in zip(plain, held(key, cache.dtype), held(value, cache.dtype), strict=True):
        sequence.append(k, v)


def assert_holds(cache: npattn.PagedKVCache, ids: list[int], plain: list[PlainSequence]) -> None:
    keys, values = plain_arrays(plain)
    assert_same_bits(cache._store.keys(cache._store.slots_of(ids), 1), keys)
    assert_same_bits(cache._store.values(cache._store.slots_of(ids), 1), values)
    assert cache.lengths(ids).tolist() == [sequence.length for sequence in plain]


def attending(cache: npattn.PagedKVCache, ids: list[int]) -> Callable[..., Any]:
    return lambda query, **options: cache.attend(ids, query, **options)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("page_size", [32, 64, 96, 160])
def test_sequences_of_different_lengths(isa: str, page_size: int, dtype: str) -> None:
    cache = cache_of(page_size=page_size, dtype=CACHE_DTYPES[dtype])
    ids, plain = filled([1, 31, 0, 33, 200], cache)
    for seed, count in enumerate((1, 40, 3)):
        append(cache, ids, plain, count, seed)
        assert_holds(cache, ids, plain)
        query = queries(5, count, dtype=CACHE_DTYPES[dtype])
        assert_attends(attending(cache, ids), plain, query, dtype=CACHE_DTYPES[dtype])
    some = [ids[4], ids[0], ids[4]]
    query = queries(3, 2, dtype=CACHE_DTYPES[dtype])
    assert_attends(attending(cache, some), [plain[4], plain[0], plain[4]], query, dtype=CACHE_DTYPES[dtype])


def test_the_bits_of_kvcache(isa: str) -> None:
    """The same for every page size, whatever else is in the batch."""
    plain = npattn.KVCache(3, KV_HEADS, DIM, value_dim=VALUE_DIM)
    parts = [tokens(3, count, count) for count in (150, 1, 70)]
    for part in parts:
        plain.append(*part, counts=np.minimum([500, 33, 60], part[0].shape[2]))
    for page_size in (32, 64, 128, 256):
        cache = cache_of(page_size=page_size)
        ids = [cache.add_sequence() for _ in range(3)]
        for part in parts:
            cache.append(ids, *part, counts=np.minimum([500, 33, 60], part[0].shape[2]))
        for count in (1, 20):
            query = queries(3, count)
            whole = cache.attend(ids, query)
            assert_same_bits(whole, plain.attend(query))
            for i in range(3):
                assert_same_bits(cache.attend(ids[i : i + 1], query[i : i + 1]), whole[i : i + 1])


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "mask": lambda: {"attn_mask": pattern((3, 1, 1, 70), 31, 5) > -0.5},
    "bias and window": lambda: {"bias": pattern((4, 6, 70), 41, 3, np.float32), "window": (9, None)},
    "softcap and sinks": lambda: {"softcap": 1.5, "sinks": np.array([0.5, -np.inf, 3.0, -1.0])},
    "alibi": lambda: {"alibi_slopes": pattern((3, 4), 29, 3) ** 2, "scale": -0.4},
    "not causal": lambda: {"is_causal": False, "window": (9, 2)},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options(isa: str, option: str) -> None:
    cache = cache_of()
    ids, plain = filled([70, 6, 33], cache)
    for counts in (None, [6, 0, 2]):
        assert_attends(attending(cache, ids), plain, queries(3, 6), counts, **OPTIONS[option]())


def test_prefix(isa: str) -> None:
    """Forks share pages, write to their own, and outlive the sequence they came from."""
    cache = cache_of()
    (first,), (plain,) = filled([40], cache)
    assert cache.free_pages == 38
    ids = [first, *(cache.add_sequence(prefix=first) for _ in range(3))]
    sequences = [plain, *(plain.fork() for _ in range(3))]
    assert cache.free_pages == 38
    assert_holds(cache, ids, sequences)
    assert_attends(attending(cache, ids), sequences, queries(4, 1))
    append(cache, ids[1:3], sequences[1:3], 1)
    assert cache.free_pages == 36
    assert_holds(cache, ids, sequences)
    append(cache, ids, sequences, 30)
    assert_holds(cache, ids, sequences)
    assert_attends(attending(cache, ids), sequences, queries(4, 30))
    cache.free(first)
    assert_holds(cache, ids[1:], sequences[1:])
    grandchild = cache.add_sequence(prefix=ids[1])
    cache.crop(grandchild, 33)
    sequences.append(sequences[1].fork())
    sequences[-1].crop(33)
    append(cache, [grandchild], sequences[-1:], 5)
    assert_holds(cache, [*ids[1:], grandchild], sequences[1:])
    for sequence in [*ids[1:], grandchild]:
        cache.free(sequence)
    assert cache.free_pages == 40


def test_pages_are_used_to_the_last() -> None:
    cache = cache_of(4)
    a, b = cache.add_sequence(), cache.add_sequence()
    plain = [PlainSequence(*[x[0] for x in tokens(1, 0)]) for _ in range(2)]
    append(cache, [a, b], plain, 64)
    assert cache.free_pages == 0
    before = state_of(cache)
    with pytest.raises(MemoryError, match=r"1 new pages of 32 tokens are needed and 0 of the 4 are free"):
        cache.append([a], *tokens(1, 1))
    with pytest.raises(MemoryError, match="4 new pages"):
        cache.append([b, a], *tokens(2, 40), counts=[40, 33])
    assert state_of(cache) == before
    cache.crop(b, 32)
    plain[1].crop(32)
    append(cache, [a], plain[:1], 32)
    assert cache.free_pages == 0
    assert_holds(cache, [a, b], plain)


def test_copies_count_as_pages() -> None:
    """Three owners of a page that is written: two copies, and the last owner writes on in it."""
    for owners, pages in ((2, 3), (3, 4)):
        for num_pages in (pages - 1, pages):
            cache = cache_of(num_pages)
            (first,), _ = filled([40], cache)
            ids = [first, *(cache.add_sequence(prefix=first) for _ in range(owners - 1))]
            before = state_of(cache)
            if num_pages < pages:
                with pytest.raises(MemoryError, match=f"{owners - 1} new pages"):
                    cache.append(ids, *tokens(owners, 1))
                assert state_of(cache) == before
                for sequence in ids[1:]:
                    cache.free(sequence)
                    assert cache.free_pages == num_pages - 2
            else:
                cache.append(ids, *tokens(owners, 1))
                assert cache.free_pages == 0


def test_ids() -> None:
    cache = cache_of(4)
    ids = [cache.add_sequence() for _ in range(3)]
    cache.free(ids[1])
    assert cache.add_sequence() not in ids
    assert cache.lengths([]).shape == (0,)
    assert cache.lengths(np.array([0, 3])).tolist() == [0, 0]
    before = state_of(cache)
    one = tokens(1, 1)
    for call, message in (
        (lambda: cache.append([1], *one), "no sequence 1: it was freed"),
        (lambda: cache.attend([9], queries(1, 1)), "no sequence 9: it was never added"),
        (lambda: cache.lengths([-1]), "no sequence -1: it was never added"),
        (lambda: cache.append([0, 2**70], *tokens(2, 1)), f"no sequence {2**70}: it was never added"),
        (lambda: cache.crop(1, 0), "freed"),
        (lambda: cache.free(1), "freed"),
        (lambda: cache.add_sequence(prefix=1), "freed"),
    ):
        with pytest.raises(KeyError, match=message):
            call()
    for wrong in (0, None, "0", 1.5):
        with pytest.raises(TypeError, match="sequences must be a list of ids"):
            cache.lengths(wrong)
    with pytest.raises(TypeError, match=r"sequences\[1\] must be an integer"):
        cache.lengths([0, 1.0])
    with pytest.raises(ValueError, match="distinct, got 2 more than once"):
        cache.append([2, 0, 2], *tokens(3, 1))
    assert state_of(cache) == before
    assert cache.free_pages == 4


@pytest.mark.parametrize(
    ("error", "message", "settings"),
    [
        (ValueError, "page_size must be a multiple of 32, got 16", {"page_size": 16}),
        (ValueError, "page_size must be at least 1, got 0", {"page_size": 0}),
        (ValueError, "num_pages must be at least 1, got 0", {"num_pages": 0}),
        (TypeError, "num_pages must be an integer", {"num_pages": 1.5}),
        (TypeError, "dtype must be float32, .* got int32", {"dtype": np.int32}),
        (MemoryError, "not enough memory for a PagedKVCache", {"num_pages": 2**50}),
    ],
)
def test_settings(error: type[Exception], message: str, settings: dict[str, Any]) -> None:
    arguments = {"num_pages": 4, "page_size": 32, "num_kv_heads": 1, "head_dim": 8, **settings}
    with pytest.raises(error, match=message):
        npattn.PagedKVCache(**arguments)


def test_errors_change_nothing() -> None:
    cache = cache_of()
    ids, _ = filled([40, 3], cache)
    before = state_of(cache)
    key, value = tokens(2, 3)
    for arguments, counts, error in (
        ((key.astype(float), value), None, TypeError),
        ((key[:1], value[:1]), None, ValueError),
        ((key, value[:, :, :2]), None, ValueError),
        ((key, value), [4, 0], ValueError),
    ):
        with pytest.raises(error):
            cache.append(ids, *arguments, counts=counts)
    for length in (-1, 41):
        with pytest.raises(ValueError, match=r"length must lie in 0\.\.40"):
            cache.crop(ids[0], length)
    with pytest.raises(ValueError, match="sequence 1 has 3 tokens and 4 queries"):
        cache.attend(ids, queries(2, 4))
    assert state_of(cache) == before


def test_conflicts_change_nothing() -> None:
    cache = cache_of()
    ids, _ = filled([40, 3], cache)
    before = state_of(cache)
    for change in (
        lambda: cache.append(ids, *tokens(2, 1)),
        lambda: cache.crop(ids[0], 1),
        lambda: cache.free(ids[0]),
        cache.add_sequence,
    ):
        with cache._reading, pytest.raises(RuntimeError, match="being read"):
            change()
    for read in (
        lambda: cache.attend(ids, queries(2, 1)),
        lambda: cache.lengths(ids),
        lambda: cache.free_pages,
        cache.__getstate__,
    ):
        with cache._reading:
            read()
        with cache._writing, pytest.raises(RuntimeError, match="being changed"):
            read()
    assert state_of(cache) == before


def test_copies() -> None:
    """Pages that are shared stay so: the copy fits into as many."""
    cache = cache_of(5)
    (first,), _ = filled([100], cache)
    ids = [first, cache.add_sequence(prefix=first), cache.add_sequence(prefix=first)]
    cache.free(first)
    cache.append(ids[1:2], *tokens(1, 1))
    before = state_of(cache)
    for other in (pickle.loads(pickle.dumps(cache)), copy.copy(cache), copy.deepcopy(cache)):
        assert state_of(other) == before
        assert repr(other).split("nbytes")[0] == repr(cache).split("nbytes")[0]
        assert other.add_sequence() == 3
        other.append([3], *tokens(1, 1) if other.free_pages else tokens(1, 0))
        other.free(ids[1])
        other.append(ids[2:], *tokens(1, 30))
        assert state_of(cache) == before


def test_repr() -> None:
    cache = cache_of(4)
    cache.add_sequence()
    told = "PagedKVCache(num_pages=4, page_size=32, num_kv_heads=2, head_dim=8, value_dim=5, dtype=float32, "
    assert repr(cache) == f"{told}sequences=1, free_pages=4, nbytes={cache.nbytes})"
    assert "<th>free_pages</th><td>4</td>" in cache._repr_html_()
