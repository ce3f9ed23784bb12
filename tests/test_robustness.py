"""Faults found by trying to break the package: each with its whole kind."""

from __future__ import annotations

import pickle
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import reference
from npattn import scaled_dot_product_attention as sdpa
from support import assert_same_bits, random_qkv

pytestmark = pytest.mark.usefixtures("isa")


def test_integers_are_read_once() -> None:
    """The core relies on what was checked: integers that lie where out is written are read before."""
    memory = np.zeros(32_000)
    starts = memory.view(np.int64)[:3]
    starts[:] = [0, 2000, 4000]
    q = np.random.default_rng(0).standard_normal((4000, 1, 8))
    expected = npattn.varlen_attention(q, q, q, starts.copy())
    assert_same_bits(npattn.varlen_attention(q, q, q, starts, out=memory.reshape(4000, 1, 8)), expected)
    batch = np.zeros((2, 1, 40, 8))
    lengths = batch.view(np.int64).reshape(-1)[:2]
    lengths[:] = [3, 40]
    x = np.random.default_rng(1).standard_normal((2, 1, 40, 8))
    expected = sdpa(x, x, x, kv_lengths=lengths.copy(), query_offset=lengths.copy(), is_causal=True)
    result = sdpa(x, x, x, kv_lengths=lengths, query_offset=lengths, is_causal=True, out=batch)
    assert_same_bits(result, expected)


@pytest.mark.parametrize("name", ["bias", "attn_mask"])
def test_out_may_overlap_a_mask_that_is_no_array(name: str) -> None:
    out = np.random.default_rng(0).standard_normal((2, 64, 64))
    q = np.random.default_rng(1).standard_normal((2, 64, 64))
    expected = sdpa(q, q, q, **{name: out[0].copy()})
    assert_same_bits(sdpa(q, q, q, **{name: memoryview(out[0])}, out=out), expected)


def test_a_missing_value_is_an_error() -> None:
    q = np.zeros((2, 4, 8))
    with pytest.raises(TypeError, match="value"):
        sdpa(q, q, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="return_lse"):
        sdpa(q, q, q, return_lse=0)  # type: ignore[arg-type]


def test_out_of_size_zero() -> None:
    empty = np.zeros((0, 4, 5, 8))
    out = np.empty_like(empty)
    assert sdpa(empty, empty, empty, out=out) is out
    assert npattn.softmax(empty, out=out) is out
    assert npattn.matmul(empty, np.zeros((8, 8)), out=out) is out


@pytest.mark.parametrize("option", ["scale", "softcap"])
@pytest.mark.parametrize("number", [1e39, 1e-46, 10**400])
def test_numbers_beyond_the_dtype(option: str, number: Any) -> None:
    q = np.ones((1, 3, 4), np.float32)
    with pytest.raises(ValueError, match=option):
        sdpa(q, q, q, **{option: number})
    for bad in (1 + 2j, np.complex64(1), np.array("2"), np.array(True), "2"):
        with pytest.raises(TypeError, match=option):
            sdpa(q, q, q, **{option: bad})


@pytest.mark.parametrize("lengths", [(3, 5), (40, 50)])
def test_low_finite_numbers_are_not_hidden(lengths: tuple[int, int]) -> None:
    q, k, v = random_qkv((), (2, 2), lengths, (8, 8), np.float32)
    lowest = np.full(lengths, np.finfo(np.float32).min)
    result, lse = sdpa(q, k, v, lowest, bias=lowest, return_lse=True)
    assert np.allclose(result, v.mean(-2, keepdims=True), atol=1e-6)
    assert np.isfinite(lse).all()
    sinks = np.array([1e39, -1e39])
    assert np.allclose(sdpa(q, k, v, sinks=sinks)[0], 0)
    assert np.allclose(
        sdpa(q, k, v, sinks=sinks)[1], reference.scaled_dot_product_attention(q, k, v)[1], atol=1e-5
    )


def test_a_rope_that_turns_nothing() -> None:
    rng = np.random.default_rng(0)
    layer = npattn.MultiHeadAttention.random(8, 2, rope={"rotary_dim": 0}, rng=0)
    plain = npattn.MultiHeadAttention.random(8, 2, rng=0)
    x = rng.standard_normal((3, 8), dtype=np.float32)
    assert_same_bits(layer(x), plain(x))


def test_batched_products_share_memory() -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 3, 200, 300))[:, :, :, :], np.ones((2, 3, 300, 200))
    assert np.allclose(npattn.matmul(a, b), a @ b)
    few = a[:, :, :4]
    assert np.allclose(npattn.matmul(few, b), few @ b)


@pytest.mark.parametrize("lengths", [(2, 5), (40, 300)])
@pytest.mark.parametrize("other", [np.inf, -np.inf])
def test_nan_wins_over_infinite_scores(lengths: tuple[int, int], other: float) -> None:
    """A visible NaN makes its row NaN: lse and the weight of a key scoring -inf; hidden keys weigh 0."""
    q, k, v = random_qkv((), (1, 1), lengths, (4, 4), np.float64)
    bias = np.zeros(lengths)
    bias[1, 0] = np.nan
    k[0, 1, 0] = other
    q[0, 1, 0] = 1.0
    mask = np.ones(lengths, bool)
    mask[:, 2] = False
    out, weights, lse = sdpa(q, k, v, mask, bias=bias, return_weights=True, return_lse=True)
    assert np.isnan(out[0, 1]).all()
    assert np.isnan(lse[0, 1])
    assert np.isnan(weights[0, 1, mask[1]]).all()
    assert (weights[0, :, 2] == 0).all()
    if other == -np.inf:
        k[0, 1, 0] = 0.0
        assert np.isfinite(sdpa(q, k, v, mask, bias=np.where(np.isnan(bias), 0, bias))).all()


def test_sizes_beyond_memory() -> None:
    """Views of one number: copies whose bytes 64 bits do not count; keys as many that are not read."""
    one = np.ones(1, np.float32)
    for dtype, shape in (("f4", (2**60, 1)), ("f2", (2**60, 3)), ("f8", (2**59, 1)), ("f4", (2**50, 1))):
        with pytest.raises(MemoryError):
            npattn.pack_matrix(np.broadcast_to(one.astype(dtype), shape))
    length = 32 * -(-(2**57) // 33)  # its panels would have few bytes modulo 2**64
    key = np.broadcast_to(one, (1, length, 1))
    for rows in (4, 20):
        query = np.ones((1, rows, 1), np.float32)
        assert_same_bits(sdpa(query, key, key, kv_lengths=5), query)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_products_without_rows(dtype: Any) -> None:
    """NumPy may give them strides of 0."""
    packed = npattn.pack_matrix(np.ones((8, 4), np.float32), dtype=dtype)
    for x in (
        np.ones((0, 8), np.float32),
        np.ones((3, 2, 8), np.float32)[:, 1:1],
        np.ones((2, 0, 8), np.float32),
    ):
        assert npattn.matmul(x, packed).shape == (*x.shape[:-1], 4)
    layer = npattn.MultiHeadAttention.random(8, 2, rope={}, rng=0).astype(dtype)
    assert layer(np.ones((2, 10, 12), np.float32)[:, :0, :8]).shape == (2, 0, 8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [1, 20])
def test_differences_of_scores_that_overflow(dtype: Any, rows: int) -> None:
    """Scores near the largest number, brought down by a scale: their difference is no number of the dtype."""
    large = np.sqrt(np.finfo(dtype).max) * 0.97
    scale = 3 / np.finfo(dtype).max
    query = np.full((1, rows, 1), large, dtype)
    key = (np.array([1.0, -1.0] * 10)[None, :, None] * large).astype(dtype)
    weights = npattn.attention_weights(query, key, scale=scale)
    expected = reference.attention_weights(query, key, scale=scale)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_positions_of_a_layer() -> None:
    """The same errors whether keys are turned in the products, after a norm, or not at all."""
    norm, weight = np.ones(16, np.float32), np.eye(64, dtype=np.float32)
    x = np.ones((2, 5, 64), np.float32)
    for rope in ({}, {"rotary_dim": 0}):
        for norms in ({}, {"q_norm": norm}, {"q_norm": norm, "k_norm": norm}):
            layer = npattn.MultiHeadAttention(*[weight] * 4, num_heads=4, rope=rope, **norms)
            with pytest.raises(ValueError, match="positions of shape \\(3, 5\\) do not fit the tokens of x"):
                layer(x, positions=np.zeros((3, 5), int))
            for wrong in (np.arange(5.0), np.ones(5, bool), ["a"] * 5, np.ma.masked_array(np.arange(5))):
                with pytest.raises(TypeError, match="positions"):
                    layer(x, positions=wrong)
            for shape in ((5,), (1, 5), (2, 5)):
                positions = np.broadcast_to(np.arange(5), shape)
                np.testing.assert_allclose(layer(x, positions=positions), layer(x), rtol=1e-6)
    with pytest.raises(TypeError, match="kv_lengths"):
        sdpa(x, x, x, kv_lengths=np.ma.masked_array([5, 5]))


def test_pickles_hold_no_angles() -> None:
    layer = npattn.MultiHeadAttention.random(64, 4, rope={}, rng=0)
    size = len(pickle.dumps(layer))
    layer(np.ones((3000, 64), np.float32))
    assert len(pickle.dumps(layer)) == size


@pytest.mark.parametrize("rows", [16, 40, 71, 96])
def test_few_rows_of_one_head_are_cut_for_threads(rows: int) -> None:
    """No bit depends on it."""
    query, key, value = random_qkv((), (1, 1), (rows, 1500), (64, 40), np.float32)
    with npattn.threads(1):
        expected = sdpa(query, key, value, is_causal=True, query_offset=1400)
    for threads in (2, 3):
        with npattn.threads(threads):
            assert_same_bits(sdpa(query, key, value, is_causal=True, query_offset=1400), expected)
    heads = np.ascontiguousarray(query.swapaxes(0, 1))  # the same rows as one query of as many heads
    with npattn.threads(1):
        expected = sdpa(heads, key, value)
    with npattn.threads(2):
        assert_same_bits(sdpa(heads, key, value), expected)
