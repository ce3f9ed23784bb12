"""MultiHeadAttention with a cache: chunks and steps give what one call over the whole gives."""

from __future__ import annotations

import threading
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import KVCache, MultiHeadAttention, reference
from npattn._matmul import linear
from plain_cache import state_of
from support import DTYPES, assert_close, assert_same_bits, each_isa
from test_layer import (
    CONTEXT,
    EMBED,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    OUTPUT,
    VALUE_DIM,
    WITHIN,
    layer_of,
    normal,
    parameters,
    plain,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LENGTH = 70  # of a whole sequence: two pages of a cache and more than two of its chunks of 32 keys

# How the layer is made, and how it is called over the whole.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "not causal": ({"window": (None, 0)}, {"is_causal": False}),  # what no later token can change
    "rope": ({"rope": {"base": 100.0}}, {}),
    "rope with scaling": ({"rope": {"base": 500.0, "scaling": LLAMA3}}, {}),
    "rope with sections": ({"rope": {"sections": [1, 1, 2]}}, {}),
    "partial interleaved rope": ({"rope": {"rotary_dim": 4, "interleaved": True}}, {}),
    "head norms": ({"q_norm": normal(8), "k_norm": normal(8, seed=3), "rope": {}}, {}),
    "norms over all heads": ({"q_norm": normal(48), "k_norm": normal(16)}, {}),
    "window": ({"window": (9, 0), "rope": {}}, {}),
    "window at the call": ({"window": (9, 0)}, {"window": (40, None)}),
    "sinks": ({"sinks": normal(HEADS)}, {}),
    "softcap": ({"softcap": 1.5, "scale": 0.7}, {}),
    "alibi": ({"alibi_slopes": reference.alibi_slopes(HEADS)}, {}),
    "alibi per batch": ({"alibi_slopes": np.abs(normal(2, HEADS))}, {}),
    "mask and bias": ({}, {"attn_mask": normal(2, 1, 70, 70) > -1, "bias": normal(HEADS, 70, 70)}),
    "everything": (
        {
            "rope": {"base": 500.0, "scaling": LLAMA3},
            "q_norm": normal(8),
            "k_norm": normal(8, seed=3),
            "scale": 0.5,
            "softcap": 3.0,
            "sinks": normal(HEADS),
            "alibi_slopes": reference.alibi_slopes(HEADS),
            "window": (50, 0),
        },
        {"attn_mask": normal(2, 1, 70, 70) > -1},
    ),
}

CHUNKS = {
    "at once": [70],
    "chunks": [1, 33, 31, 5],
    "prompt and steps": [64, 1, 1, 1, 1, 1, 1],
    "empty chunks": [0, 20, 0, 50],
}


def cache_for(layer: MultiHeadAttention, batch: int = 2, **settings: Any) -> KVCache:
    sizes = (batch, layer.num_kv_heads, layer.head_dim)
    return KVCache(*sizes, **{"value_dim": layer.value_dim, "dtype": layer.dtype, **settings})


def rows_of(called: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The arguments of a call over the whole, for the rows from start to stop over the tokens so far."""
    masks = {name: called[name][..., start:stop, :stop] for name in ("attn_mask", "bias") if name in called}
    return called | masks


def in_chunks(
    layer: MultiHeadAttention, x: Any, chunks: list[int], cache: KVCache, called: dict[str, Any]
) -> Any:
    """Output, weights (batch, H, L, longest) and lse of calls over the chunks of x, one after the other."""
    outputs, lses, start = [], [], 0
    weights = np.zeros((*x.shape[:-2], HEADS, x.shape[-2], x.shape[-2]), x.dtype)
    for count in chunks:
        stop = start + count
        options = rows_of(called, start, stop) | {"return_weights": True, "return_lse": True}
        output, part, lse = layer(x[..., start:stop, :], cache=cache, **options)
        weights[..., start:stop, :stop] = part
        outputs.append(output)
        lses.append(lse)
        start = stop
        assert cache.lengths.tolist() == [stop] * cache.batch
    return np.concatenate(outputs, axis=-2), weights, np.concatenate(lses, axis=-1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_chunks_are_the_whole(name: str, dtype: str) -> None:
    made, called = CASES[name]
    arrays = {key: array.astype(DTYPES[dtype]) for key, array in parameters().items()}
    layer = layer_of(arrays, **made)
    x = normal(2, LENGTH, EMBED).astype(DTYPES[dtype])
    exact = {key: array.astype(np.float64) for key, array in arrays.items()}
    asked = {"is_causal": True, "return_weights": True, "return_lse": True}
    if "sections" in made.get("rope", {}):  # plain text has the same place in each of them
        asked["positions"] = np.broadcast_to(np.arange(LENGTH), (3, LENGTH))
    expected = plain(exact, x.astype(np.float64), **(made | asked | called))
    for _ in each_isa():
        for have, want in zip(layer(x, **(asked | called)), expected, strict=True):
            assert_close(have, want, WITHIN[dtype])
        for chunks in CHUNKS.values():
            results = in_chunks(layer, x, chunks, cache_for(layer), called)
            for have, want in zip(results, expected, strict=True):
                assert have.dtype == x.dtype
                assert_close(have, want, WITHIN[dtype])


@pytest.mark.parametrize("settings", [{}, {"sink_tokens": 3}], ids=str)
def test_a_sliding_cache_is_a_window(settings: dict[str, int], isa: str) -> None:
    """The cache lets go what its window has passed; the layer's own window is a second one."""
    arrays, rope = parameters(), {"base": 500.0, "scaling": LLAMA3}
    x = normal(2, LENGTH, EMBED)
    place, key = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    mask = (key > place - 20) | (key < settings.get("sink_tokens", 0))
    for window in (None, (11, 0)):
        layer = layer_of(arrays, rope=rope, window=window)
        expected = plain(arrays, x, rope=rope, window=window, is_causal=True, attn_mask=mask)
        for chunks in CHUNKS.values():
            cache = cache_for(layer, sliding_window=20, **settings)
            outputs, _, _ = in_chunks(layer, x, chunks, cache, {})
            assert_close(outputs, expected, WITHIN["float64"])


def test_the_cache_may_turn_what_the_layer_does_not(isa: str) -> None:
    arrays, rope = parameters(), {"base": 100.0, "interleaved": True}
    x = normal(2, LENGTH, EMBED)
    layer = layer_of(arrays)
    output, _, _ = in_chunks(layer, x, CHUNKS["chunks"], cache_for(layer, rope=rope), {})
    assert_close(output, plain(arrays, x, rope=rope, is_causal=True), WITHIN["float64"])


def test_ragged_batch(isa: str) -> None:
    """Each sequence as if it were alone: prompts of several lengths, then steps that not all take."""
    layer = layer_of(parameters(), rope={"scaling": LLAMA3})
    x = normal(3, 90, EMBED)
    cache, start = cache_for(layer, 3), np.zeros(3, int)
    whole = layer(x, is_causal=True)
    for counts in ([40, 3, 33], [1, 1, 1], [1, 0, 1], [0, 0, 0], [30, 31, 2]):
        rows = max(counts)
        chunk = np.full((3, rows, EMBED), np.nan)  # what lies past the counts is not looked at
        for i, count in enumerate(counts):
            chunk[i, :count] = x[i, start[i] : start[i] + count]
        output, weights, lse = layer(chunk, cache=cache, counts=counts, return_weights=True, return_lse=True)
        for i, count in enumerate(counts):
            assert_close(output[i, :count], whole[i, start[i] : start[i] + count], WITHIN["float64"])
            assert_close(output[i, count:], np.broadcast_to(parameters()["b_o"], (rows - count, OUTPUT)), 0)
            assert (weights[i, :, count:] == 0).all()
            assert (lse[i, :, count:] == -np.inf).all()
        start += counts
        assert cache.lengths.tolist() == start.tolist()


def test_positions_may_be_given() -> None:
    """Prompts padded on the left, as they are often batched: positions and a mask say what is real."""
    layer = layer_of(parameters(), rope={"base": 100.0})
    x = normal(2, 20, EMBED)
    padding = np.array([0, 7])
    cache = cache_for(layer)
    real = np.arange(20) >= padding[:, None]
    mask = real[:, None, None, :]
    places = np.maximum(np.arange(20) - padding[:, None], 0)
    prompt = layer(x[:, :15], cache=cache, attn_mask=mask[..., :15], positions=places[:, :15])
    assert_close(prompt[1, 7:], layer(x[1, 7:15], is_causal=True), WITHIN["float64"])
    for n in range(15, 20):
        step = layer(
            x[:, n : n + 1], cache=cache, attn_mask=mask[..., : n + 1], positions=places[:, n : n + 1]
        )
        assert_close(step[0, 0], layer(x[0], is_causal=True)[n], WITHIN["float64"])
        assert_close(step[1, 0], layer(x[1, 7:], is_causal=True)[n - 7], WITHIN["float64"])


def test_one_sequence_without_a_batch_axis() -> None:
    layer = layer_of(parameters(), rope={})
    x = normal(9, EMBED)
    together, alone = cache_for(layer, 1), cache_for(layer, 1)
    for rows in (x[:5], x[5:6], x[6:]):
        asked = {"return_weights": True, "return_lse": True}
        for have, want in zip(
            layer(rows, cache=alone, **asked), layer(rows[None], cache=together, **asked), strict=True
        ):
            assert_same_bits(have, want[0])
    assert_same_bits(alone.keys, together.keys)
    assert layer(x[:0], cache=alone).shape == (0, OUTPUT)
    assert layer(np.zeros((0, 4, EMBED)), cache=cache_for(layer, 0)).shape == (0, 4, OUTPUT)


def test_out(isa: str) -> None:
    arrays = {**parameters(), "w_o": normal(HEADS * VALUE_DIM, EMBED), "b_o": normal(EMBED)}
    layer = layer_of(arrays, rope={})
    x = normal(2, 5, EMBED)
    expected = layer(x, cache=cache_for(layer))
    strided = np.full((2, 5, 2 * EMBED), np.nan)
    assert layer(x, cache=cache_for(layer), out=strided[..., ::2]).base is strided
    assert_same_bits(strided[..., ::2], expected)
    assert np.isnan(strided[..., 1::2]).all()
    again, lse = layer(x, cache=cache_for(layer), out=x, return_lse=True)
    assert again is x
    assert lse.shape == (2, HEADS, 5)
    assert_same_bits(x, expected)
    row = normal(5, EMBED)
    expected = layer(row, cache=cache_for(layer, 1))
    assert layer(row, cache=cache_for(layer, 1), out=row) is row
    assert_same_bits(row, expected)


def test_dtypes() -> None:
    """The cache is of the dtype that the call computes in: that of the layer, or of a wider x."""
    layer = layer_of(parameters()).astype(np.float32)
    x = normal(2, 5, EMBED)
    assert layer(x.astype(np.float16), cache=cache_for(layer)).dtype == np.float32
    wide = layer(x, cache=cache_for(layer, dtype=np.float64))
    assert wide.dtype == np.float64
    assert_close(wide, layer(x, is_causal=True), WITHIN["float64"])
    halves = [(DTYPES[a], DTYPES[b]) for a, b in (("float16", "bfloat16"), ("bfloat16", "float16"))]
    for half, other in halves:  # the cache that would be made without thinking, and the other half type
        layer = layer.astype(half)
        for cache in (cache_for(layer, dtype=np.float32), cache_for(layer, dtype=other)):
            words = rf'computes in {half} .*holds {cache.dtype}: make it with KVCache\(..., dtype="{half}"\)'
            with pytest.raises(TypeError, match=words):
                layer(x.astype(half), cache=cache)
            assert len(cache) == 0
        assert layer(x.astype(half), cache=cache_for(layer, dtype=str(half))).dtype == half


X = normal(2, 3, EMBED)

ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "context": (ValueError, "context does not go with a cache", {"context": X}),
    "offset": (ValueError, "query_offset does not go with a cache", {"query_offset": 0}),
    "lengths": (ValueError, "kv_lengths does not go with a cache", {"kv_lengths": [3, 3]}),
    "batch": (
        ValueError,
        r"x has shape \(1, 3, 48\); with a cache of batch 2 .*\(2, length",
        {"x": X[:1].astype(np.float32)},
    ),
    "no batch": (
        ValueError,
        r"x has shape \(3, 48\); with a cache of batch 2",
        {"x": X[0].astype(np.float32)},
    ),
    "axes": (ValueError, r"x has shape \(1, 2, 3, 48\)", {"x": X[None].astype(np.float32)}),
    "width": (ValueError, "x must have shape", {"x": X[..., :5]}),
    "dtype": (
        TypeError,
        r"computes in float64 \(its weights are float32, x is float64\), the cache holds float32",
        {"x": X.astype(np.float64)},
    ),
    "mask": (ValueError, r"attn_mask has shape .*\(2, 6, 3, 73\)", {"attn_mask": np.ones((3, 70), bool)}),
    "integer mask": (TypeError, "attn_mask has integer dtype", {"attn_mask": np.ones((3, 73), int)}),
    "bias": (TypeError, "bias has dtype bool", {"bias": np.ones((3, 73), bool)}),
    "counts": (ValueError, r"counts must lie in 0\.\.3 .*, got 4", {"counts": [1, 4]}),
    "counts dtype": (TypeError, "counts must be integers", {"counts": [1.0, 2.0]}),
    "positions": (ValueError, r"positions must have shape \(..., 3\)", {"positions": np.arange(4)}),
    "positions batch": (ValueError, "do not fit the tokens of x", {"positions": np.zeros((3, 3), int)}),
    "position": (TypeError, "positions must be an array of integers", {"positions": 3}),
    "window": (ValueError, "left side", {"window": (-1, None)}),
    "causal": (TypeError, "is_causal must be True or False", {"is_causal": 1}),
    "flag": (TypeError, "return_lse must be True or False", {"return_lse": 1}),
    "out": (ValueError, "out has shape", {"out": np.zeros((2, 3, EMBED), np.float32)}),
    "out dtype": (TypeError, "out has dtype", {"out": np.zeros((2, 3, OUTPUT))}),
}


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 4}, {"capacity": 100}], ids=str)
@pytest.mark.parametrize("case", ERRORS)
def test_errors_change_nothing(case: str, settings: dict[str, int]) -> None:
    error, message, arguments = ERRORS[case]
    layer = layer_of(parameters(), rope={}).astype(np.float32)
    cache = cache_for(layer, **settings)
    layer(normal(2, 70, EMBED, dtype=np.float32), cache=cache, counts=[70, 3])
    before = state_of(cache)
    with pytest.raises(error, match=message):
        layer(**{"x": X.astype(np.float32), "cache": cache, **arguments})
    assert state_of(cache) == before
    layer(X.astype(np.float32), cache=cache)
    assert cache.lengths.tolist() == [73, 6]


@pytest.mark.parametrize(
    ("error", "message", "settings"),
    [
        (ValueError, "the cache has num_kv_heads=6, the layer num_kv_heads=2", {"num_kv_heads": HEADS}),
        (ValueError, "the cache has head_dim=7, the layer head_dim=8", {"head_dim": 7}),
        (ValueError, "the cache has value_dim=8, the layer value_dim=10", {"value_dim": HEAD_DIM}),
        (TypeError, "computes in float64 .* the cache holds float32", {"dtype": np.float32}),
        (ValueError, "both have rope", {"rope": {}}),
        (ValueError, "do not fit into sequence 0: it has 0, with room for 2 more", {"capacity": 2}),
    ],
)
def test_caches_of_another_layer(error: type[Exception], message: str, settings: dict[str, Any]) -> None:
    fitting = {"batch": 2, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM}
    cache = KVCache(**{**fitting, "dtype": np.float64, **settings})
    before = state_of(cache)
    with pytest.raises(error, match=message):
        layer_of(parameters(), rope={})(X, cache=cache)
    assert state_of(cache) == before


def test_what_is_no_cache_for_a_layer() -> None:
    paged = npattn.PagedKVCache(4, 32, KV_HEADS, HEAD_DIM, value_dim=VALUE_DIM, dtype=np.float64)
    with pytest.raises(TypeError, match=r"must be a KVCache, got PagedKVCache \(.*append and attend"):
        layer_of(parameters())(X, cache=paged)
    cross = layer_of(parameters(CONTEXT))
    with pytest.raises(ValueError, match=r"x, which has 48 features.*context's 40"):
        cross(X, cache=cache_for(cross))
    without_rope = layer_of(parameters())
    cache = cache_for(without_rope)
    with pytest.raises(ValueError, match="positions need a layer with rope"):
        without_rope(X, cache=cache, positions=np.arange(3))


def test_a_cache_in_use_is_left_alone() -> None:
    layer = layer_of(parameters(), rope={})
    cache = cache_for(layer)
    layer(X, cache=cache)
    before = state_of(cache)
    for access in (cache._reading, cache._writing):
        with access, pytest.raises(RuntimeError, match="by another call"):
            layer(X, cache=cache)
    assert state_of(cache) == before


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 40}, {"capacity": 50}], ids=str)
def test_what_fails_late_is_taken_back(settings: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C or no memory when the tokens are in the cache already."""
    layer = layer_of(parameters(), rope={})
    cache = cache_for(layer, **settings)
    layer(normal(2, 20, EMBED), cache=cache)
    before = state_of(cache)
    lengths: list[list[int]] = []

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        lengths.append(cache._store.lengths(cache._slots).tolist())
        if lengths[-1] != [20, 20]:
            raise KeyboardInterrupt
        return linear(*arguments, **keywords)

    for name in ("npattn._cache_attend.deliver", "npattn._layer_forward.linear"):
        with monkeypatch.context() as patch:
            patch.setattr(name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                layer(X, cache=cache)
        assert lengths[-1] == [23, 23]
        assert state_of(cache) == before


def test_threads_with_caches_of_their_own() -> None:
    layer = layer_of(parameters(), rope={})
    x = normal(4, 2, 40, EMBED)
    expected = [layer(part, is_causal=True) for part in x]
    results: list[Any] = [None] * 4

    def generate(i: int) -> None:
        results[i] = in_chunks(layer, x[i], [30, *[1] * 10], cache_for(layer), {})[0]

    threads = [threading.Thread(target=generate, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for have, want in zip(results, expected, strict=True):
        assert_close(have, want, WITHIN["float64"])
