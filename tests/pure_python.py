"""The second oracle: attention, softmax, RoPE, split and concat on lists, with ``math`` alone.

It shares nothing with NumPy, with ``npattn.reference`` or with the kernels, not even an array; every sum is a
correctly rounded ``math.fsum``. A vector is a list of floats, a matrix a list of vectors, heads are a list of
matrices.
"""

from __future__ import annotations

import math

Vector = list[float]
Matrix = list[Vector]


def dot(a: Vector, b: Vector) -> float:
    """sum_i a_i b_i."""
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def softmax(scores: Vector) -> Vector:
    """exp(s_j - m) / sum_k exp(s_k - m); zeros where every score is -inf."""
    maximum = max(scores, default=-math.inf)
    if maximum == -math.inf:
        return [0.0] * len(scores)
    exponentials = [math.exp(score - maximum) for score in scores]
    total = math.fsum(exponentials)
    return [e / total for e in exponentials]


def logsumexp(scores: Vector) -> float:
    """log(sum_j exp(s_j)); -inf where there is nothing to sum."""
    maximum = max(scores, default=-math.inf)
    if maximum == -math.inf:
        return -math.inf
    return maximum + math.log(math.fsum(math.exp(score - maximum) for score in scores))


def scores_of(
    query: Vector, keys: Matrix, scale: float, visible: list[bool], added: Vector | None = None
) -> Vector:
    """scale * q.k_j + added_j where key j is visible, -inf where not: a hidden key is not looked at."""
    return [
        scale * dot(query, key) + (added[j] if added else 0.0) if visible[j] else -math.inf
        for j, key in enumerate(keys)
    ]


def attention(
    query: list[Matrix],
    key: list[Matrix],
    value: list[Matrix],
    mask: list[list[bool]] | None = None,
    *,
    bias: Matrix | None = None,
    is_causal: bool = False,
    query_offset: int = 0,
    scale: float | None = None,
) -> tuple[list[Matrix], list[Matrix], Matrix]:
    """Output [Hq][Lq][Ev], weights [Hq][Lq][Lk] and lse [Hq][Lq] of query [Hq][Lq][E], key [Hkv][Lk][E] and
    value [Hkv][Lk][Ev]. ``mask`` and ``bias`` are [Lq][Lk], the same for every head; True is visible.
    """
    group = len(query) // len(key)
    output, weights, lse = [], [], []
    for h, rows in enumerate(query):
        keys, values = key[h // group], value[h // group]
        output.append([])
        weights.append([])
        lse.append([])
        for i, row in enumerate(rows):
            visible = [
                (mask is None or mask[i][j]) and (not is_causal or j <= i + query_offset)
                for j in range(len(keys))
            ]
            factor = 1.0 / math.sqrt(len(row)) if scale is None else scale
            scores = scores_of(row, keys, factor, visible, bias[i] if bias else None)
            w = softmax(scores)
            seen = [j for j in range(len(keys)) if visible[j]]
            width = len(values[0]) if values else 0
            output[h].append([math.fsum(w[j] * values[j][e] for j in seen) for e in range(width)])
            weights[h].append(w)
            lse[h].append(logsumexp(scores))
    return output, weights, lse


def rope(x: Vector, position: int, *, base: float = 10000.0, interleaved: bool = False) -> Vector:
    """Turns each pair (a, b) of x by position * base^(-2i/D): (a cos - b sin, b cos + a sin).

    The pairs are (x_i, x_{i + D/2}), or (x_{2i}, x_{2i + 1}) when interleaved.
    """
    dim, turned = len(x), list(x)
    for i in range(dim // 2):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        angle = position * base ** (-2.0 * i / dim)
        cos, sin = math.cos(angle), math.sin(angle)
        turned[first] = x[first] * cos - x[second] * sin
        turned[second] = x[second] * cos + x[first] * sin
    return turned


def split(x: Matrix, num_heads: int) -> list[Matrix]:
    """[L][H * E] -> [H][L][E]."""
    width = len(x[0]) // num_heads if x else 0
    return [[row[h * width : (h + 1) * width] for row in x] for h in range(num_heads)]


def concat(heads: list[Matrix]) -> Matrix:
    """[H][L][E] -> [L][H * E]."""
    return [[element for head in heads for element in head[i]] for i in range(len(heads[0]))]
