"""Sinusoidal encodings, ALiBi slopes, the angles of RoPE: computed in float64, then cast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ._check import as_array, as_int64, as_integer, as_number, float_dtype
from ._rope_scaling import DEFAULT_BASE, rope_frequencies, rope_sections

STYLES = ("interleaved", "concatenated", "tensor2tensor")


def sinusoidal_encoding(
    positions: ArrayLike,
    dim: int,
    *,
    base: float = 10000.0,
    style: str = "interleaved",
    dtype: DTypeLike = np.float32,
) -> NDArray[Any]:
    """Sinusoidal position encodings, sin and cos of p / base^(2i/dim).

    Parameters
    ----------
    positions : int or array_like of int, (..., L)
        Where the tokens stand; an int n is a length, the positions 0 .. n - 1. Any integer dtype,
        negative ones too.
    dim : int
        The width of the encoding, at least 1.
    base : float
        The longest wavelength over 2 pi.
    style : {"interleaved", "concatenated", "tensor2tensor"}
        "interleaved" puts sine and cosine of a frequency side by side, as in the paper; "concatenated" puts
        all sines before all cosines; "tensor2tensor" does the same with p / base^(i / (dim/2 - 1)), whose
        last frequency is 1 / base where dim is even. An odd dim has one sine more than cosines.
    dtype : dtype
        Of the result: float32, float64, float16 or bfloat16. Angles are computed in float64.

    Returns
    -------
    ndarray, (..., L, dim)

    Raises
    ------
    TypeError
        For positions that are not integers, or another dtype.
    ValueError
        For a negative length, a dim below 1, a base not above 0, an unknown style.

    Notes
    -----
    Vaswani et al. 2017, Attention Is All You Need, section 3.5.

    Examples
    --------
    >>> import npattn
    >>> npattn.sinusoidal_encoding(2, 4, dtype="float64").round(4)
    array([[0.    , 1.    , 0.    , 1.    ],
           [0.8415, 0.5403, 0.01  , 1.    ]])
    """
    places = token_positions(positions)
    dim, base = as_integer("dim", dim, minimum=1), as_number("base", base)
    if base <= 0.0:
        raise ValueError(f"base must be above 0, got {base:g}")
    if style not in STYLES:
        raise ValueError(f"style must be one of {', '.join(map(repr, STYLES))}; got {style!r}")
    sines = (dim + 1) // 2
    # A tensor2tensor encoding of width 2 has the one frequency 1, whatever 0 / 0 may be.
    steps = dim / 2 - (style == "tensor2tensor") or 1.0
    angles = places[..., None] / base ** (np.arange(sines) / steps)
    encoding = np.empty((*places.shape, dim), dtype=float_dtype(dtype))
    halves = slice(0, sines), slice(sines, dim)
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if style == "interleaved" else halves
    encoding[..., first] = np.sin(angles)
    encoding[..., second] = np.cos(angles[..., : dim // 2])
    return encoding


def alibi_slopes(num_heads: int) -> NDArray[np.float64]:
    """The slopes of ALiBi (attention with linear biases) for any number of heads.

    2^(-8 (h + 1) / H) where H is a power of two; otherwise the slopes of the next power below, followed by
    every second one of the next power above.

    Parameters
    ----------
    num_heads : int
        At least 1.

    Returns
    -------
    ndarray of float64, (num_heads,)
        All positive; ``scaled_dot_product_attention`` subtracts slope * distance.

    Raises
    ------
    TypeError, ValueError
        For a num_heads that is no integer, or below 1.

    Notes
    -----
    Press, Smith and Lewis 2022, Train Short, Test Long, and the authors' ``get_slopes``.

    Examples
    --------
    >>> import npattn
    >>> npattn.alibi_slopes(6)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625, 0.5       ,
           0.125     ])
    """
    num_heads = as_integer("num_heads", num_heads, minimum=1)
    power = 1 << (num_heads.bit_length() - 1)
    # Python's power, not NumPy's: the vector routine may be off in the last bit.
    slopes = (
        2.0 ** -(8.0 * (h + 1) / power if h < power else 4.0 * (2 * (h - power) + 1) / power)
        for h in range(num_heads)
    )
    return np.fromiter(slopes, np.float64, count=num_heads)


def rope_cos_sin(
    positions: ArrayLike,
    dim: int,
    *,
    base: float = DEFAULT_BASE,
    scaling: Mapping[str, Any] | None = None,
    length: int | None = None,
    sections: Sequence[int] | None = None,
    dtype: DTypeLike = np.float32,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cosines and sines of the angles of rotary position embedding, position * inverse frequency.

    Parameters
    ----------
    positions : int or array_like of int, (..., L), or (S, ..., L) with S ``sections``
        Where the tokens stand; an int n is a length, the positions 0 .. n - 1. Any integer dtype,
        negative ones too.
    dim : int
        The width that is turned, even.
    base, scaling
        As in `rope_frequencies`.
    length : int, optional
        The length in use, for the scaling types that depend on it; by default the largest position + 1. Fix
        it for the life of a cache: keys turned for one length do not match queries turned for another.
    sections : sequence of int, optional
        M-RoPE: how many of the dim // 2 pairs each row of positions (time, height, width) turns. By default
        the ``mrope_section`` of ``scaling``, if it has one; given both, they must agree.
    dtype : dtype
        Of the results: float32, float64, float16 or bfloat16. Angles are computed in float64.

    Returns
    -------
    cos, sin : ndarray, (..., L, dim // 2)
        Already multiplied with the attention factor of the scaling type.

    Raises
    ------
    TypeError
        For positions that are not integers, or another dtype.
    ValueError
        For what `rope_frequencies` refuses, a negative length, sections that do not add up to dim // 2 or are
        not as many as the first axis of positions.

    Notes
    -----
    Su et al. 2021, RoFormer, section 3.2; Wang et al. 2024, Qwen2-VL (sections).

    Examples
    --------
    >>> import npattn
    >>> cos, sin = npattn.rope_cos_sin([0, 1], 4, dtype="float64")
    >>> cos.round(4)
    array([[1.    , 1.    ],
           [0.5403, 1.    ]])
    """
    places = token_positions(positions)
    if length is None:
        length = max(int(places.max(initial=-1)) + 1, 0)
    inv_freq, factor = rope_frequencies(dim, base=base, scaling=scaling, length=length)
    result_dtype = float_dtype(dtype)
    sections = rope_sections(sections, scaling)
    if sections is None:
        angles = places[..., None] * inv_freq
    else:
        angles = section_angles(places, inv_freq, sections, alike=np.ndim(positions) == 0)
    return (factor * np.cos(angles)).astype(result_dtype), (factor * np.sin(angles)).astype(result_dtype)


def section_angles(
    places: NDArray[np.int64], inv_freq: NDArray[np.float64], sections: list[int], *, alike: bool
) -> NDArray[np.float64]:
    """Angles (..., L, pairs): the pairs of section s take the positions places[s], or all places if alike."""
    count = len(sections)
    if sum(sections) != len(inv_freq):
        raise ValueError(
            f"sections must add up to {len(inv_freq)}, dim // 2; {sections} add up to {sum(sections)}"
        )
    if alike:
        places = np.broadcast_to(places, (count, *places.shape))
    if places.ndim < 2 or places.shape[0] != count:
        raise ValueError(
            f"positions must have shape ({count}, ..., L), one row for each of the sections; got "
            f"{places.shape}; for plain text use np.broadcast_to(positions, ({count}, *positions.shape))"
        )
    row = np.repeat(np.arange(count), sections)
    angles: NDArray[np.float64] = np.moveaxis(places, 0, -1)[..., row] * inv_freq
    return angles


def token_positions(positions: ArrayLike, *, allow_length: bool = True) -> NDArray[np.int64]:
    """Positions as int64, (..., L); an int is a length, or where that is not allowed a TypeError."""
    places = as_array("positions", positions, any_dtype=True)
    if places.size == 0 and isinstance(positions, (list, tuple)):
        places = places.astype(np.int64)  # an empty list has no dtype of its own
    advice = "; convert them with np.asarray(positions).astype(np.int64) if they are whole numbers"
    places = as_int64("positions", places, advice)
    if places.ndim:
        return places
    if not allow_length:
        raise TypeError(
            f"positions must be an array of integers, got {places}; "
            "use np.arange(n) for n tokens from 0 on, or [p] for one token at p"
        )
    if places < 0:
        raise ValueError(f"positions as a length must be at least 0, got {places}")
    return np.arange(int(places), dtype=np.int64)
