"""Peak memory beyond inputs and outputs: never a matrix of queries times keys."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEBIBYTE = 2**20

# Prints how far the peak of resident memory rises above what was resident when a call began.
PRELUDE = """
import sys
import numpy as np
import npattn

def resident(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

def measure(call):
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak starts from here
    before = resident("VmRSS")
    call()
    print(resident("VmHWM") - before)
"""
ATTENTION = """
name, heads, kv_heads, query_len, key_len, threads, options = sys.argv[1:]
npattn.isa.use(name)
npattn.set_num_threads(int(threads))
rng = np.random.default_rng(0)
query = rng.standard_normal((int(heads), int(query_len), 64), dtype=np.float32)
key = rng.standard_normal((int(kv_heads), int(key_len), 64), dtype=np.float32)
value = rng.standard_normal((int(kv_heads), int(key_len), 64), dtype=np.float32)
out = np.ones_like(query)
options = eval(options)
few = [array[:, :16] for array in (query, key, value, out)]
npattn.scaled_dot_product_attention(*few[:3], out=few[3])  # loads code and starts threads
if options.pop("summary", False):
    measure(lambda: npattn.attention_summary(query, key))
else:
    measure(lambda: npattn.scaled_dot_product_attention(query, key, value, out=out, **options))
"""
PRODUCT = """
dtype, columns = sys.argv[1:]
npattn.set_num_threads(1)
packed = npattn.pack_matrix(np.ones((300, int(columns)), np.float32), dtype=dtype)
rows = np.ones((96, 300), np.float16 if dtype == "float16" else np.float32)
out = np.ones((96, int(columns)), rows.dtype)
npattn.matmul(rows[:1], packed)
measure(lambda: npattn.matmul(rows, packed, out=out))
"""


def extra_memory(*arguments: object, program: str = ATTENTION) -> int:
    command = [sys.executable, "-c", PRELUDE + program, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "clear_refs" in run.stderr and "Error" in run.stderr:
        pytest.skip("the kernel does not let a process reset its peak memory")
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_one_long_head(isa: str, options: dict[str, object]) -> None:
    """A matrix of the scores would take 1 GiB. The slow ISA does a band of it only."""
    if isa == "generic":
        options = {**options, "window": (500, 100)}
    assert extra_memory(isa, 1, 1, 16384, 16384, 2, options) < 64 * MEBIBYTE


def test_extra_memory_does_not_grow_with_the_queries(isa: str) -> None:
    """Decode over many heads and prefill of a short context: scratch is for threads and blocks."""
    assert extra_memory(isa, 32, 8, 1, 16384, 2, {}) < 32 * MEBIBYTE
    assert extra_memory(isa, 1, 1, 30000, 300, 2, {"return_lse": True}) < 32 * MEBIBYTE


def test_masks_are_never_expanded(isa: str) -> None:
    mask = "{'attn_mask': np.arange(16384) % 3 > 0, 'window': (300, 0)}"
    assert extra_memory(isa, 1, 1, 16384, 16384, 2, mask) < 64 * MEBIBYTE


def test_summary_is_linear() -> None:
    assert extra_memory("generic", 1, 1, 4096, 4096, 2, {"summary": True}) < 32 * MEBIBYTE


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_sums_of_products_do_not_grow_with_the_columns(dtype: str) -> None:
    """Those that a thread keeps: 48 MiB for all columns."""
    assert extra_memory(dtype, 131072, program=PRODUCT) < 8 * MEBIBYTE


# Prints how much more memory a process has than before it made and filled the caches, and their nbytes.
CACHES = """
import sys
import numpy as np
import npattn

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

def filled(cache, tokens, append=None):
    chunk = np.ones((1, cache.num_kv_heads, tokens, cache.head_dim), np.float32)
    (append or cache.append)(chunk, chunk)
    return cache

def ring(steps):
    cache, chunk = npattn.KVCache(1, 1, 2, sliding_window=1), np.ones((1, 1, 2**20, 2), np.float32)
    for _ in range(steps):
        cache.append(chunk, chunk)
    cache.append(chunk[:, :, :1], chunk[:, :, :1])
    return cache

def paged(forks):
    cache = npattn.PagedKVCache(16, 32, 1, 2)
    first = cache.add_sequence()
    cache.append([first], *np.ones((2, 1, 1, 512, 2), np.float32))
    for _ in range(forks):
        cache.add_sequence(prefix=first)
    return cache

make = {
    "grown": lambda scale: filled(npattn.KVCache(1, 8, 128), 8000 * scale),
    "fixed": lambda scale: filled(npattn.KVCache(1, 8, 128, capacity=8000 * scale), 8000 * scale),
    "int8": lambda scale: filled(npattn.KVCache(1, 8, 128, dtype=np.int8), 32000 * scale),
    "ring": ring,
    "forks": lambda scale: paged(40000 * scale),
}[sys.argv[1]]
npattn.set_num_threads(1)
small = make(1)  # code, and what the allocator keeps
before = resident()
cache = make(2 if sys.argv[1] != "ring" else 200)
print(resident() - before, cache.nbytes)
"""


@pytest.mark.parametrize("kind", ["grown", "fixed", "int8", "ring", "forks"])
def test_the_memory_of_a_cache_is_what_nbytes_says(kind: str) -> None:
    """Its pages, and the tables of them: all that a long ring or many forks of a short prefix come to."""
    command = [sys.executable, "-c", CACHES, kind]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    taken, said = map(int, run.stdout.split())
    assert said > 2 * MEBIBYTE
    assert 0.8 * said < taken + MEBIBYTE
    assert taken < 1.1 * said + 2 * MEBIBYTE
