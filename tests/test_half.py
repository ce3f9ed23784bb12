"""float16 and bfloat16 are stored, never computed in: every result is that of float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import npattn
import numpy as np
import pytest
from shapes import Array, broadcast, every_second, layouts_of, poisoned_border
from support import assert_same_bits, assert_within
from tolerances import BFLOAT16, unit

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
