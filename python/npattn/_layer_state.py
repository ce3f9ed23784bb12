"""What a layer holds, immutable, and the angles and heads that follow from it."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._check import INT8, common_dtype
from ._layer_rope import Angles, RotaryPositions
from ._matmul import PackedMatrix, Rotation

Array = NDArray[Any]


class LayerState:
    """The attributes of a `MultiHeadAttention`, which sets them once in its ``__dict__``."""

    embed_dim: int
    context_dim: int
    output_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: np.dtype[Any]
    _query: PackedMatrix
    _key_value: PackedMatrix
    _output: PackedMatrix
    _bias_query: Array | None
    _bias_key_value: Array | None
    _bias_output: Array | None
    _q_norm: Array | None
    _k_norm: Array | None
    _norm_eps: float
    _rope: RotaryPositions | None
    _options: dict[str, Any]

    def _result_dtype(self, **inputs: Array) -> np.dtype[Any]:
        """What a call computes in: the wider of its inputs and the weights; of int8 weights, its inputs."""
        weights = {} if self.dtype == INT8 else {"weights": np.empty(0, self.dtype)}
        return common_dtype(**inputs, **weights)

    def _angles(
        self, dtype: np.dtype[Any], length: int, context_length: int | None, positions: ArrayLike | None
    ) -> tuple[Angles | None, Angles | None]:
        """cos and sin for the queries and for the keys, which are the queries' in self attention."""
        if self._rope is None:
            if positions is not None:
                raise ValueError("positions need a layer with rope; this one has none")
            return None, None
        turns = self._rope.angles(positions, length, dtype)
        return turns, turns if context_length is None else self._rope.angles(None, context_length, dtype)

    def _row_angles(self, x: Array, turns: Angles | None) -> Angles | None:
        """cos and sin for the rows of x (..., L, in), one behind the other."""
        return None if self._rope is None or turns is None else self._rope.of_rows(x.shape[:-1], turns)

    def _rotation(self, angles: Angles | None, num_heads: int, norm: Array | None) -> Rotation | None:
        """What turns heads by the angles of their rows as they are made: a norm would come in between."""
        if self._rope is None or angles is None or norm is not None:
            return None
        return *angles, self.head_dim, num_heads * self.head_dim, bool(self._rope.interleaved)

    def _heads(self, x: Array, num_heads: int, norm: Array | None, turns: Angles | None) -> Array:
        """(..., L, H * E) -> (..., L, H, E): a view; with a norm, normalised and turned in place."""
        heads = x.reshape(*x.shape[:-1], num_heads, self.head_dim)
        if norm is not None:
            _rms_norm(heads if norm.size == self.head_dim else x, norm, self._norm_eps)
            if self._rope is not None and turns is not None:
                self._rope.rotate(heads, turns)
        return heads

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"cannot set {name}: a MultiHeadAttention is immutable")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"cannot delete {name}: a MultiHeadAttention is immutable")

    def __repr__(self) -> str:
        widths = ("embed_dim", "context_dim", "output_dim", "head_dim", "value_dim")
        facts = [f"{name}={getattr(self, name)}" for name in ("num_heads", "num_kv_heads", *widths)]
        facts += [] if self._rope is None else [f"rope={self._rope.keywords}"]
        for name, value in self._options.items():
            if value is not None:
                facts.append(f"{name}={f'array{value.shape}' if isinstance(value, np.ndarray) else value}")
        return f"MultiHeadAttention({', '.join(facts)}, dtype={self.dtype})"


def _rms_norm(x: Array, weight: Array, eps: float) -> None:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in place (Zhang and Sennrich 2019)."""
    wide = x.astype(weight.dtype, copy=False)
    mean_square = np.einsum("...i,...i->...", wide, wide) / x.shape[-1]
    x[...] = wide / np.sqrt(mean_square + eps)[..., None] * weight
