"""What every public function asks of its arguments: dtypes, integers, output arrays."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
FLOAT16 = np.dtype(np.float16)
INT8 = np.dtype(np.int8)
FLOAT_NAMES = "float32, float64, float16 or bfloat16"
FLOAT_OR_INT8_NAMES = "float32, float64, float16, bfloat16 or int8"


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """True for ml_dtypes.bfloat16, recognised without importing ml_dtypes."""
    return dtype.itemsize == 2 and dtype.name == "bfloat16"  # a name takes long to make


def is_float(dtype: np.dtype[Any]) -> bool:
    """True for the four floating dtypes npattn computes with."""
    return dtype in (FLOAT32, FLOAT64, FLOAT16) or is_bfloat16(dtype)


def plain_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    """np.asarray(value), whatever its dtype; None and lists of unequal length are errors that name it."""
    if value is None:
        raise TypeError(f"{name} must be an array, got None")
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} cannot be made an array ({type(value).__name__}): {error}") from None


def as_array(name: str, value: Any, *, any_dtype: bool = False) -> np.ndarray[Any, Any]:
    """`value` as a plain ndarray in native byte order; floats keep their dtype, others become float64.

    Raises
    ------
    TypeError
        For None, masked arrays, np.matrix, and (unless `any_dtype`) dtypes that attention does not take.
    ValueError
        For nested sequences of unequal length.
    """
    if type(value) is np.ndarray and (value.dtype is FLOAT32 or value.dtype is FLOAT64):
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array; pass {name}.filled(0) and its mask as attn_mask (True = attend), "
            "or fill it yourself"
        )
    if isinstance(value, np.matrix):
        raise TypeError(f"{name} is a np.matrix; pass np.asarray({name})")
    array = plain_array(name, value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any_dtype or is_float(array.dtype):
        return array
    if array.dtype.kind in "biu":
        return array.astype(np.float64)
    advice = {
        "c": f"attention is not defined for complex numbers; pass {name}.real or their parts",
        "O": f"convert it with np.asarray({name}, dtype=np.float64)",
        "f": f"convert it with {name}.astype(np.float64)",
    }.get(array.dtype.kind, "convert it to a float array")
    raise TypeError(
        f"{name} has dtype {array.dtype}; expected float32, float64, float16, bfloat16, integers or bool: "
        f"{advice}"
    )


def halves_mix(*dtypes: np.dtype[Any]) -> bool:
    """True for float16 beside bfloat16."""
    return FLOAT16 in dtypes and any(map(is_bfloat16, dtypes))


def common_dtype(**arrays: Any) -> np.dtype[Any]:
    """The dtype of the result: np.result_type of the arrays; float16 with bfloat16 is a TypeError."""
    dtypes: set[np.dtype[Any]] = {array.dtype for array in arrays.values()}
    if len(dtypes) == 1:
        return dtypes.pop()
    if halves_mix(*dtypes):
        found = ", ".join(f"{name} {array.dtype}" for name, array in arrays.items())
        raise TypeError(f"float16 and bfloat16 do not mix ({found}); convert one of them with .astype")
    wide = [dtype for dtype in dtypes if not is_bfloat16(dtype)]
    return np.result_type(*wide) if wide else dtypes.pop()


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype computed in: float64 for float64, float32 for float32 and the half types."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def as_dtype(dtype: Any, expected: str = FLOAT_NAMES) -> np.dtype[Any]:
    """np.dtype(dtype); what is none of this machine is a TypeError that says what is `expected`."""
    if dtype is None:  # which NumPy takes for float64
        raise TypeError(f"dtype must be {expected}, got None")
    try:
        result: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        named = isinstance(dtype, str) and dtype == "bfloat16"
        hint = ", which NumPy knows after import ml_dtypes" if named else ""
        raise TypeError(f"dtype must be {expected}, got {dtype!r}{hint}") from None
    if not result.isnative:
        native = result.newbyteorder("=")
        raise TypeError(f"dtype must be {expected}, got {result}, in the other byte order: pass {native}")
    return result


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """A dtype that results can have: one of the four that npattn computes with, else a TypeError."""
    result = as_dtype(dtype)
    if not is_float(result):
        raise TypeError(f"dtype must be {FLOAT_NAMES}, got {result}")
    return result


def weight_dtype(dtype: Any) -> np.dtype[Any]:
    """A dtype that weights can be held in: one of the four, or int8 with scales; else a TypeError."""
    result = as_dtype(dtype, FLOAT_OR_INT8_NAMES)
    if result != INT8 and not is_float(result):
        raise TypeError(f"dtype must be {FLOAT_OR_INT8_NAMES}, got {result}")
    return result


def conversion(name: str, given: Any, dtype: str) -> str:
    """What makes `given` an array of this dtype, for a message."""
    return f"{name}.astype({dtype})" if isinstance(given, np.ndarray) else f"np.asarray({name}, {dtype})"


def as_int64(name: str, array: np.ndarray[Any, Any], advice: str = "") -> np.ndarray[Any, Any]:
    """A copy of an array of integers as int64; other dtypes are a TypeError, larger numbers a ValueError."""
    python = array.dtype == object and all(type(number) is int for number in array.flat)
    if array.size and (
        python or array.dtype == np.uint64
    ):  # numbers that NumPy has no dtype for, or may be large
        furthest = max(int(array.max()), int(array.min()), key=abs)
        if abs(furthest) > np.iinfo(np.int64).max:
            raise ValueError(f"{name} must be below 2**63, got {furthest}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got dtype {array.dtype}{advice}")
    return array.astype(np.int64)


def as_integer(name: str, value: Any, *, minimum: int | None = None) -> int:
    """`value` as an int; bool and floats are a TypeError, below `minimum` a ValueError."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def as_number(name: str, value: Any) -> float:
    """`value` as a float; bool, str and arrays are a TypeError, NaN and inf a ValueError."""
    if isinstance(value, (bool, str, bytes)) or np.ndim(value) != 0 or np.asarray(value).dtype.kind in "bcSU":
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})") from None
    if not np.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def as_flag(name: str, value: Any) -> bool:
    """`value` as a bool; anything but a bool is a TypeError."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """`out` itself if a result of this shape and dtype can be written to it.

    Raises
    ------
    TypeError
        If it is not an ndarray or has another dtype.
    ValueError
        If it has another shape, is read-only, or overlaps itself.
    """
    if not isinstance(out, np.ndarray) or isinstance(out, (np.ma.MaskedArray, np.matrix)):
        raise TypeError(f"out must be a numpy.ndarray, got {type(out).__name__}")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}; the result has {dtype}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; the result has {shape}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    repeats = 0 in out.strides and any(
        stride == 0 and size > 1 for stride, size in zip(out.strides, out.shape, strict=True)
    )
    if repeats and out.size:
        raise ValueError("out is a broadcast array: several of its elements share memory")
    return out


def writes_directly(
    out: np.ndarray[Any, Any], dtype: np.dtype[Any], *inputs: np.ndarray[Any, Any] | None
) -> bool:
    """True if a kernel computing in `dtype` may write `out`: same dtype, contiguous last axis, no overlap."""
    return (
        out.dtype == dtype
        and out.dtype.isnative
        and (out.ndim == 0 or out.shape[-1] <= 1 or out.strides[-1] == out.itemsize)
        and not any(array is not None and np.may_share_memory(out, array) for array in inputs)
    )
