"""Caches as plain arrays that are concatenated: what KVCache and PagedKVCache must agree with."""

from __future__ import annotations

from copy import copy
from typing import Any

import npattn
import numpy as np
from npattn import reference
from numpy.typing import ArrayLike
from shapes import Array
from support import DTYPES, assert_same_bits, assert_within, int8_tolerances_of, tolerances_of
from tolerances import largest

KV_HEADS, DIM, VALUE_DIM = 2, 8, 5
# Of caches, by name.
CACHE_DTYPES = {name: DTYPES[name] for name in ("float32", "float64", "float16", "bfloat16")}
CACHE_DTYPES["int8"] = np.dtype(np.int8)


def token_dtype(dtype: Any) -> np.dtype[Any]:
    """A dtype of tokens that a cache of `dtype` rounds: the widest that it takes."""
    return np.promote_types(dtype, np.float32)


def held(x: Array, dtype: Any) -> Array:
    """What a cache of `dtype` makes of x: for int8 the nearest multiples of max |x| / 127, in float32."""
    if dtype != np.int8:
        return x.astype(dtype)
    top = np.abs(x).max(axis=-1, keepdims=True, initial=0).astype(np.float32)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    return (np.rint(x * inverse) + np.float32(0)) * (top / np.float32(127))  # integers have no -0


class PlainSequence:
    """The tokens of one sequence: key (Hkv, L, E), value (Hkv, L, Ev), and where the window begins."""

    def __init__(
        self, key: Array, value: Array, *, sliding_window: int | None = None, sink_tokens: int = 0
    ) -> None:
        self.key, self.value = key, value
        self.sliding_window, self.sink_tokens = sliding_window, sink_tokens
        self.first = 0  # no query to come sees what lies between the sinks and this token

    @property
    def length(self) -> int:
        return int(self.key.shape[1])

    def append(self, key: Array, value: Array) -> None:
        if self.sliding_window is not None and key.shape[1]:
            self.first = max(self.first, self.length - self.sliding_window + 1)
        self.key = np.concatenate([self.key, key], axis=1)
        self.value = np.concatenate([self.value, value], axis=1)

    def may_crop(self, length: int) -> bool:
        """Every token that token length - 1 sees is held."""
        seen = [key for key in range(length) if self.sees(length - 1, key)]
        return all(self.holds(key) for key in seen)

    def crop(self, length: int) -> None:
        self.key, self.value = self.key[:, :length], self.value[:, :length]
        if length <= self.sink_tokens:
            self.first = 0

    def sees(self, place: int, key: int) -> bool:
        """Token `key`, at most at `place`, lies in the sliding window of `place` or is a sink."""
        return self.sliding_window is None or key > place - self.sliding_window or key < self.sink_tokens

    def holds(self, key: int) -> bool:
        return key >= self.first or key < self.sink_tokens

    def fork(self) -> PlainSequence:
        return copy(self)

    def attend(self, query: Array, **options: Any) -> tuple[Array, Array, Array]:
        """Output, weights and lse of query (Hq, n, E), the last n tokens."""
        places = np.arange(self.length - query.shape[1], self.length)
        mask = np.array([[self.sees(p, j) for j in range(self.length)] for p in places], bool)
        mask = mask.reshape(len(places), self.length)
        given = options.pop("attn_mask", None)
        if given is not None:
            mask = mask & given if given.dtype == bool else np.where(mask, given, -np.inf)
        return reference.scaled_dot_product_attention(
            query,
            self.key,
            self.value,
            mask,
            query_offset=self.length - query.shape[1],
            return_weights=True,
            return_lse=True,
            **options,
        )


def plain_arrays(sequences: list[PlainSequence]) -> tuple[Array, Array]:
    """keys and values as the caches give them: zeros where no token is held."""
    longest = max((sequence.length for sequence in sequences), default=0)
    arrays = []
    for name in ("key", "value"):
        one = getattr(sequences[0], name)
        plain = np.zeros((len(sequences), one.shape[0], longest, one.shape[2]), one.dtype)
        for row, sequence in zip(plain, sequences, strict=True):
            held = [key for key in range(sequence.length) if sequence.holds(key)]
            row[:, held] = getattr(sequence, name)[:, held]
        arrays.append(plain)
    return arrays[0], arrays[1]


def plain_attend(
    sequences: list[PlainSequence],
    query: Array,
    counts: ArrayLike | None = None,
    *,
    attn_mask: Array | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    is_causal: bool = True,
    **options: Any,
) -> tuple[Array, Array, Array]:
    """`attend` of both caches with the weights and lse, one sequence after the other, in float64."""
    batch, heads, rows, _ = query.shape
    longest = max((sequence.length for sequence in sequences), default=0)
    shape = (batch, heads, rows, longest)
    output = np.zeros((batch, heads, rows, sequences[0].value.shape[-1] if sequences else 0))
    weights, lse = np.zeros(shape), np.full((batch, heads, rows), -np.inf)
    real = np.broadcast_to(rows if counts is None else np.asarray(counts), (batch,))
    for i, (sequence, count) in enumerate(zip(sequences, real, strict=True)):
        if count == 0:
            continue
        here = options | {"is_causal": is_causal}
        for name, mask in (("attn_mask", attn_mask), ("bias", bias)):
            if mask is not None:
                here[name] = np.broadcast_to(mask, shape)[i, :, :count, : sequence.length]
        if alibi_slopes is not None:
            here["alibi_slopes"] = np.broadcast_to(alibi_slopes, (batch, heads))[i]
        results = sequence.attend(query[i, :, :count], **here)
        output[i, :, :count], weights[i, :, :count, : sequence.length], lse[i, :, :count] = results
    return output, weights, lse


def assert_attends(
    attend: Any,
    sequences: list[PlainSequence],
    query: Array,
    counts: ArrayLike | None = None,
    *,
    dtype: Any = np.float32,
    **options: Any,
) -> None:
    """attend(query, counts=...) of a cache of `dtype` gives what the sequences give, weights and lse too."""
    results = attend(query, counts=counts, return_weights=True, return_lse=True, **options)
    expected = plain_attend(sequences, query, counts, **options)
    keys, values = plain_arrays(sequences)
    if not keys.size:
        keys, values = (
            np.zeros((*array.shape[:2], 1, array.shape[3]), array.dtype) for array in (keys, values)
        )
    slopes = largest(options.get("alibi_slopes", 0.0)) * keys.shape[2]
    added = slopes + largest(options.get("bias", 0.0)) + largest(options.get("attn_mask", 0.0))
    scale = options.get("scale")
    allowed = tolerances_of(query, keys, values, scale=scale, added=added)
    if dtype == np.int8:
        allowed = int8_tolerances_of(query, keys, values, expected[1], scale=scale, added=added)
    for actual, wanted, within in zip(
        results, expected, (allowed.output, allowed.weights, allowed.lse), strict=True
    ):
        assert_within(actual, wanted, within)
    assert_same_bits(attend(query, counts=counts, **options), results[0])


def state_of(cache: Any) -> list[Any]:
    """All that can be seen of a cache: it is the same before and after an error."""
    if isinstance(cache, npattn.PagedKVCache):
        slots = cache._store.slots_of(cache._store.ids())
        told: list[Any] = [cache._store.ids(), cache.lengths(cache._store.ids()).tolist(), cache.free_pages]
    else:
        slots = cache._slots
        told = [cache.lengths.tolist(), len(cache), cache._store.free_pages]
    held = [cache._store.keys(slots, 1).tobytes(), cache._store.values(slots, 1).tobytes()]
    return [*told, cache._store.pages, cache._store.firsts(slots).tolist(), *held]


def tokens(batch: int, count: int, seed: int = 0, dtype: Any = np.float32) -> tuple[Array, Array]:
    """Normal tokens that a cache of `dtype` takes."""
    rng = np.random.default_rng([seed, batch, count])
    key = rng.standard_normal((batch, KV_HEADS, count, DIM)).astype(token_dtype(dtype))
    return key, rng.standard_normal((batch, KV_HEADS, count, VALUE_DIM)).astype(token_dtype(dtype))


def queries(batch: int, count: int, heads: int = 4, dtype: Any = np.float32) -> Array:
    """Normal queries that a cache of `dtype` takes."""
    rng = np.random.default_rng([7, batch, count])
    return rng.standard_normal((batch, heads, count, DIM)).astype(token_dtype(dtype))


def cache_of(batch: int = 2, **settings: Any) -> npattn.KVCache:
    return npattn.KVCache(batch, KV_HEADS, DIM, value_dim=VALUE_DIM, **settings)


def filled(lengths: list[int], **settings: Any) -> tuple[npattn.KVCache, list[PlainSequence]]:
    """A cache with sequences of these lengths, and the same as plain arrays."""
    cache = cache_of(len(lengths), **settings)
    dtype = settings.get("dtype", np.float32)
    key, value = tokens(len(lengths), max(lengths, default=0), dtype=dtype)
    cache.append(key, value, counts=lengths)
    window = {name: settings[name] for name in ("sliding_window", "sink_tokens") if name in settings}
    rows = zip(held(key, dtype), held(value, dtype), lengths, strict=True)
    return cache, [PlainSequence(k[:, :n], v[:, :n], **window) for k, v, n in rows]
