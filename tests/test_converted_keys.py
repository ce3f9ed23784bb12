"""Keys and values of dtypes that must be converted: in parts of 2048 keys, to the result of a whole copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import scaled_dot_product_attention as sdpa
from npattn._inputs import PART_KEYS
from shapes import Array
from support import DTYPES, assert_same_bits, assert_within

HEADS, KV_HEADS, ROWS, KEYS, DIM = 4, 2, 7, 2 * PART_KEYS + 700, 24

# query, key, value; the tolerance
DTYPES_OF: dict[str, tuple[tuple[str, str, str], float]] = {
    "float64 query": (("float64", "float32", "float32"), 1e-13),
    "float64 query, half keys": (("float64", "bfloat16", "bfloat16"), 1e-13),
    "float64 keys": (("float32", "float64", "float32"), 1e-13),
    "values differ": (("float32", "float32", "float16"), 2e-6),
}

OPTIONS: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "none": lambda rng: {},
    "causal": lambda rng: {"is_causal": True, "query_offset": [2000, 4700]},
    "causal from 0": lambda rng: {"is_causal": True, "query_offset": 0},
    "window": lambda rng: {"window": (2100, 3), "query_offset": [-3, 4600]},
    "lengths": lambda rng: {"kv_lengths": [0, PART_KEYS + 5]},
    "mask": lambda rng: {"attn_mask": rng.random((3, 2, 1, ROWS, KEYS)) < 0.3},
    "float mask and bias": lambda rng: {
        "attn_mask": np.where(rng.random((ROWS, KEYS)) < 0.5, -np.inf, 1.0),
        "bias": rng.standard_normal((HEADS, 1, KEYS)),
    },
    "sinks and softcap": lambda rng: {"sinks": rng.standard_normal(HEADS) + 5, "softcap": 2.0, "scale": 1.5},
    "alibi": lambda rng: {"alibi_slopes": rng.random(HEADS) / 100, "query_offset": KEYS - ROWS},
    "sinks alone": lambda rng: {"sinks": rng.standard_normal(HEADS), "kv_lengths": 0},
}


def inputs(rng: np.random.Generator, dtypes: tuple[str, str, str]) -> list[Array]:
    """Leading axes (3, 2) of the query, (2,) of keys, none of values."""
    shapes = ((3, 2, HEADS, ROWS, DIM), (2, KV_HEADS, KEYS, DIM), (KV_HEADS, KEYS, DIM + 1))
    return [rng.standard_normal(s).astype(DTYPES[d]) for s, d in zip(shapes, dtypes, strict=True)]


@pytest.mark.parametrize("dtypes", DTYPES_OF)
@pytest.mark.parametrize("option", OPTIONS)
def test_the_result_of_a_whole_copy(option: str, dtypes: str) -> None:
    rng = np.random.default_rng(0)
    names, within = DTYPES_OF[dtypes]
    given = inputs(rng, names)
    wide = [array.astype(np.result_type(*given)) for array in given]
    options = OPTIONS[option](rng) | {"return_weights": True, "return_lse": True}
    whole, parts = sdpa(*wide, **options), sdpa(*given, **options)
    for part, wanted in zip(parts, whole, strict=True):
        assert part.dtype == wanted.dtype
        assert_within(part, wanted, within * 10)
    assert_same_bits(sdpa(*given, **options | {"return_weights": False, "return_lse": False}), parts[0])
    del options["return_weights"], options["return_lse"]
    if given[1].dtype == given[2].dtype:  # without values, keys that are float64 need no parts
        assert_same_bits(npattn.attention_weights(*given[:2], **options), parts[1])
        scores = npattn.attention_scores(*given[:2], **options)
        assert_within(scores, npattn.attention_scores(*wide[:2], **options), within * 100)


def test_layouts_and_out() -> None:
    rng = np.random.default_rng(1)
    query, key, value = inputs(rng, ("float64", "float32", "float32"))
    expected = sdpa(query, key, value)
    swapped = [array.swapaxes(-2, -3) for array in (query, key, value)]
    assert_same_bits(sdpa(*swapped, layout="BSHD").swapaxes(-2, -3), expected)
    fortran = [np.asfortranarray(array) for array in (query, key, value)]
    assert_same_bits(sdpa(*fortran), expected)
    out = np.empty_like(expected)[..., ::-1, :]
    assert sdpa(query, key, value, out=out) is out
    assert_same_bits(out, expected)
    alone = sdpa(query[2, 1, 2:], key[1, 1:], value[1:])
    assert_same_bits(alone, expected[2, 1, 2:])
    assert_same_bits(sdpa(query[2, 1, 3], key[1, 1], value[1]), expected[2, 1, 3])


def test_hidden_and_visible_nan() -> None:
    """What is hidden does not matter; a visible NaN makes its row NaN, but for the weights of hidden keys."""
    rng = np.random.default_rng(2)
    query, key, value = (array[..., :1, :, :] for array in inputs(rng, ("float64", "float32", "float32")))
    key, value = key[0], value
    query = query[0, 0]
    mask = rng.random((ROWS, KEYS)) < 0.5
    mask[:, 3000] = False
    mask[2, 3000] = True
    expected = sdpa(query, key, value, mask & (np.arange(KEYS) != 3000))
    key[:, 3000] = np.nan
    value[:, 3000] = np.inf
    output, weights, lse = sdpa(query, key, value, mask, return_weights=True, return_lse=True)
    others = np.arange(ROWS) != 2
    assert_same_bits(output[:, others], expected[:, others])
    assert np.isnan(output[:, 2]).all()
    assert np.isnan(lse[:, 2]).all()
    assert (weights[:, ~mask] == 0).all()
    assert np.isnan(weights[:, 2, mask[2]]).all()
