"""Attention against the reference: every ISA and dtype at every size where a kernel changes what it does."""

from __future__ import annotations

from typing import Any

import npattn
import numpy as np
import pure_python
import pytest
from npattn import reference
from npattn import scaled_dot_product_attention as sdpa
from shapes import FEW_LENGTHS, GROUPS, HEAD_DIMS, LENGTHS, Array
from support import DTYPES, assert_within, each_isa, random_qkv, tolerances_of


def check(query: Array, key: Array, value: Array, **options: Any) -> None:
    """Output, weights and lse of one call on every ISA, within tolerance of the reference."""
    expected = reference.scaled_dot_product_attention(
        query, key, value, **options, return_weights=True, return_lse=True
    )
    within = tolerances_of(query, key, value)
    dtype = np.result_type(query, key, value)
    for isa in each_isa():
        try:
            out = sdpa(query, key, value, **options)
            _, weights, lse = sdpa(query, key, value, **options, return_weights=True, return_lse=True)
            assert (out.dtype, weights.dtype) == (dtype, dtype)
            assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
            assert_within(out, expected[0], within.output)
            assert_within(weights, expected[1], within.weights)
            assert_within(lse, expected[2], within.lse)
        except AssertionError as error:
            raise AssertionError(
                f"{isa} {dtype} {query.shape} {key.shape} {value.shape} {options}"
            ) from error


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: "x".join(map(str, lengths)))
def test_lengths(lengths: tuple[int, int]) -> None:
    turn = LENGTHS.index(lengths)  # every size meets another head dim, value dim and group
    head_dim, value_dim = HEAD_DIMS[turn % 9], HEAD_DIMS[(turn // 2) % 9]
    heads = GROUPS[turn % len(GROUPS)]
    for dtype in DTYPES.values():
        check(*random_qkv((2,), heads, lengths, (head_dim, value_dim), dtype))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(dtype: str, head_dim: int) -> None:
    for lengths in ((1, 70), (5, 33), (19, 300)):
        check(*random_qkv((1,), (2, 1), lengths, (head_dim, head_dim), DTYPES[dtype]))
        check(*random_qkv((1,), (2, 2), lengths, (head_dim, head_dim + 3), DTYPES[dtype]))
        check(*random_qkv((1,), (1, 1), lengths, (24, head_dim), DTYPES[dtype]))


@pytest.mark.parametrize("heads", [*GROUPS, (7, 1), (8, 2), (12, 4), (32, 2)], ids=str)
def test_groups(heads: tuple[int, int]) -> None:
    for lengths in ((1, 5), (2, 40), (13, 33), (40, 270)):
        check(*random_qkv((2,), heads, lengths, (16, 16)))
        check(
            *random_qkv((2,), heads, lengths, (16, 16)), is_causal=True, query_offset=lengths[1] - lengths[0]
        )


@pytest.mark.parametrize("lengths", FEW_LENGTHS, ids=lambda lengths: "x".join(map(str, lengths)))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_causal_and_window_borders(dtype: str, lengths: tuple[int, int]) -> None:
    """The diagonal and both edges of the window cross tiles, panels and blocks at every place."""
    query_len, key_len = lengths
    arrays = random_qkv((1,), (2, 1), lengths, (20, 20), DTYPES[dtype])
    for offset in sorted({0, 1, key_len - query_len, key_len, -1, -query_len, key_len + 40}):
        check(*arrays, is_causal=True, query_offset=offset)
        for window in ((0, 0), (3, 5), (31, None), (None, 0), (40, 1)):
            check(*arrays, window=window, query_offset=offset)


@pytest.mark.parametrize(
    "dtypes", [("float32", "float16"), ("float32", "bfloat16"), ("float64", "float32")], ids=str
)
def test_mixed_dtypes(dtypes: tuple[str, str]) -> None:
    """Keys and values narrower than the query; the result has the wider dtype."""
    for lengths in ((1, 300), (5, 33), (40, 270)):
        query, key, value = random_qkv((2,), (4, 2), lengths, (40, 24))
        query = query.astype(DTYPES[dtypes[0]])
        key, value = key.astype(DTYPES[dtypes[1]]), value.astype(DTYPES[dtypes[1]])
        assert sdpa(query, key, value).dtype == DTYPES[dtypes[0]]
        check(query, key, value)


@pytest.mark.parametrize("magnitude", [1e-3, 30.0, 300.0])
def test_large_and_small_scores(magnitude: float) -> None:
    """The maximum moves from block to block by more than the rescaling threshold, and far down."""
    for lengths in ((1, 600), (40, 600)):
        query, key, value = random_qkv((1,), (2, 2), lengths, (16, 16), np.float64)
        query *= magnitude
        key *= np.linspace(0.1, 1.0, lengths[1])[:, None]  # later keys score higher
        for order in (slice(None), slice(None, None, -1)):
            for dtype in (np.float32, np.float64):
                arrays = [array.astype(dtype) for array in (query, key[..., order, :], value)]
                check(*arrays)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"mask": True}, {"bias": True}, {"scale": 0.3}], ids=str
)
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
def test_second_oracle(isa: str, heads: tuple[int, int], options: dict[str, Any]) -> None:
    """The same numbers as lists and `math` alone give."""
    query, key, value = random_qkv((), heads, (5, 7), (3, 4), np.float64)
    rng = np.random.default_rng(3)
    mask = rng.random((5, 7)) < 0.7 if "mask" in options else None
    bias = rng.standard_normal((5, 7)) if "bias" in options else None
    causal, scale = options.get("is_causal", False), options.get("scale")
    expected = pure_python.attention(
        query.tolist(),
        key.tolist(),
        value.tolist(),
        None if mask is None else mask.tolist(),
        bias=None if bias is None else bias.tolist(),
        is_causal=causal,
        query_offset=2,
        scale=scale,
    )
    actual = sdpa(
        query, key, value, mask, bias=bias, is_causal=causal, query_offset=2, scale=scale,
        return_weights=True, return_lse=True,
    )  # fmt: skip
    for got, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-14)


def test_each_isa_takes_its_turn() -> None:
    """Every ISA takes its turn, and the one in use before is back afterwards."""
    assert len(set(npattn.isa.available())) == len(npattn.isa.available()) >= 1
    assert list(each_isa()) == list(npattn.isa.available())
    before = npattn.isa.active()
    for name in each_isa():
        assert npattn.isa.active() == name
    assert npattn.isa.active() == before
