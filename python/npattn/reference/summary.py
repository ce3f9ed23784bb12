"""What each query looks at, and what each key receives."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from npattn._summary import AttentionSummary

from ._common import ieee
from .attention import attention_weights


@ieee
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
    layout: str = "BHSD",
) -> AttentionSummary:
    """-sum_j W_ij ln W_ij; the k = min(top_k, Lk) largest W_ij, the lower key first; and sum_i W_ij.

    The weight of a sink belongs to no key and counts nowhere. Where a query gives fewer than k keys a weight,
    the rest of top_weights is 0 and of top_keys -1.
    """
    weights = attention_weights(
        query,
        key,
        attn_mask,
        bias=bias,
        is_causal=is_causal,
        query_offset=query_offset,
        window=window,
        kv_lengths=kv_lengths,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        layout=layout,
    )
    entropy = np.where(weights == 0.0, 0.0, -weights * np.log(weights)).sum(-1)
    order = np.argsort(-weights, axis=-1, kind="stable")[..., :top_k]
    top_weights = np.take_along_axis(weights, order, axis=-1)
    return AttentionSummary(entropy, top_weights, np.where(top_weights == 0.0, -1, order), weights.sum(-2))
