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
    def nbytes(self) -> int: ...
    def unpack(self) -> _Array: ...

class PackedInt8:
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...
    def unpack(self) -> tuple[_Array, _Array]: ...

def pack_int8(q: _Array, scales: _Array, threads: int, /) -> PackedInt8: ...
def matmul_int8(
    a: _Array,
    packed: PackedInt8,
    bias: _Array | None,
    out: _Array,
    threads: int,
    rotation: tuple[_Array, _Array, int, int, bool] | None = None,
) -> None: ...
def pack_matrix(b: _Array, threads: int) -> PackedPanels: ...
def matmul(a: _Array, b: _Array, out: _Array, threads: int) -> None: ...
def matmul_packed(
    a: _Array,
    packed: PackedPanels,
    bias: _Array | None,
    out: _Array,
    threads: int,
    rotation: tuple[_Array, _Array, int, int, bool] | None = None,
) -> None: ...
def softmax(x: _Array, mask: _Array | None, sinks: _Array | None, out: _Array, threads: int, /) -> None: ...
def log_softmax(x: _Array, out: _Array, threads: int, /) -> None: ...
def logsumexp(x: _Array, out: _Array, threads: int, /) -> None: ...
def rotary_embedding(
    x: _Array, cos: _Array, sin: _Array, out: _Array, interleaved: bool, inverse: bool, threads: int, /
) -> None: ...
def copy(source: _Array, destination: _Array, threads: int, /) -> None: ...
def narrow(source: _Array, destination: _Array, threads: int, /) -> None: ...
def measure_fma_peak(dtype_char: str, threads: int, seconds: float, /) -> float: ...
def measure_read_bandwidth(array: _Array, threads: int, repeats: int, /) -> float: ...

class StoreAccess:
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...

class StoreChange:
    def __enter__(self) -> _Array: ...
    def __exit__(self, *error: object) -> None: ...

class KVStore:
    def __init__(
        self,
        sequences: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        page_keys: int,
        dtype: np.dtype[Any],
        fixed_pages: int,
        capacity: int,
        sliding_window: int,
        sink_tokens: int,
    ) -> None: ...
    @staticmethod
    def restore(
        keys: _Array,
        values: _Array,
        tables: list[list[int]],
        lengths: list[int],
        firsts: list[int],
        fixed_pages: int,
        capacity: int,
        sliding_window: int,
        sink_tokens: int,
        key_scales: _Array | None = None,
        value_scales: _Array | None = None,
    ) -> KVStore: ...
    def reading(self) -> StoreAccess: ...
    def writing(self) -> StoreAccess: ...
    def changing(self) -> StoreChange: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def free_pages(self) -> int: ...
    def append_plain(
        self, sequences: list[int] | None, key: object, value: object, counts: object, threads: int, /
    ) -> bool: ...
    def append(
        self, slots: _Array, key: _Array, value: _Array, counts: _Array, may_overflow: bool, threads: int, /
    ) -> int: ...
    def attend_plain(
        self, sequences: list[int] | None, query: object, options: tuple[object, ...], threads: int, /
    ) -> _Array | None: ...
    def attend(
        self,
        slots: _Array,
        query: _Array,
        out: _Array,
        lse: _Array | None,
        weights: _Array | None,
        mask: _Array | None,
        float_mask: _Array | None,
        bias: _Array | None,
        sinks: _Array | None,
        alibi_slopes: _Array | None,
        counts: _Array,
        causal: bool,
        left: int,
        right: int,
        scale: float,
        softcap: float,
        threads: int,
        /,
    ) -> int: ...
    def first_lost(self, slots: _Array, counts: _Array, left: int, /) -> int: ...
    def lengths(self, slots: _Array, /) -> _Array: ...
    def firsts(self, slots: _Array, /) -> _Array: ...
    def room(self, slots: _Array, /) -> _Array: ...
    def crop(self, slots: _Array, lengths: _Array, /) -> int: ...
    def reorder(self, indices: _Array, /) -> None: ...
    def add_sequence(self, prefix: int | None, added: list[int], /) -> None: ...
    def remove_sequence(self, sequence: int, /) -> None: ...
    def slots_of(self, sequences: list[int], /) -> _Array: ...
    def ids(self) -> list[int]: ...
    def next_id(self) -> int: ...
    def name_slots(self, ids: list[int], next_id: int, /) -> None: ...
    def copy(self) -> KVStore: ...
    def keys(self, slots: _Array, threads: int, /) -> _Array: ...
    def values(self, slots: _Array, threads: int, /) -> _Array: ...
    def dump(self, slots: _Array, threads: int, /) -> tuple[Any, ...]: ...
