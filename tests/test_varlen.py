"""Packed sequences: the bits of each sequence alone, whatever they are packed with."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import scaled_dot_product_attention as sdpa
from shapes import Array
from support import DTYPES, assert_same_bits, assert_within, random_qkv

pytestmark = pytest.mark.usefixtures("isa")
INF = np.inf

# (queries, keys) of each sequence, on every path: nothing at all, no queries, no keys, one query over few and
# many keys, few rows, one block of rows, many blocks.
SEQUENCES = [
    (0, 0),
    (0, 9),
    (7, 0),
    (40, 0),
    (1, 5),
    (1, 1700),
    (3, 700),
    (16, 40),
    (33, 33),
    (200, 600),
    (1, 1),
]


def packed(
    sequences: list[tuple[int, int]], heads: tuple[int, int] = (4, 2), dtype: Any = np.float32
) -> tuple[list[Array], Array, Array]:
    """Query, key, value (T, H, E) and where the sequences begin."""
    queries, keys = (np.cumsum([0, *lengths]) for lengths in zip(*sequences, strict=True))
    arrays = random_qkv((), heads, (int(queries[-1]), int(keys[-1])), (24, 20), dtype)
    return [array.swapaxes(0, 1) for array in arrays], queries, keys


def options_of(name: str, sequences: list[tuple[int, int]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Keywords of the packed call, and those of each sequence alone."""
    shared: dict[str, Any] = {
        "plain": {},
        "causal": {"is_causal": True},
        "everything": {"window": (90, 3), "softcap": 2.0, "scale": -0.3, "sinks": np.linspace(-1, 1, 4)},
    }[name]
    if name == "plain":
        return {}, [{}] * len(sequences)
    offsets = [keys - queries + n % 3 - 1 for n, (queries, keys) in enumerate(sequences)]
    each = [{**shared, "query_offset": offset} for offset in offsets]
    together = {**shared, "query_offset": offsets}
    if name == "everything":
        slopes = np.linspace(0.01, 0.2, 4 * len(sequences)).reshape(-1, 4)
        together["alibi_slopes"] = slopes
        each = [{**one, "alibi_slopes": own} for one, own in zip(each, slopes, strict=True)]
    return together, each


@pytest.mark.parametrize("options", ["plain", "causal", "everything"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2), (4, 1)], ids=str)
def test_bits_of_each_sequence_alone(heads: tuple[int, int], dtype: str, options: str) -> None:
    arrays, queries, keys = packed(SEQUENCES, heads, DTYPES[dtype])
    together, each = options_of(options, SEQUENCES)
    for count in (1, 3):
        with npattn.threads(count):
            out, lse = npattn.varlen_attention(*arrays, queries, keys, **together, return_lse=True)
        bounds = zip(pairwise(queries), pairwise(keys), each, strict=True)
        for (first, last), (first_key, last_key), own in bounds:
            part = [arrays[0][first:last], arrays[1][first_key:last_key], arrays[2][first_key:last_key]]
            alone, alone_lse = sdpa(*part, **own, layout="BSHD", return_lse=True)
            assert_same_bits(out[first:last], alone)
            assert_same_bits(lse[:, first:last], alone_lse)


def test_order_and_company_do_not_matter() -> None:
    arrays, queries, keys = packed(SEQUENCES)
    expected = npattn.varlen_attention(*arrays, queries, keys)
    order = np.random.default_rng(0).permutation(len(SEQUENCES))
    moved = [
        np.concatenate([array[starts[n] : starts[n + 1]] for n in order])
        for array, starts in zip(arrays, (queries, keys, keys), strict=True)
    ]
    lengths = [np.diff(starts)[order] for starts in (queries, keys)]
    starts = [np.cumsum([0, *length]) for length in lengths]
    out = npattn.varlen_attention(*moved, *starts)
    for place, n in enumerate(order):
        assert_same_bits(out[starts[0][place] : starts[0][place + 1]], expected[queries[n] : queries[n + 1]])


def test_more_than_one_region() -> None:
    """Panels beyond 64 MiB, and more tasks than one list holds, are computed one part after the other."""
    if npattn.isa.active() == "generic":
        pytest.skip("the same code, for minutes")
    arrays, queries, keys = packed([(97, 9000)] * 3 + [(1, 2)] * 20000, heads=(4, 4))
    arrays = [np.concatenate([array] * 5, axis=-1) for array in arrays]
    out = npattn.varlen_attention(*arrays, queries, keys)
    for n in (0, 2, 3, 777, 20002):
        rows, columns = slice(queries[n], queries[n + 1]), slice(keys[n], keys[n + 1])
        alone = sdpa(arrays[0][rows], arrays[1][columns], arrays[2][columns], layout="BSHD")
        assert_same_bits(out[rows], alone)


def test_nothing_to_do() -> None:
    empty = [np.zeros((0, heads, 8), np.float32) for heads in (4, 2, 2)]
    for starts in ([0], [0, 0], [0, 0, 0]):
        out, lse = npattn.varlen_attention(*empty, np.array(starts), return_lse=True, is_causal=True)
        assert out.shape == (0, 4, 8)
        assert lse.shape == (4, 0)
    query = np.ones((5, 4, 8), np.float32)
    out, lse = npattn.varlen_attention(query, *empty[1:], [0, 5], [0, 0], return_lse=True)
    assert not out.any()
    assert (lse == -INF).all()
    sinks = np.arange(4.0)
    out, lse = npattn.varlen_attention(query, *empty[1:], [0, 2, 5], [0, 0, 0], sinks=sinks, return_lse=True)
    assert not out.any()
    assert (lse == sinks[:, None]).all()


def test_out_and_offsets() -> None:
    lengths = [(5, 5), (20, 20), (1, 1)]
    arrays, queries, _ = packed(lengths, heads=(4, 4))
    query, key, _ = arrays
    expected = npattn.varlen_attention(query, key, query, queries, is_causal=True)
    over_itself = query.copy()
    assert (
        npattn.varlen_attention(over_itself, key, over_itself, queries, is_causal=True, out=over_itself)
        is over_itself
    )
    assert_same_bits(over_itself, expected)
    wide = np.full((26, 8, 48), np.nan, np.float32)
    out = wide[:, ::2, ::2]
    npattn.varlen_attention(query, key, query, queries, is_causal=True, out=out)
    assert_same_bits(np.ascontiguousarray(out), np.ascontiguousarray(expected))
    assert np.isnan(wide[:, 1::2]).all()
    again = npattn.varlen_attention(query, key, query, queries, is_causal=True, query_offset=0)
    assert_same_bits(again, expected)
    shifted = npattn.varlen_attention(query, key, query, queries, is_causal=True, query_offset=[-5, 0, 0])
    assert not shifted[:5].any()
    assert_same_bits(shifted[5:], expected[5:])


def test_refusals() -> None:
    arrays, queries, keys = packed([(3, 4), (2, 2)])
    with pytest.raises(ValueError, match=r"cu_seqlens_k.*5 tokens.*6"):
        npattn.varlen_attention(*arrays, queries)
    for options in ({"window": (1, 0)}, {"alibi_slopes": np.ones(4)}, {"is_causal": True}):
        name = next(iter(options))
        with pytest.raises(ValueError, match=rf"(?s){name}.*query_offset.*sequence 0.*3 queries.*4 keys"):
            npattn.varlen_attention(*arrays, queries, keys, **options)
    with pytest.raises(ValueError, match=r"alibi_slopes.*\(3, 4\).*\(2, 4\)"):
        npattn.varlen_attention(*arrays, queries, keys, query_offset=0, alibi_slopes=np.ones((3, 4)))
    with pytest.raises(TypeError, match="query_offset"):
        npattn.varlen_attention(*arrays, queries, keys, query_offset=0.5)
    with pytest.raises(ValueError, match="scale"):
        npattn.varlen_attention(*arrays, queries, keys, scale=INF)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must not decrease, got 2 after 3 \(index 2\)"):
        npattn.varlen_attention(*arrays, [0, 3, 2, 5], [0, 3, 4, 6])


def test_accuracy_of_long_sequences() -> None:
    """Float32 against float64 over lengths that split into key ranges and blocks of rows."""
    arrays, queries, keys = packed([(1, 3000), (120, 1000)])
    offset = np.diff(keys) - np.diff(queries)
    out = npattn.varlen_attention(*arrays, queries, keys, is_causal=True, query_offset=offset)
    exact = npattn.varlen_attention(
        *(array.astype(np.float64) for array in arrays), queries, keys, is_causal=True, query_offset=offset
    )
    assert_within(out, exact, 2e-6)
