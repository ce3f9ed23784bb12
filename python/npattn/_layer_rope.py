"""The rotary positions of a layer: its keywords checked once, its angles made per call."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._check import compute_dtype
from ._output import stored
from ._positions import rope_cos_sin, token_positions
from ._rope import apply_rope, check_places, rotary_embedding
from ._rope_scaling import rope_sections, rotary_width
from ._threads import _core, current

Array = NDArray[Any]
Angles = tuple[Array, Array]

_STEP_PLACES = 256  # the most whose angles are kept for the next call
KEYWORDS = ("base", "interleaved", "rotary_dim", "scaling", "sections")


class RotaryPositions:
    """What the layer's ``rope`` dictionary means: cos and sin of places, and the rotation by them."""

    def __init__(self, keywords: Mapping[str, Any], head_dim: int) -> None:
        if not isinstance(keywords, Mapping):
            raise TypeError(f"rope must be a dict of apply_rope's keywords, or None; got {keywords!r}")
        unknown = sorted(map(repr, set(keywords) - set(KEYWORDS)))
        if unknown:
            raise ValueError(f"rope takes {', '.join(KEYWORDS)}; got {', '.join(unknown)}")
        self.keywords = deepcopy(dict(keywords))
        self.interleaved = keywords.get("interleaved", False)
        self.rotary_dim = rotary_width(head_dim, keywords.get("rotary_dim"), keywords.get("scaling"))
        self._sections = rope_sections(keywords.get("sections"), keywords.get("scaling"))
        self._for_angles = {
            name: self.keywords[name] for name in ("base", "scaling", "sections") if name in keywords
        }
        # The angles of 0, 1, 2, ... made last, with their length and dtype: what most calls ask for.
        self._last: tuple[int, np.dtype[Any], Angles] | None = None
        self._last_step: tuple[Any, Angles] | None = None
        # What apply_rope would refuse at a call is refused now.
        probe = np.zeros((1, 1, head_dim), np.float32)
        apply_rope(probe, probe, self.default_places(1), **keywords)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None, "_last_step": None}  # what can be made again

    def default_places(self, length: int) -> Array:
        """0, 1, 2, ...; with sections the same for each of them, which is what plain text has."""
        return self.alike(np.arange(length))

    def alike(self, places: Array) -> Array:
        """Places (..., L) as `rope_cos_sin` takes them: with sections the same for each of them."""
        sections = self._sections
        return places if sections is None else np.broadcast_to(places, (len(sections), *places.shape))

    def angles(self, positions: ArrayLike | None, length: int, dtype: np.dtype[Any]) -> Angles:
        """cos and sin, (..., length, rotary_dim / 2), in the dtype that is computed in for ``dtype``."""
        wide = compute_dtype(dtype)
        if positions is None:
            last = self._last
            if last is None or last[:2] != (length, wide):
                self._last = last = (length, wide, self._angles_of(self.default_places(length), wide))
            return last[2]
        places = token_positions(positions, allow_length=False)
        if places.shape[-1] != length:
            raise ValueError(
                f"positions must have shape (..., {length}), one for each row; got {places.shape}"
            )
        return self._angles_of(places, wide)

    def _angles_of(self, places: Array, wide: np.dtype[Any]) -> Angles:
        if self.rotary_dim == 0:  # nothing turns
            nothing = np.empty((*places.shape[0 if self._sections is None else 1 :], 0), wide)
            return nothing, nothing
        cos, sin = rope_cos_sin(places, self.rotary_dim, dtype=wide, **self._for_angles)
        return np.ascontiguousarray(cos), np.ascontiguousarray(sin)

    def turned(self, heads: Array, places: Array) -> Array:
        """A copy of (batch, H, L, E) turned to its places, (batch, L)."""
        cos, sin = self._angles_of_step(places, compute_dtype(heads.dtype))
        result = np.empty_like(heads)
        _core.rotary_embedding(stored(heads), cos, sin, stored(result), self.interleaved, False, current())
        return result

    def _angles_of_step(self, places: Array, wide: np.dtype[Any]) -> Angles:
        """The angles of places (batch, L); a step asks for its queries what it asked for its keys."""
        if places.size > _STEP_PLACES:
            return self._angles_of(self.alike(places), wide)
        step = (places.shape, places.tobytes(), wide)
        last = self._last_step
        if last is None or last[0] != step:
            self._last_step = last = (step, self._angles_of(self.alike(places), wide))
        return last[1]

    def of_rows(self, rows: tuple[int, ...], angles: Angles) -> Angles | None:
        """Angles of rows (..., L) of a product, one behind the other, for `linear`; None: nothing turns."""
        check_places(angles[0].shape[:-1], "x", rows)
        if self.rotary_dim == 0:
            return None
        length, pairs = angles[0].shape[-2:]
        for_all = angles[0].size == length * pairs  # the batch turns alike
        cos, sin = (
            np.ascontiguousarray(table if for_all else np.broadcast_to(table, (*rows, pairs))).reshape(
                -1, pairs
            )
            for table in angles
        )
        return cos, sin

    def rotate(self, heads: Array, angles: Angles) -> None:
        """Turn (..., L, H, E) by its angles, in place."""
        check_places(angles[0].shape[:-1], "x", heads.shape[:-2])
        keywords = {"interleaved": self.interleaved, "rotary_dim": self.rotary_dim}
        rotary_embedding(heads, *angles, layout="BSHD", out=heads, **keywords)
