"""The options of attention: which keys a query sees, and what is added to its scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._common import Array, Bool, float64


@dataclass(frozen=True)
class Options:
    """The keywords of scaled_dot_product_attention that act on scores; see there for their meaning."""

    attn_mask: ArrayLike | None
    bias: ArrayLike | None
    is_causal: bool
    query_offset: ArrayLike | None
    window: tuple[int | None, int | None] | None
    kv_lengths: ArrayLike | None
    scale: float | None
    softcap: float | None
    alibi_slopes: ArrayLike | None


def query_positions(options: Options, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """p = i + query_offset, the place of query i on the key axis: (..., 1, Lq, 1)."""
    offset = options.query_offset
    if offset is None:
        query_len, key_len = shape[-2:]
        placed = options.is_causal or options.window is not None or options.alibi_slopes is not None
        if placed and query_len != key_len:
            raise ValueError(
                f"query_offset is needed where query_len ({query_len}) and key_len ({key_len}) differ: "
                f"0 (upper left) or {key_len - query_len} (lower right)"
            )
        offset = 0
    start = np.broadcast_to(np.asarray(offset).astype(np.int64), shape[:-3])
    return start[..., None, None, None] + np.arange(shape[-2])[:, None]


def visible_keys(options: Options, shape: tuple[int, ...]) -> Bool:
    """(..., Hq, Lq, Lk), True where query i sees key j; decided before anything is added.

    j <= p (causal), p - left <= j <= p + right (window), j < kv_lengths, a bool mask, a float mask > -inf.
    """
    j, p = np.arange(shape[-1]), query_positions(options, shape)
    visible = np.ones(shape, dtype=np.bool_)
    for given in (options.attn_mask, options.bias):
        if given is not None:
            mask = np.asarray(given)
            visible &= mask if mask.dtype == np.bool_ else float64(mask) != -np.inf
    if options.is_causal:
        visible &= j <= p
    left, right = options.window or (None, None)
    if left is not None:
        visible &= p - j <= float(left)
    if right is not None:
        visible &= j - p <= float(right)
    return visible & within_lengths(options, shape)


def within_lengths(options: Options, shape: tuple[int, ...]) -> Bool:
    """(..., 1, 1, Lk), True where j < kv_lengths: the keys that exist."""
    lengths = shape[-1] if options.kv_lengths is None else np.asarray(options.kv_lengths).astype(np.int64)
    return np.arange(shape[-1]) < np.broadcast_to(lengths, shape[:-3])[..., None, None, None]


def added_terms(options: Options, shape: tuple[int, ...]) -> Array:
    """(..., Hq, Lq, Lk): float mask + bias + ALiBi, -slope * |p - j|."""
    total = np.zeros(shape)
    for given in (options.attn_mask, options.bias):
        if given is not None and np.asarray(given).dtype != np.bool_:
            total += float64(given)
    if options.alibi_slopes is not None:
        distance = np.abs(query_positions(options, shape) - np.arange(shape[-1]))
        total -= float64(options.alibi_slopes)[..., None, None] * distance
    return total
