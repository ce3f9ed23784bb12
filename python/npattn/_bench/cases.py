"""The rows of the benchmark: shapes that transformers have, from the smallest useful call up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import plain
from .decode import cached, step
from .inputs import FLOAT32, FLOAT64, computed_in, dtype_of, normal, sampled, wider
from .plain import Array
from .problem import Case, Limit, PeerTask, Problem


def _visible(query_len: int, key_len: int, causal: bool, window: int | None, hidden: float) -> Array | None:
    """(Lq, Lk), True = attend; None where every query sees every key."""
    if not (causal or window or hidden):
        return None
    distance = np.arange(query_len)[:, None] - np.arange(key_len)
    visible: Array = distance >= 0 if causal else np.ones((query_len, key_len), bool)
    if window is not None:
        visible &= distance <= window
    if hidden:
        visible &= np.random.default_rng(0).random(visible.shape) >= hidden
    return visible


def attention(
    shape: tuple[int, int, int, int],
    *,
    kv_heads: int | None = None,
    key_len: int | None = None,
    dtype: str = "float32",
    causal: bool = False,
    window: int | None = None,
    hidden: float = 0.0,
    limit: Limit = "fma",
    give_out: bool = True,
) -> Problem:
    """Attention of a query of `shape`; a random bool mask hides the share `hidden` of the keys.

    NumPy gets half types in float32.
    """
    from .. import scaled_dot_product_attention

    held = dtype_of(dtype)
    batch, heads, query_len, head_dim = shape
    key_shape = (batch, kv_heads or heads, key_len or query_len, head_dim)
    query, key, value = normal(held, shape, key_shape, key_shape)
    visible = _visible(query_len, key_shape[2], causal, window, hidden)
    compute, exact_in = computed_in(held), wider(held)
    additive = None if visible is None else np.where(visible, 0, -np.inf).astype(compute)

    options: dict[str, Any] = {"out": np.empty_like(query)} if give_out else {}
    if causal:
        options["is_causal"] = True
    if window is not None:
        options["window"] = (window, None)
    if hidden:
        options["attn_mask"] = visible

    pairs = batch * heads * (query_len * key_shape[2] if visible is None else int(visible.sum()))
    rows = sampled(query_len, batch * heads * head_dim)
    exact = plain.attention(
        query[..., rows, :].astype(exact_in),
        key.astype(exact_in),
        value.astype(exact_in),
        None if additive is None else additive[rows].astype(exact_in),
    )
    q, k, v = (array.astype(compute, copy=False) for array in (query, key, value))
    causal_only = causal and window is None and not hidden
    return Problem(
        dtype=held,
        limit=limit,
        amount=4.0 * head_dim * pairs if limit == "fma" else float(key.nbytes + value.nbytes),
        npattn=partial(scaled_dot_product_attention, query, key, value, **options),
        numpy=partial(plain.attention, q, k, v, additive),
        sample=lambda result: result[..., rows, :],
        exact=exact,
        peer=PeerTask(
            "attention",
            (query, key, value),
            {"causal": causal_only, "visible": None if causal_only else visible},
        ),
    )


def decode(key_len: int, *, batch: int = 1, kv_heads: int = 8, dtype: str = "float32") -> Problem:
    """One new token a sequence, 32 heads of 128 on `kv_heads`: all keys and values are read once."""
    shape = (batch, 32, 1, 128)
    return attention(shape, kv_heads=kv_heads, key_len=key_len, dtype=dtype, limit="read")


def matmul(
    rows: int,
    depth: int,
    columns: int,
    *,
    dtype: str = "float32",
    packed: str | None = None,
    transposed: bool = False,
    limit: Limit = "fma",
) -> Problem:
    """(rows, depth) times (depth, columns); `packed`: npattn gets the second one packed beforehand, so;
    `transposed`: it is the transpose of what lies in memory, as torch's Linear keeps its weights."""
    import npattn

    held = dtype_of(dtype)
    a, b = normal(held, (rows, depth), (depth, columns))
    if transposed:
        b = np.asfortranarray(b)
    second = b if packed is None else npattn.pack_matrix(b, dtype=packed)
    kept = sampled(rows, columns)
    wide = [array.astype(FLOAT32, copy=False) for array in (a, b)]
    return Problem(
        dtype=held,
        limit=limit,
        amount=2.0 * rows * depth * columns if limit == "fma" else float(b.nbytes),
        npattn=partial(npattn.matmul, a, second, out=np.empty((rows, columns), held)),
        numpy=partial(np.matmul, *wide, out=np.empty((rows, columns), FLOAT32)),
        sample=lambda result: result[kept],
        exact=a[kept].astype(FLOAT64) @ b.astype(FLOAT64),
        allowed=5e-2 if packed == "int8" else None,
        peer=PeerTask("matmul", (a, b)) if packed is None else None,
    )


def softmax(rows: int, columns: int, *, dtype: str = "float32") -> Problem:
    """softmax over the last axis: every number is read once and written once."""
    import npattn

    held = dtype_of(dtype)
    (x,) = normal(held, (rows, columns))
    kept = sampled(rows, columns)
    wide = x.astype(computed_in(held), copy=False)
    return Problem(
        dtype=held,
        limit="read",
        amount=2.0 * x.nbytes,
        npattn=partial(npattn.softmax, x, out=np.empty_like(x)),
        numpy=partial(plain.softmax, wide, np.empty_like(wide)),
        sample=lambda result: result[kept],
        exact=plain.softmax(x[kept].astype(FLOAT64)),
        peer=PeerTask("softmax", (x,)),
    )


def rope(batch: int, heads: int, length: int, head_dim: int, *, dtype: str = "float32") -> Problem:
    """Rotary embedding of (batch, heads, length, head_dim), halves paired, with cos and sin at hand."""
    import npattn

    held = dtype_of(dtype)
    (x,) = normal(held, (batch, heads, length, head_dim))
    cos, sin = npattn.rope_cos_sin(length, head_dim)
    kept = sampled(length, batch * heads * head_dim)
    exact = [array.astype(FLOAT64) for array in (x[..., kept, :], cos[kept], sin[kept])]
    wide = x.astype(computed_in(held), copy=False)
    return Problem(
        dtype=held,
        limit="read",
        amount=2.0 * x.nbytes + cos.nbytes + sin.nbytes,
        npattn=partial(npattn.rotary_embedding, x, cos, sin, out=np.empty_like(x)),
        numpy=partial(plain.rotate_halves, wide, cos, sin, np.empty_like(wide)),
        sample=lambda result: result[..., kept, :],
        exact=plain.rotate_halves(*exact),
    )


def merge_heads(heads: int, length: int, head_dim: int) -> Problem:
    """(heads, length, head_dim) -> (length, heads * head_dim): a copy."""
    import npattn

    (x,) = normal(FLOAT32, (heads, length, head_dim))
    return Problem(
        dtype=FLOAT32,
        limit="read",
        amount=2.0 * x.nbytes,
        npattn=partial(npattn.merge_heads, x, out=np.empty((length, heads * head_dim), FLOAT32)),
        numpy=partial(plain.merge_heads, x, np.empty((length, heads * head_dim), FLOAT32)),
        sample=lambda result: result,
        exact=plain.merge_heads(x.astype(FLOAT64)),
    )


def layer(length: int, width: int, num_heads: int) -> Problem:
    """Self-attention of `length` tokens with projections; beside it, the four products alone in NumPy."""
    from .. import MultiHeadAttention

    (x, *weights) = normal(FLOAT32, (length, width), *[(width, width)] * 4)
    weights = [weight * np.float32(width**-0.5) for weight in weights]
    biases = normal(FLOAT32, *[(width,)] * 4)
    b_q, b_k, b_v, b_o = biases
    module = MultiHeadAttention(*weights, num_heads=num_heads, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o)
    wide = [array.astype(FLOAT64) for array in (x, *weights, *biases)]
    return Problem(
        dtype=FLOAT32,
        limit="fma",
        amount=8.0 * length * width * width + 4.0 * length * length * width,
        npattn=partial(module, x),
        numpy=partial(plain.layer, x, weights, biases, num_heads),
        sample=lambda result: result,
        exact=plain.layer(wide[0], wide[1:5], wide[5:], num_heads),
        extra={"NumPy's four products": lambda: [x @ weight for weight in weights]},
    )


def _case(group: str, name: str, function: Callable[..., Problem], *arguments: Any, **options: Any) -> Case:
    return Case(group, name, partial(function, *arguments, **options))


HALVES = ("bfloat16", "float16")
CASES = (
    # Heads "32/8": 32 query heads share 8 key heads.
    _case("prefill", "causal 32/8 x 2048 x 128", attention, (1, 32, 2048, 128), kv_heads=8, causal=True),
    _case("prefill", "causal 16 x 2048 x 128", attention, (1, 16, 2048, 128), causal=True),
    _case("prefill", "causal 32 x 2048 x 128", attention, (1, 32, 2048, 128), causal=True),
    _case("prefill", "8 x 4096 x 64", attention, (1, 8, 4096, 64)),
    _case("prefill", "12 x 512 x 64", attention, (1, 12, 512, 64)),
    _case("prefill", "12 x 512 x 64, bool mask", attention, (1, 12, 512, 64), hidden=0.01),
    _case("prefill", "8 x 1024 x 64", attention, (1, 8, 1024, 64)),
    _case("prefill", "8 x 1024 x 64, float64", attention, (1, 8, 1024, 64), dtype="float64"),
    _case("prefill", "1 x 8192 x 64", attention, (1, 1, 8192, 64)),
    _case("prefill", "1 x 8192 x 64, window 256", attention, (1, 1, 8192, 64), causal=True, window=255),
    *(
        _case("prefill", f"{name}, {dtype}", attention, shape, dtype=dtype, **options)
        for dtype in HALVES
        for name, shape, options in (
            ("causal 32/8 x 2048 x 128", (1, 32, 2048, 128), {"kv_heads": 8, "causal": True}),
            ("12 x 512 x 64", (1, 12, 512, 64), {}),
        )
    ),
    _case("batch", "8 x 12 x 128 x 64", attention, (8, 12, 128, 64)),
    _case("small call", "8 x 4 x 64", attention, (1, 8, 4, 64), give_out=False),
    _case("decode", "32/8 x 16384 x 128", decode, 16384),
    _case("decode", "32/8 x 2048 x 128", decode, 2048),
    _case("decode", "32 x 4096 x 128", decode, 4096, kv_heads=32),
    _case("decode", "8 x 32/8 x 2048 x 128", decode, 2048, batch=8),
    _case("decode", "32/8 x 1024 x 128", decode, 1024),
    _case("decode", "32/8 x 4096 x 128, bfloat16", decode, 4096, dtype="bfloat16"),
    _case("cache", "32 x 4096 x 128", cached, 4096, kv_heads=32),
    _case("cache", "8 x 32/8 x 2048 x 128", cached, 2048, batch=8),
    _case("cache", "32/8 x 1024 x 128", cached, 1024),
    *(
        _case("cache", f"{name}32/8 x 4096 x 128, {dtype}", cached, 4096, batch=batch, dtype=dtype)
        for dtype in (*HALVES, "int8")
        for name, batch in (("", 1), ("8 x ", 8))
    ),
    _case("cache", "a step at 16, 32/8 x 16 x 128", step, 16),
    _case("matmul", "2048 x 2048 x 2048", matmul, 2048, 2048, 2048),
    *(
        _case("matmul", f"2048 x 2048 x 2048, {dtype}", matmul, 2048, 2048, 2048, dtype=dtype)
        for dtype in HALVES
    ),
    _case("matmul", "512 x 768 x 2304", matmul, 512, 768, 2304),
    _case("matmul", "512 x 768 x 2304, packed", matmul, 512, 768, 2304, packed="float32"),
    _case("matmul", "512 x 768 x 2304, int8 weights", matmul, 512, 768, 2304, packed="int8"),
    _case("matmul", "128 x 768 x 768", matmul, 128, 768, 768),
    _case("matmul", "128 x 768 x 768, packed", matmul, 128, 768, 768, packed="float32"),
    _case("matmul", "1 x 4096 x 4096", matmul, 1, 4096, 4096, limit="read"),
    _case("matmul", "1 x 4096 x 4096, transposed", matmul, 1, 4096, 4096, transposed=True, limit="read"),
    _case("matmul", "1 x 4096 x 4096, packed", matmul, 1, 4096, 4096, packed="float32", limit="read"),
    _case("softmax", "4096 x 4096", softmax, 4096, 4096),
    _case("softmax", "12288 x 128", softmax, 12288, 128),
    *(_case("softmax", f"4096 x 4096, {dtype}", softmax, 4096, 4096, dtype=dtype) for dtype in HALVES),
    _case("rope", "32 x 2048 x 128", rope, 1, 32, 2048, 128),
    *(_case("rope", f"32 x 2048 x 128, {dtype}", rope, 1, 32, 2048, 128, dtype=dtype) for dtype in HALVES),
    _case("heads", "merge 32 x 2048 x 128", merge_heads, 32, 2048, 128),
    _case("layer", "4 x 512, 8 heads", layer, 4, 512, 8),
    _case("layer", "512 x 768, 12 heads", layer, 512, 768, 12),
)
