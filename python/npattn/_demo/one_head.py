"""One head over four words, with vectors small enough to check by hand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import npattn

from .report import Lines, Matrix, Section, Text

WORDS = ("我", "喜欢", "深度", "学习")
QUERY = np.array([[1.0, 0.5], [0.0, 1.0], [0.5, -1.0], [1.0, -0.5]])
KEY = np.array([[1.0, 0.0], [-2.0, -1.9], [0.0, 2.0], [1.0, 2.0]])
VALUE = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])


def section() -> Section:
    """scores = q k' / sqrt(2), weights = softmax(scores), b = weights v: every stage on its own."""
    products = QUERY @ KEY.T
    scores = npattn.attention_scores(QUERY, KEY, stage="scaled")
    weights = npattn.softmax(scores)
    output = npattn.scaled_dot_product_attention(QUERY, KEY, VALUE)

    vectors = [["", "query", "key", "value"]]
    for index, word in enumerate(WORDS):
        vectors.append([word, *(_vector(array[index]) for array in (QUERY, KEY, VALUE))])
    lines = [
        [word, f"b{index + 1} = {_combination(weights[index])}", f"= {_vector(output[index], 3)}"]
        for index, word in enumerate(WORDS)
    ]
    sums = ", ".join(f"{total:.6f}" for total in weights.sum(axis=1))
    return Section(
        "One head over four words: " + " ".join(WORDS),
        (
            Text("Every word has a query, a key and a value. Here they are fixed, and two numbers long."),
            Lines(vectors, header=True),
            Matrix("Scores: each query (row) times each key (column).", WORDS, WORDS, products, decimals=2),
            Matrix("Scaled: divided by √2, the root of the vectors' length.", WORDS, WORDS, scores),
            Matrix(
                "Weights: the softmax of each row says where its word looks.",
                WORDS,
                WORDS,
                weights,
                shaded=True,
            ),
            Text(f"Each row sums to 1 before it is rounded for print: {sums}."),
            Text("Output: for each word, the values weighted by its row."),
            Lines(lines),
        ),
    )


def _combination(weights: NDArray[np.float64]) -> str:
    """0.245*v1 + 0.015*v2 + ..."""
    return " + ".join(f"{weight:.3f}*v{index + 1}" for index, weight in enumerate(weights.tolist()))


def _vector(values: NDArray[np.float64], decimals: int = 1) -> str:
    return "(" + ", ".join(f"{value:.{decimals}f}" for value in values.tolist()) + ")"
