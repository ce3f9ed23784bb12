"""Faults found by trying to break the package: each with its whole kind."""

from __future__ import annotations

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
