"""Scaled dot product attention in float64, every option of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._common import Array, Bool, float64, heads_first, ieee, swap_layout
from ._options import Options, added_terms, visible_keys, within_lengths
from .softmax import logsumexp, softmax


def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    is_causal: bool = False,
    query_offset: ArrayLike | None = None,
    window: tuple[int | None, int | None] | None = None,
    kv_lengths: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    layout: str = "BHSD",
    return_weights: bool = False,
    return_lse: bool = False,
) -> Any:
    """O_i = sum_j W_ij V_j, W = softmax over the visible keys (and the sink) of the scores.

    query (..., Hq, Lq, E), key (..., Hkv, Lk, E), value (..., Hkv, Lk, Ev) -> output (..., Hq, Lq, Ev), then
    weights (..., Hq, Lq, Lk) and lse (..., Hq, Lq) if asked for. Query head h reads kv head h // (Hq / Hkv).
    """
    places = is_causal, query_offset, window, kv_lengths
    options = Options(attn_mask, bias, *places, scale, softcap, alibi_slopes)
    q, k, v = heads_first(layout, query, key, value)
    scores, visible = masked_scores(q, k, options)
    weights, lse = normalise(scores, visible, sinks)
    output = swap_layout(weighted_sum(weights, visible, repeat_heads(v, q.shape[-3])), layout)
    results = [output] + [weights] * return_weights + [lse] * return_lse
    if max(np.ndim(query), np.ndim(key), np.ndim(value)) == 2:
        results = [result[0] for result in results]
    return tuple(results) if len(results) > 1 else results[0]


def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    is_causal: bool = False,
    query_offset: ArrayLike | None = None,
    window: tuple[int | None, int | None] | None = None,
    kv_lengths: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    layout: str = "BHSD",
) -> Array:
    """W (..., Hq, Lq, Lk), the weights of scaled_dot_product_attention: zero at hidden keys."""
    places = is_causal, query_offset, window, kv_lengths
    options = Options(attn_mask, bias, *places, scale, softcap, alibi_slopes)
    q, k = heads_first(layout, query, key)
    weights, _ = normalise(*masked_scores(q, k, options), sinks)
    return weights[0] if max(np.ndim(query), np.ndim(key)) == 2 else weights


def attention_scores(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    stage: str = "masked",
    bias: ArrayLike | None = None,
    is_causal: bool = False,
    query_offset: ArrayLike | None = None,
    window: tuple[int | None, int | None] | None = None,
    kv_lengths: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    layout: str = "BHSD",
) -> Array:
    """Scores (..., Hq, Lq, Lk) after a stage: "scaled", "capped", "masked" (all added, -inf where hidden).

    Keys past kv_lengths are -inf at every stage. A sink is no score of a key: ``sinks`` changes nothing here.
    """
    places = is_causal, query_offset, window, kv_lengths
    options = Options(attn_mask, bias, *places, scale, softcap, alibi_slopes)
    q, k = heads_first(layout, query, key)
    if stage == "masked":
        scores, _ = masked_scores(q, k, options)
    else:
        scores = capped_scores(q, k, scale, softcap if stage == "capped" else None)
        scores = np.where(within_lengths(options, scores.shape), scores, -np.inf)
    return scores[0] if max(np.ndim(query), np.ndim(key)) == 2 else scores


def repeat_heads(x: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """(..., Hkv, L, E) -> (..., Hq, L, E): query head h reads kv head h // (Hq // Hkv)."""
    return np.repeat(x, num_heads // x.shape[-3], axis=-3) if x.shape[-3] else x


@ieee
def capped_scores(query: Array, key: Array, scale: float | None, softcap: float | None) -> Array:
    """S = scale * Q K^T, then cap * tanh(S / cap)."""
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores: Array = (query @ repeat_heads(key, query.shape[-3]).swapaxes(-1, -2)) * scale
    return np.tanh(scores / softcap) * softcap if softcap else scores


@ieee
def masked_scores(query: Array, key: Array, options: Options) -> tuple[Array, Bool]:
    """S + bias + mask + ALiBi at the visible keys, -inf at the others; and which keys are visible.

    A query whose visible scores are all -inf sees no key.
    """
    scores = capped_scores(query, key, options.scale, options.softcap)
    visible = visible_keys(options, scores.shape)
    scores = np.where(visible, scores + added_terms(options, scores.shape), -np.inf)
    return scores, visible & (scores != -np.inf).any(-1, keepdims=True)


@ieee
def normalise(scores: Array, visible: Bool, sinks: ArrayLike | None) -> tuple[Array, Array]:
    """Weights (..., Hq, Lq, Lk) and lse (..., Hq, Lq); sinks (Hq,) are in the denominator only.

    Where a +inf makes the weights NaN, lse is NaN too.
    """
    sink = np.array(-np.inf) if sinks is None else float64(sinks)[:, None]
    lse = np.logaddexp(logsumexp(scores), sink)
    return softmax(scores, mask=visible, sinks=sink), np.where(lse == np.inf, np.nan, lse)


@ieee
def weighted_sum(weights: Array, visible: Bool, value: Array) -> Array:
    """O_i = sum over the visible j of W_ij V_j: a hidden V_j is not even read, as 0 * NaN would.

    Non-finite rows of V are therefore added one by one, to the queries that see them.
    """
    finite = np.isfinite(value)
    rest = np.where(finite, 0.0, value)
    output = weights @ np.where(finite, value, 0.0)
    for j in np.flatnonzero(np.any(~finite, axis=(*range(value.ndim - 2), -1))):
        output += np.where(visible[..., j, None], weights[..., j, None] * rest[..., j, None, :], 0.0)
    return output
