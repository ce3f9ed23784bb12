"""The compiled core: it takes arrays whose shapes, dtypes and layouts the package has checked."""

from typing import Any

import numpy as np

_Array = np.ndarray[Any, Any]

__version__: str

def isa_available() -> list[str]: ...
def isa_active() -> str: ...
def isa_use(name: str, /) -> bool: ...
def cpu_features() -> list[str]: ...
def default_threads() -> int: ...
def openmp_limit() -> int: ...
def parallel_runtime() -> str: ...
def attention_plain(
    query: object,
    key: object,
    value: object,
    causal: bool,
    scale: object,
    swap: bool,
    out: object,
    threads: int,
    /,
) -> _Array | None: ...
def attention(
    query: _Array,
    key: _Array,
    value: _Array,
    out: _Array | None,
    lse: _Array | None,
    weights: _Array | None,
    mask: _Array | None,
    float_mask: _Array | None,
    bias: _Array | None,
    sinks: _Array | None,
    alibi_slopes: _Array | None,
    query_offset: _Array | None,
    kv_lengths: _Array | None,
    causal: bool,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    want_scores: bool,
    threads: int,
) -> None: ...
def varlen_attention(
    query: _Array,
    key: _Array,
    value: _Array,
    out: _Array,
    lse: _Array | None,
    query_starts: _Array,
    key_starts: _Array,
    query_offset: _Array | None,
    sinks: _Array | None,
    alibi_slopes: _Array | None,
    causal: bool,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    threads: int,
) -> None: ...

class PackedPanels:
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def nbytes(self) -> int: ...
    def unpack(self) -> _Array: ...

def pack_matrix(b: _Array, threads: int) -> PackedPanels: ...
def matmul(a: _Array, b: _Array, out: _Array, threads: int) -> None: ...
def matmul_packed(
    a: _Array, packed: PackedPanels, bias: _Array | None, out: _Array, threads: int
) -> None: ...
def softmax(x: _Array, mask: _Array | None, sinks: _Array | None, out: _Array, threads: int, /) -> None: ...
def log_softmax(x: _Array, out: _Array, threads: int, /) -> None: ...
def logsumexp(x: _Array, out: _Array, threads: int, /) -> None: ...
def rotary_embedding(
    x: _Array, cos: _Array, sin: _Array, out: _Array, interleaved: bool, inverse: bool, threads: int, /
) -> None: ...
def copy(source: _Array, destination: _Array, threads: int, /) -> None: ...
def measure_fma_peak(dtype_char: str, threads: int, seconds: float, /) -> float: ...
def measure_read_bandwidth(array: _Array, threads: int, repeats: int, /) -> float: ...
