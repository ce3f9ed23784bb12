"""Sinusoidal encodings, ALiBi slopes and the angles of RoPE."""

from __future__ import annotations

import math

import npattn
import numpy as np
import pytest
from npattn import reference
from tolerances import BFLOAT16, DTYPES, unit

STYLES = ("interleaved", "concatenated", "tensor2tensor")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dim", range(1, 17))
def test_sinusoidal_against_the_reference(dim, style):
    places = np.array([[0, 1, 2], [-3, 511, 100_000]])
    found = npattn.sinusoidal_encoding(places, dim, style=style, dtype=np.float64)
    assert found.shape == (2, 3, dim)
    np.testing.assert_allclose(
        found, reference.sinusoidal_encoding(places, dim, style=style), rtol=0, atol=1e-11
    )


def test_sinusoidal_formula():
    found = npattn.sinusoidal_encoding([2], 5, dtype=np.float64)[0]
    angles = [2.0, 2.0 * 10000 ** (-2 / 5), 2.0 * 10000 ** (-4 / 5)]
    expected = [
        math.sin(angles[0]),
        math.cos(angles[0]),
        math.sin(angles[1]),
        math.cos(angles[1]),
        math.sin(angles[2]),
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    np.testing.assert_allclose(npattn.sinusoidal_encoding([2], 1), [[math.sin(2)]], rtol=1e-7)
    np.testing.assert_array_equal(npattn.sinusoidal_encoding([0], 4), [[0, 1, 0, 1]])


def test_sinusoidal_styles_hold_the_same_numbers():
    pairs = npattn.sinusoidal_encoding(20, 7, base=500.0)
    halves = npattn.sinusoidal_encoding(20, 7, base=500.0, style="concatenated")
    np.testing.assert_array_equal(halves, np.concatenate([pairs[:, ::2], pairs[:, 1::2]], axis=1))
    older = npattn.sinusoidal_encoding([3], 8, style="tensor2tensor", dtype=np.float64)[0]
    np.testing.assert_allclose(older[3], math.sin(3 / 10000), rtol=1e-14)
    np.testing.assert_allclose(older[5], math.cos(3 * 10000 ** (-1 / 3)), rtol=1e-14)
    np.testing.assert_allclose(
        npattn.sinusoidal_encoding([3], 2, style="tensor2tensor"), [[math.sin(3), math.cos(3)]], rtol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    exact = npattn.sinusoidal_encoding(50, 6, dtype=np.float64)
    found = npattn.sinusoidal_encoding(50, 6, dtype=dtype)
    assert found.dtype == dtype
    assert np.abs(found.astype(np.float64) - exact).max() <= unit(dtype)
    for found, exact in zip(
        npattn.rope_cos_sin(50, 6, dtype=dtype), npattn.rope_cos_sin(50, 6, dtype=np.float64), strict=True
    ):
        assert found.dtype == dtype
        assert np.abs(found.astype(np.float64) - exact).max() <= unit(dtype)


def test_default_dtype_is_float32():
    assert npattn.sinusoidal_encoding(2, 2).dtype == np.float32
    assert [table.dtype for table in npattn.rope_cos_sin(2, 2)] == [np.float32, np.float32]


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i4", ">u2"]
)
def test_every_integer_dtype_of_positions(dtype):
    places = np.array([0, 1, 100, 127], dtype=dtype)
    for function, keywords in ((npattn.sinusoidal_encoding, {}), (npattn.rope_cos_sin, {"base": 77.0})):
        expected = function([0, 1, 100, 127], 6, **keywords)
        np.testing.assert_array_equal(function(places, 6, **keywords), expected)


def test_small_dtypes_do_not_wrap_or_round():
    expected, _ = npattn.rope_cos_sin([250, 255], 4, scaling={"rope_type": "linear", "factor": 1})
    np.testing.assert_array_equal(npattn.rope_cos_sin(np.array([250, 255], np.uint8), 4)[0], expected)
    half = npattn.rope_cos_sin([2048, 2049], 4, dtype=np.float16)[0]
    assert half[0, 0] != half[1, 0]
    scaling = {"type": "dynamic", "factor": 2.0, "max_position_embeddings": 128}
    byte, wide = (
        npattn.rope_cos_sin(np.array([0, 255], dtype), 4, scaling=scaling) for dtype in (np.uint8, np.int64)
    )
    np.testing.assert_array_equal(byte, wide)


def test_angles_are_exact_far_out():
    for place in (1_000_000, -1_000_000, 123_456_789):
        cos, sin = npattn.rope_cos_sin([place], 8, dtype=np.float64)
        angles = [place * 10000.0 ** (-2 * i / 8) for i in range(4)]
        bound = 4e-16 * abs(place)
        np.testing.assert_allclose(cos[0], [math.cos(a) for a in angles], rtol=0, atol=bound)
        np.testing.assert_allclose(sin[0], [math.sin(a) for a in angles], rtol=0, atol=bound)


def test_rope_against_the_reference():
    rng = np.random.default_rng(1)
    places = rng.integers(-50, 100_000, (2, 3, 5))
    for dim in (2, 6, 64):
        found = npattn.rope_cos_sin(places, dim, base=500.0, dtype=np.float64)
        expected = reference.rope_cos_sin(places, dim, base=500.0)
        assert found[0].shape == (2, 3, 5, dim // 2)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def test_positions_as_a_length():
    np.testing.assert_array_equal(
        npattn.sinusoidal_encoding(5, 4), npattn.sinusoidal_encoding(np.arange(5), 4)
    )
    np.testing.assert_array_equal(npattn.rope_cos_sin(np.int32(5), 4), npattn.rope_cos_sin(np.arange(5), 4))
    assert npattn.sinusoidal_encoding(0, 4).shape == (0, 4)
    assert npattn.sinusoidal_encoding([], 4).shape == (0, 4)
    assert npattn.rope_cos_sin(np.zeros((2, 0), int), 4)[0].shape == (2, 0, 2)


def test_sections():
    rng = np.random.default_rng(2)
    places = rng.integers(0, 100, (3, 2, 7))
    cos, sin = npattn.rope_cos_sin(places, 16, sections=[2, 3, 3], dtype=np.float64)
    assert cos.shape == (2, 7, 8)
    for row, pairs in ((0, slice(0, 2)), (1, slice(2, 5)), (2, slice(5, 8))):
        alone = npattn.rope_cos_sin(places[row], 16, dtype=np.float64)
        np.testing.assert_array_equal(cos[..., pairs], alone[0][..., pairs])
        np.testing.assert_array_equal(sin[..., pairs], alone[1][..., pairs])
    np.testing.assert_allclose(
        (cos, sin), reference.rope_cos_sin(places, 16, sections=[2, 3, 3]), rtol=0, atol=1e-12
    )
    text = npattn.rope_cos_sin(np.broadcast_to(np.arange(7), (3, 7)), 16, sections=[2, 3, 3])
    np.testing.assert_array_equal(text, npattn.rope_cos_sin(7, 16))
    np.testing.assert_array_equal(npattn.rope_cos_sin(7, 16, sections=[2, 3, 3]), text)


def test_sections_are_checked():
    with pytest.raises(ValueError, match=r"sections must add up to 8, dim // 2; \[2, 3\] add up to 5"):
        npattn.rope_cos_sin(np.zeros((2, 4), int), 16, sections=[2, 3])
    with pytest.raises(ValueError, match=r"positions must have shape \(3, ..., L\).*got \(4,\)"):
        npattn.rope_cos_sin(np.arange(4), 16, sections=[2, 3, 3])
    with pytest.raises(TypeError, match=r"sections\[0\] must be an integer"):
        npattn.rope_cos_sin(np.zeros((2, 4), int), 16, sections=[2.0, 6])


@pytest.mark.parametrize("function", [npattn.sinusoidal_encoding, npattn.rope_cos_sin])
@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        ([0.0, 1.0], TypeError, r"positions must be integers, got dtype float64; convert"),
        (2.0, TypeError, "positions must be integers"),
        (np.zeros(0), TypeError, "positions must be integers, got dtype float64"),
        ([True, False], TypeError, "positions must be integers, got dtype bool"),
        (["a"], TypeError, "positions must be integers"),
        (None, TypeError, "positions must be an array, got None"),
        (-1, ValueError, "positions as a length must be at least 0, got -1"),
        (np.array([2**63], np.uint64), ValueError, r"positions must be below 2\*\*63"),
    ],
)
def test_positions_are_checked(function, positions, error, message):
    with pytest.raises(error, match=message):
        function(positions, 4)


def test_other_arguments_are_checked():
    with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
        npattn.sinusoidal_encoding(3, 0)
    with pytest.raises(TypeError, match=r"dim must be an integer, got 4.0"):
        npattn.sinusoidal_encoding(3, 4.0)
    with pytest.raises(ValueError, match=r"style must be one of 'interleaved'.*got 'sin'"):
        npattn.sinusoidal_encoding(3, 4, style="sin")
    with pytest.raises(ValueError, match="base must be above 0, got 0"):
        npattn.sinusoidal_encoding(3, 4, base=0)
    with pytest.raises(TypeError, match="dtype must be float32, float64, float16 or bfloat16, got int64"):
        npattn.sinusoidal_encoding(3, 4, dtype=np.int64)
    with pytest.raises(TypeError, match=r"dtype must be float32.*got complex64"):
        npattn.rope_cos_sin(3, 4, dtype=np.complex64)
    assert npattn.rope_cos_sin(3, 4, dtype=BFLOAT16)[0].dtype == BFLOAT16


@pytest.mark.parametrize("num_heads", range(1, 70))
def test_alibi_slopes(num_heads):
    slopes = npattn.alibi_slopes(num_heads)
    assert slopes.dtype == np.float64
    np.testing.assert_array_equal(slopes, reference.alibi_slopes(num_heads))
    power = 2 ** int(math.log2(num_heads))
    np.testing.assert_array_equal(slopes[:power], [2 ** -(8 * (h + 1) / power) for h in range(power)])
    twice = npattn.alibi_slopes(2 * power)
    np.testing.assert_array_equal(slopes[power:], twice[::2][: num_heads - power])


def test_alibi_slopes_are_checked():
    for wrong, error in ((0, ValueError), (-4, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="num_heads"):
            npattn.alibi_slopes(wrong)
