"""Any sequence of operations on a cache equals attention over concatenated plain arrays (Hypothesis)."""

from __future__ import annotations

import pickle
from typing import Any

import npattn
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plain_cache import CACHE_DTYPES, PlainSequence, assert_attends, held, plain_arrays, state_of, token_dtype
from shapes import Array
from support import assert_same_bits

COUNTS = st.one_of(st.integers(0, 4), st.integers(5, 80))
SEEDS = st.integers(0, 2**32 - 1)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    return rng.standard_normal(shape).astype(dtype)


def some_options(rng: np.random.Generator, heads: int, rows: int, longest: int) -> dict[str, Any]:
    """Each option of attend with a chance of a quarter."""
    every: dict[str, Any] = {
        "attn_mask": rng.random((heads, rows, longest)) < 0.8,
        "bias": rng.standard_normal((rows, longest)).astype(np.float32),
        "window": (int(rng.integers(0, 30)), None),
        "is_causal": False,
        "softcap": 2.0,
        "sinks": rng.standard_normal(heads),
        "alibi_slopes": rng.random(heads) / 8,
    }
    return {name: option for name, option in every.items() if rng.random() < 0.25}


class CacheMachine(RuleBasedStateMachine):
    """What both caches are put through. A subclass says what its sequences are."""

    cache: Any
    plain: list[PlainSequence]
    dtype: Any
    dims: tuple[int, int]
    kv_heads: int

    def __init__(self) -> None:
        super().__init__()
        self.isa = npattn.isa.active()

    def teardown(self) -> None:
        npattn.isa.use(self.isa)

    def tokens(self, seed: int, sequences: int, count: int) -> tuple[Array, Array]:
        rng = np.random.default_rng(seed)
        key, value = (
            normal(rng, (sequences, count, self.kv_heads, width), token_dtype(self.dtype)).swapaxes(1, 2)
            for width in self.dims
        )
        return key, value

    def held_tokens(self, key: Array, value: Array) -> tuple[Array, Array]:
        return held(key, self.dtype), held(value, self.dtype)

    def check_attend(self, attend: Any, plain: list[PlainSequence], seed: int, rows: int) -> None:
        """The last `rows` tokens of each sequence as queries, fewer where there are fewer."""
        rng = np.random.default_rng(seed)
        counts = [min(rows, self.visible_rows(sequence)) for sequence in plain]
        heads = self.kv_heads * int(rng.integers(1, 4))
        query = normal(rng, (len(plain), heads, rows, self.dims[0]), token_dtype(self.dtype))
        longest = max((sequence.length for sequence in plain), default=0)
        options = some_options(rng, heads, rows, longest)
        assert_attends(attend, plain, query, counts, dtype=self.dtype, **options)

    def visible_rows(self, sequence: PlainSequence) -> int:
        """How many of the last tokens see nothing that is gone."""
        rows = 0
        while rows < sequence.length:
            place = sequence.length - rows - 1
            if any(sequence.sees(place, key) and not sequence.holds(key) for key in range(place + 1)):
                break
            rows += 1
        return rows

    def slots(self) -> Array:
        raise NotImplementedError

    @rule(name=st.sampled_from(npattn.isa.available()))
    def change_isa(self, name: str) -> None:
        npattn.isa.use(name)

    @rule()
    def pickle(self) -> None:
        self.cache = pickle.loads(pickle.dumps(self.cache))

    @invariant()
    def holds_the_same(self) -> None:
        if not hasattr(self, "cache") or not self.plain:
            return
        keys, values = plain_arrays(self.plain)
        assert_same_bits(self.cache._store.keys(self.slots(), 2), keys)
        assert_same_bits(self.cache._store.values(self.slots(), 2), values)
        lengths = self.cache._store.lengths(self.slots()).tolist()
        assert lengths == [sequence.length for sequence in self.plain]


class KVCacheMachine(CacheMachine):
    @initialize(
        batch=st.integers(1, 3),
        kv_heads=st.integers(1, 2),
        dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
        dtype=st.sampled_from(list(CACHE_DTYPES.values())),
        sliding_window=st.one_of(st.none(), st.integers(1, 90)),
        sink_tokens=st.one_of(st.just(0), st.integers(1, 70)),
        spare=st.one_of(st.none(), st.integers(0, 150)),
    )
    def create(
        self,
        batch: int,
        kv_heads: int,
        dims: tuple[int, int],
        dtype: Any,
        sliding_window: int | None,
        sink_tokens: int,
        spare: int | None,
    ) -> None:
        ring = {"sliding_window": sliding_window, "sink_tokens": sink_tokens if sliding_window else 0}
        least = (sliding_window or 1) + ring["sink_tokens"]
        self.capacity = None if spare is None else least + spare
        self.dtype, self.dims, self.kv_heads = dtype, dims, kv_heads
        self.cache = npattn.KVCache(
            batch, kv_heads, dims[0], value_dim=dims[1], dtype=dtype, capacity=self.capacity, **ring
        )
        key, value = self.tokens(0, batch, 0)
        self.plain = [PlainSequence(*self.held_tokens(key[i], value[i]), **ring) for i in range(batch)]

    def slots(self) -> Array:
        return self.cache._slots

    @rule(count=COUNTS, seed=SEEDS, ragged=st.booleans())
    def append(self, count: int, seed: int, ragged: bool) -> None:
        batch = len(self.plain)
        counts = [count] * batch
        if ragged:
            counts = np.random.default_rng([seed, 1]).integers(0, count + 1, batch).tolist()
        key, value = self.tokens(seed, batch, count)
        after = [sequence.fork() for sequence in self.plain]
        for sequence, k, v, n in zip(after, key, value, counts, strict=True):
            sequence.append(*self.held_tokens(k[:, :n], v[:, :n]))
        kept = [sum(map(sequence.holds, range(sequence.length))) for sequence in after]
        fits = self.capacity is None or all(
            n == 0 or m <= self.capacity for n, m in zip(counts, kept, strict=True)
        )
        if fits:
            self.cache.append(key, value, counts=counts if ragged else None)
            self.plain = after
        else:
            before = state_of(self.cache)
            with pytest.raises(ValueError, match="capacity"):
                self.cache.append(key, value, counts=counts if ragged else None)
            assert state_of(self.cache) == before

    @rule(part=st.lists(st.floats(0, 1), min_size=3, max_size=3))
    def crop(self, part: list[float]) -> None:
        lengths = [round(share * sequence.length) for share, sequence in zip(part, self.plain, strict=False)]
        if all(sequence.may_crop(n) for sequence, n in zip(self.plain, lengths, strict=True)):
            self.cache.crop(lengths)
            for sequence, length in zip(self.plain, lengths, strict=True):
                sequence.crop(length)
        else:
            before = state_of(self.cache)
            with pytest.raises(ValueError, match="were let go"):
                self.cache.crop(lengths)
            assert state_of(self.cache) == before

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        batch = len(self.plain)
        indices = data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
        self.cache.reorder(indices)
        self.plain = [self.plain[index].fork() for index in indices]

    @rule(seed=SEEDS)
    def go_on_with_a_copy(self, seed: int) -> None:
        """The cache that is left behind changes, the copy does not."""
        left = self.cache
        self.cache = left.copy()
        left.crop(0)
        left.append(*self.tokens(seed, len(self.plain), 1))

    @rule(seed=SEEDS, rows=st.integers(0, 9))
    def attend(self, seed: int, rows: int) -> None:
        self.check_attend(self.cache.attend, self.plain, seed, rows)

    @invariant()
    def memory_is_bounded(self) -> None:
        """Pages in use are those that tokens are held in."""
        if not hasattr(self, "cache"):
            return
        store = self.cache._store
        tables = store.dump(self.slots(), 1)[2]
        for table, sequence in zip(tables, self.plain, strict=True):
            pages = [range(start, start + 64) for start in range(0, sequence.length, 64)]
            assert [number >= 0 for number in table] == [any(map(sequence.holds, page)) for page in pages]


class PagedMachine(CacheMachine):
    @initialize(
        num_pages=st.integers(1, 16),
        page_size=st.sampled_from([32, 64, 96]),
        kv_heads=st.integers(1, 2),
        dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
        dtype=st.sampled_from(list(CACHE_DTYPES.values())),
    )
    def create(
        self, num_pages: int, page_size: int, kv_heads: int, dims: tuple[int, int], dtype: Any
    ) -> None:
        self.dtype, self.dims, self.kv_heads = dtype, dims, kv_heads
        self.cache = npattn.PagedKVCache(
            num_pages, page_size, kv_heads, dims[0], value_dim=dims[1], dtype=dtype
        )
        self.ids: list[int] = []
        self.plain = []
        self.add()

    def slots(self) -> Array:
        return self.cache._store.slots_of(self.ids)

    def owned(self) -> int:
        """The pages in use: tables name a shared one once."""
        tables = self.cache._store.dump(self.slots(), 1)[2]
        return len({number for table in tables for number in table})

    @rule()
    def add(self) -> None:
        self.ids.append(self.cache.add_sequence())
        key, value = self.tokens(0, 1, 0)
        self.plain.append(PlainSequence(*self.held_tokens(key[0], value[0])))

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.ids) - 1))
        self.ids.append(self.cache.add_sequence(prefix=self.ids[at]))
        self.plain.append(self.plain[at].fork())

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.ids) - 1))
        self.cache.free(self.ids.pop(at))
        self.plain.pop(at)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), share=st.floats(0, 1))
    def crop(self, data: st.DataObject, share: float) -> None:
        at = data.draw(st.integers(0, len(self.ids) - 1))
        length = round(share * self.plain[at].length)
        self.cache.crop(self.ids[at], length)
        self.plain[at].crop(length)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), count=COUNTS, seed=SEEDS)
    def append(self, data: st.DataObject, count: int, seed: int) -> None:
        chosen = data.draw(st.lists(st.integers(0, len(self.ids) - 1), unique=True))
        counts = np.random.default_rng([seed, 1]).integers(0, count + 1, len(chosen)).tolist()
        key, value = self.tokens(seed, len(chosen), count)
        before = state_of(self.cache)
        try:
            self.cache.append([self.ids[at] for at in chosen], key, value, counts=counts)
        except MemoryError:
            assert state_of(self.cache) == before
            size = self.cache.page_size
            most = sum(-(-n // size) + 1 for n in counts if n)
            assert most > self.cache.free_pages
            return
        for i, at in enumerate(chosen):
            self.plain[at].append(*self.held_tokens(key[i, :, : counts[i]], value[i, :, : counts[i]]))

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), seed=SEEDS, rows=st.integers(0, 9))
    def attend(self, data: st.DataObject, seed: int, rows: int) -> None:
        chosen = data.draw(st.lists(st.integers(0, len(self.ids) - 1), min_size=1, max_size=5))
        ids = [self.ids[at] for at in chosen]
        self.check_attend(
            lambda query, **options: self.cache.attend(ids, query, **options),
            [self.plain[at] for at in chosen],
            seed,
            rows,
        )

    @invariant()
    def free_pages_are_counted(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.free_pages == self.cache.num_pages - self.owned()


TestKVCache = KVCacheMachine.TestCase
TestPagedKVCache = PagedMachine.TestCase
TestKVCache.settings = TestPagedKVCache.settings = settings(max_examples=60, stateful_step_count=25)
