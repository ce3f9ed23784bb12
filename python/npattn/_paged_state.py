"""What a `PagedKVCache` is made from, how its sequences are found, and how it is pickled."""

from __future__ import annotations

from typing import Any

from npattn._cache_base import CacheBase, as_size
from npattn._threads import _core, current

PANEL = 32  # tokens that the kernels read at a time


class PagedKVCacheState(CacheBase):
    """The sizes of a `PagedKVCache` and the slots of its sequences."""

    @property
    def num_pages(self) -> int:
        """How many pages there are."""
        return self._num_pages

    @property
    def page_size(self) -> int:
        """The tokens that a page holds."""
        return self._page_size

    def _configure(
        self, num_pages: Any, page_size: Any, num_kv_heads: Any, head_dim: Any, value_dim: Any, dtype: Any
    ) -> None:
        self._describe(num_kv_heads, head_dim, value_dim, dtype)
        self._num_pages = as_size("num_pages", num_pages)
        self._page_size = as_size("page_size", page_size)
        if int(page_size) % PANEL:
            raise ValueError(f"page_size must be a multiple of {PANEL}, got {page_size}")

    def _create(self) -> None:
        self._store = self._make_store(0, self._page_size, self._num_pages, 0, 0, 0)

    def __getstate__(self) -> dict[str, Any]:
        sizes = (self.num_pages, self.page_size, self.num_kv_heads, self.head_dim, self.value_dim, self.dtype)
        with self._reading:
            ids = self._store.ids()
            contents = self._store.dump(self._store.slots_of(ids), current())
            return {"sizes": sizes, "ids": ids, "next_id": self._store.next_id(), "contents": contents}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._configure(*state["sizes"])
        keys, values, tables, lengths, firsts, *scales = state["contents"]
        limits = (self.num_pages, 0, 0, 0)
        self._store = _core.KVStore.restore(keys, values, tables, lengths, firsts, *limits, *scales)
        self._store.name_slots(state["ids"], state["next_id"])

    def _facts(self) -> dict[str, Any]:
        names = ("num_pages", "page_size", "num_kv_heads", "head_dim", "value_dim", "dtype")
        facts = {name: getattr(self, name) for name in names}
        return facts | self._state_facts() | {"nbytes": self.nbytes}

    def _state(self) -> dict[str, Any]:
        return {"sequences": len(self._store.ids()), "free_pages": self._store.free_pages}
