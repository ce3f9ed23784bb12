"""Caches: which calls agree in every bit, as docs/index.md says."""

from __future__ import annotations

import npattn
import numpy as np
import pytest
from shapes import Array
from support import assert_same_bits, multiplies_halves

LENGTH, KV_HEADS = 420, 2


def attended(key: Array, value: Array, query: Array, chunk: int, dtype: object = np.float32) -> Array:
    """All queries (1, Hq, LENGTH, E), so many tokens a call."""
    cache = npattn.KVCache(1, KV_HEADS, key.shape[3], dtype=dtype)
    outputs = []
    for first in range(0, LENGTH, chunk):
        part = np.s_[:, :, first : first + chunk]
        cache.append(key[part], value[part])
        outputs.append(cache.attend(query[part]))
    return np.concatenate(outputs, axis=2)


@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 40)])
def test_chunks(isa: str, group: int, dim: int) -> None:
    """Up to 96 rows and more than 96: each kind has its bits, however the tokens are cut into calls."""
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 1, KV_HEADS, LENGTH, dim), dtype=np.float32)
    query = rng.standard_normal((1, KV_HEADS * group, LENGTH, dim), dtype=np.float32)
    few = [attended(key, value, query, rows // group) for rows in (4, 20, 96)]
    for output in few[1:]:
        assert_same_bits(output[:, :, 96:], few[0][:, :, 96:])
    many = [attended(key, value, query, chunk) for chunk in (140, 210, LENGTH)]
    for output in many[1:]:
        assert_same_bits(output, many[0])
    np.testing.assert_allclose(few[0], many[0], rtol=0, atol=3e-6)


def test_half_caches(isa: str) -> None:
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 1, KV_HEADS, LENGTH, 40)).astype(np.float16)
    query = rng.standard_normal((1, KV_HEADS, LENGTH, 40), dtype=np.float32)
    for chunk in (1, 140):
        half = attended(key, value, query, chunk, np.float16)
        assert_same_bits(half, attended(*(x.astype(np.float32) for x in (key, value)), query, chunk))


def test_int8_caches(isa: str) -> None:
    """Up to 4 rows and up to 96 are two kinds where no instruction multiplies quads."""
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 1, KV_HEADS, LENGTH, 40), dtype=np.float32)
    query = rng.standard_normal((1, KV_HEADS, LENGTH, 40), dtype=np.float32)
    step, four, twelve, most = (
        attended(key, value, query, chunk, np.int8)[:, :, 96:] for chunk in (1, 4, 12, 96)
    )
    assert_same_bits(four, step)
    assert_same_bits(most, twelve)
    if multiplies_halves(isa):
        assert_same_bits(twelve, four)
