"""Does this machine compute what the reference computes? Seconds at most, on every available ISA."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import npattn

_Result = tuple[NDArray[Any], NDArray[Any], int]
_Compute = Callable[[np.random.Generator, type[np.floating]], _Result]


class Check(NamedTuple):
    """One function on one instruction set: its largest error as a share of what is allowed."""

    name: str
    isa: str
    share: float

    @property
    def passed(self) -> bool:
        """A NaN is a failure too."""
        return self.share <= 1


def self_check() -> list[Check]:
    """Compare each function of CHECKS with the reference, on every available ISA, in float32 and float64.

    Allowed are ``16 eps sqrt(depth) max|result|``; depth is the number of terms a result sums.
    """
    before = npattn.isa.active()
    checks = []
    try:
        for name in npattn.isa.available():
            npattn.isa.use(name)
            for label, compute in CHECKS.items():
                share = float(np.max([_share(compute, dtype) for dtype in (np.float32, np.float64)]))
                checks.append(Check(label, name, share))
    finally:
        npattn.isa.use(before)
    return checks


def _share(compute: _Compute, dtype: type[np.floating]) -> float:
    actual, expected, depth = compute(np.random.default_rng(0), dtype)
    if actual.dtype != dtype or actual.shape != expected.shape:
        return float("inf")
    allowed = 16 * np.finfo(dtype).eps * depth**0.5 * np.abs(expected).max()
    return float(np.abs(actual - expected).max() / allowed)


def _check_attention(rng: np.random.Generator, dtype: type[np.floating]) -> _Result:
    query = rng.standard_normal((2, 4, 67, 40)).astype(dtype)
    key, value = (rng.standard_normal((2, 2, 131, 40)).astype(dtype) for _ in range(2))
    mask = rng.random((67, 131)) < 0.9
    options: dict[str, Any] = {"is_causal": True, "query_offset": 64}
    actual = npattn.scaled_dot_product_attention(query, key, value, mask, **options)
    expected = npattn.reference.scaled_dot_product_attention(query, key, value, mask, **options)
    return np.asarray(actual), np.asarray(expected), 131


def _check_decode(rng: np.random.Generator, dtype: type[np.floating]) -> _Result:
    query = rng.standard_normal((8, 1, 64)).astype(dtype)
    key, value = (rng.standard_normal((2, 300, 64)).astype(dtype) for _ in range(2))
    actual = npattn.scaled_dot_product_attention(query, key, value)
    expected = npattn.reference.scaled_dot_product_attention(query, key, value)
    return np.asarray(actual), np.asarray(expected), 300


def _check_matmul(rng: np.random.Generator, dtype: type[np.floating]) -> _Result:
    a = rng.standard_normal((37, 300)).astype(dtype)
    b = rng.standard_normal((300, 70)).astype(dtype)
    return npattn.matmul(a, b), npattn.reference.matmul(a, b), 300


def _check_int8(rng: np.random.Generator, dtype: type[np.floating]) -> _Result:
    """Whole numbers up to 127 in each row and column: nothing is rounded on the way to int8."""
    a = rng.integers(-127, 128, (37, 300)).astype(np.float32)
    b = rng.integers(-127, 128, (300, 70)).astype(np.float32)
    a[:, 0] = b[0] = 127
    product = npattn.matmul(a, npattn.pack_matrix(b, dtype=np.int8))
    return product.astype(dtype), npattn.reference.matmul(a, b).astype(dtype), 300


def _check_bfloat16(rng: np.random.Generator, dtype: type[np.floating]) -> _Result:
    """Small whole numbers: every product and sum is exact."""
    a = rng.integers(-9, 10, (37, 300)).astype(np.float32)
    b = rng.integers(-9, 10, (300, 70)).astype(np.float32)
    bfloat16 = import_module("ml_dtypes").bfloat16
    product = npattn.matmul(a.astype(bfloat16), b.astype(bfloat16), dtype=np.float32)
    return product.astype(dtype), npattn.reference.matmul(a, b).astype(dtype), 300


def _check_softmax(rng: np.random.Generator, dtype: type[np.floating]) -> _Result:
    x = (4 * rng.standard_normal((33, 131))).astype(dtype)
    return npattn.softmax(x), npattn.reference.softmax(x), 131


def _check_rope(rng: np.random.Generator, dtype: type[np.floating]) -> _Result:
    x = rng.standard_normal((3, 17, 40)).astype(dtype)
    cos, sin = npattn.rope_cos_sin(17, 40, dtype=dtype)
    return npattn.rotary_embedding(x, cos, sin), npattn.reference.rotary_embedding(x, cos, sin), 2


CHECKS: dict[str, _Compute] = {
    "attention": _check_attention,
    "decode": _check_decode,
    "matmul": _check_matmul,
    "int8 weights": _check_int8,
    "softmax": _check_softmax,
    "rotary embedding": _check_rope,
}
if find_spec("ml_dtypes"):  # else there is no bfloat16
    CHECKS["bfloat16 matmul"] = _check_bfloat16
