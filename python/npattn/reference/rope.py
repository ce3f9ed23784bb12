"""Rotary position embedding in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ._common import Array, float64, ieee, swap_layout, token_positions
from .rope_scaling import rope_frequencies, rope_type


def rope_cos_sin(
    positions: ArrayLike,
    dim: int,
    *,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    length: int | None = None,
    sections: Sequence[int] | None = None,
    dtype: DTypeLike = np.float32,
) -> tuple[Array, Array]:
    """c cos(p f), c sin(p f): positions (..., L) -> two (..., L, dim // 2), c the attention factor.

    ``sections``: positions (3, ..., L); pair i takes the positions of the section that it lies in. A
    ``mrope_section`` of ``scaling`` is the default.
    """
    p = token_positions(positions)
    if length is None:
        length = int(p.max(initial=-1)) + 1
    inv_freq, factor = rope_frequencies(dim, base=base, scaling=scaling, length=length)
    angles = p[..., None] * inv_freq
    if sections is None:
        sections = (scaling or {}).get("mrope_section")
    if sections is not None:
        ends = np.cumsum(sections)
        angles = np.concatenate(
            [angles[n, ..., end - sections[n] : end] for n, end in enumerate(ends)], axis=-1
        )
    return factor * np.cos(angles), factor * np.sin(angles)


@ieee
def rotary_embedding(
    x: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inverse: bool = False,
    layout: str = "BHSD",
) -> Array:
    """(a, b) -> (a cos - b sin, b cos + a sin) for each pair (a, b) of the first rotary_dim elements.

    Pairs are (x_i, x_{i + D/2}), or (x_{2i}, x_{2i + 1}) when interleaved. x (..., H, L, E); cos and sin
    (..., L, D/2) broadcast against x without its head axis. ``inverse`` turns the other way.
    """
    y = swap_layout(float64(x), layout)
    width = y.shape[-1] if rotary_dim is None else rotary_dim
    c, s = ((float64(t)[..., None, :, :] if y.ndim > 2 else float64(t)) for t in (cos, sin))
    s = -s if inverse else s
    first = slice(0, width, 2) if interleaved else slice(0, width // 2)
    second = slice(1, width, 2) if interleaved else slice(width // 2, width)
    a, b = y[..., first].copy(), y[..., second].copy()
    y[..., first], y[..., second] = a * c - b * s, b * c + a * s
    return swap_layout(y, layout)


def apply_rope(
    query: ArrayLike,
    key: ArrayLike,
    positions: ArrayLike,
    *,
    base: float = 10000.0,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    scaling: Mapping[str, Any] | None = None,
    sections: Sequence[int] | None = None,
    layout: str = "BHSD",
) -> tuple[Array, Array]:
    """query and key, rotated to their positions, (L,) or (batch, L)."""
    width = np.shape(query)[-1]
    if rotary_dim is None and scaling is not None and rope_type(scaling) != "proportional":
        rotary_dim = int(width * scaling.get("partial_rotary_factor", 1.0))
    width = width if rotary_dim is None else rotary_dim
    cos, sin = rope_cos_sin(positions, width, base=base, scaling=scaling, sections=sections)
    query, key = (
        rotary_embedding(x, cos, sin, interleaved=interleaved, rotary_dim=width, layout=layout)
        for x in (query, key)
    )
    return query, key
