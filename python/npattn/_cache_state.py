"""What a `KVCache` is made from, what it checks before it changes, and how it is pickled."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn._cache_base import LARGEST, Array, CacheBase, Indices, as_size
from npattn._check import as_integer
from npattn._layer_rope import RotaryPositions
from npattn._masks import shown
from npattn._threads import _core, current

PAGE_KEYS = 64  # tokens a page: the least a sequence takes, and what is copied when a shared page is written


class KVCacheState(CacheBase):
    """The settings and the sequences of a `KVCache`, sequence i in slot i."""

    _rope: RotaryPositions | None
    _slots: Indices

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self._batch

    @property
    def capacity(self) -> int | None:
        """The tokens that a sequence may hold; None: any number."""
        return self._capacity

    @property
    def sliding_window(self) -> int | None:
        """The tokens that a query sees, itself among them; None: all."""
        return self._sliding_window

    @property
    def sink_tokens(self) -> int:
        """The first tokens that stay visible beside the sliding window."""
        return self._sink_tokens

    def _configure(
        self,
        *,
        batch: Any,
        num_kv_heads: Any,
        head_dim: Any,
        value_dim: Any,
        capacity: Any,
        sliding_window: Any,
        sink_tokens: Any,
        rope: Any,
        dtype: Any,
    ) -> None:
        self._describe(num_kv_heads, head_dim, value_dim, dtype)
        self._batch = as_size("batch", batch, minimum=0)
        self._sink_tokens = as_integer("sink_tokens", sink_tokens, minimum=0)
        self._sliding_window = None
        if sliding_window is not None:
            self._sliding_window = as_integer("sliding_window", sliding_window, minimum=1)
        elif self._sink_tokens:
            raise ValueError(f"sink_tokens={sink_tokens} needs a sliding_window; without one all stay")
        self._capacity = None if capacity is None else as_integer("capacity", capacity, minimum=1)
        least = self._sink_tokens + (self._sliding_window or 0)
        if self._capacity is not None and self._capacity < least:
            raise ValueError(
                f"capacity must be at least {least} (sliding_window + sink_tokens), got {capacity}"
            )
        self._rope = None if rope is None else RotaryPositions(rope, self._head_dim)

    def _limits(self, page_keys: int) -> tuple[int, int, int, int]:
        """Pages taken at once, capacity, window and sinks as the store has them: 0 for none."""
        capacity, window, sinks = self.capacity or 0, self.sliding_window or 0, self.sink_tokens
        # The window's first token and the last sink may lie anywhere in their pages.
        pages = self.batch * (-(-capacity // page_keys) + (2 if window else 0)) if capacity else 0
        return min(pages, LARGEST), min(capacity, LARGEST), min(window, LARGEST), min(sinks, LARGEST)

    def _create(self) -> None:
        self._take(self._make_store(self._batch, PAGE_KEYS, *self._limits(PAGE_KEYS)))

    def _take(self, store: _core.KVStore) -> None:
        self._store = store
        self._slots = np.arange(self._batch)
        self._slots.flags.writeable = False

    def _check_room(self, counts: Indices) -> None:
        lengths, room = self._store.lengths(self._slots), self._store.room(self._slots)
        for i in np.flatnonzero(counts > room):
            held = "tokens" if self.sliding_window is None else "tokens in its window"
            raise ValueError(
                f"{counts[i]} tokens do not fit into sequence {i}: it has {lengths[i]}, with room for "
                f"{room[i]} more, as its capacity is {self.capacity} {held}"
            )

    def _extend(self, keys: Array, values: Array, counts: Indices) -> None:
        """Append checked tokens; called with the access of a writer."""
        if self.capacity is not None:
            self._check_room(counts)
        if self._append(self._slots, keys, values, counts, self._rope):
            raise MemoryError("a cache of fixed capacity has too few pages")

    def _crop_error(self, i: int, kept: int) -> ValueError:
        """Why sequence i cannot be cropped to so many tokens."""
        now = int(self._store.lengths(self._slots)[i])
        if not 0 <= kept <= now:
            return ValueError(
                f"lengths[{i}] must lie in 0..{now}, the length of sequence {i}; got {shown(kept)}"
            )
        return ValueError(
            f"sequence {i} cannot be cropped to {kept}: its last token would see those from "
            f"{max(kept - (self._sliding_window or 0), 0)} on, and those before "
            f"{self._store.firsts(self._slots)[i]} were let go"
        )

    def __getstate__(self) -> dict[str, Any]:
        settings = {
            "batch": self.batch,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "capacity": self.capacity,
            "sliding_window": self.sliding_window,
            "sink_tokens": self.sink_tokens,
            "rope": None if self._rope is None else self._rope.keywords,
            "dtype": self.dtype,
        }
        with self._reading:
            return {"settings": settings, "contents": self._store.dump(self._slots, current())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._configure(**state["settings"])
        keys, values, tables, lengths, firsts, *scales = state["contents"]
        limits = self._limits(keys.shape[2])
        self._take(_core.KVStore.restore(keys, values, tables, lengths, firsts, *limits, *scales))

    def _facts(self) -> dict[str, Any]:
        names = ("batch", "num_kv_heads", "head_dim", "value_dim", "capacity", "sliding_window")
        facts = {name: getattr(self, name) for name in names}
        facts = {name: fact for name, fact in facts.items() if fact is not None}
        facts |= {"sink_tokens": self.sink_tokens} if self.sink_tokens else {}
        facts |= {} if self._rope is None else {"rope": self._rope.keywords}
        return facts | self._state_facts() | {"dtype": self.dtype, "nbytes": self.nbytes}

    def _state(self) -> dict[str, Any]:
        lengths = self._store.lengths(self._slots)
        few = lengths.tolist() if lengths.size <= 8 else f"{lengths.min()}..{lengths.max()}"
        return {"lengths": few}
