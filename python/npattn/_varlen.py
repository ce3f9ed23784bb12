"""Attention over packed sequences of different lengths: arguments checked here, computed in the core."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from npattn._check import as_array, as_flag, as_int64, check_out, plain_array
from npattn._inputs import Inputs, parse_scale, parse_softcap
from npattn._masks import UNBOUNDED, Sizes, integers, parse_sinks, parse_slopes, parse_window
from npattn._output import deliver, result_array, stored
from npattn._threads import _core, current

Array = np.ndarray[Any, Any]


def _parse_starts(name: str, value: Any, tokens: int, what: str) -> NDArray[np.int64]:
    """Where the sequences begin in the packed array, then its end: 0, ..., tokens."""
    array = plain_array(name, value)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(
            f"{name} has shape {array.shape}; expected (sequences + 1,): where each begins, then the end"
        )
    starts = as_int64(name, array)  # a copy: the core relies on what is checked here
    if starts[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {starts[0]}")
    falls = np.flatnonzero(starts[1:] < starts[:-1])
    if falls.size:
        before, after = starts[falls[0]], starts[falls[0] + 1]
        raise ValueError(f"{name} must not decrease, got {after} after {before} (index {falls[0] + 1})")
    if starts[-1] != tokens:
        raise ValueError(f"{name} must end with the number of tokens of {what}, {tokens}, got {starts[-1]}")
    return starts


def _parse_offset(
    query_offset: Any, query_starts: NDArray[np.int64], key_starts: NDArray[np.int64], needed_by: str | None
) -> Array | None:
    """The query offset of every sequence, or None for 0. `needed_by`: the option that needs places."""
    query_lengths, key_lengths = np.diff(query_starts), np.diff(key_starts)
    if query_offset is not None:
        return integers("query_offset", query_offset, query_lengths.shape, "the sequences")
    different = np.flatnonzero(query_lengths != key_lengths)
    if needed_by is not None and different.size:
        n = different[0]
        raise ValueError(
            f"{needed_by} needs query_offset, the place of the first query on the key axis, as sequence {n} "
            f"has {query_lengths[n]} queries and {key_lengths[n]} keys. The usual choices: query_offset=0 "
            "(upper left: torch, ONNX without a cache) or query_offset="
            "np.diff(cu_seqlens_k) - np.diff(cu_seqlens_q) (lower right: flash-attention, a cache)"
        )
    return None


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
    out: NDArray[Any] | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of each of many sequences by itself, packed one behind the other without padding.

    Sequence n is tokens cu_seqlens_q[n] to cu_seqlens_q[n + 1] of the queries, and cu_seqlens_k[n] to
    cu_seqlens_k[n + 1] of the keys and values.

    Parameters
    ----------
    query : array_like, (Tq, Hq, E)
        The queries of all sequences; dtypes and strides as in `scaled_dot_product_attention`.
    key : array_like, (Tk, Hkv, E)
        Hq must be a multiple of Hkv; query head h reads key head h // (Hq // Hkv).
    value : array_like, (Tk, Hkv, Ev)
    cu_seqlens_q : array_like of int, (N + 1,)
        Where each of the N sequences begins in the queries, then Tq: from 0, never decreasing. Empty ones are
        allowed.
    cu_seqlens_k : array_like of int, (N + 1,), optional
        The same for keys and values. Default: that of the queries.
    is_causal : bool
        Query i of its sequence, at position p = i + query_offset, sees the sequence's keys j <= p.
    query_offset : int or array_like of int, (N,), optional
        One for all or one a sequence. 0 if every sequence has as many queries as keys; else needed with
        `is_causal`, `window` and `alibi_slopes`.
    window : (left, right), optional
        Query at p sees keys p - left <= j <= p + right; None is unbounded.
    scale : float, optional
        Default 1 / sqrt(E).
    softcap : float, optional
        s -> softcap * tanh(s / softcap); None or 0 is off.
    sinks : array_like, (Hq,), optional
        One more logit a head, in the denominator only.
    alibi_slopes : array_like, (Hq,) or (N, Hq), optional
        Adds -slope * |p - j|.
    out : ndarray, (Tq, Hq, Ev), optional
        Where the output goes; exact shape and dtype, any strides, may overlap the inputs.
    return_lse : bool
        Return the log of the sum of exp(scores), sink included.

    Returns
    -------
    output : ndarray, (Tq, Hq, Ev)
        In the dtype of np.result_type(query, key, value). A query that sees no key gives zeros.
    lse : ndarray, (Hq, Tq)
        If asked for; float32, float64 for float64; -inf for a query that sees no key and has no sink.

    Raises
    ------
    TypeError
        For dtypes that do not fit.
    ValueError
        For shapes, heads, offsets, `cu_seqlens_q`, `cu_seqlens_k` or `out` that do not fit.

    Notes
    -----
    The bits are those of `scaled_dot_product_attention` on each sequence alone. The packed layout is that of
    Dao, "FlashAttention-2" (2023).

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((7, 8, 64), dtype=np.float32) for _ in range(3))
    >>> npattn.varlen_attention(q, k, v, [0, 3, 7], is_causal=True).shape  # sequences of 3 and 4 tokens
    (7, 8, 64)
    """
    query, key, value = as_array("query", query), as_array("key", key), as_array("value", value)
    for name, array in {"query": query, "key": key, "value": value}.items():
        if array.ndim != 3:
            raise ValueError(
                f"{name} has shape {array.shape}; expected packed sequences: (tokens, heads, width), "
                "no batch axis"
            )
    inputs = Inputs(query, key, value, layout="BSHD")
    query_starts = _parse_starts("cu_seqlens_q", cu_seqlens_q, inputs.sizes.query_len, "query")
    if cu_seqlens_k is None:
        if inputs.sizes.key_len != inputs.sizes.query_len:
            tokens = f"query has {inputs.sizes.query_len} tokens and key {inputs.sizes.key_len}"
            raise ValueError(f"cu_seqlens_k is needed where they differ: {tokens}")
        key_starts = query_starts
    else:
        key_starts = _parse_starts("cu_seqlens_k", cu_seqlens_k, inputs.sizes.key_len, "key and value")
    if query_starts.shape != key_starts.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must be of as many sequences, got "
            f"{query_starts.size - 1} and {key_starts.size - 1}"
        )
    causal = as_flag("is_causal", is_causal)
    want_lse = as_flag("return_lse", return_lse)
    left, right = parse_window(window)
    windowed = left != UNBOUNDED or right != UNBOUNDED
    needed_by = "is_causal=True" if causal else "window" if windowed else None
    if needed_by is None and alibi_slopes is not None:
        needed_by = "alibi_slopes"
    sizes = Sizes((query_starts.size - 1,), inputs.sizes.heads, 0, 0)
    offset = _parse_offset(query_offset, query_starts, key_starts, needed_by)
    sink_logits = parse_sinks(sinks, sizes, inputs.compute)
    slopes = parse_slopes(alibi_slopes, sizes, inputs.compute)
    scale_number = parse_scale(scale, inputs.head_dim, inputs.compute)
    cap = parse_softcap(softcap, inputs.compute)
    result_shape = (inputs.sizes.query_len, inputs.sizes.heads, inputs.value.shape[-1])
    if out is not None:
        check_out(out, result_shape, inputs.dtype)
    named = {"sinks": sinks, "alibi_slopes": alibi_slopes}
    others = [plain_array(name, x) for name, x in named.items() if x is not None]
    output = result_array(out, result_shape, inputs.dtype, *inputs.originals, *others)
    lse = np.empty(result_shape[1::-1], inputs.compute) if want_lse else None
    _core.varlen_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        stored(output.swapaxes(0, 1)),
        lse,
        query_starts,
        key_starts,
        offset,
        sink_logits,
        slopes,
        causal,
        left,
        right,
        scale_number,
        cap,
        current(),
    )
    output = deliver(output, out, inputs.dtype)
    return (output, lse) if want_lse else output
