"""Attention over packed ragged batches, and over parts of the keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ._common import Array, float64, ieee
from .attention import scaled_dot_product_attention
from .softmax import logsumexp


def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    is_causal: bool = False,
    query_offset: ArrayLike | None = None,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of each sequence by itself: tokens cu[n] .. cu[n + 1] of the packed arrays.

    query (Tq, Hq, E), key (Tk, Hkv, E), value (Tk, Hkv, Ev), cu_seqlens (N + 1,) -> output (Tq, Hq, Ev) and
    lse (Hq, Tq). query_offset: one for all or one per sequence, (N,); alibi_slopes (Hq,) or (N, Hq).
    """
    q, k, v = float64(query), float64(key), float64(value)
    cu_q = np.asarray(cu_seqlens_q)
    cu_k = cu_q if cu_seqlens_k is None else np.asarray(cu_seqlens_k)
    output, lse = np.zeros((*q.shape[:2], v.shape[-1])), np.zeros((q.shape[1], q.shape[0]))
    offsets = None if query_offset is None else np.broadcast_to(query_offset, len(cu_q) - 1)
    slopes = None if alibi_slopes is None else np.broadcast_to(alibi_slopes, (len(cu_q) - 1, q.shape[1]))
    for n in range(len(cu_q) - 1):
        rows, columns = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        output[rows], lse[:, rows] = scaled_dot_product_attention(
            q[rows],
            k[columns],
            v[columns],
            is_causal=is_causal,
            query_offset=None if offsets is None else offsets[n],
            window=window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=None if slopes is None else slopes[n],
            layout="BSHD",
            return_lse=True,
        )
    return (output, lse) if return_lse else output


@ieee
def merge_attention(outputs: ArrayLike, lses: ArrayLike) -> tuple[Array, Array]:
    """lse = log sum_p exp(lse_p); O = sum_p exp(lse_p - lse) O_p, p over parts with disjoint keys.

    outputs: a sequence of parts (..., Lq, Ev); lses: of parts (..., Lq). A part with lse -inf adds nothing.
    """
    parts, logs = float64(outputs), float64(lses)
    lse = logsumexp(logs, axis=0)
    weighted = np.exp(logs - lse)[..., None] * parts
    return np.where(logs[..., None] == -np.inf, 0.0, weighted).sum(0), lse
