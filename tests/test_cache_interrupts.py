"""Caches: whatever the instruction at which an interrupt comes, they are as before a call or as after it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dis import opname
from types import FrameType
from typing import Any

import npattn
import numpy as np
import pytest
from plain_cache import DIM, KV_HEADS, VALUE_DIM, filled, queries, state_of, tokens
from support import assert_same_bits

PACKAGE = os.path.dirname(npattn.__file__)


def interrupted(call: Callable[[], Any], at: int) -> bool:
    """call(), with a KeyboardInterrupt before instruction number `at` of the package's own Python code.

    False if the call has not so many.
    """
    left = at

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        # Python looks for signals where calls and loops begin and end, never between a value and its return.
        if event == "opcode" and not opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN"):
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
        return trace

    previous, errors = sys.gettrace(), np.geterr()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
        # The trace may come between np.errstate and its block, where Python looks for no signal.
        np.seterr(**errors)
    assert left >= 0
    return False


def paged() -> tuple[npattn.PagedKVCache, int]:
    cache = npattn.PagedKVCache(8, 32, KV_HEADS, DIM, value_dim=VALUE_DIM)
    first = cache.add_sequence()
    cache.append([first], *tokens(1, 40))
    return cache, first


PAGED: dict[str, Callable[[npattn.PagedKVCache, int], Any]] = {
    "add": lambda cache, first: cache.add_sequence(),
    "fork": lambda cache, first: cache.add_sequence(prefix=first),
    "append": lambda cache, first: cache.append([first], *tokens(1, 3)),
    "append general": lambda cache, first: cache.append([first], *tokens(1, 3), counts=np.int32(2)),
    "attend": lambda cache, first: cache.attend([first], queries(1, 3)),
    "attend general": lambda cache, first: cache.attend([first], queries(1, 3), return_lse=True),
    "crop": lambda cache, first: cache.crop(first, 20),
    "free": lambda cache, first: cache.free(first),
}


@pytest.mark.parametrize("name", PAGED)
def test_pages(name: str) -> None:
    change = PAGED[name]
    cache, first = paged()
    before = state_of(cache)
    change(cache, first)
    after = state_of(cache)
    for at in range(10**6):
        cache, first = paged()
        # Held back by nothing: the traceback is gone, and the frames with it.
        if not interrupted(lambda: change(cache, first), at):  # noqa: B023
            break
        state = state_of(cache)
        assert state in (before, after), at
        # A sequence that was added and whose id nobody has is not kept.
        assert state[0] in ([], [first]), at
        cache.append([cache.add_sequence()], *tokens(1, 3))
    assert at > 5


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ring": {"sliding_window": 9, "sink_tokens": 2},
    "rope": {"rope": {}},
    "int8": {"dtype": np.int8},
}

CHANGES: dict[str, Callable[[npattn.KVCache], Any]] = {
    "append": lambda cache: cache.append(*tokens(2, 3)),
    "append ragged": lambda cache: cache.append(*tokens(2, 3), counts=(2, 1)),
    "attend": lambda cache: cache.attend(queries(2, 3), sinks=np.zeros(4)),
    "crop": lambda cache: cache.crop([69, 3]),
    "reorder": lambda cache: cache.reorder([1, 1]),
    "copy": lambda cache: cache.copy(),
    "lengths": lambda cache: cache.lengths,
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", CHANGES)
def test_kvcache(name: str, kind: str) -> None:
    change, settings = CHANGES[name], SETTINGS[kind]
    cache, _ = filled([70, 3], **settings)
    before = state_of(cache)
    change(cache)
    after = state_of(cache)
    for at in range(0, 10**6, 1 if kind == "plain" else 7):
        cache, _ = filled([70, 3], **settings)
        if not interrupted(lambda: change(cache), at):  # noqa: B023
            break
        assert state_of(cache) in (before, after), at
        cache.append(*tokens(2, 3))
    assert at > 5


def test_a_layer_with_a_cache() -> None:
    layer = npattn.MultiHeadAttention.random(16, 4, num_kv_heads=2, rng=0)
    x = np.ones((2, 3, 16), np.float32)

    def filled_by_layer() -> npattn.KVCache:
        cache = npattn.KVCache(2, 2, 4)
        layer(x, cache=cache)
        return cache

    cache = filled_by_layer()
    before = state_of(cache)
    layer(x, cache=cache)
    after = state_of(cache)
    for at in range(0, 10**6, 5):
        cache = filled_by_layer()
        if not interrupted(lambda: layer(x, cache=cache), at):  # noqa: B023
            break
        assert state_of(cache) in (before, after), at
        layer(x, cache=cache)
    assert at > 500


@pytest.mark.skipif(sys.platform == "win32", reason="needs setitimer")
def test_tokens_that_are_quantised_for_a_full_ring() -> None:
    """An interrupt while the integers are made, of tokens that are to go where the window has left."""
    window = 32000
    cache = npattn.KVCache(1, 16, 64, capacity=2 * window, sliding_window=window, dtype=np.int8)
    row = np.linspace(-1, 1, 64, dtype=np.float32)
    query = np.ones((1, 16, 1, 64), np.float32)

    def append(cache: npattn.KVCache, number: int) -> None:
        shape = (1, 16, window, 64)
        cache.append(np.broadcast_to(number * row, shape), np.broadcast_to(row + number, shape))

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    append(cache, 1)
    append(cache, 2)
    whole = cache.copy()
    isa = npattn.isa.use("generic")  # which takes long enough: a long call looks for signals after 50 ms
    previous = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with npattn.threads(1), pytest.raises(KeyboardInterrupt):
            append(cache, 3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        npattn.isa.use(isa)
    assert cache.lengths.tolist() == [2 * window]
    assert cache._store.free_pages == whole._store.free_pages
    assert_same_bits(cache.attend(query), whole.attend(query))
    for one in (cache, whole):
        append(one, 4)
    assert_same_bits(cache.attend(query), whole.attend(query))
