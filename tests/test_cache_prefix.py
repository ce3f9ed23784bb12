"""PagedKVCache: keys that several sequences share are read once for all of them, and nobody can tell."""

from __future__ import annotations

from typing import Any

import npattn
import numpy as np
import pytest
from plain_cache import CACHE_DTYPES, token_dtype
from shapes import Array
from support import assert_same_bits

WIDTH, KEY_HEADS, GROUP = 40, 2, 4
PART = 512  # keys that are computed at once, and merged in order
UNBOUNDED = 2**63 - 1


def normal(dtype: Any, *shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32).astype(token_dtype(dtype))


def alike(
    prefix: int, own: int, sequences: int, dtype: Any, *, shared: bool
) -> tuple[npattn.PagedKVCache, list[int]]:
    """Sequences that begin with the same tokens, in the same pages or in pages of their own."""
    cache = npattn.PagedKVCache(sequences * (prefix // 32 + 3), 32, KEY_HEADS, WIDTH, dtype=dtype)
    tokens = normal(dtype, 2, 1, KEY_HEADS, prefix, WIDTH)
    ids = [cache.add_sequence()]
    cache.append(ids, *tokens)
    while len(ids) < sequences:
        ids.append(cache.add_sequence(prefix=ids[0] if shared else None))
        if not shared:
            cache.append(ids[-1:], *tokens)
    cache.append(ids, *normal(dtype, 2, sequences, KEY_HEADS, own, WIDTH))
    return cache, ids


def attended(
    cache: npattn.PagedKVCache, ids: list[int], query: Array, left: int = UNBOUNDED, mask: Array | None = None
) -> tuple[Array, int]:
    """The output, and how many parts of the keys were computed for several sequences at once."""
    output = np.empty(query.shape, query.dtype)
    counts = np.full(len(ids), query.shape[2])
    masks = None if mask is None else np.broadcast_to(mask, (*query.shape[:3], len(mask)))
    options = (None, None, masks, None, None, None, None, counts, True, left, UNBOUNDED, WIDTH**-0.5, 0.0, 2)
    parts = cache._store.attend(cache._store.slots_of(ids), query, output, *options)
    return output, parts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("rows", [1, 3])
def test_parts_that_are_shared_are_computed_once(isa: str, rows: int, dtype: str) -> None:
    """All whole parts that lie in shared pages and that all queries see; the bits are those of each alone."""
    kind = CACHE_DTYPES[dtype]
    for prefix, parts in ((PART - 32, 0), (PART, 1), (PART + 500, 1), (2 * PART + 60, 2)):
        shared, ids = alike(prefix, 3, 9, kind, shared=True)
        apart, others = alike(prefix, 3, 9, kind, shared=False)
        query = normal(np.float32, 9, KEY_HEADS * GROUP, rows, WIDTH)
        output, found = attended(shared, ids, query)
        assert found == parts, prefix
        unshared, none = attended(apart, others, query)
        assert none == 0
        assert_same_bits(output, unshared)
        assert_same_bits(output, shared.attend(ids, query))
        for i, sequence in enumerate(ids):
            alone, none = attended(shared, [sequence], query[i : i + 1])
            assert none == 0
            assert_same_bits(alone, output[i : i + 1])


def test_some_share_and_others_do_not(isa: str) -> None:
    """Two families and a stranger: a part for each family, none with a mask or a window."""
    cache, ids = alike(PART, 3, 3, np.float32, shared=True)
    for _ in range(2):
        cache.append([other := cache.add_sequence()], *normal(np.float32, 2, 1, KEY_HEADS, 5, WIDTH))
    assert other == 4
    query = normal(np.float32, 5, KEY_HEADS * GROUP, 1, WIDTH)
    sequences = [0, 3, 1, 4, 2]
    output, found = attended(cache, sequences, query)
    assert found == 1
    for i, sequence in enumerate(sequences):
        assert_same_bits(cache.attend([sequence], query[i : i + 1]), output[i : i + 1])
    assert attended(cache, ids, query[:3], left=10**6)[1] == 0
    assert attended(cache, ids, query[:3], mask=np.ones(PART + 3, bool))[1] == 0
    assert_same_bits(attended(cache, ids, query[:3], left=10**6)[0], attended(cache, ids, query[:3])[0])


def test_what_is_cropped_into_the_shared_part_shares_no_more(isa: str) -> None:
    cache, ids = alike(PART + 40, 1, 3, np.float32, shared=True)
    cache.crop(ids[1], PART - 1)
    query = normal(np.float32, 3, KEY_HEADS * GROUP, 1, WIDTH)
    output, found = attended(cache, ids, query)
    assert found == 1
    cache.crop(ids[2], PART - 1)
    assert attended(cache, ids, query)[1] == 0
    assert_same_bits(cache.attend(ids[:1], query[:1]), output[:1])
