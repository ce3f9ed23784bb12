"""Rows that decode from a cache: one new token a sequence attends to all that came before it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from . import plain
from .inputs import FLOAT32, FLOAT64, dtype_of, normal
from .plain import Array
from .problem import PeerTask, Problem

HEADS, HEAD_DIM = 32, 128


def _tokens(held: np.dtype[Any], batch: int, kv_heads: int, length: int) -> list[Array]:
    """A query, and the keys and values of `length` tokens, its own among them."""
    key_shape = (batch, kv_heads, length, HEAD_DIM)
    return normal(held, (batch, HEADS, 1, HEAD_DIM), key_shape, key_shape)


def cached(length: int, *, batch: int = 1, kv_heads: int = 8, dtype: str = "float32") -> Problem:
    """Attention over a cache of `dtype`. NumPy and the peers have plain arrays, NumPy in float32.

    An int8 cache is given float32, which the errors are measured against; its scales count as bytes read.
    """
    from .. import KVCache

    int8 = dtype == "int8"
    held = FLOAT32 if int8 else dtype_of(dtype)
    query, key, value = arrays = _tokens(held, batch, kv_heads, length)
    cache = KVCache(batch, kv_heads, HEAD_DIM, capacity=length, dtype=np.int8 if int8 else held)
    cache.append(key, value)
    numbers = key.size + value.size
    return Problem(
        dtype=held,
        limit="read",
        amount=numbers * (1 + 4 / HEAD_DIM) if int8 else float(numbers * held.itemsize),
        npattn=partial(cache.attend, query, out=np.empty_like(query)),
        numpy=partial(plain.attention, *(array.astype(FLOAT32, copy=False) for array in arrays)),
        sample=lambda result: result,
        exact=plain.attention(*(array.astype(FLOAT64) for array in arrays)),
        allowed=1e-2 if int8 else None,
        peer=None if int8 else PeerTask("attention", tuple(arrays), {"causal": False, "visible": None}),
    )


def step(length: int, *, kv_heads: int = 8) -> Problem:
    """The key and value of one more token are appended, its query attends, and it is taken back."""
    from .. import KVCache

    query, key, value = arrays = _tokens(FLOAT32, 1, kv_heads, length)
    cache = KVCache(1, kv_heads, HEAD_DIM, capacity=length)
    cache.append(key[:, :, :-1], value[:, :, :-1])
    new_key, new_value = key[:, :, -1:].copy(), value[:, :, -1:].copy()
    keys, values = key.copy(), value.copy()

    def ours() -> Array:
        cache.append(new_key, new_value)
        output: Array = cache.attend(query)
        cache.crop(length - 1)
        return output

    def numpys() -> Array:
        keys[:, :, -1:], values[:, :, -1:] = new_key, new_value
        return plain.attention(query, keys, values)

    return Problem(
        dtype=FLOAT32,
        limit="read",
        amount=float(key.nbytes + value.nbytes),
        npattn=ours,
        numpy=numpys,
        sample=lambda result: result,
        exact=plain.attention(*(array.astype(FLOAT64) for array in arrays)),
    )
