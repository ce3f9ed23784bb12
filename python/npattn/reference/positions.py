"""Absolute positions and ALiBi slopes, an element at a time."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ._common import Array, token_positions


def sinusoidal_encoding(
    positions: ArrayLike,
    dim: int,
    *,
    base: float = 10000.0,
    style: str = "interleaved",
    dtype: DTypeLike = np.float32,
) -> Array:
    """sin(p / base^(2i/dim)), cos(p / base^(2i/dim)): (..., L) -> (..., L, dim), float64. An int is a length.

    "interleaved" puts the pairs side by side, "concatenated" all sines before all cosines;
    "tensor2tensor" does that with p / base^(i / (dim/2 - 1)). An odd dim ends with a sine that has no cosine.
    """
    p = token_positions(positions)
    sines, step = (dim + 1) // 2, dim / 2 - (style == "tensor2tensor") or 1.0
    encoding = np.zeros((*p.shape, dim))
    for i in range(sines):
        angle = p / base ** (i / step)
        sine, cosine = (2 * i, 2 * i + 1) if style == "interleaved" else (i, sines + i)
        encoding[..., sine] = np.sin(angle)
        if cosine < dim:
            encoding[..., cosine] = np.cos(angle)
    return encoding


def alibi_slopes(num_heads: int) -> Array:
    """2^(-8 (h + 1) / H) for H heads, a power of two; otherwise those of the power below, then every second
    one of the power above (Press et al. 2022).
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    between = [2.0 ** (-8.0 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return np.array((slopes + between)[:num_heads])
