"""The rotary positions of a layer: its keywords checked once, its angles made per call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._positions import rope_cos_sin
from ._rope import apply_rope, rotary_embedding
from ._rope_scaling import rotary_width

Array = NDArray[Any]
Angles = tuple[Array, Array]

KEYWORDS = ("base", "interleaved", "rotary_dim", "scaling", "sections")


class RotaryPositions:
    """What the layer's ``rope`` dictionary means: cos and sin of places, and the rotation by them."""

    def __init__(self, keywords: Mapping[str, Any], head_dim: int) -> None:
        unknown = sorted(map(repr, set(keywords) - set(KEYWORDS)))
        if unknown:
            raise ValueError(f"rope takes {', '.join(KEYWORDS)}; got {', '.join(unknown)}")
        self.keywords = dict(keywords)
        self.interleaved = keywords.get("interleaved", False)
        self.rotary_dim = rotary_width(head_dim, keywords.get("rotary_dim"), keywords.get("scaling"))
        self._angle_keywords = {
            name: keywords[name] for name in ("base", "scaling", "sections") if name in keywords
        }
        # What apply_rope would refuse at a call is refused now.
        probe = np.zeros((1, 1, head_dim), np.float32)
        apply_rope(probe, probe, self.default_places(1), **keywords)

    def default_places(self, length: int) -> Array:
        """0, 1, 2, ...; with sections the same three times over, which is what plain text has."""
        places = np.arange(length)
        return places if self.keywords.get("sections") is None else np.broadcast_to(places, (3, length))

    def angles(self, positions: ArrayLike | None, length: int, dtype: np.dtype[Any]) -> Angles:
        """cos and sin, (..., length, rotary_dim / 2), in float64 for float64 and in float32 for all else."""
        places = self.default_places(length) if positions is None else np.asarray(positions)
        if places.ndim == 0:
            raise TypeError(
                f"positions must be an array of integers, one for each row of x; got {positions!r}: "
                "write np.arange(n) for n rows from 0, [p] for one row at p"
            )
        if places.shape[-1] != length:
            raise ValueError(
                f"positions must have shape (..., {length}), one for each row; got {places.shape}"
            )
        wide = np.float64 if dtype == np.float64 else np.float32
        return rope_cos_sin(places, self.rotary_dim, dtype=wide, **self._angle_keywords)

    def rotate(self, heads: Array, angles: Angles) -> None:
        """Turn (..., L, H, E) by its angles, in place."""
        keywords = {"interleaved": self.interleaved, "rotary_dim": self.rotary_dim}
        rotary_embedding(heads, *angles, layout="BSHD", out=heads, **keywords)
