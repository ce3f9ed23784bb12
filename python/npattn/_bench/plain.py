"""What one writes in NumPy without npattn: the other side of every row; in float64 the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def attention(query: Array, key: Array, value: Array, mask: Array | None = None) -> Array:
    """softmax(q k' / sqrt(E) + mask) v in few passes; heads that share a key head go together."""
    *leading, heads, query_len, head_dim = query.shape
    kv_heads = key.shape[-3]
    if heads != kv_heads:
        query = query.reshape(*leading, kv_heads, heads // kv_heads * query_len, head_dim)
    scores = query @ key.swapaxes(-1, -2)
    scores *= scores.dtype.type(head_dim**-0.5)
    if mask is not None:
        per_head = scores.reshape(*leading, heads, query_len, key.shape[-2])
        per_head += mask
    softmax(scores, out=scores)
    output: Array = scores @ value
    return output.reshape(*leading, heads, query_len, value.shape[-1])


def softmax(x: Array, out: Array | None = None) -> Array:
    """exp(x - max) / sum over the last axis."""
    out = np.subtract(x, x.max(axis=-1, keepdims=True), out=out)
    np.exp(out, out=out)
    out /= out.sum(axis=-1, keepdims=True)
    return out


def log_softmax(x: Array) -> Array:
    """x - max - log(sum of exp) over the last axis."""
    out: Array = x - x.max(axis=-1, keepdims=True)
    out -= np.log(np.exp(out).sum(axis=-1, keepdims=True))
    return out


def rotate_halves(x: Array, cos: Array, sin: Array, out: Array | None = None) -> Array:
    """RoPE on pairs (j, j + D/2) of x (..., L, D), with cos and sin (L, D/2)."""
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    if out is None:
        out = np.empty_like(x)
    np.multiply(low, cos, out=out[..., :half])
    out[..., :half] -= high * sin
    np.multiply(high, cos, out=out[..., half:])
    out[..., half:] += low * sin
    return out


def merge_heads(x: Array, out: Array | None = None) -> Array:
    """(..., H, L, E) -> (..., L, H E)."""
    swapped = x.swapaxes(-2, -3)
    *leading, length, heads, head_dim = swapped.shape
    if out is None:
        return np.ascontiguousarray(swapped).reshape(*leading, length, heads * head_dim)
    np.copyto(out.reshape(swapped.shape), swapped)
    return out


def layer(x: Array, weights: Sequence[Array], biases: Sequence[Array], num_heads: int) -> Array:
    """Self-attention of x (L, D): project to query, key, value, attend head by head, join, project."""
    length, width = x.shape
    heads = [
        (x @ weight + bias).reshape(length, num_heads, width // num_heads).swapaxes(0, 1)
        for weight, bias in zip(weights[:3], biases[:3], strict=True)
    ]
    joined = attention(*heads).swapaxes(0, 1).reshape(length, width)
    output: Array = joined @ weights[3] + biases[3]
    return output
