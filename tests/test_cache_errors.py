"""KVCache: errors and conflicts between threads change nothing."""

from __future__ import annotations

import pickle
import signal
import sys
import threading
from typing import Any

import npattn
import numpy as np
import pytest
from plain_cache import filled, queries, state_of, tokens
from shapes import Array
from support import assert_same_bits

# --- errors ---

ONE, VALUE = tokens(2, 3)

APPENDS: dict[str, tuple[type[Exception], str, Array, Array, Any]] = {
    "dtype": (
        TypeError,
        r"key has dtype float64, the cache holds float32.*astype",
        ONE.astype(float),
        VALUE,
        None,
    ),
    "value dtype": (TypeError, "value has dtype float16", ONE, VALUE.astype(np.float16), None),
    "integers": (TypeError, r"key has dtype int64.*key.astype\(np.float32", ONE.astype(int), VALUE, None),
    "list": (TypeError, r"key has dtype float64.*np.asarray\(key, np.float32\)$", ONE.tolist(), VALUE, None),
    "batch": (
        ValueError,
        r"key has shape \(1, 2, 3, 8\); expected \(2, 2, tokens, 8\)",
        ONE[:1],
        VALUE,
        None,
    ),
    "heads": (ValueError, "value has shape", ONE, VALUE[:, :1], None),
    "dim": (ValueError, "key has shape", ONE[..., :4], VALUE, None),
    "axes": (ValueError, "key has shape", ONE[0], VALUE, None),
    "lengths": (ValueError, "differ in tokens, 3 and 2", ONE, VALUE[:, :, :2], None),
    "counts": (ValueError, r"counts must lie in 0\.\.3 .*, got 4", ONE, VALUE, [1, 4]),
    "negative": (ValueError, "got -1", ONE, VALUE, [-1, 2]),
    "huge counts": (ValueError, r"0\.\.3 .*, got 2\*\*60 or more", ONE, VALUE, [2**70, 1]),
    "tiny counts": (ValueError, r"0\.\.3 .*, got -2\*\*60 or less", ONE, VALUE, [1, -(2**63)]),
    "counts shape": (ValueError, r"counts has shape \(3,\)", ONE, VALUE, [1, 1, 1]),
    "counts dtype": (TypeError, "counts must be integers", ONE, VALUE, [1.0, 2.0]),
    "masked": (TypeError, "masked array", np.ma.masked_array(ONE), VALUE, None),
    "none": (TypeError, "key must be an array, got None", None, VALUE, None),
}


@pytest.mark.parametrize("settings", [{}, {"rope": {}}, {"sliding_window": 4}, {"capacity": 100}], ids=str)
@pytest.mark.parametrize("case", APPENDS)
def test_append_errors(case: str, settings: dict[str, Any]) -> None:
    error, message, key, value, counts = APPENDS[case]
    cache, _ = filled([70, 3], **settings)
    before = state_of(cache)
    with pytest.raises(error, match=message):
        cache.append(key, value, counts=counts)
    assert state_of(cache) == before


QUERY = queries(2, 3)

ATTENDS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "batch": (ValueError, r"query has shape \(1, 4, 3, 8\)", {"query": QUERY[:1]}),
    "axes": (ValueError, r"query has shape \(4, 3, 8\)", {"query": QUERY[0]}),
    "dim": (ValueError, r"expected \(2, heads, queries, 8\)", {"query": QUERY[..., :7]}),
    "heads": (ValueError, "3 query heads are not a multiple of the cache's 2", {"query": QUERY[:, :3]}),
    "wide": (TypeError, "query has dtype float64, the cache holds float32", {"query": QUERY.astype(float)}),
    "counts": (ValueError, "counts must lie in", {"counts": [4, 0]}),
    "too many": (ValueError, "sequence 1 has 3 tokens and 5 queries", {"query": queries(2, 5)}),
    "mask": (ValueError, "attn_mask has shape", {"attn_mask": np.ones((3, 71), bool)}),
    "integer mask": (TypeError, "attn_mask has integer dtype", {"attn_mask": np.ones((3, 70), int)}),
    "window": (ValueError, "left side", {"window": (-1, None)}),
    "scale": (ValueError, "scale must be finite", {"scale": np.inf}),
    "softcap": (ValueError, "softcap", {"softcap": -1.0}),
    "sinks": (ValueError, "sinks has shape", {"sinks": np.zeros(2)}),
    "slopes": (ValueError, "alibi_slopes has shape", {"alibi_slopes": np.zeros(3)}),
    "out": (ValueError, "out has shape", {"out": np.zeros((2, 4, 3, 8), np.float32)}),
    "out dtype": (TypeError, "out has dtype", {"out": np.zeros((2, 4, 3, 5))}),
    "flag": (TypeError, "return_lse must be True or False", {"return_lse": 1}),
}


@pytest.mark.parametrize("case", ATTENDS)
def test_attend_errors(case: str) -> None:
    error, message, arguments = ATTENDS[case]
    cache, _ = filled([70, 3])
    with pytest.raises(error, match=message):
        cache.attend(**{"query": QUERY, **arguments})


@pytest.mark.parametrize(
    ("error", "message", "settings"),
    [
        (ValueError, "batch must be at least 0, got -1", {"batch": -1}),
        (TypeError, "num_kv_heads must be an integer, got 2.0", {"num_kv_heads": 2.0}),
        (ValueError, "head_dim must be at least 1, got 0", {"head_dim": 0}),
        (ValueError, "value_dim must be at least 1, got 0", {"value_dim": 0}),
        (ValueError, "capacity must be at least 1, got 0", {"capacity": 0}),
        (ValueError, "sliding_window must be at least 1, got 0", {"sliding_window": 0}),
        (ValueError, "sink_tokens=3 needs a sliding_window", {"sink_tokens": 3}),
        (
            ValueError,
            "capacity must be at least 10",
            {"capacity": 9, "sliding_window": 10},
        ),
        (ValueError, "rope takes", {"rope": {"theta": 1.0}}),
        (
            TypeError,
            "dtype must be float32, float64, float16, bfloat16 or int8, got int32",
            {"dtype": np.int32},
        ),
        *(
            (TypeError, r"dtype must be float32, float64, float16, bfloat16 or int8, got", {"dtype": dtype})
            for dtype in ("foo", ">f4", np.int16, complex, None, "f4,,", "f4,f4", object)
        ),
        *(
            (MemoryError, "not enough memory for a KVCache", {"capacity": 1, size: enormous})
            for size in ("batch", "num_kv_heads", "head_dim", "value_dim", "capacity")
            for enormous in (2**52, 2**63, 2**70)
        ),
    ],
)
def test_settings(error: type[Exception], message: str, settings: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        npattn.KVCache(**{"batch": 1, "num_kv_heads": 1, "head_dim": 4, **settings})


@pytest.mark.parametrize("window", [2**60 - 1, 2**63 - 1, 2**63, 2**70])
def test_windows_of_any_size(window: int) -> None:
    """A window that nothing leaves is one as good as another."""
    plain, _ = filled([70, 3])
    for settings in ({"sliding_window": window}, {"sliding_window": window, "sink_tokens": window}):
        cache, _ = filled([70, 3], **settings)
        cache.append(*tokens(2, 3))
        cache.crop([70, 3])
        for options in ({}, {"window": (window, window)}, {"window": (5, window), "is_causal": False}):
            assert_same_bits(cache.attend(QUERY, **options), plain.attend(QUERY, **options))
        assert cache.sliding_window == window
        assert cache.sink_tokens == settings.get("sink_tokens", 0)
        assert_same_bits(pickle.loads(pickle.dumps(cache)).attend(QUERY), plain.attend(QUERY))


@pytest.mark.parametrize("enormous", [2**52, 2**63, 2**70])
def test_pages_of_any_size(enormous: int) -> None:
    sizes = {"num_pages": 1, "page_size": 32, "num_kv_heads": 1, "head_dim": 4}
    for name in (*sizes, "value_dim"):
        with pytest.raises(MemoryError, match="not enough memory for a PagedKVCache"):
            npattn.PagedKVCache(**{**sizes, name: enormous})
    with pytest.raises(ValueError, match=f"multiple of 32, got {enormous + 1}"):
        npattn.PagedKVCache(**{**sizes, "page_size": enormous + 1})


def test_settings_cannot_be_set() -> None:
    cache = npattn.KVCache(1, 2, 4, value_dim=3, capacity=90, sliding_window=5, sink_tokens=1)
    paged = npattn.PagedKVCache(3, 32, 2, 4, value_dim=3)
    common = {"num_kv_heads": 2, "head_dim": 4, "value_dim": 3, "dtype": np.dtype(np.float32)}
    ring = {"batch": 1, "capacity": 90, "sliding_window": 5, "sink_tokens": 1}
    pages = {"num_pages": 3, "page_size": 32}
    for one, settings in ((cache, common | ring), (paged, common | pages)):
        for name, value in settings.items():
            assert getattr(one, name) == value
        for name in (
            *settings,
            "nbytes",
            *(("lengths", "keys", "values") if one is cache else ("free_pages",)),
        ):
            with pytest.raises(AttributeError):
                setattr(one, name, 7)
    cache.lengths[:] = 7  # a copy
    assert cache.lengths.tolist() == [0]


def test_crop_and_reorder_errors() -> None:
    cache, _ = filled([70, 3])
    before = state_of(cache)
    for lengths, message in (([71, 0], r"lengths\[0\] must lie in 0\.\.70.*got 71"), ([0, -1], "got -1")):
        with pytest.raises(ValueError, match=message):
            cache.crop(lengths)
    with pytest.raises(TypeError, match="integers"):
        cache.crop(1.5)
    for indices, message in (
        ([0, 2], r"0\.\.1, got 2"),
        ([-1, 0], "got -1"),
        ([0], "one for each"),
        (0, "one"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.reorder(indices)
    with pytest.raises(TypeError, match="integers"):
        cache.reorder([0.0, 1.0])
    with pytest.raises(ValueError, match=r"indices must lie in 0\.\.1, got 2\*\*60 or more"):
        cache.reorder([0, 2**70])
    with pytest.raises(ValueError, match=r"^indices cannot be made an array \(list\)"):
        cache.reorder([[0, 1], [1]])
    assert state_of(cache) == before


def test_no_memory() -> None:
    """An append that memory has no room for changes nothing."""
    cache = npattn.KVCache(2, 1, 2**40, value_dim=1)
    before = state_of(cache)
    key = np.broadcast_to(np.float32(0), (2, 1, 3, 2**40))
    with pytest.raises(MemoryError, match="no memory for more tokens; the cache is as it was"):
        cache.append(key, key[..., :1])
    assert state_of(cache) == before


# --- threads ---


def changes(cache: npattn.KVCache) -> dict[str, Any]:
    return {
        "append": lambda: cache.append(*tokens(2, 1)),
        "ragged": lambda: cache.append(*tokens(2, 1), counts=[1, 0]),
        "crop": lambda: cache.crop(0),
        "reorder": lambda: cache.reorder([1, 0]),
    }


def reads(cache: npattn.KVCache) -> dict[str, Any]:
    return {
        "attend": lambda: cache.attend(queries(2, 1)),
        "keys": lambda: cache.keys,
        "values": lambda: cache.values,
        "lengths": lambda: cache.lengths,
        "copy": cache.copy,
        "pickle": cache.__getstate__,
        "len": lambda: len(cache),
    }


def test_conflicts_change_nothing() -> None:
    cache, _ = filled([70, 3])
    before = state_of(cache)
    for name, change in changes(cache).items():
        with cache._reading, pytest.raises(RuntimeError, match="being read"):
            change()
        with cache._writing, pytest.raises(RuntimeError, match="being changed"):
            change()
        assert state_of(cache) == before, name
    for read in reads(cache).values():
        with cache._reading:
            read()
        with cache._writing, pytest.raises(RuntimeError, match="being changed"):
            read()
    assert cache.nbytes > 0
    assert state_of(cache) == before
    cache.append(*tokens(2, 1))


@pytest.mark.parametrize("settings", [{}, {"rope": {}}, {"capacity": 70}], ids=str)
def test_an_error_gives_the_access_back(settings: dict[str, Any]) -> None:
    cache, _ = filled([70, 3], **settings)
    with pytest.raises(ValueError):
        cache.crop(99)
    with pytest.raises(ValueError):
        cache.append(*tokens(2, 1), counts=[9, 0])
    cache.crop(1)
    cache.append(*tokens(2, 1))


def test_many_threads() -> None:
    """Appends and reads at once: each happens or is refused, and what is held is what happened."""
    cache = npattn.KVCache(1, 1, 16)
    done: list[tuple[int, int]] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(150):
            count = int(rng.integers(1, 400))
            part = np.full((1, 1, count, 16), number, np.float32)
            try:
                if rng.random() < 0.5:
                    cache.append(part, part)
                    done.append((number, count))
                else:
                    cache.copy()
            except RuntimeError:
                pass  # refused

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(cache) == sum(count for _, count in done)
    held = np.bincount(cache.keys[0, 0, :, 0].astype(int), minlength=4)
    assert held.tolist() == [sum(count for n, count in done if n == number) for number in range(4)]
    assert_same_bits(cache.keys, cache.values)


@pytest.mark.skipif(sys.platform == "win32", reason="needs setitimer")
@pytest.mark.parametrize("milliseconds", [5, 15, 30, 45, 60])
def test_an_interrupted_append_changes_nothing(milliseconds: int) -> None:
    """Forks of different lengths: the longest may write on in the page that they share, the other may not."""

    class Stopped(Exception):
        pass

    def stop(number: int, frame: Any) -> None:
        raise Stopped

    cache = npattn.KVCache(2, 4, 64)
    ones = np.ones((2, 4, 70, 64), np.float32)
    cache.append(ones, ones)
    cache.reorder([0, 0])
    cache.crop([70, 66])
    long = np.broadcast_to(np.float32(3), (2, 4, 30000, 64))
    forks: list[npattn.KVCache] = []

    def append_to_forks() -> None:
        signal.setitimer(signal.ITIMER_REAL, milliseconds / 1000)
        while True:
            forks.append(cache.copy())
            with npattn.threads(1):
                forks[-1].append(long, long)

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(Stopped):
            append_to_forks()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    stopped = forks[-1]
    assert len(stopped) in (70, 30070)
    stopped.crop([70, 66])
    assert (stopped.keys[0] == 1).all()
    assert (stopped.values[1, :, :66] == 1).all()
    assert stopped._store.pages - stopped._store.free_pages in (2, 3)
    stopped.reorder([1, 1])
    stopped.append(ones, ones)
    assert (stopped.keys == 1).all()
    assert stopped._store.pages - stopped._store.free_pages == 5
