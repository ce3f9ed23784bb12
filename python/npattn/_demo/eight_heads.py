"""The same words at the size of a real layer, and what attention knows of their order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import npattn

from .one_head import WORDS
from .report import Lines, Matrix, Section, Text

EMBED_DIM, NUM_HEADS = 512, 8
FORWARD, BACKWARD = ("猫", "追", "老鼠"), ("老鼠", "追", "猫")

Array = NDArray[np.float32]


def _embed(words: Sequence[str], rng: np.random.Generator) -> dict[str, Array]:
    return {word: rng.standard_normal(EMBED_DIM, dtype=np.float32) for word in words}


def _weights(rng: np.random.Generator) -> Array:
    """w_q, w_k, w_v, w_o, (4, 512, 512): untrained, of a size that keeps the scale of their input."""
    weights = rng.standard_normal((4, EMBED_DIM, EMBED_DIM), dtype=np.float32)
    weights *= np.float32(EMBED_DIM**-0.5)
    return weights


def layer_section() -> Section:
    """x (4, 512) -> q, k, v -> split into 8 heads of 64 -> attention -> merge -> projection (4, 512)."""
    rng = np.random.default_rng(0)
    embeddings = _embed(WORDS, rng)
    w_q, w_k, w_v, w_o = _weights(rng)

    x = np.stack([embeddings[word] for word in WORDS])
    query, key, value = (npattn.matmul(x, w) for w in (w_q, w_k, w_v))
    q_heads, k_heads, v_heads = (npattn.split_heads(part, NUM_HEADS) for part in (query, key, value))
    heads, attention = npattn.scaled_dot_product_attention(q_heads, k_heads, v_heads, return_weights=True)
    merged = npattn.merge_heads(heads)
    output = npattn.matmul(merged, w_o)
    layer = npattn.MultiHeadAttention(w_q, w_k, w_v, w_o, num_heads=NUM_HEADS)
    difference = float(np.abs(layer(x) - output).max())

    stages = [
        ["x", "the words, one row each", _shape(x)],
        ["q, k, v", "x @ w_q, x @ w_k, x @ w_v", _shape(query)],
        ["split_heads", "8 heads of 64, a view", _shape(q_heads)],
        ["attention", "each head by itself", _shape(heads)],
        ["its weights", "each head, query, key", _shape(attention)],
        ["merge_heads", "side by side again", _shape(merged)],
        ["output", "merged @ w_o", _shape(output)],
    ]
    return Section(
        "The same words, 4 × 512, with 8 heads of 64",
        (
            Text("The weights are seeded random numbers, not trained: real shapes, no meaning."),
            Lines(stages),
            Matrix(
                f"Where {WORDS[0]} looks, head by head.",
                [f"head {head + 1}" for head in range(NUM_HEADS)],
                WORDS,
                attention[:, 0],
                shaded=True,
            ),
            Text(
                "MultiHeadAttention does all of it in one call; "
                f"largest difference from the steps above: {difference:.1e}."
            ),
        ),
    )


def order_section() -> Section:
    """Swap subject and object: does a word's output change? Without positions it cannot."""
    rng = np.random.default_rng(1)
    embeddings = _embed(FORWARD, rng)
    weights = _weights(rng)
    plain = npattn.MultiHeadAttention(*weights, num_heads=NUM_HEADS)
    rotary = npattn.MultiHeadAttention(*weights, num_heads=NUM_HEADS, rope={})
    encoding = npattn.sinusoidal_encoding(len(FORWARD), EMBED_DIM)

    forward, backward = (
        np.stack([embeddings[word] for word in sentence]) for sentence in (FORWARD, BACKWARD)
    )
    kinds = {
        "no positions": (plain(forward), plain(backward)),
        "sinusoidal": (plain(forward + encoding), plain(backward + encoding)),
        "RoPE": (rotary(forward), rotary(backward)),
    }
    rows = [["", *FORWARD, "can it tell?"]]
    for kind, (first, second) in kinds.items():
        # The second sentence is the first one reversed, so its rows are compared word for word.
        by_word = np.abs(first - second[::-1]).max(axis=1)
        verdict = "yes" if by_word.max() > 1e-3 else "no: the same up to rounding"
        rows.append([kind, *(f"{difference:.1e}" for difference in by_word), verdict])
    return Section(
        f"{' '.join(FORWARD)} or {' '.join(BACKWARD)}?",
        (
            Text(
                "Attention sums over the keys, and a sum has no order: without positions, who chases whom\n"
                "is lost. Largest difference between a word's output in the one sentence and in the other:"
            ),
            Lines(rows, header=True),
        ),
    )


def _shape(array: Array) -> str:
    return " × ".join(map(str, array.shape))
