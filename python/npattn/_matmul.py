"""Matrix products, and matrices packed once to be multiplied many times."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from npattn._check import (
    FLOAT32,
    FLOAT64,
    INT8,
    as_array,
    check_out,
    common_dtype,
    compute_dtype,
    float_dtype,
    weight_dtype,
)
from npattn._output import cast, converted, deliver, result_array, rounded, stored
from npattn._threads import _core, current

Array = np.ndarray[Any, Any]
# cos and sin (n, pairs) for the rows of a product, counted round; the width of a head; the columns of all
# heads; whether pairs are interleaved: see rotary_embedding.
Rotation = tuple[Array, Array, int, int, bool]

# Up to this depth a product is summed in scratch and rounded to a half type from there.
DEEPEST_ROUNDED = 1 << 16
DEEPEST_INT8 = 1 << 16  # its sums fit in 32 bits


class PackedMatrix:
    """A matrix (in, out) packed once for `matmul`: made by `pack_matrix`, immutable, shared between threads.

    Attributes
    ----------
    shape : (int, int)
    dtype : dtype
        What the matrix holds; it counts in `matmul` as an array of this dtype does, but int8, which leaves
        the dtype to the other operand.
    nbytes : int
        Memory held.
    ndim : int
        2.

    Raises
    ------
    AttributeError
        For setting or deleting an attribute.

    See Also
    --------
    pack_matrix : makes one.

    Notes
    -----
    np.asarray(packed) is the matrix again, a copy; of int8, its integers times their scales, in float32. A
    pickle holds plain arrays.

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> w = npattn.pack_matrix(np.eye(3, 5))
    >>> w
    PackedMatrix(shape=(3, 5), dtype=float64)
    >>> npattn.matmul(np.ones((1, 3)), w)
    array([[1., 1., 1., 0., 0.]])
    """

    __slots__ = ("_panels", "dtype")
    _panels: _core.PackedPanels | _core.PackedInt8
    dtype: np.dtype[Any]
    ndim = 2

    def __init__(self, panels: _core.PackedPanels | _core.PackedInt8, dtype: np.dtype[Any]) -> None:
        object.__setattr__(self, "_panels", panels)
        object.__setattr__(self, "dtype", dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"PackedMatrix is immutable: cannot set {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"PackedMatrix is immutable: cannot delete {name}")

    @property
    def shape(self) -> tuple[int, int]:
        return self._panels.shape

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("a PackedMatrix holds its elements in another order: an array of them is a copy")
        if isinstance(self._panels, _core.PackedInt8):
            q, scales = self._panels.unpack()
            return np.asarray(q * scales, dtype=dtype)
        return np.asarray(self._panels.unpack().view(self.dtype), dtype=dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._panels, _core.PackedInt8):
            return _pack_int8, self._panels.unpack()
        return pack_matrix, (np.asarray(self),)

    def __repr__(self) -> str:
        return f"PackedMatrix(shape={self.shape}, dtype={self.dtype})"


def pack_matrix(b: ArrayLike, *, dtype: DTypeLike | None = None) -> PackedMatrix:
    """Pack a matrix once, to multiply by it many times.

    Parameters
    ----------
    b : array_like, (in, out)
        Any strides. Copied: later changes to `b` do not show.
    dtype : dtype, optional
        float32, float64, float16 or bfloat16: what to hold it as, the half types in half the memory. Default
        its own (float64 for integers). int8: a quarter of the memory, see the notes.

    Returns
    -------
    PackedMatrix

    Raises
    ------
    TypeError
        For dtypes matmul does not take.
    ValueError
        If `b` is not 2-D; for int8, if it is not finite or has more than 65536 rows.

    Notes
    -----
    int8: column j is held as round(127 b_ij / m_j), m_j = max_i |b_ij|, with the scale m_j / 127. `matmul`
    brings each row of the other operand to int8 in the same way as it comes, multiplies in integers, exactly,
    and scales the sums. With n elements a row, an element of the result is off by at most
    (m_j sum_k |a_ik| + m_i sum_k |b_kj|) / 254 + n m_i m_j / 64516, m_i = max_k |a_ik|: for normal data about
    1 % of the norm of the result. One large element takes its row or column precision. A row that is not
    finite gives NaN.

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> w = npattn.pack_matrix(np.ones((3, 2), np.float32))
    >>> npattn.matmul(np.ones((4, 3), np.float32), w).shape
    (4, 2)
    """
    if isinstance(b, PackedMatrix):
        b = np.asarray(b)
    array = as_array("b", b)
    if array.ndim != 2:
        raise ValueError(f"b has shape {array.shape}; expected a matrix (in, out)")
    return packed_as("b", array, array.dtype if dtype is None else weight_dtype(dtype))


def packed_as(name: str, b: Array, dtype: np.dtype[Any]) -> PackedMatrix:
    """`pack_matrix` of a matrix that errors call `name`, to a dtype that weights can have."""
    if dtype == INT8:
        return _pack_int8(*_quantized(name, b))
    return PackedMatrix(_core.pack_matrix(stored(cast(b, dtype)), current()), dtype)


def _quantized(name: str, b: Array) -> tuple[Array, Array]:
    """(q, scales): b (in, out) as int8 and one float32 scale a column, b about q * scales."""
    if b.shape[0] > DEEPEST_INT8:
        raise ValueError(f"{name} has shape {b.shape}; int8 takes at most {DEEPEST_INT8} rows")
    values = rounded(b, FLOAT32)
    infinite = values.size - np.count_nonzero(np.isfinite(values))
    if infinite:
        raise ValueError(
            f"{name} has {infinite} elements that are not finite in float32; int8 needs finite ones"
        )
    largest = np.abs(values).max(axis=0, initial=0)
    enlarged = np.where(
        largest < 2.0**-100, np.float32(2.0**100), np.float32(1)
    )  # 127 / largest would overflow
    inverse = np.float32(127) / np.where(largest > 0, largest * enlarged, np.float32(1))
    return np.rint(values * enlarged * inverse).astype(np.int8), largest / np.float32(127)


def _pack_int8(q: Array, scales: Array) -> PackedMatrix:
    return PackedMatrix(_core.pack_int8(q, scales, current()), INT8)


def linear(
    x: Array,
    packed: PackedMatrix,
    bias: Array | None = None,
    *,
    out: Array | None = None,
    rotation: Rotation | None = None,
) -> Array:
    """X w + bias for x (..., L, in) and packed w (in, out) of one dtype; bias (out,) in the compute dtype.

    w of int8 takes x of any dtype, which is the result's; its bias is float32. ``rotation`` turns the heads
    in the first columns of each row of the result while they are in the cache.
    """
    shape = (*x.shape[:-1], packed.shape[1])
    operand = cast(x, FLOAT32) if packed.dtype == INT8 and x.dtype == FLOAT64 else x
    target = result_array(out, shape, _kept_in(operand.dtype, x.shape[-1]), x)
    if rotation is not None:
        cos, sin = (converted(table, compute_dtype(target.dtype)) for table in rotation[:2])
        rotation = cos, sin, *rotation[2:]
    _multiply_packed(operand, packed, bias, target, rotation)
    return deliver(target, out, x.dtype)


def _multiply_packed(
    x: Array, packed: PackedMatrix, bias: Array | None, target: Array, rotation: Rotation | None = None
) -> None:
    """target (..., n, m) = x (..., n, k) packed (k, m) + bias (m,): one big product where it can be one."""
    panels = packed._panels
    if isinstance(panels, _core.PackedInt8) and x.strides[-1] != x.itemsize:
        x = np.ascontiguousarray(x)
    flat_x, flat_target = _flatten(x), _flatten(target)
    if flat_x is None or flat_target is None:
        flat_x, flat_target = x, target
    if isinstance(panels, _core.PackedInt8):
        _core.matmul_int8(stored(flat_x), panels, bias, stored(flat_target), current(), rotation)
    else:
        _core.matmul_packed(stored(flat_x), panels, bias, stored(flat_target), current(), rotation)


def _kept_in(result: np.dtype[Any], depth: int) -> np.dtype[Any]:
    """The dtype of the array a product is computed into: sums of very many depths do not fit in scratch."""
    return result if depth <= DEEPEST_ROUNDED else compute_dtype(result)


def _operand(array: Array, compute: np.dtype[Any]) -> Array:
    """`array` as products in `compute` read it: the half types are widened on the way."""
    keeps = array.dtype == compute or (compute == FLOAT32 and array.dtype.itemsize == 2)
    return array if keeps else cast(array, compute)


def _flatten(array: Array) -> Array | None:
    """(..., L, E) as a view (rows, E), or None where the strides do not allow one."""
    if array.ndim == 2:
        return array
    axes = zip(array.shape[:-1], array.strides[:-1], strict=True)
    rows = [(size, stride) for size, stride in axes if size != 1]
    for (_, outer), (size, inner) in pairwise(rows):
        if outer != size * inner:
            return None
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def matmul(
    a: ArrayLike,
    b: ArrayLike | PackedMatrix,
    *,
    dtype: DTypeLike | None = None,
    out: NDArray[Any] | None = None,
) -> Any:
    """Matrix product with the shapes of `numpy.matmul`.

    Parameters
    ----------
    a : array_like, (..., n, k) or (k,)
    b : array_like or PackedMatrix, (..., k, m) or (k,)
        Leading axes of both broadcast; a 1-D operand is a row or a column, dropped from the result.
    dtype : dtype, optional
        The dtype of the result and the products; default np.result_type(a, b). Integers and bool are computed
        in float64.
    out : ndarray, optional
        Where the result goes; exact shape and dtype, any strides, may overlap the operands.

    Returns
    -------
    ndarray, (..., n, m)

    Raises
    ------
    TypeError
        For dtypes that do not fit, float16 with bfloat16 among them.
    ValueError
        For shapes that do not chain, 0-d operands, or an `out` that does not fit.

    Notes
    -----
    The bits do not depend on the number of threads. With a `PackedMatrix` each element sums its products in
    order, k = 0, 1, ..., in blocks of 256 (bfloat16: 512). A few rows times an array whose columns are
    contiguous, as in ``x @ w.T``, are summed in the lanes of registers: the array is read as it lies.

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> npattn.matmul(np.arange(6.0).reshape(2, 3), np.ones((3, 2)))
    array([[ 3.,  3.],
           [12., 12.]])
    """
    left = as_array("a", a)
    right = b if isinstance(b, PackedMatrix) else as_array("b", b)
    if left.ndim == 0 or right.ndim == 0:
        raise ValueError("matmul does not take 0-d operands; multiply with *")
    int8 = right.dtype == INT8  # a packed matrix: arrays of integers have become float64
    common = left.dtype if int8 else common_dtype(a=left, b=right)
    result = common if dtype is None else float_dtype(dtype)
    compute = FLOAT32 if int8 else compute_dtype(result)
    x = left[None] if left.ndim == 1 else left
    if x.shape[-1] != right.shape[-2 if right.ndim > 1 else 0]:
        raise ValueError(
            f"matmul: a {left.shape} has {x.shape[-1]} columns, b {right.shape} another number of rows"
        )
    x = _operand(x, compute)
    if isinstance(right, PackedMatrix):
        if not int8 and compute_dtype(right.dtype) != compute:  # float64 meets another
            right = pack_matrix(right, dtype=compute)
        columns, y = right.shape[1], None
        leading = x.shape[:-2]
    else:
        y = _operand(right[:, None] if right.ndim == 1 else right, compute)
        columns = y.shape[-1]
        try:
            leading = np.broadcast_shapes(x.shape[:-2], y.shape[:-2]) if y.ndim > 2 else x.shape[:-2]
        except ValueError:
            message = f"matmul: the leading axes of a {left.shape} and b {right.shape} do not broadcast"
            raise ValueError(message) from None
    shape = (*leading, x.shape[-2], columns)
    final = (*leading, *(() if left.ndim == 1 else shape[-2:-1]), *(() if right.ndim == 1 else shape[-1:]))
    originals = (left, right if isinstance(right, np.ndarray) else None)
    if out is not None:
        check_out(out, final, result)
    kept = compute if int8 and result == FLOAT64 else _kept_in(result, x.shape[-1])
    target = result_array(out if final == shape else None, shape, kept, *originals)
    if isinstance(right, PackedMatrix):
        _multiply_packed(x, right, None, target)
    else:
        assert y is not None
        _multiply(x, y, target)
    value = deliver(target if target is out else target.reshape(final), out, result)
    return value if final or out is not None else value[()]


def _multiply(x: Array, y: Array, target: Array) -> None:
    """target (..., n, m) = x (..., n, k) y (..., k, m): one big product where y is a single matrix."""
    if y.ndim == 2 and x.ndim > 2:
        flat_x, flat_target = _flatten(x), _flatten(target)
        if flat_x is not None and flat_target is not None:
            x, target = flat_x, flat_target
    if target.ndim > 2:
        leading = target.shape[:-2]
        x = np.broadcast_to(x, (*leading, *x.shape[-2:]))
        y = np.broadcast_to(y, (*leading, *y.shape[-2:]))
    _core.matmul(stored(x), stored(y), stored(target), current())
