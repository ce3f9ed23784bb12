"""What both caches are: sequences of keys and values in the pages of a store, and what one appends."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from npattn._check import (
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT8,
    as_array,
    as_integer,
    conversion,
    is_float,
    weight_dtype,
)
from npattn._inputs import contiguous_last
from npattn._layer_rope import RotaryPositions
from npattn._masks import integers, shown
from npattn._output import warn_of_overflow
from npattn._threads import _core, current

Array = NDArray[Any]
Indices = NDArray[np.int64]
LARGEST = 2**60


def as_size(name: str, value: Any, *, minimum: int = 1) -> int:
    """`value` as an int that the store can take; memory has no room for larger ones."""
    return min(as_integer(name, value, minimum=minimum), LARGEST)


def cache_dtype(dtype: Any) -> np.dtype[Any]:
    """What a cache can hold, NumPy's own dtypes as its own dtype objects."""
    given = weight_dtype(dtype)
    return next((known for known in (FLOAT32, FLOAT64, FLOAT16, INT8) if given == known), given)


def parse_counts(counts: Any, sequences: int, rows: int) -> Indices:
    """How many of the rows are real, for each sequence; all of them by default."""
    if counts is None:
        return np.full(sequences, rows, np.int64)
    numbers = integers("counts", counts, (sequences,), "the sequences")
    for number in numbers[(numbers < 0) | (numbers > rows)]:
        raise ValueError(
            f"counts must lie in 0..{rows} (the rows given for each sequence), got {shown(number)}"
        )
    return numbers


def last_places(ends: Indices, counts: Indices, rows: int) -> Indices:
    """Where the last ``counts`` tokens before ``ends`` stand, (sequences, rows); other rows repeat one."""
    steps = np.arange(rows)
    if rows > 1 and (counts != rows).any():
        steps = np.minimum(steps, np.maximum(counts - 1, 0)[:, None])
    places: Indices = (ends - counts)[:, None] + steps
    return places


class CacheBase:
    """The arguments that describe tokens, the store that holds them, and what every cache tells of itself."""

    _store: _core.KVStore
    _sliding_window: int | None = None
    _sink_tokens = 0

    def _describe(self, num_kv_heads: Any, head_dim: Any, value_dim: Any, dtype: Any) -> None:
        self._num_kv_heads = as_size("num_kv_heads", num_kv_heads)
        self._head_dim = as_size("head_dim", head_dim)
        self._value_dim = self._head_dim if value_dim is None else as_size("value_dim", value_dim)
        self._dtype = cache_dtype(dtype)

    def _make_store(self, sequences: int, page_keys: int, *limits: int) -> _core.KVStore:
        sizes = (self._num_kv_heads, self._head_dim, self._value_dim, page_keys)
        try:
            return _core.KVStore(sequences, *sizes, self._dtype, *limits)
        except MemoryError:
            raise MemoryError(f"not enough memory for a {type(self).__name__} of these sizes") from None

    @property
    def num_kv_heads(self) -> int:
        """The heads of keys and values."""
        return self._num_kv_heads

    @property
    def head_dim(self) -> int:
        """The width of a key."""
        return self._head_dim

    @property
    def value_dim(self) -> int:
        """The width of a value."""
        return self._value_dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """What keys and values are held in."""
        return self._dtype

    @property
    def _reading(self) -> _core.StoreAccess:
        return self._store.reading()

    @property
    def _writing(self) -> _core.StoreAccess:
        return self._store.writing()

    def _takes(self, dtype: np.dtype[Any]) -> bool:
        """Tokens of this dtype are held: as they are, or by a cache of halves or integers, rounded."""
        if self.dtype in (FLOAT32, FLOAT64):
            return dtype == self.dtype
        return is_float(dtype) and dtype != FLOAT64

    def _tokens(self, key: ArrayLike, value: ArrayLike, sequences: int) -> tuple[Array, Array]:
        """Key and value as arrays of the cache's sizes, of its dtype or one that it takes."""
        arrays = []
        exact = self.dtype in (FLOAT32, FLOAT64)
        for name, given, width in (("key", key, self.head_dim), ("value", value, self.value_dim)):
            array = as_array(name, given, any_dtype=True)
            if not self._takes(array.dtype):
                also = "" if exact else " and takes float32, float16 and bfloat16"
                raise TypeError(
                    f"{name} has dtype {array.dtype}, the cache holds {self.dtype}{also}: "
                    "convert it with " + conversion(name, given, f"np.{self.dtype if exact else FLOAT32}")
                )
            if array.ndim != 4 or array.shape[:2] + array.shape[3:] != (sequences, self.num_kv_heads, width):
                raise ValueError(
                    f"{name} has shape {array.shape}; expected ({sequences}, {self.num_kv_heads}, tokens, "
                    f"{width}): (sequences, kv heads, tokens, width)"
                )
            arrays.append(array)
        if arrays[0].shape[2] != arrays[1].shape[2]:
            raise ValueError(
                f"key and value differ in tokens, {arrays[0].shape[2]} and {arrays[1].shape[2]}: "
                f"key {arrays[0].shape}, value {arrays[1].shape}"
            )
        return arrays[0], arrays[1]

    def _append(
        self, slots: Indices, key: Array, value: Array, counts: Indices, rope: RotaryPositions | None = None
    ) -> int:
        """Append checked tokens, the keys turned to their places; 0, or the pages needed but not free.

        What is not of the cache's dtype goes to the store as float32, which rounds it, once; before numbers
        become infinite by that, NumPy warns. Called with the access of a writer.
        """
        if rope is not None:
            ends = self._store.lengths(slots) + counts
            wide = key if key.dtype == self.dtype else key.astype(FLOAT32, copy=False)
            key = rope.turned(wide, last_places(ends, counts, key.shape[2]))
        if not key.dtype == value.dtype == self.dtype:
            key, value = (contiguous_last(x.astype(FLOAT32, copy=False)) for x in (key, value))
        needed = self._store.append(slots, key, value, counts, False, current())
        if needed < 0:
            warn_of_overflow()
            needed = self._store.append(slots, key, value, counts, True, current())
        return needed

    def _attend_plain(
        self,
        ids: list[int] | None,
        query: Any,
        options: tuple[Any, ...],
        is_causal: Any,
        layout: Any,
        return_weights: Any,
        return_lse: Any,
    ) -> Array | None:
        """The short way of the common step; None where what is asked for takes the general way."""
        plain = is_causal is True and layout == "BHSD" and return_weights is False and return_lse is False
        return self._store.attend_plain(ids, query, options, current()) if plain else None

    @property
    def nbytes(self) -> int:
        """The memory taken: all pages, in use or free, and the tables that say whose they are."""
        return self._store.nbytes

    def _facts(self) -> dict[str, Any]:
        """What the repr tells, by name."""
        raise NotImplementedError

    def _state(self) -> dict[str, Any]:
        """The facts that change; called with the access of a reader."""
        raise NotImplementedError

    def _state_facts(self) -> dict[str, Any]:
        """The facts that change, unless another thread is changing them."""
        try:
            with self._reading:
                return self._state()
        except RuntimeError:
            return {"state": "(being changed)"}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={fact}' for name, fact in self._facts().items())})"

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{escape(str(name))}</th><td>{escape(str(fact))}</td></tr>"
            for name, fact in self._facts().items()
        )
        return f"<table><caption>{escape(type(self).__name__)}</caption>{''.join(rows)}</table>"
