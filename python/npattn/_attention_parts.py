"""Attention over keys and values that are converted a part at a time: no copy of all of them is ever made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from npattn._inputs import PART_KEYS, Array, Inputs, contiguous_last
from npattn._masks import Options
from npattn._merge import merge_attention
from npattn._output import convert_once

# run(query, key, value, options, out=, lse=, weights=): the core on arrays that it reads as they are
Run = Callable[..., None]


def compute_in_parts(
    run: Run,
    inputs: Inputs,
    options: Options,
    *,
    out: Array | None,
    lse: Array | None,
    weights: Array | None,
    want_scores: bool,
) -> None:
    """What `run` would make of all keys at once: parts of PART_KEYS keys, merged in order.

    output = sum_p exp(lse_p - lse) output_p, weights_p *= exp(lse_p - lse), lse = log sum_p exp(lse_p).
    """
    rows, width = inputs.sizes.scores[:-1], inputs.value.shape[-1]
    output, total = np.zeros((*rows, width), inputs.compute), np.full(rows, -np.inf, inputs.compute)
    parts: list[tuple[Array, Array]] = []  # weights and lse
    for first in range(0, inputs.sizes.key_len, PART_KEYS):
        keys = slice(first, min(first + PART_KEYS, inputs.sizes.key_len))
        key, value = (_converted(array[..., keys, :], inputs.compute) for array in (inputs.key, inputs.value))
        columns = None if weights is None else weights[..., keys]
        here = _options_of(options, keys, inputs.sizes.leading)
        if want_scores:
            run(inputs.query, key, value, here, weights=columns)
            continue
        part, part_lse = np.empty_like(output), np.empty_like(total)
        run(inputs.query, key, value, here, out=part if width else None, lse=part_lse, weights=columns)
        output, total = merge_attention([output, part], [total, part_lse])
        if columns is not None:
            parts.append((columns, part_lse))
    with np.errstate(all="ignore"):
        for columns, part_lse in parts:
            factors = np.exp(part_lse - total)[..., None]
            np.multiply(columns, factors, out=columns, where=columns != 0)  # a hidden key's is 0 beside NaN
    if out is not None:
        out[...] = output
    if lse is not None:
        lse[...] = total


def _converted(array: Array, dtype: np.dtype[Any]) -> Array:
    return contiguous_last(convert_once(array, lambda held: held.astype(dtype)))


def _options_of(options: Options, keys: slice, leading: tuple[int, ...]) -> Options:
    """The options of a call as a part of its keys sees them; sinks are of the first part."""
    first, count = keys.start, keys.stop - keys.start
    visible, addend, bias = (None if mask is None else mask[..., keys] for mask in options.masks)
    offset = np.zeros(leading, np.int64) if options.offset is None else options.offset
    lengths = options.lengths
    return replace(
        options,
        masks=(visible, addend, bias),
        sinks=options.sinks if first == 0 else None,
        offset=np.asarray(offset - first),
        lengths=None if lengths is None else np.asarray(np.minimum(np.maximum(lengths - first, 0), count)),
    )
