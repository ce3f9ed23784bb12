"""What the reference functions share: float64, the order of the axes, silence about Inf and NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Bool = NDArray[np.bool_]

Function = TypeVar("Function", bound=Callable[..., Any])


def ieee(function: Function) -> Function:
    """Infinities and NaNs are part of the specification of ``function``; NumPy's warnings are not."""

    @wraps(function)
    def quiet(*arguments: Any, **keywords: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*arguments, **keywords)

    return quiet  # type: ignore[return-value]


def float64(x: ArrayLike) -> Array:
    """x in float64, whatever its dtype."""
    return np.asarray(x).astype(np.float64)


def token_positions(positions: ArrayLike) -> NDArray[np.int64]:
    """Positions as they are; an int is a length, 0 .. n - 1."""
    given = np.asarray(positions).astype(np.int64)
    return given if given.ndim else np.arange(int(given), dtype=np.int64)


def swap_layout(x: NDArray[Any], layout: str) -> NDArray[Any]:
    """(..., L, H, E) <-> (..., H, L, E) for layout BSHD; BHSD, and a 2-D array, stay as they are."""
    return x.swapaxes(-2, -3) if layout == "BSHD" and x.ndim > 2 else x


def heads_first(layout: str, *arrays: ArrayLike) -> list[Array]:
    """The arrays in float64 as (..., H, L, E): a 2-D array is one head, leading axes are broadcast."""
    ordered = [swap_layout(float64(x), layout) for x in arrays]
    split = [x if x.ndim > 2 else x[None] for x in ordered]
    lead = np.broadcast_shapes(*(x.shape[:-3] for x in split))
    return [np.broadcast_to(x, lead + x.shape[-3:]) for x in split]
