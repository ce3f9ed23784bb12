"""The key and value cache of a batch of sequences that grow together or raggedly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from npattn._cache_attend import attend
from npattn._cache_base import Array, Indices, parse_counts
from npattn._cache_state import KVCacheState
from npattn._check import plain_array
from npattn._inputs import Layout
from npattn._masks import integers, shown
from npattn._threads import current


class KVCache(KVCacheState):
    """The keys and values of the tokens a model has seen, to which new queries attend.

    It stores what the kernels read, so that a step packs nothing. Sequences may differ in length.
    ``len(cache)`` is the largest length, so that an empty cache is false: ask ``cache is None``, not
    ``if cache``.

    Parameters
    ----------
    batch : int
        The number of sequences.
    num_kv_heads, head_dim : int
        Of the keys.
    value_dim : int, optional
        The width of the values; default `head_dim`.
    capacity : int, optional
        The tokens a sequence may hold, memory for which is taken at once. Default: it grows.
    sliding_window : int, optional
        Each query sees itself and the ``sliding_window - 1`` tokens before it, and older ones are let go.
        Positions stay absolute. The tokens of one append are kept until the next, so that each of them as a
        query sees what it should.
    sink_tokens : int
        With a sliding window: so many tokens at the beginning of a sequence stay, and stay visible.
    rope : dict, optional
        Keywords of `apply_rope` (base, interleaved, rotary_dim, scaling, sections): `append` turns the keys
        and `attend` the queries to their positions. Scalings that depend on the length in use (dynamic,
        longrope) take that of a call's largest position, in whichever sequence.
    dtype : dtype
        float32, float64, float16, bfloat16 (of ml_dtypes) or int8.

    Attributes
    ----------
    batch, num_kv_heads, head_dim, value_dim : int
    capacity, sliding_window : int or None
    sink_tokens : int
    dtype : numpy.dtype
        What it was made with; all attributes are read-only.
    lengths : ndarray of int64, (batch,)
        The tokens that each sequence has seen; a copy.
    keys : ndarray, (batch, num_kv_heads, largest length, head_dim)
    values : ndarray, (batch, num_kv_heads, largest length, value_dim)
        Copies in plain order, zeros where no token is held; of the cache's dtype, for int8 float32.
    nbytes : int
        The memory it has taken: pages, in use or free, and the tables that say whose they are.

    Raises
    ------
    TypeError, ValueError
        For sizes that are no positive integers, a dtype that is none of those, and settings that contradict
        each other.
    MemoryError
        If there is not so much memory as a `capacity` takes at once.

    Notes
    -----
    Memory is held in pages of 64 tokens of all heads. Rows that `reorder` duplicates share their pages until
    one of them is appended to. Any number of threads may read a cache at once; a call that changes it while
    another call is at work, or the other way round, is a RuntimeError and changes nothing. The sinks beside a
    window are those of Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks".

    int8 has a scale for each token and head, ``max(abs(x)) / 127``, and a whole number of it in place of each
    x; a token that is not finite becomes NaN. Where few queries share a head (up to 4; 96 where the CPU
    multiplies such integers, instruction sets "avx512bf16" and "avx512amx"), these are rounded to integers
    too, up to 16256 for the largest element of a query, and so are the weights of 256 keys times the scales
    of their values: on normal data that changes the output by 2e-4 of its norm, the rounding of the tokens by
    1e-2.

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> rng = np.random.default_rng(0)
    >>> cache = npattn.KVCache(1, num_kv_heads=2, head_dim=64)
    >>> for tokens in (5, 1, 1):  # a prompt, then a token at a time
    ...     query = rng.standard_normal((1, 8, tokens, 64), dtype=np.float32)
    ...     key, value = rng.standard_normal((2, 1, 2, tokens, 64), dtype=np.float32)
    ...     cache.append(key, value)
    ...     output = cache.attend(query)
    >>> cache.lengths, output.shape
    (array([7]), (1, 8, 1, 64))
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        capacity: int | None = None,
        sliding_window: int | None = None,
        sink_tokens: int = 0,
        rope: Mapping[str, Any] | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self._configure(
            batch=batch,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            capacity=capacity,
            sliding_window=sliding_window,
            sink_tokens=sink_tokens,
            rope=rope,
            dtype=dtype,
        )
        self._create()

    def append(self, key: ArrayLike, value: ArrayLike, *, counts: ArrayLike | None = None) -> None:
        """Add tokens to the end of each sequence, copied.

        Parameters
        ----------
        key : array_like, (batch, num_kv_heads, n, head_dim)
            Any strides. float32 and float64 caches take their own dtype, all others float32, float16 and
            bfloat16, which they round once (with `rope` after turning); what is beyond the range of a half
            type becomes infinite, with NumPy's warning of an overflow.
        value : array_like, (batch, num_kv_heads, n, value_dim)
        counts : int or array_like of int, (batch,), optional
            How many of the n tokens are real, for each sequence; the others are not looked at. Default: all.

        Returns
        -------
        None

        Raises
        ------
        TypeError
            For a dtype that the cache does not take.
        ValueError
            For shapes and counts that do not fit, and tokens beyond the capacity.
        MemoryError
            If there is no memory for the tokens.
        RuntimeError
            If another thread is using the cache.

        Notes
        -----
        It takes time in proportion to the tokens added, whatever the length. After an error the cache is as
        it was.

        Examples
        --------
        >>> import numpy as np
        >>> import npattn
        >>> cache = npattn.KVCache(2, 1, 4)
        >>> cache.append(np.ones((2, 1, 3, 4), np.float32), np.ones((2, 1, 3, 4), np.float32), counts=[3, 1])
        >>> cache.lengths
        array([3, 1])
        """
        if self._rope is None and self._store.append_plain(None, key, value, counts, current()):
            return
        keys, values = self._tokens(key, value, self.batch)
        real = parse_counts(counts, self.batch, keys.shape[2])
        with self._writing:
            self._extend(keys, values, real)

    def attend(
        self,
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
        """Attention of the last tokens, as queries, over the tokens of their sequences.

        Row i of sequence b stands at ``lengths[b] - counts[b] + i``.

        Parameters
        ----------
        query : array_like, (batch, Hq, n, head_dim)
            Of the last n tokens appended. Hq is a multiple of num_kv_heads; query head h reads key head
            ``h // (Hq // num_kv_heads)``.
        counts : int or array_like of int, (batch,), optional
            As in `append`: how many of the n rows are real, for each sequence. Default: all.
        is_causal : bool
            Whether a query sees no token behind its own place. If not, and no other option asks where queries
            stand (window, alibi_slopes, rope, a sliding window), there may be more queries than tokens: as in
            attention to the tokens of another text.
        attn_mask, bias : array_like, optional
            As in `scaled_dot_product_attention`, broadcast to (batch, Hq, n, largest length).
        window, scale, softcap, sinks, alibi_slopes
            As in `scaled_dot_product_attention`. With a sliding window a key must be in both windows, so that
            a narrower window of some queries need not see what is let go.
        layout : {"BHSD", "BSHD"}
            BSHD: query, out and output are (batch, n, Hq, ...).
        out : ndarray, (batch, Hq, n, value_dim), optional
            Where the output goes; of the query's dtype, any strides, may overlap the query.
        return_weights, return_lse : bool
            Return the weights too, and the log of the sum of exp(scores), sink included.

        Returns
        -------
        output : ndarray, (batch, Hq, n, value_dim)
            In the query's dtype. Rows at or past the sequence's count are zeros.
        weights : ndarray, (batch, Hq, n, largest length)
            If asked for.
        lse : ndarray, (batch, Hq, n)
            If asked for; -inf for rows at or past the count.

        Raises
        ------
        TypeError
            For dtypes that do not fit: a float64 query of a cache that is not, float16 with bfloat16.
        ValueError
            For shapes and options that do not fit, more queries than tokens, and queries that see tokens
            which the sliding window has let go.
        RuntimeError
            If another thread is changing the cache.

        Examples
        --------
        >>> import numpy as np
        >>> import npattn
        >>> cache = npattn.KVCache(1, 1, 2)
        >>> cache.append(np.zeros((1, 1, 2, 2), np.float32), np.array([[[[1, 2], [3, 4]]]], np.float32))
        >>> cache.attend(np.zeros((1, 1, 2, 2), np.float32))
        array([[[[1., 2.],
                 [2., 3.]]]], dtype=float32)
        """
        options = (counts, attn_mask, bias, window, scale, softcap, sinks, alibi_slopes, out, self._rope)
        output = self._attend_plain(None, query, options, is_causal, layout, return_weights, return_lse)
        if output is not None:
            return output
        with self._reading:
            return attend(
                self,
                self._slots,
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
                rope=self._rope,
            )

    @property
    def lengths(self) -> Indices:
        """The tokens that each sequence has seen, (batch,)."""
        with self._reading:
            return self._store.lengths(self._slots)

    @property
    def keys(self) -> Array:
        """A copy, (batch, num_kv_heads, largest length, head_dim), as turned; zeros where none is held.

        Of the cache's dtype, for int8 float32.
        """
        with self._reading:
            return self._store.keys(self._slots, current())

    @property
    def values(self) -> Array:
        """A copy, (batch, num_kv_heads, largest length, value_dim), as `keys`."""
        with self._reading:
            return self._store.values(self._slots, current())

    def __len__(self) -> int:
        """The largest length; 0, and the cache false, where there are no tokens."""
        return int(self.lengths.max(initial=0))

    def crop(self, lengths: ArrayLike) -> None:
        """Keep the first tokens of each sequence only, to take back what was appended last.

        Parameters
        ----------
        lengths : int or array_like of int, (batch,)
            How many to keep, from 0 to as many as there are.

        Returns
        -------
        None

        Raises
        ------
        ValueError
            For lengths out of range, and with a sliding window where a token is gone that the last one kept
            would see. The cache is then as it was.

        Examples
        --------
        >>> import numpy as np
        >>> import npattn
        >>> cache = npattn.KVCache(2, 1, 4)
        >>> cache.append(np.ones((2, 1, 5, 4), np.float32), np.ones((2, 1, 5, 4), np.float32))
        >>> cache.crop([2, 0])
        >>> cache.lengths
        array([2, 0])
        """
        kept = integers("lengths", lengths, (self.batch,), "the sequences")
        with self._writing:
            refused = self._store.crop(self._slots, kept)
            if refused >= 0:
                raise self._crop_error(refused, int(kept[refused]))

    def reorder(self, indices: ArrayLike) -> None:
        """Make sequence i what sequence ``indices[i]`` was; several may continue one, as in a beam search.

        Parameters
        ----------
        indices : array_like of int, (batch,)
            From 0 to batch - 1.

        Returns
        -------
        None

        Raises
        ------
        ValueError
            For indices out of range, or not one for each sequence.

        Examples
        --------
        >>> import numpy as np
        >>> import npattn
        >>> cache = npattn.KVCache(2, 1, 4)
        >>> cache.append(np.ones((2, 1, 5, 4), np.float32), np.ones((2, 1, 5, 4), np.float32), counts=[5, 3])
        >>> cache.reorder([1, 1])
        >>> cache.lengths
        array([3, 3])
        """
        given = plain_array("indices", indices).shape
        if given != (self.batch,):
            raise ValueError(f"indices has shape {given}; expected one for each sequence, ({self.batch},)")
        sources = integers("indices", indices, (self.batch,), "the sequences")
        for index in sources[(sources < 0) | (sources >= self.batch)]:
            raise ValueError(f"indices must lie in 0..{self.batch - 1}, got {shown(index)}")
        with self._writing:
            self._store.reorder(sources)

    def copy(self) -> KVCache:
        """A cache with the same tokens, in memory of its own: the fork of a conversation.

        Returns
        -------
        KVCache

        Examples
        --------
        >>> import numpy as np
        >>> import npattn
        >>> cache = npattn.KVCache(1, 1, 4)
        >>> fork = cache.copy()
        >>> fork.append(np.ones((1, 1, 2, 4), np.float32), np.ones((1, 1, 2, 4), np.float32))
        >>> len(cache), len(fork)
        (0, 2)
        """
        with self._reading:
            store = self._store.copy()
        fork = object.__new__(type(self))
        fork.__dict__.update(self.__dict__)
        fork._store = store
        return fork

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        return self.copy()
