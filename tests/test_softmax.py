"""softmax, log_softmax and logsumexp along any axis, in any memory, with masks and sinks."""

from __future__ import annotations

from typing import Any

import npattn
import numpy as np
import pure_python
import pytest
from npattn import reference
from shapes import (
    Array,
    around,
    broadcast,
    every_second,
    layouts_of,
    poisoned_border,
    reversed_axes,
    unaligned,
)
from support import DTYPES, assert_same_bits, assert_within
from tolerances import softmax_tolerance, unit

pytestmark = pytest.mark.usefixtures("isa")
AxisError = getattr(np, "exceptions", np).AxisError

# Tails of every vector width, one row and several to a block, several pieces of the sum.
LENGTHS = (*around(0, 4, 8, 16, 32, 64, 256), 1000, 1025, 5000)
SHAPES = ((7,), (3, 5), (40, 3), (2, 3, 17), (5, 33, 9), (2, 1, 3, 4, 6), (1, 20000), (20000, 1))


def normal(shape: tuple[int, ...], dtype: Any = np.float64, spread: float = 2.0) -> Array:
    return (spread * np.random.default_rng(shape).standard_normal(shape)).astype(dtype)


def assert_softmax(actual: Array, x: Array, axis: int, **options: Any) -> None:
    assert actual.dtype == x.dtype
    spread = 20.0  # no element of `normal` lies further below another
    expected = reference.softmax(x, axis, **options)
    assert_within(actual, expected, softmax_tolerance(x.dtype, x.shape[axis]), (spread + 8.0) * unit(x.dtype))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_length(dtype: np.dtype[Any]) -> None:
    for length in LENGTHS:
        x = normal((3, length), dtype)
        assert_softmax(npattn.softmax(x), x, -1)
        assert_softmax(npattn.softmax(x.T, 0).T, x, -1)
        lse, log = npattn.logsumexp(x), npattn.log_softmax(x)
        assert lse.dtype == log.dtype == dtype
        assert_within(lse, reference.logsumexp(x), softmax_tolerance(dtype, length), 4 * unit(dtype))
        assert_within(log, reference.log_softmax(x), 30 * softmax_tolerance(dtype, length))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_axis(shape: tuple[int, ...], dtype: Any) -> None:
    x = normal(shape, dtype)
    for axis in range(-x.ndim, x.ndim):
        soft, lse = npattn.softmax(x, axis), npattn.logsumexp(x, axis)
        assert_softmax(soft, x, axis)
        last = np.ascontiguousarray(np.moveaxis(x, axis, -1))
        assert_same_bits(np.moveaxis(soft, axis, -1), npattn.softmax(last))
        assert_same_bits(np.moveaxis(npattn.log_softmax(x, axis), axis, -1), npattn.log_softmax(last))
        assert_same_bits(lse, npattn.logsumexp(last))
        assert_same_bits(npattn.logsumexp(x, axis, keepdims=True), np.expand_dims(lse, axis))
        assert type(lse) is np.ndarray


def test_against_lists() -> None:
    x = normal((3, 11))
    assert_within(npattn.softmax(x), [pure_python.softmax(row) for row in x.tolist()], 1e-15)
    assert_within(npattn.logsumexp(x), [pure_python.logsumexp(row) for row in x.tolist()], 1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_memory_layouts_give_the_same_bits(dtype: Any) -> None:
    x, mask = normal((3, 21, 70), dtype), np.random.default_rng(1).random((3, 21, 70)) < 0.7
    for axis in (-1, 1, 0):
        sinks = normal(x.sum(axis).shape, dtype)
        soft, log, lse = npattn.softmax(x, axis), npattn.log_softmax(x, axis), npattn.logsumexp(x, axis)
        masked = npattn.softmax(x, axis, mask=mask, sinks=sinks)
        assert_softmax(masked, x, axis, mask=mask, sinks=sinks)
        for (_, view), (_, hidden), (_, logits) in zip(
            layouts_of(x), [*layouts_of(mask), ("", mask)], layouts_of(sinks), strict=True
        ):
            assert_same_bits(npattn.softmax(view, axis), soft)
            assert_same_bits(npattn.log_softmax(view, axis), log)
            assert_same_bits(npattn.logsumexp(view, axis), lse)
            assert_same_bits(npattn.softmax(view, axis, mask=hidden, sinks=logits), masked)
    repeated = broadcast(x, (0, 2))
    assert_same_bits(npattn.softmax(repeated), npattn.softmax(repeated.copy()))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_out(dtype: np.dtype[Any]) -> None:
    x = normal((4, 30, 12), dtype)
    for function in (npattn.softmax, npattn.log_softmax):
        for axis in (-1, 1, 0):
            expected = function(x, axis)
            for place in (np.asfortranarray, every_second, poisoned_border, reversed_axes, unaligned):
                out = place(np.zeros_like(x))
                assert function(x, axis, out=out) is out
                assert_same_bits(out, expected)
            for overlapping in (lambda b: b[1:], lambda b: b[:-1], lambda b: b[::-1][1:]):
                buffer = np.empty((5, 30, 12), dtype)
                source, out = buffer[1:], overlapping(buffer)
                source[...] = x
                function(source, axis, out=out)
                assert_same_bits(out, expected)
    outside = np.full((4, 60), 7.0)
    npattn.softmax(normal((4, 30)), out=outside[:, ::2])
    assert (outside[:, 1::2] == 7.0).all()


def test_out_may_be_mask_or_sinks_memory() -> None:
    x = normal((6, 8))
    sinks = x[:, 0]
    expected = npattn.softmax(x, sinks=sinks.copy())
    assert_same_bits(npattn.softmax(x, sinks=sinks, out=x), expected)
    bytes_of = np.random.default_rng(0).random((6, 64)) < 0.5
    mask, out = bytes_of[:, :8], bytes_of.view(np.float64)
    x = normal((6, 8))
    expected = npattn.softmax(x, mask=mask.copy())
    assert_same_bits(npattn.softmax(x, mask=mask, out=out), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_long_rows(dtype: Any) -> None:
    # Longer than the scratch: such rows are gathered again for each step, with the bits of contiguous rows.
    x = normal((3, 300_001), dtype)
    mask = np.random.default_rng(0).random(x.shape) < 0.5
    assert_softmax(npattn.softmax(x), x, -1)
    for layout in (every_second, np.asfortranarray):
        assert_same_bits(npattn.softmax(layout(x)), npattn.softmax(x))
        assert_same_bits(npattn.log_softmax(layout(x)), npattn.log_softmax(x))
        assert_same_bits(npattn.logsumexp(layout(x)), npattn.logsumexp(x))
        assert_same_bits(npattn.softmax(layout(x), mask=layout(mask)), npattn.softmax(x, mask=mask))
        out = layout(np.zeros_like(x))
        assert_same_bits(npattn.softmax(layout(x), out=out), npattn.softmax(x))
        npattn.softmax(out, out=out)
        assert_same_bits(out, npattn.softmax(npattn.softmax(x)))
    ones = np.zeros((1, 1 << 20), dtype)
    assert (npattn.softmax(ones) == 2.0**-20).all()


def test_output_past_the_cache() -> None:
    # Above 32 MiB it is written with streaming stores, here at an odd address too, with a short last vector.
    x = normal((2100, 4099), np.float32)
    mask = np.random.default_rng(0).random(4099) < 0.5
    few = slice(None, None, 300)
    assert_same_bits(npattn.softmax(x)[few], npattn.softmax(x[few]))
    assert_same_bits(npattn.log_softmax(x)[few], npattn.log_softmax(x[few]))
    out = unaligned(np.zeros_like(x))
    npattn.softmax(x, mask=mask, out=out)
    assert_same_bits(out[few], npattn.softmax(x[few], mask=mask))


def test_threads_and_batch_change_no_bit() -> None:
    x = normal((97, 33, 40), np.float32)
    for axis in (-1, 0, 1):
        with npattn.threads(1):
            alone = npattn.softmax(x, axis), npattn.log_softmax(x, axis), npattn.logsumexp(x, axis)
        with npattn.threads(3):
            together = npattn.softmax(x, axis), npattn.log_softmax(x, axis), npattn.logsumexp(x, axis)
        for one, three in zip(alone, together, strict=True):
            assert_same_bits(one, three)
    assert_same_bits(npattn.softmax(x)[13, 7], npattn.softmax(x[13, 7]))
    assert_same_bits(npattn.softmax(x, 0)[:, 13, 7], npattn.softmax(x[:, 13, 7]))


def test_sinks() -> None:
    x = normal((2, 4, 3, 6))
    per_head = np.array([0.5, 100.0, -np.inf, 0.0])
    soft = npattn.softmax(x, sinks=per_head[:, None])
    assert_softmax(soft, x, -1, sinks=per_head[:, None])
    assert_same_bits(soft[:, 2], npattn.softmax(x[:, 2]))
    extended = np.concatenate([x, np.broadcast_to(per_head[:, None, None], (2, 4, 3, 1))], -1)
    assert_within(soft, npattn.softmax(extended)[..., :-1], 1e-15)
    for axis, sinks in (
        (-1, 1.5),
        (1, normal((2, 3, 6))),
        (0, normal((6,))),
        (-1, normal((1, 3))),
        (2, normal((4, 1))),
    ):
        assert_softmax(npattn.softmax(x, axis, sinks=sinks), x, axis, sinks=sinks)
    rows = normal((4, 6))
    assert_softmax(npattn.softmax(rows, sinks=per_head), rows, -1, sinks=per_head)
    assert npattn.softmax(rows[0], sinks=0.0).sum() < 1
    nan, infinite = npattn.softmax(rows, sinks=np.nan), npattn.softmax(rows, sinks=np.inf)
    assert np.isnan(nan).all()
    assert np.isnan(infinite).all()
    # The scores' own dtype counts, not that of the sinks.
    assert npattn.softmax(rows.astype(np.float16), sinks=per_head).dtype == np.float16


def test_errors() -> None:
    x = np.zeros((2, 3, 4), np.float32)
    for axis in (3, -4):
        with pytest.raises(AxisError):
            npattn.softmax(x, axis)
    for function in (npattn.softmax, npattn.log_softmax, npattn.logsumexp):
        with pytest.raises(AxisError):
            function(1.0)
        for axis in ((0, 1), 1.0, None, True):
            with pytest.raises(TypeError, match="axis"):
                function(x, axis)
        with pytest.raises(TypeError, match="complex"):
            function(x.astype(np.complex64))
    with pytest.raises(TypeError, match=r"mask has dtype int64.*mask\.astype\(bool\)"):
        npattn.softmax(x, mask=np.ones(4, np.int64))
    with pytest.raises(TypeError, match=r"mask has dtype float32.*add it to x"):
        npattn.softmax(x, mask=np.ones(4, np.float32))
    with pytest.raises(
        ValueError, match=r"mask of shape \(3,\) does not broadcast to x of shape \(2, 3, 4\)"
    ):
        npattn.softmax(x, mask=np.ones(3, bool))
    with pytest.raises(ValueError, match=r"sinks of shape \(2,\) .* to \(2, 3\).*sinks\[:, None\]"):
        npattn.softmax(x, sinks=np.zeros(2))
    with pytest.raises(ValueError, match=r"sinks of shape \(2, 4\) do not broadcast to \(2, 3\)"):
        npattn.softmax(x, sinks=np.zeros((2, 4)))
    for out, error, text in (
        (np.zeros((2, 3), np.float32), ValueError, r"out has shape \(2, 3\)"),
        (np.zeros((2, 3, 4)), TypeError, "out has dtype float64"),
        (np.broadcast_to(np.float32(0), (2, 3, 4)), ValueError, "out"),
        ([0.0], TypeError, "out must be a numpy.ndarray"),
    ):
        for function in (npattn.softmax, npattn.log_softmax):
            with pytest.raises(error, match=text):
                function(x, out=out)
    assert npattn.softmax([[1, 2], [3, 4]]).dtype == np.float64
    assert npattn.softmax(np.ones(3, bool)).dtype == np.float64
