"""Keys and values in files larger than memory: read where they lie, and only as far as they are seen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import reference
from plain_cache import DIM, KV_HEADS, VALUE_DIM, cache_of
from shapes import Array
from support import DTYPES, assert_same_bits, assert_within, each_isa, random_qkv, tolerances_of

MEBIBYTE = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def run(program: str, *arguments: object) -> None:
    """Run a program in a process of its own; it fails if the program does, or takes a minute."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr


# --- all of a file, in a process that has no room for a copy of it ---

HEADS, WIDTH, BLOCK_KEYS, BYTES = 2, 64, 2048, 160 * MEBIBYTE

# 64 MiB of the room are for packing.
NO_ROOM = """
import resource
import sys
import ml_dtypes
import numpy as np
import npattn

name, directory, dtype, query_dtype, function, queries = sys.argv[1:]
npattn.isa.use(name)
npattn.set_num_threads(2)
files = [np.memmap(f"{directory}/{which}", dtype, "r") for which in ("key", "value")]
key, value = (file.reshape(2, -1, 64) for file in files)
query = np.load(f"{directory}/query.npy")[:, : int(queries)].astype(query_dtype)

def call(key, value):
    if function == "summary":
        return npattn.attention_summary(query, key, top_k=1).entropy
    if function == "varlen":
        rows, keys = query.shape[1], key.shape[1]
        packed = (array.swapaxes(0, 1) for array in (query, key, value))
        return npattn.varlen_attention(*packed, [0, rows], [0, keys]).swapaxes(0, 1)
    return npattn.scaled_dot_product_attention(query, key, value)

call(key[:, :8192], value[:, :8192])  # loads code and starts threads
with open("/proc/self/statm") as statm:
    taken = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 112 * 2**20, resource.RLIM_INFINITY))
for array in (key, value):
    try:
        np.array(array)
    except MemoryError:
        continue
    print("the system does not limit memory")
    raise SystemExit(77)
np.save(f"{directory}/result.npy", call(key, value).astype(np.float64))
"""


@pytest.fixture(scope="module", params=["float32", "float64"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A directory with keys and values (heads, length, width) that repeat a block; dtype, query, the blocks.

    Attention to all of the keys is attention to a block.
    """
    directory, dtype = tmp_path_factory.mktemp("memmap"), np.dtype(request.param)
    query, key, value = random_qkv((), (4, 1), (24, BLOCK_KEYS), (WIDTH, WIDTH), dtype)
    for name, block in (("key", key), ("value", value)):
        with (directory / name).open("wb") as file:
            for _ in range(BYTES // block.nbytes):
                block.tofile(file)
    np.save(directory / "query.npy", query.astype(np.float64))
    yield directory, dtype, query, key, value
    for name in ("key", "value"):
        (directory / name).unlink()


@pytest.mark.parametrize("queries", [1, 24], ids=["decode", "prefill"])
def test_no_copy_is_made(files: Any, queries: int, isa: str) -> None:
    directory, dtype, query, key, value = files
    query = query[:, :queries]
    run(NO_ROOM, isa, directory, dtype, dtype, "attention", queries)
    repeats = BYTES / HEADS / key.nbytes
    within = tolerances_of(query, key, value).output * repeats**0.5  # so many more keys are summed
    expected = reference.scaled_dot_product_attention(query, key, value)
    assert_within(np.load(directory / "result.npy"), expected, within)


@pytest.mark.parametrize("queries", [1, 24], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("files", "query_dtype"),
    [("float16", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
    indirect=["files"],
)
def test_half_is_not_widened(files: Any, query_dtype: str, queries: int) -> None:
    directory, dtype, query, key, value = files
    query = query[:, :queries]
    run(NO_ROOM, npattn.isa.available()[-1], directory, dtype, query_dtype, "attention", queries)
    within = tolerances_of(query.astype(DTYPES[query_dtype]), key, value).output
    within *= (BYTES / HEADS / key.nbytes) ** 0.5
    expected = reference.scaled_dot_product_attention(query, key, value)
    assert_within(np.load(directory / "result.npy"), expected, within)


@pytest.mark.parametrize("function", ["summary", "varlen"])
def test_nor_by_other_functions(files: Any, function: str) -> None:
    directory, dtype, query, key, value = files
    run(NO_ROOM, npattn.isa.available()[-1], directory, dtype, dtype, function, 1)
    result = np.load(directory / "result.npy")
    if function == "varlen":
        expected = reference.scaled_dot_product_attention(query[:, :1], key, value)
    else:
        weights = reference.attention_weights(query[:, :1], key)
        repeats = BYTES // HEADS // key.nbytes
        expected = -(weights * np.log(weights)).sum(axis=-1) + np.log(repeats)
    assert_within(result, expected, 1e-3 if function == "summary" else 1e-5)


# --- a part of a file that no memory has room for ---

SPARSE_BYTES = 44 * 2**30
KEY_BYTES = HEADS * 128 * 4

# Fails if more becomes resident than what is seen (2 MiB), partial results (4 MiB) and pages read ahead.
SPARSE = """
import sys
import numpy as np
import npattn

name, directory, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
npattn.isa.use(name)
npattn.set_num_threads(2)

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

key, value = (
    np.memmap(f"{directory}/{which}", np.float32, "r", shape=(2, length, 128)) for which in ("key", "value")
)
for queries in (1, 64):  # decode, prefill
    query = np.random.default_rng(0).standard_normal((8, queries, 128), dtype=np.float32)
    end = {"window": (999, 0), "query_offset": length - queries}
    for which, options in (("start", {"kv_lengths": 1000}), ("end", end)):
        part = np.s_[:, :1000] if which == "start" else np.s_[:, -1064:]
        near = options if which == "start" else {**end, "query_offset": 1064 - queries}
        want = npattn.scaled_dot_product_attention(query, key[part].copy(), value[part].copy(), **near)
        try:
            with open("/proc/self/clear_refs", "w") as refs:
                refs.write("5")  # the peak starts from here
        except OSError:
            print("the kernel does not let a process reset its peak memory")
            raise SystemExit(77)
        before = memory("VmRSS")
        have, lse = npattn.scaled_dot_product_attention(query, key, value, **options, return_lse=True)
        more = memory("VmHWM") - before
        assert more < 24 * 2**20, (queries, which, more)
        assert np.abs(want).max() > 0.05
        np.testing.assert_allclose(have, want, rtol=0, atol=2e-6)
"""


def test_what_is_not_seen_is_not_read(tmp_path: Path, isa: str) -> None:
    """44 GiB of keys and as many of values, of which the disk holds two pieces of 1000 keys."""
    length = SPARSE_BYTES // KEY_BYTES
    rng = np.random.default_rng(0)
    for name in ("key", "value"):
        path = tmp_path / name
        try:
            with path.open("wb") as file:
                file.truncate(SPARSE_BYTES)
        except OSError as error:
            pytest.skip(f"no sparse files of 44 GiB here: {error.strerror}")
        array = np.memmap(path, np.float32, "r+", shape=(HEADS, length, 128))
        for part in (np.s_[:, :1000], np.s_[:, -1064:]):
            array[part] = rng.standard_normal(array[part].shape)
        array.flush()
        del array
        assert path.stat().st_blocks * 512 < 16 * MEBIBYTE
    try:
        run(SPARSE, isa, tmp_path, length)
    finally:
        for name in ("key", "value"):
            (tmp_path / name).unlink()


def test_very_many_keys() -> None:
    """Ranges of keys grow with their number, as each range has a partial result."""
    query, key, value = random_qkv((), (3, 1), (1, 1_100_003), (4, 4), np.float32)
    key[:, 512_000] = 3 * query[1]
    expected = reference.scaled_dot_product_attention(query, key, value, kv_lengths=1_100_001)
    within = tolerances_of(query, key, value).output
    for _ in each_isa():
        output = npattn.scaled_dot_product_attention(query, key, value, kv_lengths=1_100_001)
        assert_within(output, expected, within)


# --- into a cache ---


def test_append_from_a_file(tmp_path: Path) -> None:
    """A prompt's keys and values come piece by piece from files."""
    rng = np.random.default_rng(0)
    arrays: list[Array] = []
    for name, width in (("key", DIM), ("value", VALUE_DIM)):
        array = np.memmap(tmp_path / name, np.float32, "w+", shape=(2, KV_HEADS, 100, width))
        array[...] = rng.standard_normal(array.shape)
        arrays.append(array)
    cache = cache_of()
    for start in range(0, 100, 40):
        cache.append(*(array[:, :, start : start + 40] for array in arrays))
    assert_same_bits(cache.keys, np.asarray(arrays[0]))
    assert_same_bits(cache.values, np.asarray(arrays[1]))
    query = rng.standard_normal((2, 4, 1, DIM)).astype(np.float32)
    expected = reference.scaled_dot_product_attention(query, *arrays)
    assert_within(cache.attend(query), expected, tolerances_of(query, *arrays).output)
