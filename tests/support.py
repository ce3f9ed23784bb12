"""What the tests of attention share: seeded inputs, comparisons, the instruction sets in turn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import npattn
import numpy as np
from numpy.typing import ArrayLike
from shapes import Array, pattern
from tolerances import (
    BFLOAT16,
    CASES,
    attention_tolerance,
    int8_output_tolerance,
    int8_score_tolerance,
    largest,
    longest,
    lse_tolerance,
    score_tolerance,
    tolerance,
    weight_tolerance,
)

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
}


def filled_qkv(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], dtype: Any = np.float64
) -> tuple[Array, Array, Array]:
    """The query, key and value that the recorded cases use."""
    return pattern(query, 37, 5, dtype), pattern(key, 53, 11, dtype), pattern(value, 71, 3, dtype)


def uniform(length: int, dtype: Any = np.float64) -> tuple[Array, Array, Array]:
    """One head whose scores are all equal and whose values are unit vectors: the output is the weights."""
    query, key = np.zeros((1, 1, length, 2), dtype), np.ones((1, 1, length, 2), dtype)
    return query, key, np.eye(length, dtype=dtype)[None, None]


def random_qkv(
    batch: tuple[int, ...],
    heads: tuple[int, int],
    lengths: tuple[int, int],
    dims: tuple[int, int],
    dtype: Any = np.float32,
    seed: int = 0,
) -> tuple[Array, Array, Array]:
    """Normal query (*batch, Hq, Lq, E), key (*batch, Hkv, Lk, E), value (*batch, Hkv, Lk, Ev)."""
    rng = np.random.default_rng([seed, *heads, *lengths, *dims])
    query = rng.standard_normal((*batch, heads[0], lengths[0], dims[0]))
    key = rng.standard_normal((*batch, heads[1], lengths[1], dims[0]))
    value = rng.standard_normal((*batch, heads[1], lengths[1], dims[1]))
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)


def assert_within(actual: Any, expected: Any, absolute: float, relative: float = 0.0) -> None:
    """Element by element: equal infinities and NaNs, else |a - e| <= absolute + relative * |e|."""
    a, e = np.asarray(actual).astype(np.float64), np.asarray(expected).astype(np.float64)
    assert a.shape == e.shape, f"shape {a.shape}, expected {e.shape}"
    finite = np.isfinite(e)
    np.testing.assert_array_equal(a[~finite], e[~finite])
    a, e = a[finite], e[finite]
    assert np.isfinite(a).all(), "a NaN or infinity where the expected value is finite"
    excess = np.abs(a - e) - (absolute + relative * np.abs(e))
    if excess.size and excess.max() > 0:
        worst = int(excess.argmax())
        raise AssertionError(
            f"{a[worst]!r}, expected {e[worst]!r} within {absolute:.3g} + {relative:.3g} |e|"
        )


def assert_close(actual: Any, expected: Any, within: float) -> None:
    """|a - e| <= within * max(1, |e|)."""
    a, e = np.asarray(actual).astype(np.float64), np.asarray(expected).astype(np.float64)
    scale = np.where(np.isfinite(e), np.maximum(1.0, np.abs(e)), 1.0)
    assert_within(a / scale, e / scale, within)


def assert_case(actual: Any, expected: Any, *, digits: float = 5e-9) -> None:
    """Compare with a recorded answer: its dtype's tolerance, but never finer than the printed digits."""
    assert_close(actual, expected, max(CASES[np.asarray(actual).dtype], digits))


def assert_same_bits(actual: Array, expected: Array) -> None:
    """Same shape, dtype and bit pattern (signed zeros and NaN payloads included)."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    a, e = np.ascontiguousarray(actual), np.ascontiguousarray(expected)
    different = int((a.reshape(-1).view(np.uint8) != e.reshape(-1).view(np.uint8)).sum())
    assert different == 0, f"{different} bytes differ"


class Tolerances(NamedTuple):
    """Absolute tolerances of the results of one attention call."""

    output: float
    weights: float
    scores: float
    lse: float


def tolerances_of(
    query: Array,
    key: Array,
    value: Array | None = None,
    *,
    scale: float | None = None,
    added: ArrayLike = 0.0,
    layout: str = "BHSD",
) -> Tolerances:
    """What tolerances.py allows a call with these arrays; ``added`` are its masks, biases and ALiBi terms."""
    if layout == "BSHD":
        query, key = query.swapaxes(-2, -3), key.swapaxes(-2, -3)
    values = key[..., :0] if value is None else value
    dtype = np.result_type(query, key, values)
    score = score_tolerance(dtype, query, key, scale=scale, added=largest(added))
    return Tolerances(
        attention_tolerance(dtype, query, key, values, scale=scale, added=largest(added)),
        weight_tolerance(dtype, score) + tolerance(dtype),
        score,
        lse_tolerance(dtype, key.shape[-2], score, largest(added) + longest(query) * longest(key)),
    )


def int8_tolerances_of(
    query: Array,
    key: Array,
    value: Array,
    weights: Array,
    *,
    scale: float | None = None,
    added: ArrayLike = 0.0,
) -> Tolerances:
    """The same of a cache of int8 that holds these numbers; `weights` are those expected."""
    allowed = tolerances_of(query, key, value, scale=scale, added=added)
    score = int8_score_tolerance(query, key, scale=scale)
    return Tolerances(
        allowed.output + int8_output_tolerance(value, largest(weights), score),
        allowed.weights + math.expm1(2 * score),
        allowed.scores + score,
        allowed.lse + score,
    )


def multiplies_halves(isa: str | None = None) -> bool:
    """True where this instruction set (or the active one) multiplies bfloat16 and int8 as they are."""
    return (isa or npattn.isa.active()) in ("avx512bf16", "avx512amx")


def each_isa() -> Iterator[str]:
    """Every instruction set in turn, in use while the loop body runs; for tests whose reference is slow."""
    before = npattn.isa.active()
    try:
        for name in npattn.isa.available():
            npattn.isa.use(name)
            yield name
    finally:
        npattn.isa.use(before)
