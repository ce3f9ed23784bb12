"""The multi-head attention layer: projections packed once, heads as views, no merge pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from . import _check
from . import _layer_parameters as parameters
from ._attention import scaled_dot_product_attention
from ._layer_forward import LayerForward
from ._layer_rope import RotaryPositions
from ._matmul import packed_as
from ._output import cast

Array = NDArray[Any]


class MultiHeadAttention(LayerForward):
    """Multi-head attention with its four projections, for self and for cross attention.

    ``softmax(q k^T / sqrt(head_dim)) v`` per head, the heads side by side, times ``w_o``
    (Vaswani et al. 2017, section 3.2.2). Weights are packed once; a layer is immutable and may be
    called from many threads.

    Parameters
    ----------
    w_q : array_like, (embed_dim, num_heads * head_dim)
        Weights are stored (in, out): ``y = x @ w + b``. ``head_dim`` is ``w_q.shape[1] // num_heads``,
        whatever the embedding's width.
    w_k, w_v : array_like, (context_dim, num_kv_heads * head_dim), (context_dim, num_kv_heads * value_dim)
    w_o : array_like, (num_heads * value_dim, output_dim)
    num_heads : int
    num_kv_heads : int, optional
        A divisor of ``num_heads``, which is the default; query head h reads kv head
        ``h // (num_heads // num_kv_heads)``.
    b_q, b_k, b_v, b_o : array_like, optional
        One bias per output of the projection.
    rope : dict, optional
        Rotary positions for queries and keys: keywords of `apply_rope` (base, interleaved, rotary_dim,
        scaling, sections); ``{}`` is the standard rotation.
    q_norm, k_norm : array_like, optional
        RMS norm weights, applied before the rotation: (head_dim,) normalises each head,
        (num_heads * head_dim,) the whole projection (num_kv_heads for ``k_norm``).
    norm_eps : float
    scale, softcap, sinks, alibi_slopes, window
        As in `scaled_dot_product_attention`.

    Attributes
    ----------
    embed_dim, context_dim, output_dim, num_heads, num_kv_heads, head_dim, value_dim : int
    dtype : numpy.dtype
        Of the weights. Results are of the wider of it and the input's; int8 (see `astype`) leaves that to the
        input.

    Raises
    ------
    ValueError
        Shapes or head counts that do not fit; the message names the argument.
    TypeError
        Weights that are not real numbers.

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> layer = npattn.MultiHeadAttention.random(64, num_heads=4, rng=0)
    >>> x = np.ones((2, 5, 64), np.float32)             # batch, sequence, embedding
    >>> layer(x, is_causal=True).shape
    (2, 5, 64)
    """

    def __init__(
        self,
        w_q: ArrayLike,
        w_k: ArrayLike,
        w_v: ArrayLike,
        w_o: ArrayLike,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None,
        b_v: ArrayLike | None = None,
        b_o: ArrayLike | None = None,
        rope: Mapping[str, Any] | None = None,
        q_norm: ArrayLike | None = None,
        k_norm: ArrayLike | None = None,
        norm_eps: float = 1e-6,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: ArrayLike | None = None,
        alibi_slopes: ArrayLike | None = None,
        window: tuple[int | None, int | None] | None = None,
    ) -> None:
        num_heads, num_kv_heads = parameters.head_counts(num_heads, num_kv_heads)
        query = parameters.parameter("w_q", w_q, (None, None))
        head_dim = parameters.per_head("w_q.shape[1]", query.shape[1], "num_heads", num_heads)
        key = parameters.parameter("w_k", w_k, (None, num_kv_heads * head_dim))
        value = parameters.parameter("w_v", w_v, (key.shape[0], None))
        value_dim = parameters.per_head("w_v.shape[1]", value.shape[1], "num_kv_heads", num_kv_heads)
        output = parameters.parameter("w_o", w_o, (num_heads * value_dim, None))
        dtype = _check.common_dtype(w_q=query, w_k=key, w_v=value, w_o=output)

        compute = _check.compute_dtype(dtype)
        key_value = np.concatenate([key, value], axis=1)

        def vector(name: str, given: ArrayLike | None, *lengths: int) -> Array | None:
            if given is None:
                return None
            array = _check.as_array(name, given)
            length = lengths[0] if array.shape == (lengths[0],) else lengths[-1]
            return parameters.parameter(name, array, (length,)).astype(compute)

        def option(name: str, given: ArrayLike | None) -> Array | None:
            return None if given is None else _check.as_array(name, given).copy()

        key_bias, value_bias = vector("b_k", b_k, key.shape[1]), vector("b_v", b_v, value.shape[1])
        if key_bias is None and value_bias is not None:
            key_bias = np.zeros(key.shape[1], compute)
        if value_bias is None and key_bias is not None:
            value_bias = np.zeros(value.shape[1], compute)
        self.__dict__.update(
            embed_dim=query.shape[0],
            context_dim=key.shape[0],
            output_dim=output.shape[1],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=dtype,
            # The query has its own matrix, key and value share one: the same two serve self and cross
            # attention, with the same bits.
            _query=packed_as("w_q", query, dtype),
            _key_value=packed_as("w_k and w_v", key_value, dtype),
            _output=packed_as("w_o", output, dtype),
            _bias_query=vector("b_q", b_q, query.shape[1]),
            _bias_key_value=None if key_bias is None else np.concatenate([key_bias, value_bias]),
            _bias_output=vector("b_o", b_o, output.shape[1]),
            _q_norm=vector("q_norm", q_norm, head_dim, query.shape[1]),
            _k_norm=vector("k_norm", k_norm, head_dim, key.shape[1]),
            _norm_eps=parameters.positive("norm_eps", norm_eps),
            _rope=None if rope is None else RotaryPositions(rope, head_dim),
            _options={
                "scale": scale,
                "softcap": softcap,
                "sinks": option("sinks", sinks),
                "alibi_slopes": option("alibi_slopes", alibi_slopes),
                "window": window,
            },
        )
        self._check_options()

    def _check_options(self) -> None:
        """One query and one key: an option that attention refuses is refused now, not at the first call."""
        slopes, dtype = self._options["alibi_slopes"], _check.compute_dtype(self.dtype)
        leading = () if slopes is None else slopes.shape[:-1]
        one_query = np.zeros((*leading, self.num_heads, 1, self.head_dim), dtype)
        one_key = np.zeros((self.num_kv_heads, 1, self.head_dim), dtype)
        scaled_dot_product_attention(one_query, one_key, one_key, **self._options)

    @classmethod
    def random(
        cls,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        rope: Mapping[str, Any] | None = None,
        rng: np.random.Generator | int | None = None,
        dtype: DTypeLike = np.float32,
    ) -> MultiHeadAttention:
        """A layer with untrained weights, uniform within ``sqrt(6 / (in + out))`` (Glorot and Bengio 2010).

        Biases are uniform within ``1 / sqrt(in)``.

        Parameters
        ----------
        embed_dim : int
            The width of inputs and outputs, a multiple of ``num_heads``.
        num_heads, num_kv_heads, rope
            As in `MultiHeadAttention`.
        bias : bool
            Whether the four projections have biases.
        rng : numpy.random.Generator or int, optional
            Where chance comes from. The same seed gives the same layer; None a new one each time.
        dtype : dtype
            float32, float64, float16, bfloat16 or int8.

        Returns
        -------
        MultiHeadAttention

        Raises
        ------
        TypeError, ValueError
            For arguments that are not of these kinds, or widths and heads that do not fit.

        Examples
        --------
        >>> import npattn
        >>> npattn.MultiHeadAttention.random(512, 8, num_kv_heads=2, rng=0).head_dim
        64
        """
        num_heads, num_kv_heads = parameters.head_counts(num_heads, num_kv_heads)
        embed_dim = _check.as_integer("embed_dim", embed_dim, minimum=1)
        kv_dim = parameters.per_head("embed_dim", embed_dim, "num_heads", num_heads) * num_kv_heads
        kept = _check.weight_dtype(dtype)
        made = _check.FLOAT32 if kept == _check.INT8 else kept
        arrays = parameters.random_parameters(embed_dim, kv_dim, bias, rng, made)
        layer = cls(**arrays, num_heads=num_heads, num_kv_heads=num_kv_heads, rope=rope)
        return layer.astype(kept)

    @classmethod
    def from_torch(
        cls, state_dict: Mapping[str, Any], num_heads: int, *, prefix: str = ""
    ) -> MultiHeadAttention:
        """The layer that a ``torch.nn.MultiheadAttention`` with this ``state_dict`` is.

        Parameters
        ----------
        state_dict : mapping of str to array_like or tensor
            in_proj_weight, or q_proj_weight, k_proj_weight and v_proj_weight; in_proj_bias;
            out_proj.weight; out_proj.bias. torch keeps weights (out, in); they are transposed here. The layer
            has the dtype of the weights: bfloat16 tensors need ml_dtypes.
        num_heads : int
        prefix : str
            What stands before the names, e.g. ``"encoder.layers.0.self_attn."``.

        Returns
        -------
        MultiHeadAttention

        Raises
        ------
        TypeError
            ``state_dict`` is no mapping, ``prefix`` no str, or a weight no array of numbers, or bfloat16
            without ml_dtypes.
        ValueError
            A weight is missing or of the wrong shape, or there is a ``bias_k`` or ``bias_v`` (one more key
            and value in torch).

        Examples
        --------
        >>> import numpy as np
        >>> import npattn
        >>> state = {"in_proj_weight": np.ones((24, 8)), "out_proj.weight": np.ones((8, 8))}
        >>> npattn.MultiHeadAttention.from_torch(state, 2).head_dim
        4
        """
        return cls(**parameters.torch_parameters(state_dict, prefix), num_heads=num_heads)

    def astype(self, dtype: DTypeLike) -> MultiHeadAttention:
        """The same layer with weights of another dtype.

        Parameters
        ----------
        dtype : dtype
            float32, float64, float16, bfloat16, or int8: a quarter of the memory of float32.

        Returns
        -------
        MultiHeadAttention
            The layer itself if it has that dtype.

        Raises
        ------
        TypeError
            For another dtype.
        ValueError
            For int8, if a weight is not finite in float32 or has more than 65536 rows.

        Notes
        -----
        A number beyond the range of the new dtype becomes infinite, with NumPy's warning of an overflow.

        int8 holds each of the four projections as `pack_matrix` does, with a scale for each of its columns;
        biases and norms become float32. Inputs are rounded to int8 row by row as they are projected; between
        the projections all is of the input's dtype. From int8 to a floating dtype the weights are the
        integers times their scales: what was rounded off does not come back.

        Examples
        --------
        >>> import numpy as np
        >>> import npattn
        >>> layer = npattn.MultiHeadAttention.random(64, 4)
        >>> layer.astype("float64").dtype
        dtype('float64')
        >>> layer.astype(np.int8)(np.ones((5, 64), np.float32)).dtype
        dtype('float32')
        """
        dtype = _check.weight_dtype(dtype)
        if dtype == self.dtype:
            return self
        held = _check.FLOAT32 if dtype == _check.INT8 else dtype

        def vector(array: Array | None) -> Array | None:
            return None if array is None else cast(cast(array, held), _check.compute_dtype(held))

        layer = object.__new__(type(self))
        layer.__dict__.update(
            self.__dict__,
            dtype=dtype,
            _query=packed_as("w_q", np.asarray(self._query), dtype),
            _key_value=packed_as("w_k and w_v", np.asarray(self._key_value), dtype),
            _output=packed_as("w_o", np.asarray(self._output), dtype),
            _bias_query=vector(self._bias_query),
            _bias_key_value=vector(self._bias_key_value),
            _bias_output=vector(self._bias_output),
            _q_norm=vector(self._q_norm),
            _k_norm=vector(self._k_norm),
        )
        layer._check_options()
        return layer
