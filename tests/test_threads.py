"""Thread counts: who decides them, and that they never change a bit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import _core, _threads

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run(script: str, **environment: str) -> str:
    """What `script` prints in a process of its own that has these variables of the environment."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "NPATTN_NUM"))}
    done = subprocess.run(
        [sys.executable, "-c", "import os\nimport npattn\n" + script],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def _unchanged_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts and ends with what set_num_threads has set before."""
    monkeypatch.setattr(_threads, "_process_threads", _threads._process_threads)


# --- who decides ---


def test_set_num_threads_returns_the_number_before() -> None:
    npattn.set_num_threads(3)
    assert npattn.get_num_threads() == 3
    assert npattn.set_num_threads(np.int64(5)) == 3
    assert npattn.get_num_threads() == 5


def test_the_innermost_block_decides() -> None:
    npattn.set_num_threads(3)
    with npattn.threads(2):
        with npattn.threads(7):
            assert npattn.get_num_threads() == 7
            assert npattn.set_num_threads(4) == 3  # the process's number, not the block's
            assert npattn.get_num_threads() == 7
        assert npattn.get_num_threads() == 2
    assert npattn.get_num_threads() == 4


def test_a_block_ends_with_an_exception() -> None:
    npattn.set_num_threads(3)
    with pytest.raises(ZeroDivisionError), npattn.threads(2):
        raise ZeroDivisionError
    assert npattn.get_num_threads() == 3


def test_a_block_holds_in_its_own_thread_and_task_only() -> None:
    npattn.set_num_threads(3)
    with npattn.threads(2), ThreadPoolExecutor(1) as pool:
        assert pool.submit(npattn.get_num_threads).result() == 3

    async def task(n: int) -> int:
        with npattn.threads(n):
            await asyncio.sleep(0.01)
            return npattn.get_num_threads()

    async def all_tasks() -> list[int]:
        return await asyncio.gather(*(task(n) for n in range(1, 6)))

    assert asyncio.run(all_tasks()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("function", [npattn.set_num_threads, npattn.threads])
@pytest.mark.parametrize(
    ("n", "error", "words"),
    [
        (True, TypeError, "n must be an integer.*True"),
        (np.True_, TypeError, "n must be an integer.*True"),
        (2.0, TypeError, "n must be an integer.*2.0"),
        ("2", TypeError, "n must be an integer.*'2'"),
        (None, TypeError, "n must be an integer.*None"),
        (0, ValueError, "n must be at least 1, got 0"),
        (-3, ValueError, "n must be at least 1, got -3"),
        (10**12, ValueError, "n must be at most 4096 threads, got 1000000000000"),
    ],
)
def test_wrong_numbers(function: Any, n: Any, error: type[Exception], words: str) -> None:
    before = npattn.get_num_threads()
    with pytest.raises(error, match=words):
        function(n)
    assert npattn.get_num_threads() == before


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NPATTN_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, "3 NPATTN_NUM_THREADS"),
        ({"NPATTN_NUM_THREADS": " ", "OMP_NUM_THREADS": "5,2"}, "5 OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "four"}, "CPUs"),
        ({}, "CPUs"),
    ],
)
def test_environment(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("NPATTN_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(_threads, "_cgroup_quota", lambda: None)
    if expected == "CPUs":
        expected = f"{_core.default_threads()} the CPUs this process may use"
    number, source = _threads._default.__wrapped__()
    assert f"{number} {source}" == expected


@pytest.mark.parametrize("text", ["0", "-1", "two", "2.0", "99999"])
def test_wrong_environment(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPATTN_NUM_THREADS", text)
    with pytest.raises(
        ValueError, match=f"NPATTN_NUM_THREADS must be an integer from 1 to 4096, got '{text}'"
    ):
        _threads._default.__wrapped__()


@LINUX
def test_affinity_is_respected() -> None:
    one = min(os.sched_getaffinity(0))
    script = f"os.sched_setaffinity(0, [{one}])\nprint(npattn.get_num_threads())"
    assert run(script) == "1"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "5000 100000\n"}, 1),
        # The path of the host is not there inside a container.
        ({"proc/self/cgroup": "0::/docker/1\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/x\n0::/\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_cgroup_quota(files: dict[str, str], quota: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _threads._cgroup_quota(str(tmp_path)) == quota


@pytest.mark.skipif(_core.parallel_runtime() != "openmp", reason="this build does not use OpenMP")
def test_openmp_limit_of_the_calling_thread_caps() -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")
    npattn.set_num_threads(4)
    with threadpoolctl.threadpool_limits(limits=1, user_api="openmp"):
        assert npattn.get_num_threads() == 1
        assert "OpenMP" in _threads.reason()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(npattn.get_num_threads).result() == 4
    assert npattn.get_num_threads() == 4
    assert _threads.reason() == "npattn.set_num_threads"


def test_import_leaves_the_environment_as_it_was() -> None:
    script = "print(sorted(name for name in os.environ if 'OMP_' in name), os.environ.get('GOMP_SPINCOUNT'))"
    assert run(script) == "[] None"
    assert run(script, GOMP_SPINCOUNT="7") == "['GOMP_SPINCOUNT'] 7"


# --- what it never changes ---


def test_same_bits_for_every_number_of_threads() -> None:
    rng = np.random.default_rng(1)
    query = rng.standard_normal((2, 6, 333, 64), dtype=np.float32)
    key, value = (rng.standard_normal((2, 2, 777, 64), dtype=np.float32) for _ in range(2))
    a, b = rng.standard_normal((301, 517)), rng.standard_normal((517, 203))

    def results() -> list[bytes]:
        attended = npattn.scaled_dot_product_attention(query, key, value, is_causal=True, query_offset=444)
        decoded = npattn.scaled_dot_product_attention(query[:, :, :1], key, value)
        return [x.tobytes() for x in (attended, decoded, npattn.matmul(a, b), npattn.softmax(a, axis=0))]

    with npattn.threads(1):
        expected = results()
    for n in (2, 3, 4, 8):
        with npattn.threads(n):
            assert results() == expected, f"{n} threads"


def test_many_callers_at_once() -> None:
    rng = np.random.default_rng(2)
    query = rng.standard_normal((4, 256, 64), dtype=np.float32)
    expected = npattn.scaled_dot_product_attention(query, query, query).tobytes()
    wrong = []

    def call(n: int) -> None:
        with npattn.threads(1 + n % 4):
            for _ in range(20):
                if npattn.scaled_dot_product_attention(query, query, query).tobytes() != expected:
                    wrong.append(n)

    callers = [threading.Thread(target=call, args=(n,)) for n in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []
