"""MultiHeadAttention with weights of 8 bits: its projections are int8 products, all between is as it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import KVCache, MultiHeadAttention
from npattn._matmul import linear
from support import DTYPES, assert_close, assert_same_bits
from test_layer import (
    CASES,
    CONTEXT,
    EMBED,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    VALUE_DIM,
    Arrays,
    layer_of,
    normal,
    parameters,
    plain,
)

INT8 = np.dtype(np.int8)
# Each product is off by about 1 % of its norm; attention takes a mean of the values' errors.
SHARE = 0.03


def composed(arrays: Arrays, x: Any, context: Any = None) -> Any:
    """The layer out of public parts: int8 products, attention, an int8 product."""

    def project(rows: Any, name: str) -> Any:
        weight = npattn.pack_matrix(arrays[f"w_{name}"], dtype=np.int8)
        return linear(rows, weight, arrays[f"b_{name}"].astype(np.float32))

    source = x if context is None else context
    heads = [
        npattn.split_heads(project(rows, name), count)
        for name, rows, count in (("q", x, HEADS), ("k", source, KV_HEADS), ("v", source, KV_HEADS))
    ]
    return project(npattn.merge_heads(npattn.scaled_dot_product_attention(*heads)), "o")


def share_of_norm(result: Any, exact: Any) -> float:
    """The norm of the error over the norm of the exact result."""
    return float(np.linalg.norm(result.astype(np.float64) - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_its_parts(dtype: str, isa: str) -> None:
    arrays = parameters(CONTEXT)
    layer = layer_of(arrays).astype(np.int8)
    x, context = (normal(2, n, width).astype(DTYPES[dtype]) for n, width in ((37, EMBED), (50, CONTEXT)))
    result = layer(x, context)
    assert layer.dtype == INT8
    assert_same_bits(result, composed(arrays, x, context))
    out = np.empty_like(result)
    assert layer(x, context, out=out) is out
    assert_same_bits(out, result)
    for threads in (1, 3):
        with npattn.threads(threads):
            assert_same_bits(layer(x[1], context[1]), result[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_near_the_reference(name: str, dtype: str) -> None:
    made, called = CASES[name]
    x = normal(2, 7, EMBED).astype(DTYPES[dtype])
    result, weights, lse = layer_of(parameters(), **made).astype(np.int8)(
        x, **called, return_weights=True, return_lse=True
    )
    exact = plain(parameters(), x.astype(np.float64), **(made | called), return_weights=True, return_lse=True)
    assert result.dtype == weights.dtype == x.dtype
    assert lse.dtype == np.promote_types(np.float32, lse.dtype)
    assert share_of_norm(result, exact[0]) < SHARE
    assert share_of_norm(weights, exact[1]) < SHARE


def test_dtype_is_that_of_the_input() -> None:
    layer = layer_of(parameters()).astype(np.int8)
    x = normal(2, 5, EMBED)
    single = layer(x.astype(np.float32))
    assert_close(layer(x), single, 0.02)
    assert layer(x).dtype == layer(np.ones((2, 5, EMBED), np.int8)).dtype == np.float64
    assert layer(x.astype(np.float16), x.astype(np.float32)).dtype == np.float32
    with pytest.raises(TypeError, match="float16 and bfloat16 do not mix"):
        layer(x.astype(np.float16), x.astype(DTYPES["bfloat16"]))
    with pytest.raises(TypeError, match="out has dtype float64; the result has float32"):
        layer(x.astype(np.float32), out=x)


def test_astype_there_and_back() -> None:
    made, called = CASES["everything"]
    layer = layer_of(parameters(), **made)
    small = layer.astype("int8")
    assert small.astype(np.int8) is small
    assert repr(small) == repr(layer).replace("float64", "int8")
    held = sum(matrix.nbytes for matrix in (small._query, small._key_value, small._output))
    whole = sum(matrix.nbytes for matrix in (layer._query, layer._key_value, layer._output))
    assert held < 0.16 * whole  # of float64
    arrays = parameters()
    for name in "qkvo":
        weight = npattn.pack_matrix(arrays[f"w_{name}"], dtype=np.int8)
        arrays[f"w_{name}"] = np.asarray(weight).astype(np.float64)
        arrays[f"b_{name}"] = arrays[f"b_{name}"].astype(np.float32).astype(np.float64)
    x = normal(2, 7, EMBED)
    for dtype, within in ((np.float64, 1e-6), (np.float32, 1e-5)):
        back = small.astype(dtype)
        assert back.dtype == dtype
        assert_close(back(x.astype(dtype), **called), plain(arrays, x, **(made | called)), within)
    again = small.astype(np.float32).astype(np.int8)
    assert_close(again(x, **called), small(x, **called), 0.02)


def test_copies_and_pickles() -> None:
    layer = layer_of(parameters(), rope={"base": 500.0}, window=(3, 0)).astype(np.int8)
    x = normal(2, 5, EMBED, dtype=np.float32)
    for twin in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.dtype == INT8
        assert_same_bits(twin(x), layer(x))


def test_random() -> None:
    x = normal(2, 5, 64, dtype=np.float32)
    layer = MultiHeadAttention.random(64, 8, num_kv_heads=2, rng=7, dtype=np.int8)
    assert layer.dtype == INT8
    assert_same_bits(layer(x), MultiHeadAttention.random(64, 8, num_kv_heads=2, rng=7).astype(np.int8)(x))


@pytest.mark.parametrize("cached", [*DTYPES, "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_through_a_cache(dtype: str, cached: str) -> None:
    layer = layer_of(parameters(), rope={}).astype(np.int8)
    x = normal(2, 40, EMBED).astype(DTYPES[dtype])
    cache = KVCache(2, KV_HEADS, HEAD_DIM, value_dim=VALUE_DIM, dtype=DTYPES.get(cached, INT8))
    exact = cached in ("float32", "float64")
    if cached != dtype if exact else dtype == "float64" or {cached, dtype} == {"float16", "bfloat16"}:
        words = rf"computes in {dtype} \(its weights are int8, x is {dtype}\), the cache holds {cached}: "
        words += rf'make it with KVCache\(..., dtype="{dtype}"\)'
        with pytest.raises(TypeError, match=words):
            layer(x, cache=cache)
        assert len(cache) == 0
        return
    pieces = [layer(part, cache=cache) for part in np.split(x, [30, 31, 39], axis=1)]
    result, whole = np.concatenate(pieces, axis=1), layer(x, is_causal=True)
    assert result.dtype == x.dtype
    # The same projections; what attention rounds otherwise may tip an element to the next of 8 bits.
    assert share_of_norm(result, whole.astype(np.float64)) < 0.02


def test_errors_name_the_weight() -> None:
    for name, named in (("w_q", "w_q"), ("w_v", "w_k and w_v"), ("w_o", "w_o")):
        arrays = parameters()
        arrays[name][3, 4] = np.inf
        arrays[name][2, 1] = 1e39
        with pytest.raises(ValueError, match=f"^{named} has 2 elements that are not finite in float32"):
            layer_of(arrays).astype(np.int8)
    for wrong in (np.int16, np.uint8, "U3"):
        with pytest.raises(TypeError, match="dtype must be float32, float64, float16, bfloat16 or int8, got"):
            layer_of(parameters()).astype(wrong)
    with pytest.raises(TypeError, match="bfloat16 or int8, got int32"):
        MultiHeadAttention.random(64, 8, dtype=np.int32)
    with pytest.raises(TypeError, match="bfloat16 or int8, got int16"):
        npattn.pack_matrix(np.ones((2, 3)), dtype=np.int16)
