"""The rows of the benchmark: shapes that transformers have, from the smallest useful call up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import plain
from .plain import Array
from .problem import Case, Limit, PeerTask, Problem

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
SAMPLED_OUTPUTS = 20_000  # a row, for the errors


def _random(dtype: np.dtype[Any], *shapes: tuple[int, ...]) -> list[Array]:
    """Normal numbers, the same on every run."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, dtype) for shape in shapes]


def _sampled(length: int, outputs_each: int) -> NDArray[np.intp]:
    """Evenly spaced indices along an axis, `outputs_each` outputs each, SAMPLED_OUTPUTS in all."""
    count = min(length, -(-SAMPLED_OUTPUTS // outputs_each))
    return np.unique(np.linspace(0, length - 1, count).astype(np.intp))


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
    dtype: np.dtype[Any] = FLOAT32,
    causal: bool = False,
    window: int | None = None,
    hidden: float = 0.0,
    limit: Limit = "fma",
    give_out: bool = True,
) -> Problem:
    """Attention of a query of `shape`; a random bool mask hides the share `hidden` of the keys."""
    from .. import scaled_dot_product_attention

    batch, heads, query_len, head_dim = shape
    key_shape = (batch, kv_heads or heads, key_len or query_len, head_dim)
    query, key, value = _random(dtype, shape, key_shape, key_shape)
    visible = _visible(query_len, key_shape[2], causal, window, hidden)
    additive = None if visible is None else np.where(visible, 0, -np.inf).astype(dtype)

    options: dict[str, Any] = {"out": np.empty_like(query)} if give_out else {}
    if causal:
        options["is_causal"] = True
    if window is not None:
        options["window"] = (window, None)
    if hidden:
        options["attn_mask"] = visible

    pairs = batch * heads * (query_len * key_shape[2] if visible is None else int(visible.sum()))
    rows = _sampled(query_len, batch * heads * head_dim)
    wider = np.dtype(np.longdouble) if dtype == FLOAT64 else FLOAT64
    exact = plain.attention(
        query[..., rows, :].astype(wider),
        key.astype(wider),
        value.astype(wider),
        None if additive is None else additive[rows].astype(wider),
    )
    causal_only = causal and window is None and not hidden
    return Problem(
        dtype=dtype,
        limit=limit,
        amount=4.0 * head_dim * pairs if limit == "fma" else float(key.nbytes + value.nbytes),
        npattn=partial(scaled_dot_product_attention, query, key, value, **options),
        numpy=partial(plain.attention, query, key, value, additive),
        sample=lambda result: result[..., rows, :],
        exact=exact,
        peer=PeerTask(
            "attention",
            (query, key, value),
            {"causal": causal_only, "visible": None if causal_only else visible},
        ),
    )


def decode(key_len: int) -> Problem:
    """One new token, 32 heads of 128 on 8 key heads: all keys and values are read once."""
    return attention((1, 32, 1, 128), kv_heads=8, key_len=key_len, limit="read")


def matmul(rows: int, depth: int, columns: int, *, packed: bool = False, limit: Limit = "fma") -> Problem:
    """(rows, depth) times (depth, columns); `packed`: npattn gets the second one packed beforehand."""
    import npattn

    a, b = _random(FLOAT32, (rows, depth), (depth, columns))
    second = npattn.pack_matrix(b) if packed else b
    sampled = _sampled(rows, columns)
    return Problem(
        dtype=FLOAT32,
        limit=limit,
        amount=2.0 * rows * depth * columns if limit == "fma" else float(b.nbytes),
        npattn=partial(npattn.matmul, a, second, out=np.empty((rows, columns), FLOAT32)),
        numpy=partial(np.matmul, a, b, out=np.empty((rows, columns), FLOAT32)),
        sample=lambda result: result[sampled],
        exact=a[sampled].astype(FLOAT64) @ b.astype(FLOAT64),
        peer=None if packed else PeerTask("matmul", (a, b)),
    )


def softmax(rows: int, columns: int) -> Problem:
    """softmax over the last axis: every number is read once and written once."""
    import npattn

    (x,) = _random(FLOAT32, (rows, columns))
    sampled = _sampled(rows, columns)
    return Problem(
        dtype=FLOAT32,
        limit="read",
        amount=2.0 * x.nbytes,
        npattn=partial(npattn.softmax, x, out=np.empty_like(x)),
        numpy=partial(plain.softmax, x, np.empty_like(x)),
        sample=lambda result: result[sampled],
        exact=plain.softmax(x[sampled].astype(FLOAT64)),
        peer=PeerTask("softmax", (x,)),
    )


def rope(batch: int, heads: int, length: int, head_dim: int) -> Problem:
    """Rotary embedding of (batch, heads, length, head_dim), halves paired, with cos and sin at hand."""
    import npattn

    (x,) = _random(FLOAT32, (batch, heads, length, head_dim))
    cos, sin = npattn.rope_cos_sin(length, head_dim)
    sampled = _sampled(length, batch * heads * head_dim)
    wide = [array.astype(FLOAT64) for array in (x[..., sampled, :], cos[sampled], sin[sampled])]
    return Problem(
        dtype=FLOAT32,
        limit="read",
        amount=2.0 * x.nbytes + cos.nbytes + sin.nbytes,
        npattn=partial(npattn.rotary_embedding, x, cos, sin, out=np.empty_like(x)),
        numpy=partial(plain.rotate_halves, x, cos, sin, np.empty_like(x)),
        sample=lambda result: result[..., sampled, :],
        exact=plain.rotate_halves(*wide),
    )


def merge_heads(heads: int, length: int, head_dim: int) -> Problem:
    """(heads, length, head_dim) -> (length, heads * head_dim): a copy."""
    import npattn

    (x,) = _random(FLOAT32, (heads, length, head_dim))
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

    (x, *weights) = _random(FLOAT32, (length, width), *[(width, width)] * 4)
    weights = [weight * np.float32(width**-0.5) for weight in weights]
    biases = _random(FLOAT32, *[(width,)] * 4)
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


CASES = (
    # Heads "32/8": 32 query heads share 8 key heads.
    _case("prefill", "causal 32/8 x 2048 x 128", attention, (1, 32, 2048, 128), kv_heads=8, causal=True),
    _case("prefill", "causal 16 x 2048 x 128", attention, (1, 16, 2048, 128), causal=True),
    _case("prefill", "causal 32 x 2048 x 128", attention, (1, 32, 2048, 128), causal=True),
    _case("prefill", "8 x 4096 x 64", attention, (1, 8, 4096, 64)),
    _case("prefill", "12 x 512 x 64", attention, (1, 12, 512, 64)),
    _case("prefill", "12 x 512 x 64, bool mask", attention, (1, 12, 512, 64), hidden=0.01),
    _case("prefill", "8 x 1024 x 64", attention, (1, 8, 1024, 64)),
    _case("prefill", "8 x 1024 x 64, float64", attention, (1, 8, 1024, 64), dtype=FLOAT64),
    _case("prefill", "1 x 8192 x 64", attention, (1, 1, 8192, 64)),
    _case("prefill", "1 x 8192 x 64, window 256", attention, (1, 1, 8192, 64), causal=True, window=255),
    _case("batch", "8 x 12 x 128 x 64", attention, (8, 12, 128, 64)),
    _case("small call", "8 x 4 x 64", attention, (1, 8, 4, 64), give_out=False),
    _case("decode", "32/8 x 16384 x 128", decode, 16384),
    _case("decode", "32/8 x 2048 x 128", decode, 2048),
    _case("matmul", "2048 x 2048 x 2048", matmul, 2048, 2048, 2048),
    _case("matmul", "512 x 768 x 2304", matmul, 512, 768, 2304),
    _case("matmul", "512 x 768 x 2304, packed", matmul, 512, 768, 2304, packed=True),
    _case("matmul", "128 x 768 x 768", matmul, 128, 768, 768),
    _case("matmul", "128 x 768 x 768, packed", matmul, 128, 768, 768, packed=True),
    _case("matmul", "1 x 4096 x 4096", matmul, 1, 4096, 4096, limit="read"),
    _case("matmul", "1 x 4096 x 4096, packed", matmul, 1, 4096, 4096, packed=True, limit="read"),
    _case("softmax", "4096 x 4096", softmax, 4096, 4096),
    _case("softmax", "12288 x 128", softmax, 12288, 128),
    _case("rope", "32 x 2048 x 128", rope, 1, 32, 2048, 128),
    _case("heads", "merge 32 x 2048 x 128", merge_heads, 32, 2048, 128),
    _case("layer", "4 x 512, 8 heads", layer, 4, 512, 8),
    _case("layer", "512 x 768, 12 heads", layer, 512, 768, 12),
)
