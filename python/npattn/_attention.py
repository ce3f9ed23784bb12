"""Scaled dot-product attention, its weights and its scores: arguments checked here, computed in the core."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from npattn._check import as_flag, check_out, plain_array
from npattn._inputs import Array, Inputs, Layout, parse_scale, parse_softcap
from npattn._masks import resolve
from npattn._output import deliver, result_array, stored
from npattn._threads import _core, current


def _compute(
    inputs: Inputs,
    scale: Any,
    softcap: Any,
    options: dict[str, Any],
    *,
    out: Array | None = None,
    lse: Array | None = None,
    weights: Array | None = None,
    want_scores: bool = False,
) -> None:
    """Run the core on checked inputs, into the arrays given: (..., H, L, ...), lse in inputs.compute."""
    resolved = resolve(inputs.sizes, inputs.compute, **options)
    _core.attention(
        inputs.query,
        inputs.key,
        inputs.value,
        None if out is None else stored(out),
        lse,
        None if weights is None else stored(weights),
        *resolved.masks,
        resolved.sinks,
        resolved.slopes,
        resolved.offset,
        resolved.lengths,
        resolved.is_causal,
        resolved.left,
        resolved.right,
        parse_scale(scale, inputs.head_dim, inputs.compute),
        parse_softcap(softcap, inputs.compute),
        want_scores,
        current(),
    )


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
    layout: Layout = "BHSD",
    out: NDArray[Any] | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
) -> Any:
    """Softmax(query key^T * scale) value, exactly, without a matrix of queries by keys.

    In this order: scores are scaled, soft-capped, biased, masked, joined by the sink, turned into weights by
    softmax over the keys, and the weights average the values.

    Parameters
    ----------
    query : array_like, (..., Hq, Lq, E)
        float32, float64, float16, bfloat16; integers and bool become float64. Any strides. 2-D is one head,
        3-D heads without a batch.
    key : array_like, (..., Hkv, Lk, E)
        Hq must be a multiple of Hkv; query head h reads key head h // (Hq // Hkv).
    value : array_like, (..., Hkv, Lk, Ev)
        Leading axes of the three broadcast.
    attn_mask : array_like, optional
        bool, True = attend; or float, added to the scores. Broadcasts to (..., Hq, Lq, Lk).
    bias : array_like, optional
        float, added to the scores; may accompany a mask. Broadcasts to (..., Hq, Lq, Lk).
    is_causal : bool
        Query i, at position p = i + query_offset on the key axis, sees keys j <= p.
    query_offset : int or array_like of int, optional
        Broadcasts to the leading axes. 0 if Lq == Lk; else needed with `is_causal`, `window`, `alibi_slopes`.
    window : (left, right), optional
        Query at p sees keys p - left <= j <= p + right, left + 1 + right keys at most; None is unbounded.
    kv_lengths : int or array_like of int, optional
        Broadcasts to the leading axes: the number of keys; later ones are never read.
    scale : float, optional
        Default 1 / sqrt(E).
    softcap : float, optional
        s -> softcap * tanh(s / softcap), before bias and masks; None or 0 is off.
    sinks : array_like, (Hq,), optional
        One more logit a head, in the denominator only.
    alibi_slopes : array_like, (Hq,) or (..., Hq), optional
        Adds -slope * |p - j|.
    layout : {"BHSD", "BSHD"}
        "BSHD": query, key, value and out are (..., L, H, E). Masks, weights and lse stay (..., H, Lq, ...).
    out : ndarray, optional
        Where the output goes; exact shape and dtype, any strides, may overlap the inputs.
    return_weights, return_lse : bool
        Return the weights (..., Hq, Lq, Lk), the log of the sum of exp(scores), sink included (..., Hq, Lq).

    Returns
    -------
    output : ndarray, (..., Hq, Lq, Ev)
        In the dtype of np.result_type(query, key, value). A query that sees no key gives zeros.
    weights : ndarray, (..., Hq, Lq, Lk)
        If asked for.
    lse : ndarray, (..., Hq, Lq)
        If asked for; float32, float64 for float64; -inf for a query that sees no key and has no sink.

    Raises
    ------
    TypeError
        For dtypes that do not fit: an integer mask, a bool bias, complex numbers, float16 with bfloat16.
    ValueError
        For shapes, heads, offsets, lengths or `out` that do not fit.

    Notes
    -----
    Vaswani et al., "Attention Is All You Need" (2017); Milakov and Gimelshein's online softmax (2018).
    Hidden keys never influence a result, whatever memory holds there. The bits do not depend on the number of
    threads, the memory layout or what else is in the batch.

    Keys and values are read where they lie, a file that is larger than memory too (`numpy.memmap`). Only what
    is not of the dtype computed in is converted first, as a whole: float32 keys and values under a float64
    query, keys and values that differ, integers. Convert the query then, or merge the results over parts of
    the keys (`merge_attention`).

    float16 and bfloat16 are read as they are, computed in float32 and rounded once; so are half keys and
    values under a float32 query. Where the CPU multiplies bfloat16 itself (instruction sets "avx512bf16",
    "avx512amx") and all three are bfloat16, calls of many queries do so: the weights are rounded to
    bfloat16 too, which keeps the error of normal inputs within 1.5 times that of rounding the exact
    result, and numbers below 2**-126 count as 0.

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((2, 8, 5, 64), dtype=np.float32) for _ in range(3))
    >>> npattn.scaled_dot_product_attention(q, k, v, is_causal=True).shape
    (2, 8, 5, 64)
    """
    if (
        return_weights is False
        and return_lse is False
        and attn_mask is None
        and (is_causal is False or is_causal is True)
        and query_offset is None
        and window is None
        and kv_lengths is None
        and bias is None
        and softcap is None
        and sinks is None
        and alibi_slopes is None
        and (layout == "BHSD" or layout == "BSHD")
    ):
        output = _core.attention_plain(query, key, value, is_causal, scale, layout == "BSHD", out, current())
        if output is not None:
            return output
    inputs = Inputs(query, key, value, layout=layout)
    want_weights = as_flag("return_weights", return_weights)
    want_lse = as_flag("return_lse", return_lse)
    sizes = inputs.sizes
    shape = (*sizes.leading, sizes.heads, sizes.query_len, inputs.value.shape[-1])
    laid_out = (*shape[:-3], shape[-2], shape[-3], shape[-1]) if inputs.swap else shape
    # The output lies in memory as the caller sees it, so that merging the heads of layout BSHD is a view.
    laid_out = shape[1:] if inputs.single_head else laid_out
    others: list[Array] = []
    if out is not None:
        check_out(out, laid_out, inputs.dtype)
        named = {"attn_mask": attn_mask, "bias": bias, "sinks": sinks, "alibi_slopes": alibi_slopes}
        others = [plain_array(name, x) for name, x in named.items() if x is not None]
    output = result_array(out, laid_out, inputs.dtype, *inputs.originals, *others)
    lse = np.empty(shape[:-1], inputs.compute) if want_lse else None
    weights = np.empty(sizes.scores, inputs.dtype) if want_weights else None
    options = {
        "attn_mask": attn_mask,
        "bias": bias,
        "is_causal": is_causal,
        "query_offset": query_offset,
        "window": window,
        "kv_lengths": kv_lengths,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
    }
    _compute(inputs, scale, softcap, options, out=inputs.heads_first(output), lse=lse, weights=weights)
    results: list[Array] = [deliver(output, out, inputs.dtype)]
    if weights is not None:
        results.append(inputs.restore(weights))
    if lse is not None:
        results.append(inputs.restore(lse))
    return results[0] if len(results) == 1 else tuple(results)


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
    layout: Layout = "BHSD",
) -> Array:
    """The weights that `scaled_dot_product_attention` gives the values: a softmax of the scores over keys.

    Parameters
    ----------
    query, key, attn_mask, bias, is_causal, query_offset, window, kv_lengths, scale, softcap, sinks,
    alibi_slopes, layout
        As in `scaled_dot_product_attention`.

    Returns
    -------
    ndarray, (..., Hq, Lq, Lk)
        0 at hidden keys; a row sums to 1, to less with a sink, to 0 if the query sees no key.

    Raises
    ------
    TypeError, ValueError
        As `scaled_dot_product_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> npattn.attention_weights(np.zeros((2, 4)), np.ones((2, 4)), is_causal=True)
    array([[1. , 0. ],
           [0.5, 0.5]])
    """
    inputs = Inputs(query, key, layout=layout)
    weights = np.empty(inputs.sizes.scores, inputs.dtype)
    options = {
        "attn_mask": attn_mask,
        "bias": bias,
        "is_causal": is_causal,
        "query_offset": query_offset,
        "window": window,
        "kv_lengths": kv_lengths,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
    }
    _compute(inputs, scale, softcap, options, weights=weights)
    return inputs.restore(weights)


def attention_scores(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = None,
    *,
    stage: Literal["scaled", "capped", "masked"] = "masked",
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
) -> Array:
    """The scores that the softmax of `scaled_dot_product_attention` starts from.

    Parameters
    ----------
    query, key, attn_mask, bias, is_causal, query_offset, window, kv_lengths, scale, softcap, sinks,
    alibi_slopes, layout
        As in `scaled_dot_product_attention`. A sink is no key's score: `sinks` is checked, no more.
    stage : {"masked", "capped", "scaled"}
        "scaled" and "capped" give every key's true score at that point; "masked" also adds bias, float mask
        and ALiBi, and gives -inf at hidden keys. Keys past `kv_lengths` are -inf at every stage.

    Returns
    -------
    ndarray, (..., Hq, Lq, Lk)

    Raises
    ------
    TypeError, ValueError
        As `scaled_dot_product_attention`; ValueError for an unknown stage.

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> npattn.attention_scores(np.eye(2), np.eye(2), scale=2.0, is_causal=True)
    array([[  2., -inf],
           [  0.,   2.]])
    """
    if stage not in ("scaled", "capped", "masked"):
        raise ValueError(f'stage must be "scaled", "capped" or "masked", got {stage!r}')
    inputs = Inputs(query, key, layout=layout)
    options = {
        "attn_mask": attn_mask,
        "bias": bias,
        "is_causal": is_causal,
        "query_offset": query_offset,
        "window": window,
        "kv_lengths": kv_lengths,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
    }
    if stage != "masked":
        resolve(inputs.sizes, inputs.compute, **options)  # an error at every stage if one does not fit
        options = dict.fromkeys(options, None) | {"is_causal": False, "kv_lengths": kv_lengths}
    if stage == "scaled":
        parse_softcap(softcap, inputs.compute)
        softcap = None
    scores = np.empty(inputs.sizes.scores, inputs.dtype)
    _compute(inputs, scale, softcap, options, weights=scores, want_scores=True)
    return inputs.restore(scores)
