"""Softmax of special values, its laws, and its accuracy."""

from __future__ import annotations

from typing import Any

import npattn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import Array
from support import assert_same_bits, assert_within
from tolerances import softmax_tolerance, unit

pytestmark = pytest.mark.usefixtures("isa")


def normal(shape: tuple[int, ...], dtype: Any = np.float64, spread: float = 2.0) -> Array:
    return (spread * np.random.default_rng(shape).standard_normal(shape)).astype(dtype)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hidden_elements_never_leak(dtype: Any, poison: float) -> None:
    for length in (1, 5, 16, 40, 1300):
        x = normal((4, length), dtype)
        mask = np.random.default_rng(length).random(x.shape) < 0.5
        expected = npattn.softmax(np.where(mask, x, 0), mask=mask)
        for axis, where in ((-1, np.ascontiguousarray), (0, np.transpose)):
            soft = npattn.softmax(where(np.where(mask, x, dtype(poison))), axis, mask=where(mask))
            assert_same_bits(where(soft), expected)
        assert (expected[~mask] == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_rows_touch_no_other(dtype: Any) -> None:
    inf, nan = np.inf, np.nan
    for length in (5, 16, 37):
        x = normal((7, length), dtype)
        clean = x.copy()
        x[1, 2], x[2, 1], x[4], x[5, :3] = nan, inf, -inf, (nan, inf, -inf)
        soft, log, lse = npattn.softmax(x), npattn.log_softmax(x), npattn.logsumexp(x)
        for row in (0, 3, 6):
            assert_same_bits(soft[row], npattn.softmax(clean[row]))
        assert np.isnan(soft[[1, 2, 5]]).all()
        assert (soft[4] == 0).all()
        assert (log[4] == -inf).all()
        assert np.isnan(log[2, 1])
        assert (np.delete(log[2], 1) == -inf).all()
        np.testing.assert_array_equal(lse[[1, 2, 4, 5]], [nan, inf, -inf, nan])
        hidden = np.ones((7, length), bool)
        hidden[1, 3] = hidden[2, 3] = False  # a visible NaN beside a hidden element
        soft = npattn.softmax(x, mask=hidden)
        assert (soft[[1, 2], 3] == 0).all()
        assert np.isnan(np.delete(soft[[1, 2]], 3, axis=1)).all()


def test_nothing_visible() -> None:
    x = normal((2, 3, 5))
    mask = np.ones((3, 1), bool)
    mask[1] = False
    soft = npattn.softmax(x, mask=mask)
    assert (soft[:, 1] == 0).all()
    assert_within(soft.sum(-1), [[1, 0, 1]] * 2, 1e-15)
    assert (npattn.softmax(x, mask=False, sinks=0.3) == 0).all()
    for shape, axis in (((10, 0), 1), ((10, 0), 0), ((0, 5), 1), ((0,), 0), ((2, 0, 3), 0)):
        empty = np.zeros(shape, np.float32)
        assert npattn.softmax(empty, axis).shape == npattn.log_softmax(empty, axis).shape == shape
        lse = npattn.logsumexp(empty, axis)
        assert lse.shape == shape[:axis] + shape[axis + 1 :]
        assert (lse == -np.inf).all()


@given(data=st.data())
def test_laws(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    x = (
        data.draw(st.floats(0.01, 50.0))
        * np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal(shape)
    ).astype(dtype)
    tolerance = softmax_tolerance(dtype, shape[axis], 100.0)
    soft, log = npattn.softmax(x, axis), npattn.log_softmax(x, axis)
    assert_within(soft.sum(axis), np.ones_like(soft.sum(axis)), shape[axis] * tolerance)
    assert ((soft >= 0) & (soft <= 1)).all()
    assert_within(np.exp(log), soft, 4 * tolerance)
    assert_within(npattn.logsumexp(log, axis), np.zeros_like(soft.sum(axis)), 4 * tolerance)
    shifted = npattn.softmax(x + dtype(1024), axis)
    assert_within(shifted, soft, 2 * tolerance + 2.0**12 * unit(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["normal", "uniform", "heavy tails", "large offset"])
def test_error_is_at_most_twice_that_of_numpy(kind: str, dtype: Any) -> None:
    rng = np.random.default_rng(3)
    draw = {
        "normal": lambda shape: 3 * rng.standard_normal(shape),
        "uniform": rng.random,
        "heavy tails": lambda shape: rng.standard_t(3, shape),
        "large offset": lambda shape: rng.standard_normal(shape) + 1000,
    }[kind]
    for rows, length in ((400, 50), (20, 2048), (1, 1 << 18)):
        x = draw((rows, length)).astype(dtype)
        precise = np.exp(x.astype(np.longdouble) - x.max(-1, keepdims=True))
        precise /= precise.sum(-1, keepdims=True)
        plain = np.exp(x - x.max(-1, keepdims=True))
        plain /= plain.sum(-1, keepdims=True)
        ours, theirs = (np.abs((soft - precise) / precise) for soft in (npattn.softmax(x), plain))
        assert ours.max() <= 2 * theirs.max()
        assert np.sqrt((ours**2).mean()) <= 2 * np.sqrt((theirs**2).mean())
