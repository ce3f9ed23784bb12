"""What each query looks at and what each key receives, a block of weights at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from npattn._check import as_integer
from npattn._inputs import Inputs, Layout, parse_scale, parse_softcap
from npattn._masks import resolve
from npattn._threads import _core, current

Array = np.ndarray[Any, Any]

_BLOCK = 2**20  # weights computed at a time
_ENOUGH_ROWS = 64  # queries that are worth a call of their own: they share the keys that it reads
_FEW = 64  # up to so many largest weights are found one after the other


class AttentionSummary(NamedTuple):
    """What `attention_summary` returns: a tuple of four arrays, by name.

    Attributes
    ----------
    entropy : ndarray, (..., Hq, Lq)
        Of each query's weights, in nats.
    top_weights : ndarray, (..., Hq, Lq, k)
        Each query's largest weights, in falling order.
    top_keys : ndarray of int64, (..., Hq, Lq, k)
        The keys they belong to, -1 where there is none.
    received : ndarray, (..., Hq, Lk)
        The sum of the weights that all queries give each key.

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> entropy, top_weights, top_keys, received = npattn.attention_summary(np.zeros((1, 4)), np.ones((2, 4)))
    >>> entropy.round(3), received
    (array([0.693]), array([0.5, 0.5]))
    """

    entropy: Array
    top_weights: Array
    top_keys: NDArray[np.int64]
    received: Array


class _Block(NamedTuple):
    """Queries `rows` of `heads`, which read the key heads `kv_heads`, at `batch` of the leading axes."""

    batch: tuple[int, ...]
    kv_heads: slice
    heads: slice
    rows: slice


def _blocks(inputs: Inputs) -> Iterator[_Block]:
    """All weights in blocks of at most _BLOCK, whole batches and heads together where they are small."""
    sizes, kv_heads = inputs.sizes, inputs.key.shape[-3]
    group = sizes.heads // max(kv_heads, 1)
    rows_wanted = min(sizes.query_len, _ENOUGH_ROWS)
    batches: list[tuple[int, ...]] = [()]
    row_weights = int(np.prod(sizes.leading)) * sizes.heads * sizes.key_len  # of one query position
    heads_at_once = kv_heads
    if row_weights * rows_wanted > _BLOCK:
        batches = list(product(*map(range, sizes.leading)))
        row_weights = sizes.heads * sizes.key_len
    if row_weights * rows_wanted > _BLOCK:
        heads_at_once = 1
        row_weights = group * sizes.key_len
    rows_at_once = max(1, _BLOCK // max(row_weights, 1))
    for batch in batches:
        for kv_head in range(0, kv_heads, max(heads_at_once, 1)):
            last = kv_head + heads_at_once
            for row in range(0, sizes.query_len, rows_at_once):
                rows = slice(row, min(row + rows_at_once, sizes.query_len))
                yield _Block(batch, slice(kv_head, last), slice(kv_head * group, last * group), rows)


def _entropy(weights: Array) -> Array:
    """-sum_j w_j ln w_j over the last axis; NaN where the row has one."""
    terms = np.zeros_like(weights)
    np.log(weights, out=terms, where=weights > 0)
    terms *= weights
    entropy: Array = 0.0 - terms.sum(-1, dtype=np.float64)
    return entropy


def _largest(weights: Array, count: int) -> tuple[Array, NDArray[np.int64]]:
    """The `count` largest of the last axis and their places: the lower place first among equals, NaN last.

    `weights` is overwritten.
    """
    if count > _FEW:
        order = np.argsort(-weights, axis=-1, kind="stable")[..., :count]
        return np.take_along_axis(weights, order, axis=-1), order
    poisoned = np.isnan(weights)
    if poisoned.any():
        weights[poisoned] = -1.0
    places = np.empty((*weights.shape[:-1], count), np.int64)
    largest = np.empty(places.shape, weights.dtype)
    for n in range(count):
        place = weights.argmax(axis=-1, keepdims=True)
        largest[..., n : n + 1] = np.take_along_axis(weights, place, axis=-1)
        np.put_along_axis(weights, place, -2.0, axis=-1)
        places[..., n : n + 1] = place
    largest[largest == -1.0] = np.nan
    return largest, places


def attention_summary(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    top_k: int = 5,
    bias: ArrayLike | None = None,
    is_causal: bool = False,
    query_offset: ArrayLike | None = None,
    window: tuple[int | None, int | None] | None = None,
    kv_lengths: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    layout: Layout = "BHSD",
) -> AttentionSummary:
    """What each query looks at and what each key receives, without a matrix of queries by keys.

    Parameters
    ----------
    query, key, attn_mask, bias, is_causal, query_offset, window, kv_lengths
        As in `scaled_dot_product_attention`.
    scale, softcap, sinks, alibi_slopes, layout
        As in `scaled_dot_product_attention`.
    top_k : int
        How many of each query's largest weights to return, at least 1; k = min(top_k, Lk).

    Returns
    -------
    AttentionSummary
        A named tuple of

        - entropy (..., Hq, Lq): -sum_j W_ij ln W_ij, in nats: 0 where a query looks at one key, ln n where it
          looks at n alike;
        - top_weights (..., Hq, Lq, k): the largest W_ij, in falling order, the lower key first among equals;
        - top_keys (..., Hq, Lq, k), int64: their keys. Where a query gives fewer than k keys a weight, the
          rest of top_weights is 0 and of top_keys -1;
        - received (..., Hq, Lk): sum_i W_ij.

        Floats are float32, float64 for float64. The weight of a sink belongs to no key and counts nowhere.

    Raises
    ------
    TypeError, ValueError
        As `scaled_dot_product_attention`; ValueError for `top_k` below 1.

    Notes
    -----
    The weights W are those of `attention_weights`, computed a few MiB at a time. Entropy as a measure of how
    widely a head looks: Ghader and Monz, "What does Attention in Neural Machine Translation Pay Attention
    to?" (2017).

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> summary = npattn.attention_summary(np.zeros((3, 4)), np.ones((3, 4)), top_k=2, is_causal=True)
    >>> summary.top_keys
    array([[ 0, -1],
           [ 0,  1],
           [ 0,  1]])
    >>> summary.received.round(2)
    array([1.83, 0.83, 0.33])
    """
    count = as_integer("top_k", top_k, minimum=1)
    inputs = Inputs(query, key, layout=layout)
    sizes, compute = inputs.sizes, inputs.compute
    options = resolve(
        sizes,
        compute,
        attn_mask=attn_mask,
        bias=bias,
        is_causal=is_causal,
        query_offset=query_offset,
        window=window,
        kv_lengths=kv_lengths,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    scale_number = parse_scale(scale, inputs.head_dim, inputs.compute)
    cap = parse_softcap(softcap, inputs.compute)
    count = min(count, sizes.key_len)
    offsets = np.zeros(sizes.leading, np.int64) if options.offset is None else options.offset
    rows_shape = sizes.scores[:-1]
    entropy = np.empty(rows_shape, compute)
    top_weights = np.empty((*rows_shape, count), compute)
    top_keys = np.empty((*rows_shape, count), np.int64)
    received = np.zeros((*rows_shape[:-1], sizes.key_len), np.float64)
    for batch, kv_heads, heads, rows in _blocks(inputs):
        key_block = inputs.key[batch][..., kv_heads, :, :]
        query_block = inputs.query[batch][..., heads, rows, :]
        weights = np.empty((*query_block.shape[:-1], sizes.key_len), compute)
        mask, float_mask, bias_part = (
            None if m is None else m[batch][..., heads, rows, :] for m in options.masks
        )
        _core.attention(
            query_block,
            key_block,
            key_block[..., :0],
            None,
            None,
            weights,
            mask,
            float_mask,
            bias_part,
            None if options.sinks is None else options.sinks[heads],
            None if options.slopes is None else options.slopes[batch][..., heads],
            np.asarray(offsets[batch] + rows.start),
            None if options.lengths is None else np.asarray(options.lengths[batch]),
            options.is_causal,
            options.left,
            options.right,
            scale_number,
            cap,
            False,
            current(),
        )
        entropy[batch][..., heads, rows] = _entropy(weights)
        received[batch][..., heads, :] += weights.sum(-2, dtype=np.float64)
        largest, places = _largest(weights, count)
        top_weights[batch][..., heads, rows, :] = largest
        top_keys[batch][..., heads, rows, :] = np.where(largest == 0, -1, places)
    results = (entropy, top_weights, top_keys, received.astype(compute, copy=False))
    return AttentionSummary(*(inputs.restore(result) for result in results))
