"""Results of attention over parts of the keys, merged into the result over all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn._check import as_array, common_dtype, compute_dtype

Array = np.ndarray[Any, Any]


def _parts(name: str, value: Any) -> list[Array]:
    """The arrays in a sequence of them, or along the first axis of one array."""
    if not isinstance(value, Iterable) or (isinstance(value, np.ndarray) and value.ndim == 0):
        raise TypeError(f"{name} must be a sequence of arrays, one for each part of the keys, got {value!r}")
    return [as_array(f"{name}[{n}]", part) for n, part in enumerate(value)]


def _check(outputs: list[Array], lses: list[Array]) -> None:
    if not outputs:
        raise ValueError("outputs is empty; expected at least one part")
    if len(outputs) != len(lses):
        raise ValueError(f"outputs has {len(outputs)} parts and lses {len(lses)}; expected as many")
    shape = outputs[0].shape
    if not shape:
        raise ValueError("outputs[0] has shape (); expected (..., heads, queries, value_dim)")
    for n, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if output.shape != shape:
            raise ValueError(f"outputs[{n}] has shape {output.shape}, outputs[0] {shape}; they must agree")
        if lse.shape == shape[:-1]:
            continue
        message = f"lses[{n}] has shape {lse.shape}; expected {shape[:-1]}, as the outputs have {shape}"
        if len(shape) >= 3 and lse.shape == (*shape[:-3], shape[-2], shape[-3]):
            message += "; outputs with heads last (BSHD, varlen_attention) go in as output.swapaxes(-2, -3)"
        raise ValueError(message)


def merge_attention(outputs: ArrayLike, lses: ArrayLike) -> tuple[Array, Array]:
    """Merge the results of attention over disjoint parts of the keys into the result over all of them.

    lse = log sum_p exp(lse_p) and output = sum_p exp(lse_p - lse) output_p over the parts p.

    Parameters
    ----------
    outputs : sequence of array_like, each (..., Lq, Ev)
        The outputs of `scaled_dot_product_attention` for the same queries and one or more parts of the keys,
        or one array with the parts along its first axis. A sink belongs in one part only.
    lses : sequence of array_like, each (..., Lq)
        Their lse, asked for with ``return_lse=True``. A part with lse -inf saw no key and adds nothing,
        whatever it holds.

    Returns
    -------
    output : ndarray, (..., Lq, Ev)
        In the dtype of np.result_type of the outputs. Zeros where no part saw a key.
    lse : ndarray, (..., Lq)
        float32, float64 for float64 outputs; so the result can be merged with further parts.

    Raises
    ------
    TypeError
        For arguments that are not sequences, or of dtypes that do not fit.
    ValueError
        For no parts, numbers of parts that differ, or shapes that do not fit.

    Notes
    -----
    The order of the parts matters to rounding only. A NaN stays in its row. Milakov and Gimelshein, "Online
    normalizer calculation for softmax" (2018).

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 6, 4))
    >>> first = npattn.scaled_dot_product_attention(q, k[:, :4], v[:, :4], return_lse=True)
    >>> rest = npattn.scaled_dot_product_attention(q, k[:, 4:], v[:, 4:], return_lse=True)
    >>> output, lse = npattn.merge_attention([first[0], rest[0]], [first[1], rest[1]])
    >>> bool(np.allclose(output, npattn.scaled_dot_product_attention(q, k, v)))
    True
    """
    parts, logs = _parts("outputs", outputs), _parts("lses", lses)
    _check(parts, logs)
    dtype = common_dtype(**{f"outputs[{n}]": part for n, part in enumerate(parts)})
    compute = compute_dtype(dtype)
    scores = np.array(logs, dtype=np.float64)
    output = np.zeros(parts[0].shape, compute)
    with np.errstate(all="ignore"):  # inf - inf is meant: it makes its row NaN
        maximum = scores.max(axis=0)
        maximum = np.where(np.isfinite(maximum), maximum, 0.0)
        lse = maximum + np.log(np.exp(scores - maximum).sum(axis=0))
        weights = np.exp(scores - lse).astype(compute)[..., None]
        for part, weight, score in zip(parts, weights, scores, strict=True):
            weighted = weight * part.astype(compute, copy=False)
            nothing = score == -np.inf
            if nothing.any():
                weighted[nothing] = 0.0
            output += weighted
    return output.astype(dtype, copy=False), np.asarray(lse, compute)
