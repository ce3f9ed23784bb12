"""A cache of many sequences that come and go, in a fixed number of pages that they may share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from npattn._cache_attend import attend
from npattn._cache_base import Indices, parse_counts
from npattn._check import as_integer
from npattn._inputs import Layout
from npattn._paged_state import PagedKVCacheState
from npattn._threads import current


class PagedKVCache(PagedKVCacheState):
    """The keys and values of many sequences of any lengths, in pages from one pool of fixed size.

    Sequences are known by ids. They are added and freed one by one and may begin as the continuation of
    another, whose pages they share.

    Parameters
    ----------
    num_pages : int
        How many pages there are; their memory is taken at once.
    page_size : int
        The tokens that a page holds, of all heads: a multiple of 32.
    num_kv_heads, head_dim : int
        Of the keys.
    value_dim : int, optional
        The width of the values; default `head_dim`.
    dtype : dtype
        float32, float64, float16, bfloat16 (of ml_dtypes) or int8.

    Attributes
    ----------
    num_pages, page_size, num_kv_heads, head_dim, value_dim : int
    dtype : numpy.dtype
        What it was made with; all attributes are read-only.
    nbytes : int
        The memory it has taken: all pages, and the tables that say whose they are.
    free_pages : int
        How many of them no sequence owns.

    Raises
    ------
    TypeError, ValueError
        For sizes that are no positive integers, and a page_size that is no multiple of 32.
    MemoryError
        If there is not so much memory.

    Notes
    -----
    A page that several sequences own is copied when one of them writes to it (Kwon et al. 2023, "Efficient
    Memory Management for Large Language Model Serving with PagedAttention"). For threads see `KVCache`.

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> rng = np.random.default_rng(0)
    >>> cache = npattn.PagedKVCache(num_pages=16, page_size=32, num_kv_heads=2, head_dim=64)
    >>> prompt = cache.add_sequence()
    >>> key, value = rng.standard_normal((2, 1, 2, 40, 64), dtype=np.float32)
    >>> cache.append([prompt], key, value)
    >>> answers = [cache.add_sequence(prefix=prompt) for _ in range(2)]  # 40 tokens each, shared
    >>> key, value = rng.standard_normal((2, 2, 2, 1, 64), dtype=np.float32)
    >>> cache.append(answers, key, value)
    >>> query = rng.standard_normal((2, 8, 1, 64), dtype=np.float32)
    >>> cache.attend(answers, query).shape
    (2, 8, 1, 64)
    >>> cache.lengths([prompt, *answers]), cache.free_pages
    (array([40, 41, 41]), 12)
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self._configure(num_pages, page_size, num_kv_heads, head_dim, value_dim, dtype)
        self._create()

    def add_sequence(self, prefix: int | None = None) -> int:
        """Begin a sequence.

        Parameters
        ----------
        prefix : int, optional
            The id of a sequence that the new one continues: it has the same tokens, in the same pages.
            Default: it is empty.

        Returns
        -------
        int
            The id of the new sequence, never given before.

        Raises
        ------
        KeyError
            If there is no sequence with the id `prefix`.
        RuntimeError
            If another thread is using the cache.

        Examples
        --------
        >>> import npattn
        >>> cache = npattn.PagedKVCache(4, 32, 1, 8)
        >>> first = cache.add_sequence()
        >>> second = cache.add_sequence(prefix=first)
        >>> first, second
        (0, 1)
        """
        source = None if prefix is None else as_integer("prefix", prefix)
        added: list[int] = []
        try:
            self._store.add_sequence(source, added)
            return added[0]
        except BaseException:  # an interrupt right behind it: nobody would ever know the id
            for new in added:
                self._store.remove_sequence(new)
            raise

    def append(
        self, sequences: Sequence[int], key: ArrayLike, value: ArrayLike, *, counts: ArrayLike | None = None
    ) -> None:
        """Add tokens to the end of sequences, copied.

        Parameters
        ----------
        sequences : list of int
            Their ids, each once.
        key : array_like, (len(sequences), num_kv_heads, n, head_dim)
            As in `KVCache.append`.
        value : array_like, (len(sequences), num_kv_heads, n, value_dim)
        counts : int or array_like of int, (len(sequences),), optional
            How many of the n tokens are real, for each sequence; the others are not looked at. Default: all.

        Returns
        -------
        None

        Raises
        ------
        MemoryError
            If there are not enough free pages: `free` or `crop` sequences, and try again.
        KeyError
            For an id of no sequence.
        TypeError
            For a dtype that the cache does not take.
        ValueError
            For shapes and counts that do not fit, and an id that comes twice.
        RuntimeError
            If another thread is using the cache.

        Notes
        -----
        After an error the cache is as it was: no sequence has got any of the tokens.

        Examples
        --------
        >>> import numpy as np
        >>> import npattn
        >>> cache = npattn.PagedKVCache(4, 32, 1, 8)
        >>> ids = [cache.add_sequence(), cache.add_sequence()]
        >>> tokens = np.ones((2, 1, 5, 8), np.float32)
        >>> cache.append(ids, tokens, tokens, counts=[5, 2])
        >>> cache.lengths(ids)
        array([5, 2])
        """
        ids = _as_ids(sequences)
        if self._store.append_plain(ids, key, value, counts, current()):
            return
        keys, values = self._tokens(key, value, len(ids))
        real = parse_counts(counts, len(ids), keys.shape[2])
        with self._writing:
            slots = self._store.slots_of(ids)
            if len(set(slots.tolist())) < len(ids):
                twice = next(i for i in ids if ids.count(i) > 1)
                raise ValueError(f"sequences must be distinct, got {twice} more than once")
            needed = self._append(slots, keys, values, real)
            if needed:
                free = self._store.free_pages
                raise MemoryError(
                    f"{needed} new pages of {self.page_size} tokens are needed and {free} of the "
                    f"{self.num_pages} are free; free or crop sequences"
                )

    def attend(
        self,
        sequences: Sequence[int],
        query: ArrayLike,
        *,
        counts: ArrayLike | None = None,
        is_causal: bool = True,
        attn_mask: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: ArrayLike | None = None,
        alibi_slopes: ArrayLike | None = None,
        layout: Layout = "BHSD",
        out: NDArray[Any] | None = None,
        return_weights: bool = False,
        return_lse: bool = False,
    ) -> Any:
        """Attention of the last tokens of sequences, as queries, over the tokens of each.

        Parameters
        ----------
        sequences : list of int
            Their ids.
        query : array_like, (len(sequences), Hq, n, head_dim)
            Row i of sequence b stands at ``lengths[b] - counts[b] + i``.
        counts, is_causal, attn_mask, bias, window, scale, softcap, sinks, alibi_slopes, layout, out,
        return_weights, return_lse
            As in `KVCache.attend`, with these sequences as the batch: masks broadcast to
            (len(sequences), Hq, n, largest length of them).

        Returns
        -------
        output : ndarray, (len(sequences), Hq, n, value_dim)
            In the query's dtype. Rows at or past the sequence's count are zeros.
        weights : ndarray, (len(sequences), Hq, n, largest length)
            If asked for.
        lse : ndarray, (len(sequences), Hq, n)
            If asked for; -inf for rows at or past the count.

        Raises
        ------
        KeyError
            For an id of no sequence.
        TypeError, ValueError, RuntimeError
            As `KVCache.attend`.

        Examples
        --------
        >>> import numpy as np
        >>> import npattn
        >>> cache = npattn.PagedKVCache(4, 32, 1, 8)
        >>> ids = [cache.add_sequence(), cache.add_sequence()]
        >>> tokens = np.ones((2, 1, 5, 8), np.float32)
        >>> cache.append(ids, tokens, tokens, counts=[5, 2])
        >>> cache.attend(ids, np.ones((2, 4, 1, 8), np.float32)).shape
        (2, 4, 1, 8)
        """
        ids = _as_ids(sequences)
        options = (counts, attn_mask, bias, window, scale, softcap, sinks, alibi_slopes, out)
        output = self._attend_plain(ids, query, options, is_causal, layout, return_weights, return_lse)
        if output is not None:
            return output
        with self._reading:
            return attend(
                self,
                self._store.slots_of(ids),
                query,
                counts=counts,
                is_causal=is_causal,
                attn_mask=attn_mask,
                bias=bias,
                window=window,
                scale=scale,
                softcap=softcap,
                sinks=sinks,
                alibi_slopes=alibi_slopes,
                layout=layout,
                out=out,
                return_weights=return_weights,
                return_lse=return_lse,
            )

    def lengths(self, sequences: Sequence[int]) -> Indices:
        """The tokens of sequences.

        Parameters
        ----------
        sequences : list of int
            Their ids.

        Returns
        -------
        ndarray of int64, (len(sequences),)

        Raises
        ------
        KeyError
            For an id of no sequence.
        RuntimeError
            If another thread is changing the cache.

        Examples
        --------
        >>> import npattn
        >>> cache = npattn.PagedKVCache(4, 32, 1, 8)
        >>> cache.lengths([cache.add_sequence()])
        array([0])
        """
        ids = _as_ids(sequences)
        with self._reading:
            return self._store.lengths(self._store.slots_of(ids))

    def crop(self, sequence: int, length: int) -> None:
        """Keep the first tokens of a sequence only; pages that nobody owns any more become free.

        Parameters
        ----------
        sequence : int
            Its id.
        length : int
            How many to keep, from 0 to as many as there are.

        Returns
        -------
        None

        Raises
        ------
        KeyError
            If there is no such sequence.
        ValueError
            For a length out of range.
        RuntimeError
            If another thread is using the cache.

        Examples
        --------
        >>> import numpy as np
        >>> import npattn
        >>> cache = npattn.PagedKVCache(4, 32, 1, 8)
        >>> s = cache.add_sequence()
        >>> cache.append([s], np.ones((1, 1, 100, 8), np.float32), np.ones((1, 1, 100, 8), np.float32))
        >>> cache.crop(s, 10)
        >>> cache.lengths([s]), cache.free_pages
        (array([10]), 3)
        """
        number, kept = as_integer("sequence", sequence), as_integer("length", length)
        with self._writing:
            slots = self._store.slots_of([number])
            now = int(self._store.lengths(slots)[0])
            if not 0 <= kept <= now:
                raise ValueError(f"length must lie in 0..{now}, that of sequence {number}; got {kept}")
            self._store.crop(slots, np.array([kept]))

    def free(self, sequence: int) -> None:
        """End a sequence: its id is gone, and so are the pages that it alone owned.

        Parameters
        ----------
        sequence : int
            Its id.

        Returns
        -------
        None

        Raises
        ------
        KeyError
            If there is no such sequence.
        RuntimeError
            If another thread is using the cache.

        Examples
        --------
        >>> import npattn
        >>> cache = npattn.PagedKVCache(4, 32, 1, 8)
        >>> cache.free(cache.add_sequence())
        >>> cache.free_pages
        4
        """
        self._store.remove_sequence(as_integer("sequence", sequence))

    @property
    def free_pages(self) -> int:
        """How many pages no sequence owns."""
        with self._reading:
            return self._store.free_pages


def _as_ids(sequences: Any) -> list[int]:
    """The ids as a list of integers; one id alone is a TypeError."""
    if not isinstance(sequences, (list, tuple, range)) and getattr(sequences, "ndim", 0) != 1:
        raise TypeError(f"sequences must be a list of ids, got {sequences!r}")
    ids = list(sequences)
    if all(type(number) is int for number in ids):
        return ids
    return [as_integer(f"sequences[{i}]", number) for i, number in enumerate(ids)]
