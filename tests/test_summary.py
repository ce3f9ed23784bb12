"""attention_summary block by block, and merge_attention at the edges."""

from __future__ import annotations

from typing import Any

import npattn
import numpy as np
import pytest
from npattn import _summary, reference
from shapes import pattern
from support import DTYPES, assert_same_bits, assert_within, random_qkv

pytestmark = pytest.mark.usefixtures("isa")
NAN, INF = np.nan, np.inf


@pytest.fixture(params=[2**20, 5000, 700, 1])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Weights computed at a time: everything at once, by batch, by key head, row by row."""
    monkeypatch.setattr(_summary, "_BLOCK", request.param)
    monkeypatch.setattr(_summary, "_ENOUGH_ROWS", 4)
    return int(request.param)


def agree(summary: Any, expected: Any, within: float = 1e-12) -> None:
    for name in ("entropy", "top_weights", "received"):
        assert_within(getattr(summary, name), getattr(expected, name), within)
    assert_same_bits(summary.top_keys, expected.top_keys)


def test_blocks(block: int) -> None:
    """Every option in float64, where no two weights are so close that their order is in doubt."""
    query, key, _ = random_qkv((2, 1), (4, 2), (11, 70), (16, 16), np.float64)
    key = np.repeat(key, 3, axis=1)
    options: dict[str, Any] = {
        "bias": pattern((4, 11, 70), 41, 3),
        "attn_mask": pattern((2, 1, 1, 1, 70), 31, 5) > -0.5,
        "query_offset": np.array([[59], [30]]),
        "kv_lengths": np.array([70, 60, 0]),
        "alibi_slopes": np.array([0.5, 0.1, 0.02, 0.0]),
        "sinks": np.array([0.5, -INF, 3.0, -1.0]),
    }
    expected = reference.attention_summary(query, key, **options, is_causal=True, softcap=3.0, top_k=7)
    summary = npattn.attention_summary(query, key, **options, is_causal=True, softcap=3.0, top_k=7)
    assert summary.entropy.shape == (2, 3, 4, 11)
    agree(summary, expected)
    swapped = [array.swapaxes(-2, -3) for array in (query, key)]
    again = npattn.attention_summary(*swapped, **options, is_causal=True, softcap=3.0, top_k=7, layout="BSHD")
    agree(again, expected)


@pytest.mark.parametrize("top_k", [1, 3, 64, 65, 300])
def test_top_k(top_k: int) -> None:
    query, key, _ = random_qkv((), (2, 1), (9, 200), (8, 8), np.float64)
    options: dict[str, Any] = {"window": (80, 20), "query_offset": 100, "top_k": top_k}
    agree(npattn.attention_summary(query, key, **options), reference.attention_summary(query, key, **options))


@pytest.mark.parametrize("top_k", [3, 100])
def test_ties_go_to_the_lower_key(top_k: int) -> None:
    summary = npattn.attention_summary(np.zeros((2, 4)), np.ones((150, 4)), np.arange(150) >= 7, top_k=top_k)
    assert summary.top_keys.tolist() == [list(range(7, 7 + top_k))] * 2


@pytest.mark.parametrize("top_k", [2, 100])
def test_nan_stays_in_its_rows(top_k: int) -> None:
    query, key, _ = random_qkv((), (2, 2), (5, 130), (8, 8), np.float64)
    clean = npattn.attention_summary(query, key, top_k=top_k)
    query[1, 2, 3] = NAN
    summary = npattn.attention_summary(query, key, top_k=top_k)
    exact = reference.attention_summary(query, key, top_k=top_k)
    others = np.ones((2, 5), bool)
    others[1, 2] = False
    for name in ("entropy", "top_weights", "top_keys"):
        assert_same_bits(getattr(summary, name)[others], getattr(clean, name)[others])
    assert np.isnan(summary.entropy[1, 2])
    assert np.isnan(summary.top_weights[1, 2]).all()
    assert np.isnan(summary.received[1]).all()
    agree(summary, exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_empty_axes(dtype: str) -> None:
    query, key, _ = random_qkv((2,), (4, 2), (3, 5), (8, 8), DTYPES[dtype])
    wanted = np.float64 if dtype == "float64" else np.float32
    for keys in (5, 0):
        summary = npattn.attention_summary(query, key[:, :, :keys])
        assert summary.top_keys.shape == (2, 4, 3, keys)
        assert summary.received.shape == (2, 4, keys)
        assert {array.dtype for array in summary} == {np.dtype(wanted), np.dtype(np.int64)}
    assert not summary.entropy.any()
    summary = npattn.attention_summary(query[:, :, :0], key)
    assert summary.entropy.shape == (2, 4, 0)
    assert not summary.received.any()
    assert npattn.attention_summary(query[:0], key[:0]).received.shape == (0, 4, 5)
    assert npattn.AttentionSummary is reference.AttentionSummary


def test_merge_dtypes_and_forms() -> None:
    parts = np.ones((3, 2, 4, 5)), np.zeros((3, 2, 4))
    for dtype, lse_dtype in (("float32", np.float32), ("float64", np.float64), ("float16", np.float32)):
        outputs, lses = parts[0].astype(DTYPES[dtype]), parts[1].astype(lse_dtype)
        output, lse = npattn.merge_attention(outputs, lses)
        assert (output.dtype, lse.dtype) == (DTYPES[dtype], lse_dtype)
        assert_within(output, np.ones((2, 4, 5)), 2e-3)
        assert_within(lse, np.full((2, 4), np.log(3.0)), 1e-6)
        assert_same_bits(npattn.merge_attention(list(outputs), tuple(lses))[0], output)
    output, lse = npattn.merge_attention(parts[0][:1], parts[1][:1])
    assert_same_bits(output, parts[0][0])
    assert_same_bits(lse, parts[1][0])


def test_merge_of_nan_and_infinity() -> None:
    """A NaN, and an lse of +inf, make their row NaN; no other row changes."""
    rng = np.random.default_rng(0)
    outputs, lses = rng.standard_normal((3, 6, 4)), rng.standard_normal((3, 6))
    clean, clean_lse = npattn.merge_attention(outputs, lses)
    lses[1, 2], lses[0, 4], outputs[2, 5, 1] = NAN, INF, NAN
    output, lse = npattn.merge_attention(outputs, lses)
    assert np.isnan(output[[2, 4]]).all()
    assert np.isnan(output[5]).tolist() == [False, True, False, False]
    assert np.isnan(lse[2])
    assert lse[4] == INF
    assert_same_bits(output[[0, 1, 3]], clean[[0, 1, 3]])
    assert_same_bits(lse[[0, 1, 3]], clean_lse[[0, 1, 3]])


def test_merge_refusals() -> None:
    with pytest.raises(TypeError, match="outputs must be a sequence"):
        npattn.merge_attention(3.0, [1.0])
    with pytest.raises(TypeError, match=r"outputs\[1\].*complex"):
        npattn.merge_attention([np.ones((2, 3)), np.ones((2, 3), complex)], [np.ones(2)] * 2)
    with pytest.raises(ValueError, match=r"lses\[0\].*swapaxes"):
        npattn.merge_attention([np.ones((6, 2, 3))], [np.ones((2, 6))])
