"""The forward pass of a layer: projections, heads as views, attention with or without a cache, output."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from . import _check
from . import _layer_parameters as parameters
from ._attention import scaled_dot_product_attention
from ._cache import KVCache
from ._cache_attend import attend
from ._cache_base import last_places, parse_counts
from ._layer_rope import Angles
from ._layer_state import LayerState
from ._matmul import linear

Array = NDArray[Any]


class LayerForward(LayerState):
    """What a `MultiHeadAttention` does when it is called."""

    def astype(self, dtype: DTypeLike) -> LayerForward:
        """The same layer with weights of another dtype."""
        raise NotImplementedError

    def __call__(
        self,
        x: ArrayLike,
        context: ArrayLike | None = None,
        *,
        attn_mask: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        is_causal: bool | None = None,
        query_offset: ArrayLike | None = None,
        kv_lengths: ArrayLike | None = None,
        window: tuple[int | None, int | None] | None = None,
        positions: ArrayLike | None = None,
        cache: KVCache | None = None,
        counts: ArrayLike | None = None,
        return_weights: bool = False,
        return_lse: bool = False,
        out: Array | None = None,
    ) -> Any:
        """Attend from ``x`` to itself, to ``context``, or to ``cache`` and itself.

        Parameters
        ----------
        x : array_like, (..., L, embed_dim)
            The batch axes (none, one, more) come first, then the sequence. A wider dtype than the layer's
            is computed in that dtype and converts the weights at each call; `astype` once is cheaper. Weights
            of int8 take any dtype as it is, float64 rounded to float32 where it is projected.
        context : array_like, (..., context_len, context_dim), optional
            Where keys and values come from; ``x`` if not given.
        attn_mask, bias, is_causal, query_offset, kv_lengths
            As in `scaled_dot_product_attention`, over (..., num_heads, L, context_len); True = attend.
            ``is_causal=None`` is False, with a cache True.
        window : (left, right), optional
            Instead of the layer's own; ``(None, None)`` lifts it.
        positions : integer array, (L,) or (..., L), optional
            Where the rows of ``x`` stand, for a layer with ``rope``; ``np.arange(L)`` if not given, with a
            cache counted on from its lengths. The rows of ``context`` always stand at 0, 1, 2, ...
        cache : KVCache, optional
            What this layer has seen of each sequence: one cache a layer, of its heads, widths and dtype. The
            keys and values of ``x`` (batch, L, embed_dim) are appended, and its rows attend as the last
            tokens of their sequences, over (batch, num_heads, L, largest length): a prompt at once or in
            chunks and then a token at a time give what one call over the whole gives. ``x`` (L, embed_dim)
            is one sequence. ``context``, ``query_offset`` and ``kv_lengths`` are errors beside it.
        counts : int or array_like of int, (batch,), optional
            With a cache: how many of the L rows are real, for each sequence, as in `KVCache.append`. The rest
            attend to nothing and are not appended.
        return_weights, return_lse : bool
            Also return the weights (..., num_heads, L, context_len), the log-sum-exp (..., num_heads, L).
        out : ndarray, optional
            (..., L, output_dim) of the result's dtype; may be ``x``.

        Returns
        -------
        ndarray, (..., L, output_dim), or a tuple of it with the weights and the lse, in this order.

        Raises
        ------
        TypeError, ValueError
            As `scaled_dot_product_attention`; for ``x``, ``context``, ``positions`` or ``cache`` that do not
            fit the layer or each other.
        RuntimeError
            If another thread is using the cache.

        Notes
        -----
        After an error the cache is as it was. Only if a call is interrupted, or finds no memory, when the
        tokens are appended already and a sliding window has let others go for them, they stay. Scalings that
        depend on the length in use (dynamic, longrope) turn each token by the length at its call.

        Examples
        --------
        >>> import numpy as np
        >>> import npattn
        >>> layer = npattn.MultiHeadAttention.random(64, num_heads=4, rng=0)
        >>> x = np.ones((2, 5, 64), np.float32)
        >>> y, weights = layer(x, np.ones((2, 9, 64), np.float32), kv_lengths=[9, 3], return_weights=True)
        >>> y.shape, weights.shape
        ((2, 5, 64), (2, 4, 5, 9))

        A prompt and a token after it:

        >>> cache = npattn.KVCache(2, layer.num_kv_heads, layer.head_dim)
        >>> prompt = layer(x[:, :4], cache=cache)
        >>> token = layer(x[:, 4:], cache=cache)
        >>> bool(np.allclose(token, layer(x, is_causal=True)[:, 4:], atol=1e-6)), cache.lengths
        (True, array([5, 5]))
        """
        x = parameters.sequence("x", x, self.embed_dim)
        options = {
            "attn_mask": attn_mask,
            "bias": bias,
            "return_weights": return_weights,
            "return_lse": return_lse,
            **(self._options if window is None else {**self._options, "window": window}),
        }
        if cache is not None:
            others = {"context": context, "query_offset": query_offset, "kv_lengths": kv_lengths}
            for name, given in others.items():
                if given is not None:
                    raise ValueError(f"{name} does not go with a cache: the rows of x attend to its tokens")
            causal = is_causal is None or _check.as_flag("is_causal", is_causal)
            return self._through(cache, x, counts, positions, out, is_causal=causal, **options)
        if counts is not None:
            raise ValueError("counts need a cache; kv_lengths says how many keys are real without one")
        if context is None and self.context_dim != self.embed_dim:
            raise ValueError(f"context is needed: keys and values are made of {self.context_dim} features")
        source = x if context is None else parameters.sequence("context", context, self.context_dim)
        dtype = self._result_dtype(x=x, context=source)
        layer = self._computing_in(dtype)
        x = x.astype(dtype, copy=False)
        source = x if context is None else source.astype(dtype, copy=False)
        rows = (*parameters.common_leading(x, source), x.shape[-2])
        if out is not None:
            _check.check_out(out, (*rows, self.output_dim), dtype)
        turns, source_turns = layer._angles(
            dtype, x.shape[-2], None if context is None else source.shape[-2], positions
        )

        query, key, value = layer._projected(x, source, turns, source_turns)
        merged = np.empty((*rows, self.num_heads * self.value_dim), dtype)
        attended = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=is_causal is not None and _check.as_flag("is_causal", is_causal),
            query_offset=query_offset,
            kv_lengths=kv_lengths,
            layout="BSHD",
            out=merged.reshape(*rows, self.num_heads, self.value_dim),
            **options,
        )
        result = linear(merged, layer._output, layer._bias_output, out=out)
        return (result, *attended[1:]) if return_weights or return_lse else result

    def _through(
        self, cache: KVCache, x: Array, counts: Any, positions: Any, out: Array | None, **options: Any
    ) -> Any:
        """Append the keys and values of x (batch, L, embed_dim) to the cache, attend as its last tokens.

        x (L, embed_dim) is the only sequence of its cache; the results have no batch axis then either.
        """
        dtype = self._result_dtype(x=x)
        parameters.check_cache(self, cache, x, dtype)
        if out is not None:
            _check.check_out(out, (*x.shape[:-1], self.output_dim), dtype)
        layer = self._computing_in(dtype)
        batch = (x[None] if x.ndim == 2 else x).astype(dtype, copy=False)
        rows = batch.shape[:2]
        real = parse_counts(counts, *rows)
        with cache._store.changing() as lengths:
            if self._rope is not None and positions is None:
                positions = self._rope.alike(last_places(lengths + real, real, rows[1]))
            turns, _ = layer._angles(dtype, rows[1], None, positions)
            query, key, value = (
                heads.swapaxes(1, 2) for heads in layer._projected(batch, batch, turns, turns)
            )
            merged = np.empty((*x.shape[:-1], self.num_heads * self.value_dim), dtype)
            attended = attend(
                cache,
                cache._slots,
                query,
                counts=counts,
                out=merged.reshape(*rows, self.num_heads, self.value_dim).swapaxes(1, 2),
                rope=cache._rope,
                append=lambda: cache._extend(*cache._tokens(key, value, rows[0]), real),
                **options,
            )
            result = linear(merged, layer._output, layer._bias_output, out=out)
        if not isinstance(attended, tuple):
            return result
        return (result, *(array[0] if x.ndim == 2 else array for array in attended[1:]))

    def _computing_in(self, dtype: np.dtype[Any]) -> LayerForward:
        """The layer whose weights multiply inputs of this dtype: int8 takes any."""
        return self if self.dtype in (dtype, _check.INT8) else self.astype(dtype)

    def _projected(
        self, x: Array, source: Array, turns: Angles | None, source_turns: Angles | None
    ) -> tuple[Array, Array, Array]:
        """Queries of x (..., L, Hq, E); keys (..., Lk, Hkv, E), values (..., Lk, Hkv, Ev) of the source."""
        angles = self._row_angles(x, turns)
        rotation = self._rotation(angles, self.num_heads, self._q_norm)
        query = linear(x, self._query, self._bias_query, rotation=rotation)
        if source is not x or source_turns is not turns:
            angles = self._row_angles(source, source_turns)
        rotation = self._rotation(angles, self.num_kv_heads, self._k_norm)
        key_value = linear(source, self._key_value, self._bias_key_value, rotation=rotation)
        columns = self.num_kv_heads * self.head_dim
        key, value = key_value[..., :columns], key_value[..., columns:]
        return (
            self._heads(query, self.num_heads, self._q_norm, turns),
            self._heads(key, self.num_kv_heads, self._k_norm, source_turns),
            value.reshape(*value.shape[:-1], self.num_kv_heads, self.value_dim),
        )
