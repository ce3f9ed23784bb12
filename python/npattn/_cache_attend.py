"""Attention over the sequences of a cache: arguments checked here; the queries are their last tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from npattn._cache_base import CacheBase, Indices, last_places, parse_counts
from npattn._check import (
    FLOAT64,
    INT8,
    as_array,
    as_flag,
    check_out,
    common_dtype,
    compute_dtype,
    conversion,
    plain_array,
)
from npattn._inputs import Array, check_layout, contiguous_last, parse_scale, parse_softcap
from npattn._layer_rope import RotaryPositions
from npattn._masks import UNBOUNDED, Sizes, resolve
from npattn._output import deliver, result_array, rounded, stored
from npattn._threads import current


def _parse_query(cache: CacheBase, query: Any, sequences: int, layout: Any) -> Array:
    """(sequences, Hq, Lq, E) whatever the layout, of a dtype that is not wider than the cache's."""
    check_layout(layout)
    array = as_array("query", query)
    if array.ndim != 4 or array.shape[0] != sequences or array.shape[3] != cache.head_dim:
        rows = "heads, queries" if layout == "BHSD" else "queries, heads"
        raise ValueError(
            f"query has shape {array.shape}; expected ({sequences}, {rows}, {cache.head_dim}): "
            f"(sequences, {rows.replace('heads', 'query heads')}, head_dim)"
        )
    if layout == "BSHD":
        array = array.swapaxes(1, 2)
    if array.shape[1] % cache.num_kv_heads:
        raise ValueError(
            f"{array.shape[1]} query heads are not a multiple of the cache's {cache.num_kv_heads} kv heads"
        )
    if cache.dtype != INT8:
        common_dtype(query=array, cache=cache)
    if array.dtype == FLOAT64 and cache.dtype != FLOAT64:
        raise TypeError(
            f"query has dtype {np.asarray(query).dtype}, the cache holds {cache.dtype}: convert it with "
            + conversion("query", query, "np.float32")
        )
    return array


def _lost_error(cache: CacheBase, slots: Indices, i: int, count: int, left: int) -> ValueError:
    """Why the queries of sequence i are not tokens of the cache, or see some that it does not hold."""
    length = int(cache._store.lengths(slots)[i])
    if count > length:
        return ValueError(
            f"sequence {i} has {length} tokens and {count} queries, which are to be its last tokens: "
            "append the tokens first, or say with counts how many of the rows are real"
        )
    assert cache._sliding_window is not None
    widest = cache._sliding_window - 1
    narrower = f" and window=({left}, ...)" if left < widest else ""
    return ValueError(
        f"the first of {count} queries of sequence {i} sees the tokens from "
        f"{max(length - count - min(left, widest), 0)} on, but those before "
        f"{cache._store.firsts(slots)[i]} were let go at the last append "
        f"(sliding_window={cache._sliding_window}{narrower})"
    )


def attend(
    cache: CacheBase,
    slots: Indices,
    query: Any,
    *,
    counts: Any,
    is_causal: Any,
    attn_mask: Any,
    bias: Any,
    window: Any,
    scale: Any,
    softcap: Any,
    sinks: Any,
    alibi_slopes: Any,
    out: Any,
    return_weights: Any,
    return_lse: Any,
    layout: Any = "BHSD",
    rope: RotaryPositions | None = None,
    append: Callable[[], None] | None = None,
) -> Any:
    """Attention of query (sequences, Hq, Lq, E) over the sequences in these slots.

    Called with the access of a reader, or with that of a writer and what appends the tokens of the queries,
    which is done as soon as every argument has been checked.

    Row i of sequence b stands at p = lengths[b] - counts[b] + i; rows past counts[b] give zeros and lse -inf.
    It sees key j if all of these hold: j <= p (causal), p - left <= j <= p + right (window), the masks,
    and j > p - sliding_window or j < sink_tokens.
    """
    given = _parse_query(cache, query, slots.size, layout)
    swap = layout == "BSHD"
    want_weights = as_flag("return_weights", return_weights)
    want_lse = as_flag("return_lse", return_lse)
    sequences, heads, rows, _ = given.shape
    real = parse_counts(counts, sequences, rows)
    shape = (sequences, heads, rows, cache.value_dim)
    others: list[Array] = []
    target = out
    if out is not None:
        check_out(out, (sequences, rows, heads, cache.value_dim) if swap else shape, given.dtype)
        target = out.swapaxes(1, 2) if swap else out
        named = {"attn_mask": attn_mask, "bias": bias, "sinks": sinks, "alibi_slopes": alibi_slopes}
        others = [plain_array(name, x) for name, x in named.items() if x is not None]
    compute = compute_dtype(cache.dtype)
    factor = parse_scale(scale, cache.head_dim, compute)
    cap = parse_softcap(softcap, compute)
    lengths = cache._store.lengths(slots)
    if append is not None:
        lengths = lengths + real
    longest = int(lengths.max(initial=0))
    options = resolve(
        Sizes((sequences,), heads, rows, longest),
        compute,
        attn_mask=attn_mask,
        bias=bias,
        is_causal=is_causal,
        query_offset=0,  # it is known; the store places each sequence's queries itself
        window=window,
        kv_lengths=None,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    placed = options.is_causal or options.left != UNBOUNDED or options.right != UNBOUNDED
    placed = placed or options.slopes is not None or cache._sliding_window is not None or rope is not None
    if placed and append is None:
        lost = cache._store.first_lost(slots, real, options.left)
        if lost >= 0:
            raise _lost_error(cache, slots, lost, int(real[lost]), options.left)
    # In float32 the kernels read and write the half types themselves.
    written = given.dtype if compute != FLOAT64 else compute
    rows_read = given.astype(written if rope is None else compute, copy=False)
    rows_read = contiguous_last(rows_read)
    if rope is not None:
        rows_read = rope.turned(rows_read, last_places(lengths, real, rows))
    if swap and target is None:
        target = np.empty((sequences, rows, heads, cache.value_dim), given.dtype).swapaxes(1, 2)
    output = result_array(target, shape, written, given, *others)
    lse = np.empty(shape[:3], compute) if want_lse else None
    weights = np.empty((*shape[:3], longest), written) if want_weights else None
    if append is not None:
        append()
    cache._store.attend(
        slots,
        stored(rows_read),
        stored(output),
        lse,
        None if weights is None else stored(weights),
        *options.masks,
        options.sinks,
        options.slopes,
        real,
        options.is_causal,
        options.left,
        options.right,
        factor,
        cap,
        current(),
    )
    result = deliver(output, target, given.dtype)
    results: list[Array] = [out if out is not None else result.swapaxes(1, 2) if swap else result]
    if weights is not None:
        results.append(rounded(weights, given.dtype))
    if lse is not None:
        results.append(rounded(lse, compute_dtype(given.dtype)))
    return results[0] if len(results) == 1 else tuple(results)
