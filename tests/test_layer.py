"""MultiHeadAttention against projections, heads and attention written out with the float64 reference."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import MultiHeadAttention, reference
from npattn._layer_rope import RotaryPositions
from support import DTYPES, assert_close, assert_same_bits

Arrays = dict[str, np.ndarray[Any, Any]]

# Errors of four matrix products of depth 48 and one attention, relative to outputs of about 1.
WITHIN = {"float64": 1e-13, "float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 6, 2, 8, 10
EMBED, CONTEXT, OUTPUT = 48, 40, 36


def parameters(context_dim: int = EMBED, value_dim: int = VALUE_DIM, seed: int = 1) -> Arrays:
    """Weights and biases of a layer in which no two widths are equal."""
    rng = np.random.default_rng(seed)
    shapes = {
        "q": (EMBED, HEADS * HEAD_DIM),
        "k": (context_dim, KV_HEADS * HEAD_DIM),
        "v": (context_dim, KV_HEADS * value_dim),
        "o": (HEADS * value_dim, OUTPUT),
    }
    arrays = {f"w_{name}": rng.standard_normal(shape) / np.sqrt(shape[0]) for name, shape in shapes.items()}
    return arrays | {f"b_{name}": rng.standard_normal(shape[1]) for name, shape in shapes.items()}


def layer_of(arrays: Arrays, **options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(**arrays, num_heads=HEADS, num_kv_heads=KV_HEADS, **options)


def normal(*shape: int, seed: int = 2, dtype: Any = np.float64) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def rms(x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], eps: float) -> np.ndarray[Any, Any]:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def plain(
    arrays: Arrays,
    x: np.ndarray[Any, Any],
    context: np.ndarray[Any, Any] | None = None,
    *,
    rope: dict[str, Any] | None = None,
    positions: Any = None,
    q_norm: Any = None,
    k_norm: Any = None,
    norm_eps: float = 1e-6,
    **options: Any,
) -> Any:
    """The layer, one formula a line; rope for self attention alone."""
    source = x if context is None else context
    query = x @ arrays["w_q"] + arrays.get("b_q", 0)
    key = source @ arrays["w_k"] + arrays.get("b_k", 0)
    value = source @ arrays["w_v"] + arrays.get("b_v", 0)
    if q_norm is not None and len(q_norm) != HEAD_DIM:
        query = rms(query, q_norm, norm_eps)
    if k_norm is not None and len(k_norm) != HEAD_DIM:
        key = rms(key, k_norm, norm_eps)
    query = reference.split_heads(query, HEADS)
    key = reference.split_heads(key, KV_HEADS)
    value = reference.split_heads(value, KV_HEADS)
    if q_norm is not None and len(q_norm) == HEAD_DIM:
        query = rms(query, q_norm, norm_eps)
    if k_norm is not None and len(k_norm) == HEAD_DIM:
        key = rms(key, k_norm, norm_eps)
    if rope is not None:
        places = np.arange(x.shape[-2]) if positions is None else positions
        query, key = reference.apply_rope(query, key, places, **rope)
    result = reference.scaled_dot_product_attention(query, key, value, **options)
    output, *others = result if isinstance(result, tuple) else (result,)
    output = reference.merge_heads(output) @ arrays["w_o"] + arrays.get("b_o", 0)
    return (output, *others) if others else output


# What is given when the layer is made, and what at the call, for x (2, 7, 48).
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "mask": ({}, {"attn_mask": normal(2, 1, 7, 7) > -0.5}),
    "bias": ({}, {"attn_mask": normal(7, 7) > -0.5, "bias": normal(6, 7, 7)}),
    "lengths": ({}, {"kv_lengths": [7, 3]}),
    "scale": ({"scale": 0.9}, {}),
    "zero scale": ({"scale": 0.0}, {}),
    "softcap": ({"softcap": 1.5}, {}),
    "sinks": ({"sinks": normal(6)}, {}),
    "alibi": ({"alibi_slopes": reference.alibi_slopes(6)}, {}),
    "alibi per batch": ({"alibi_slopes": np.abs(normal(2, 6))}, {}),
    "window": ({"window": (2, 0)}, {}),
    "window at the call": ({"window": (0, 0)}, {"window": (1, None)}),
    "window lifted": ({"window": (0, 0)}, {"window": (None, None)}),
    "offset": ({}, {"is_causal": True, "query_offset": [2, -1]}),
    "head norms": ({"q_norm": normal(8), "k_norm": normal(8, seed=3), "norm_eps": 1e-3}, {}),
    "norms over all heads": ({"q_norm": normal(48), "k_norm": normal(16)}, {}),
    "one norm": ({"q_norm": normal(8)}, {}),
    "rope": ({"rope": {}}, {}),
    "rope with keywords": ({"rope": {"base": 500.0, "interleaved": True, "rotary_dim": 4}}, {}),
    "rope, partial by its dictionary": (
        {"rope": {"scaling": {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}}},
        {},
    ),
    "rope with positions": ({"rope": {}}, {"positions": np.arange(7) * 3 - 5}),
    "rope with positions per batch": (
        {"rope": {}},
        {"positions": np.stack([np.arange(7), np.arange(7) + 90]).astype(np.int16)},
    ),
    "rope with sections": (
        {"rope": {"sections": [1, 1, 2]}},
        {"positions": np.stack([np.arange(7), np.arange(7) // 2, np.arange(7) % 3])},
    ),
    "everything": (
        {
            "rope": {"base": 100.0},
            "q_norm": normal(8),
            "k_norm": normal(8, seed=3),
            "scale": 0.5,
            "softcap": 3.0,
            "sinks": normal(6),
            "alibi_slopes": reference.alibi_slopes(6),
            "window": (3, 1),
        },
        {"attn_mask": normal(7, 7) > -1, "bias": normal(2, 1, 7, 7), "kv_lengths": [6, 7]},
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name: str, dtype: str, isa: str) -> None:
    made, called = CASES[name]
    arrays = {key: array.astype(DTYPES[dtype]) for key, array in parameters().items()}
    x = normal(2, 7, EMBED).astype(DTYPES[dtype])
    result = layer_of(arrays, **made)(x, **called, return_weights=True, return_lse=True)
    exact = {key: array.astype(np.float64) for key, array in arrays.items()}
    expected = plain(exact, x.astype(np.float64), **(made | called), return_weights=True, return_lse=True)
    assert result[0].dtype == result[1].dtype == x.dtype
    for have, want in zip(result, expected, strict=True):
        assert_close(have, want, WITHIN[dtype])


@pytest.mark.parametrize("biased", [(), ("b_q",), ("b_k",), ("b_v",), ("b_o",), ("b_k", "b_v")])
def test_any_bias_may_be_missing(biased: tuple[str, ...]) -> None:
    arrays = {name: array for name, array in parameters().items() if name in biased or name[0] == "w"}
    x = normal(2, 5, EMBED)
    assert_close(layer_of(arrays)(x), plain(arrays, x), WITHIN["float64"])


def test_cross_attention() -> None:
    arrays = parameters(CONTEXT)
    x, context = normal(2, 5, EMBED), normal(2, 9, CONTEXT)
    layer = layer_of(arrays)
    assert_close(layer(x, context), plain(arrays, x, context), WITHIN["float64"])
    output, weights = layer(
        x, context, is_causal=True, query_offset=4, kv_lengths=[9, 6], return_weights=True
    )
    expected = plain(
        arrays, x, context, is_causal=True, query_offset=4, kv_lengths=[9, 6], return_weights=True
    )
    assert_close(output, expected[0], WITHIN["float64"])
    assert_close(weights, expected[1], WITHIN["float64"])
    with pytest.raises(ValueError, match="context"):
        layer(x)
    with pytest.raises(ValueError, match="query_offset"):
        layer(x, context, is_causal=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_angles_of_self_attention_are_laid_out_once(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out: list[int] = []
    of_rows = RotaryPositions.of_rows
    monkeypatch.setattr(
        RotaryPositions, "of_rows", lambda *arguments: (laid_out.append(1), of_rows(*arguments))[1]
    )
    layer = layer_of(parameters(), rope={}).astype(np.float64)
    x = normal(2, 5, EMBED).astype(dtype)
    places = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    expected = plain(parameters(), x.astype(np.float64), rope={}, positions=places)
    assert_close(layer(x, positions=places), expected, WITHIN["float64"])
    assert len(laid_out) == 1
    layer(x, cache=npattn.KVCache(2, KV_HEADS, HEAD_DIM, value_dim=VALUE_DIM, dtype=np.float64))
    assert len(laid_out) == 2
    # As a context, its own rows stand elsewhere.
    layer(x, x, positions=places)
    assert len(laid_out) == 4


def test_cross_attention_with_rope_counts_context_from_zero() -> None:
    layer = layer_of(parameters(), rope={})
    x = normal(2, 7, EMBED)
    assert_same_bits(layer(x, x.copy()), layer(x))
    moved = layer(x[:, 3:], x, positions=np.arange(3, 7))
    assert_close(moved, layer(x)[:, 3:], WITHIN["float64"])


def test_self_attention_is_cross_attention_to_itself() -> None:
    layer = layer_of(parameters())
    x = normal(2, 33, EMBED, dtype=np.float32)
    layer = layer.astype(np.float32)
    assert_same_bits(layer(x, x), layer(x))


@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 1, 2), (0,)])
def test_leading_axes(leading: tuple[int, ...]) -> None:
    arrays = parameters()
    x = normal(*leading, 6, EMBED)
    assert_close(layer_of(arrays, rope={})(x), plain(arrays, x, rope={}), WITHIN["float64"])


def test_leading_axes_of_context_broadcast() -> None:
    arrays = parameters(CONTEXT)
    x, context = normal(4, 1, 3, EMBED), normal(2, 5, CONTEXT)
    output = layer_of(arrays)(x, context)
    assert output.shape == (4, 2, 3, OUTPUT)
    for i in range(4):
        for j in range(2):
            assert_close(output[i, j], plain(arrays, x[i, 0], context[j]), WITHIN["float64"])


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_short_sequences(lengths: tuple[int, int]) -> None:
    arrays = parameters(CONTEXT)
    x, context = normal(2, lengths[0], EMBED), normal(2, lengths[1], CONTEXT)
    output = layer_of(arrays)(x, context)
    assert output.shape == (2, lengths[0], OUTPUT)
    if lengths[1] == 0:  # nothing to attend to: zeros before the output projection
        assert_close(output, np.broadcast_to(arrays["b_o"], output.shape), WITHIN["float64"])
    else:
        assert_close(output, plain(arrays, x, context), WITHIN["float64"])


def test_a_batch_is_its_items(isa: str) -> None:
    layer = layer_of(parameters(), rope={}).astype(np.float32)
    x = normal(5, 40, EMBED, dtype=np.float32)
    together = layer(x, is_causal=True)
    for item in range(5):
        assert_same_bits(layer(x[item], is_causal=True), together[item])


def test_strided_input() -> None:
    layer = layer_of(parameters())
    wide = normal(4, 7, 2 * EMBED)
    for x in (
        wide[::2, :, ::2],
        wide[:2, ::-1, :EMBED],
        wide[1:3, :, EMBED:],
        np.asfortranarray(wide[:2, :, :EMBED]),
    ):
        assert_same_bits(layer(x), layer(x.copy()))


def test_out() -> None:
    arrays = {**parameters(), "w_o": normal(HEADS * VALUE_DIM, EMBED), "b_o": normal(EMBED)}
    layer = layer_of(arrays)
    x = normal(2, 5, EMBED)
    expected = layer(x)
    out = np.empty_like(x)
    assert layer(x, out=out) is out
    assert_same_bits(out, expected)
    strided = np.full((2, 5, 2 * EMBED), np.nan)
    layer(x, out=strided[..., ::2])
    assert_same_bits(strided[..., ::2], expected)
    assert np.isnan(strided[..., 1::2]).all()
    again, weights = layer(x, out=x, return_weights=True)
    assert again is x
    assert weights.shape == (2, HEADS, 5, 5)
    assert_same_bits(x, expected)


def test_dtypes() -> None:
    layer = layer_of(parameters()).astype(np.float32)
    x = normal(2, 5, EMBED)
    single = layer(x.astype(np.float32))
    assert single.dtype == np.float32
    wider = layer(x)
    assert wider.dtype == np.float64
    assert_close(wider, layer.astype(np.float64)(x), 0)
    assert_close(single, wider, 1e-5)
    assert layer(x.astype(np.float16)).dtype == np.float32
    assert layer(np.ones((2, 5, EMBED), np.int8)).dtype == np.float64
    with pytest.raises(TypeError, match="float16"):
        layer.astype(np.float16)(x.astype(DTYPES["bfloat16"]))
    for wrong in (np.int64, np.complex64, np.longdouble, "U3"):
        with pytest.raises(TypeError, match="dtype"):
            layer.astype(wrong)


def test_astype_keeps_everything() -> None:
    made, called = CASES["everything"]
    layer = layer_of(parameters(), **made)
    x = normal(2, 7, EMBED)
    single = layer.astype(np.float32)
    assert layer.astype(np.float64) is layer
    assert repr(single) == repr(layer).replace("float64", "float32")
    assert_close(single(x.astype(np.float32), **called), layer(x, **called), WITHIN["float32"])
    exact = layer.astype(np.float32).astype(np.float64)
    assert_close(
        exact.astype(np.float32)(x.astype(np.float32), **called), single(x.astype(np.float32), **called), 0
    )


def test_copies_and_pickles() -> None:
    layer = layer_of(parameters(), rope={"base": 500.0}, window=(3, 0))
    x = normal(2, 5, EMBED)
    for twin in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(twin(x), layer(x))


def test_what_was_called_before_does_not_matter() -> None:
    scaling: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 4}
    layer = layer_of(parameters(), rope={"scaling": scaling})
    scaling["factor"] = np.nan  # the layer has its own copy
    x = normal(9, EMBED)
    for length in (9, 3, 9, 5, 5):
        fresh = layer_of(parameters(), rope={"scaling": scaling | {"factor": 2.0}})
        assert_same_bits(layer(x[:length]), fresh(x[:length]))
        moved = layer(x[:length], positions=np.arange(length) + 2)
        assert_same_bits(layer(x[:length], positions=range(2, length + 2)), moved)


def test_many_threads_share_a_layer() -> None:
    layer = layer_of(parameters(), rope={}).astype(np.float32)
    inputs = [normal(2, 40, EMBED, seed=seed, dtype=np.float32) for seed in range(16)]
    expected = [layer(x, is_causal=True) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for have, want in zip(pool.map(lambda x: layer(x, is_causal=True), inputs), expected, strict=True):
            assert_same_bits(have, want)


def test_one_token_at_a_time_is_the_whole() -> None:
    """Without a cache: each new token as a query over all the tokens so far."""
    layer = layer_of(parameters(), rope={})
    x = normal(9, EMBED)
    whole = layer(x, is_causal=True)
    for n in range(9):
        last = layer(x[n : n + 1], x[: n + 1], positions=[n], is_causal=True, query_offset=n)
        assert_close(last[0], whole[n], WITHIN["float64"])


def test_rows_of_weights_sum_to_one() -> None:
    layer = npattn.MultiHeadAttention.random(64, 4, rng=0)
    _, weights = layer(normal(2, 9, 64, dtype=np.float32), is_causal=True, return_weights=True)
    assert_close(weights.sum(axis=-1), np.ones((2, 4, 9)), 1e-6)
    assert (weights[..., ~np.tri(9, dtype=bool)] == 0).all()
