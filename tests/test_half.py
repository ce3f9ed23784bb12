"""float16 and bfloat16 are stored, never computed in: every result is that of float32, rounded once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import reference
from npattn._output import rounded as to_dtype
from shapes import Array, broadcast, every_second, layouts_of, poisoned_border
from support import assert_same_bits, assert_within, each_isa, multiplies_halves
from tolerances import BFLOAT16, tolerance, unit

pytestmark = pytest.mark.usefixtures("isa")

HALVES = (np.dtype(np.float16), BFLOAT16)
Function = Callable[..., Array]


def normal(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    return (3 * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(dtype)


def rounded(result: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(all="ignore"):
        return result.astype(dtype)


def wide(x: Array) -> Array:
    return x.astype(np.float32)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize(
    "shape", [(1, 0), (1, 1), (3, 7), (40, 3), (5, 33), (2, 17, 9), (4, 1025), (2, 70_000), (300, 1500)]
)
def test_softmax_is_float32_rounded(shape: tuple[int, ...], name: str, dtype: np.dtype[Any]) -> None:
    function: Function = getattr(npattn, name)
    x = normal(shape, dtype)
    for axis in (-1, 0):
        expected = rounded(function(wide(x), axis), dtype)
        assert_same_bits(function(x, axis), expected)
        assert_same_bits(function(every_second(x), axis), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_softmax_with_masks_sinks_and_layouts(dtype: np.dtype[Any]) -> None:
    x, mask = normal((3, 21, 70), dtype), np.random.default_rng(1).random((3, 21, 70)) < 0.7
    for axis in (-1, 1, 0):
        sinks = normal(x.sum(axis).shape, dtype, seed=1)
        expected = rounded(npattn.softmax(wide(x), axis, mask=mask, sinks=wide(sinks)), dtype)
        for name, view in layouts_of(x):
            assert_same_bits(npattn.softmax(view, axis, mask=mask, sinks=sinks), expected)
            out = poisoned_border(np.zeros_like(x))
            assert npattn.softmax(view, axis, mask=mask, sinks=sinks, out=out) is out, name
            assert_same_bits(out, expected)
        in_place = x.copy()
        npattn.softmax(in_place, axis, mask=mask, sinks=sinks, out=in_place)
        assert_same_bits(in_place, expected)
    repeated = broadcast(x, (0, 2))
    assert_same_bits(npattn.softmax(repeated), npattn.softmax(repeated.copy()))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_softmax_of_rows_too_long_for_the_scratch(dtype: np.dtype[Any]) -> None:
    x = normal((3, 300_001), dtype)
    mask = np.random.default_rng(0).random(x.shape) < 0.5
    for layout in (np.ascontiguousarray, every_second, np.asfortranarray):
        out = layout(np.zeros_like(x))
        assert_same_bits(
            npattn.softmax(layout(x), mask=mask), rounded(npattn.softmax(wide(x), mask=mask), dtype)
        )
        npattn.log_softmax(layout(x), out=out)
        assert_same_bits(out, rounded(npattn.log_softmax(wide(x)), dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_softmax_past_the_cache(dtype: np.dtype[Any]) -> None:
    x = normal((4200, 4099), dtype)  # above 32 MiB
    few = slice(None, None, 300)
    assert_same_bits(npattn.softmax(x)[few], npattn.softmax(x[few]))
    assert_same_bits(npattn.log_softmax(x)[few], npattn.log_softmax(x[few]))


def test_sums_do_not_overflow_or_stall() -> None:
    equal = np.zeros((2, 70_000), np.float16)
    assert (npattn.softmax(equal) == np.float16(1 / 70_000)).all()
    assert_within(npattn.logsumexp(equal), np.full(2, np.log(70_000)), 0, 2 * unit(np.float16))
    low = np.array([65504, 65504, -65504], np.float16)
    assert_same_bits(npattn.softmax(low), np.array([0.5, 0.5, 0], np.float16))
    assert npattn.log_softmax(low)[2] == -np.inf  # -131008.7, beyond float16
    tiny = npattn.softmax(np.array([0, -13], np.float16))[1]  # a denormal float16
    assert tiny == np.float16(np.exp(-13.0) / (1 + np.exp(-13.0)))
    assert 0 < tiny < 2**-14


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_float32_rounded(interleaved: bool, dtype: np.dtype[Any]) -> None:
    for width, turned in ((2, 2), (17, 6), (40, 40), (64, 64), (80, 66)):
        x = normal((2, 3, 11, width), dtype)
        cos, sin = npattn.rope_cos_sin(np.arange(11), turned)
        options = {"interleaved": interleaved, "rotary_dim": turned}
        expected = rounded(npattn.rotary_embedding(wide(x), cos, sin, **options), dtype)
        for name, view in layouts_of(x):
            assert_same_bits(npattn.rotary_embedding(view, cos, sin, **options), expected)
            out = every_second(np.zeros_like(x))
            assert npattn.rotary_embedding(view, cos, sin, out=out, **options) is out, name
            assert_same_bits(out, expected)
        in_place = x.copy()
        npattn.rotary_embedding(in_place, cos, sin, out=in_place, **options)
        assert_same_bits(in_place, expected)
        both = npattn.apply_rope(x, x[:, :1], np.arange(11), **options)
        assert_same_bits(both[0], expected)
        assert both[1].dtype == dtype


# Few rows, tiles, several panels, several blocks of depth, odd depths; the last two are shared by threads.
PRODUCTS = (
    (1, 1, 1),
    (1, 40, 33),
    (3, 257, 70),
    (8, 513, 600),
    (13, 31, 65),
    (40, 600, 100),
    (97, 1025, 130),
)
SHARED = ((300, 2500, 300), (5, 3001, 2500))


def dots(dtype: np.dtype[Any]) -> bool:
    """True where the active instruction set multiplies this dtype as it is: sums come in another order."""
    return dtype == BFLOAT16 and multiplies_halves()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [*PRODUCTS, *SHARED], ids=lambda shape: "x".join(map(str, shape)))
def test_product_is_float32_rounded(shape: tuple[int, int, int], dtype: np.dtype[Any]) -> None:
    rows, depth, columns = shape
    a, b = normal((rows, depth), dtype), normal((depth, columns), dtype, seed=1)
    single = npattn.matmul(a, b, dtype=np.float32)
    assert single.dtype == np.float32
    expected = rounded(single, dtype)
    if not dots(dtype):
        assert_same_bits(single, npattn.matmul(wide(a), wide(b)))
    magnitude = reference.matmul(np.abs(wide(a)), np.abs(wide(b)))
    error = np.abs(single - reference.matmul(a, b))
    assert (error <= tolerance(np.float32, depth) * magnitude + 1e-30).all()
    packed = npattn.pack_matrix(b)
    for left in (a, np.asfortranarray(a), every_second(a)):
        for right in (b, every_second(b), packed):
            assert_same_bits(npattn.matmul(left, right), expected)
            assert_same_bits(npattn.matmul(left, right, dtype=np.float32), single)
        turned = np.asfortranarray(b)  # few rows meet its columns as they lie, in another order
        in_columns = npattn.matmul(left, turned, dtype=np.float32)
        assert (np.abs(in_columns - single) <= 2 * tolerance(np.float32, depth) * magnitude + 1e-30).all()
        assert_same_bits(npattn.matmul(left, turned), rounded(in_columns, dtype))
    mixed = npattn.matmul(wide(a), wide(b))
    for left, right in ((a, wide(b)), (wide(a), b), (wide(a), packed), (a, npattn.pack_matrix(wide(b)))):
        assert_same_bits(npattn.matmul(left, right), mixed)
    assert npattn.matmul(wide(a), b, dtype=dtype).dtype == dtype
    assert npattn.matmul(a, b.astype(np.float64)).dtype == np.float64


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_threads_batches_and_rows_share_the_bits_of_products(dtype: np.dtype[Any]) -> None:
    for rows, depth, columns in SHARED:
        a, b = normal((rows, depth), dtype), normal((depth, columns), dtype, seed=1)
        with npattn.threads(1):
            expected = npattn.matmul(a, b)
        for threads in (2, 3):
            with npattn.threads(threads):
                assert_same_bits(npattn.matmul(a, b), expected)
                assert_same_bits(npattn.matmul(a, npattn.pack_matrix(b)), expected)
        assert_same_bits(npattn.matmul(a[-1:], b), expected[-1:])
        assert_same_bits(npattn.matmul(np.stack([a, a]), np.stack([b, b]))[1], expected)
        out = np.zeros((rows, 2, columns), dtype)[:, 1]
        assert npattn.matmul(a, b, out=out) is out
        assert_same_bits(out, expected)
    square = normal((40, 40), dtype)
    expected = npattn.matmul(square.copy(), square)
    assert_same_bits(npattn.matmul(square, square, out=square), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_packed_halves(dtype: np.dtype[Any]) -> None:
    for depth in (0, 1, 40, 41):
        b = normal((depth, 70), dtype)
        packed = npattn.pack_matrix(b)
        assert packed.dtype == dtype
        assert packed.nbytes == (depth + depth % 2) * 96 * 2
        assert_same_bits(np.asarray(packed), b)
        assert_same_bits(np.asarray(pickle.loads(pickle.dumps(packed))), b)
        assert_same_bits(np.asarray(npattn.pack_matrix(wide(b), dtype=dtype)), b)
        for _ in each_isa():  # packed under one instruction set, multiplied under another
            assert_same_bits(npattn.matmul(b.T, packed), npattn.matmul(b.T, b))


def test_half_types_do_not_mix_in_products() -> None:
    for dtype, other in (HALVES, HALVES[::-1]):
        a, b = np.ones((2, 3), dtype), np.ones((3, 4), other)
        for right in (b, npattn.pack_matrix(b)):
            for asked in (None, dtype, np.float32, np.float64):
                words = rf"float16 and bfloat16 do not mix \(a {dtype}, b {other}\); convert one of them"
                with pytest.raises(TypeError, match=words):
                    npattn.matmul(a, right, dtype=asked)
        assert npattn.matmul(a, npattn.pack_matrix(b, dtype=np.int8)).dtype == dtype


def test_sums_of_products_are_rounded_once() -> None:
    large = np.full((2, 3), 60_000, np.float16)
    assert_same_bits(npattn.matmul(large, np.array([1, 1, -1], np.float16)), np.full(2, 60_000, np.float16))
    assert (npattn.matmul(large, np.ones(3, np.float16)) == np.inf).all()
    for dtype in HALVES:
        ones = np.ones((1, 70_000), dtype)
        for right in (ones.T, npattn.pack_matrix(ones.T)):
            assert npattn.matmul(ones, right, dtype=np.float32) == 70_000
            assert npattn.matmul(ones, right) == rounded(np.float32(70_000), dtype)
    tiny = np.full((1, 64), 2.0**-24, np.float16)  # denormal, and exact in float32
    assert npattn.matmul(tiny, tiny.T, dtype=np.float32) == 2.0**-42
    assert npattn.matmul(tiny, np.full((64, 1), 2.0**10, np.float16)) == 2.0**-8


def test_denormal_bfloat16_is_zero_for_the_instruction_alone() -> None:
    denormal = np.full((1, 2), 2.0**-130, BFLOAT16)
    large = np.full((2, 1), 2.0**100, BFLOAT16)
    expected = 0.0 if dots(BFLOAT16) else 2.0**-29
    assert npattn.matmul(denormal, large) == expected
    assert npattn.matmul(denormal, wide(large)) == 2.0**-29


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_error_is_that_of_rounding_the_result(offset: float, dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(7)
    a, b = (
        (rng.standard_normal((100, 1000)) + offset).astype(dtype),
        rng.standard_normal((1000, 100)).astype(dtype),
    )
    exact = reference.matmul(a, b)
    least = exact.astype(dtype).astype(np.float64) - exact
    ours = npattn.matmul(a, b).astype(np.float64) - exact
    assert np.sqrt((ours**2).mean()) <= 1.01 * np.sqrt((least**2).mean())
    assert np.abs(ours).max() <= 1.5 * np.abs(least).max()


def test_what_a_dtype_cannot_hold_is_inf_with_numpys_warning() -> None:
    large = np.full((2, 2), 1e300)
    near, odd = large / 1e295, np.array([[np.inf, np.nan], [65504, -1e-30]])
    warns = partial(pytest.warns, RuntimeWarning, match="overflow encountered in cast")
    for b, dtypes in ((large, (*HALVES, np.dtype(np.float32))), (near, HALVES[:1])):
        for dtype in dtypes:
            for given in (b, b.astype(np.float32)) if b is near else (b,):
                with warns():
                    packed = npattn.pack_matrix(given, dtype=dtype)
                assert np.isinf(np.asarray(packed).astype(float)).all()
                layer = npattn.MultiHeadAttention(*[given] * 4, num_heads=1, b_q=given[0])
                with warns():
                    layer.astype(dtype)
                layer = npattn.MultiHeadAttention(*[np.eye(2)] * 4, num_heads=1, b_q=given[0])
                with warns():
                    layer.astype(dtype)
                with np.errstate(over="raise"), pytest.raises(FloatingPointError):
                    npattn.pack_matrix(given, dtype=dtype)
    for right in (np.eye(2), npattn.pack_matrix(np.eye(2)), npattn.pack_matrix(np.eye(2), dtype=np.int8)):
        with warns():
            npattn.matmul(large, right, dtype=np.float32)
        with warns():
            npattn.matmul(np.eye(2), npattn.pack_matrix(large), dtype=np.float32)
    with warns():
        npattn.MultiHeadAttention(*[np.eye(2)] * 4, num_heads=1).astype(np.int8)(large)
    for dtype in HALVES:  # what is infinite already, and small numbers
        assert np.isinf(np.asarray(npattn.pack_matrix(odd, dtype=dtype)).astype(float)).sum() == 1
    assert (npattn.matmul(near, near, dtype=np.float16) == np.inf).all()  # a result, rounded at the end


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (37,), (3, 0, 2), (5, 33), (2, 3, 17, 9), (700, 33), (3, 300_001)]
)
def test_rounding_is_numpys(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(len(shape))
    exponents = rng.integers(-50, 38, shape) if dtype == BFLOAT16 else rng.integers(-10, 7, shape)
    x = np.asarray(rng.uniform(-3, 3, shape) * 10.0**exponents, np.float32)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 65519.0, 65520.0, 2.0**-25, 3.4e38], np.float32)
    x.reshape(-1)[: special.size] = special[: x.size]
    for _, view in [("plain", x), *(layouts_of(x) if x.ndim else [])]:
        for threads in (1, 3):
            with npattn.threads(threads):
                result = to_dtype(view, dtype)
            assert result.dtype == dtype
            assert_same_bits(np.nan_to_num(wide(result)), np.nan_to_num(wide(rounded(x, dtype))))
            assert np.array_equal(np.isnan(wide(result)), np.isnan(x))
            assert x.size == 0 or not np.may_share_memory(result, view)
