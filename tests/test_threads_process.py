"""What the team of threads does to the process it lives in: its threads, forks, signals, limits, end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")

# What every child process below starts with.
PRELUDE = """
import os, signal, sys, threading, time
import numpy as np, npattn

def attend(length=512):
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, length, 64), dtype=np.float32) for _ in range(3))
    return npattn.scaled_dot_product_attention(query, key, value)

def thread_count():
    return len(os.listdir("/proc/self/task"))
"""


def run(script: str) -> str:
    """What `script` prints in a process of its own, whose BLAS has one thread."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "NPATTN_NUM"))}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        env={**inherited, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@LINUX
def test_the_process_has_no_more_than_callers_and_team() -> None:
    script = """
before = thread_count()
most = []
def call():
    for n in range(60):
        with npattn.threads(1 + n % 3):
            attend(128)
    most.append(thread_count())
callers = [threading.Thread(target=call) for _ in range(6)]
for caller in callers: caller.start()
for caller in callers: caller.join()
time.sleep(0.2)  # a joined thread takes a moment to leave /proc
print(max(most) - before <= 6 + 2, thread_count() - before <= 2)
"""
    assert run(script) == "True True"


@LINUX
def test_an_idle_team_sleeps() -> None:
    script = """
npattn.set_num_threads(2)
for _ in range(20): attend()
time.sleep(0.05)
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before < 0.02)
"""
    assert run(script) == "True"


@FORK
@LINUX
def test_a_forked_child_computes_with_all_its_threads() -> None:
    script = """
import warnings; warnings.simplefilter("ignore")
npattn.set_num_threads(3)
expected = attend().tobytes()
for _ in range(5):
    child = os.fork()
    if child == 0:
        alone = thread_count()
        same = all(attend().tobytes() == expected for _ in range(10))
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if attend().tobytes() == expected else 1)
        same = same and os.waitpid(grandchild, 0)[1] == 0
        os._exit(0 if same and alone == 1 and thread_count() == 3 else 1)
    if os.waitpid(child, 0)[1] != 0: sys.exit("a child failed")
    assert attend().tobytes() == expected
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert all(x.tobytes() == expected for x in pool.map(attend, [512] * 8))
print("done")
"""
    assert run(script) == "done"


@FORK
def test_fork_while_another_thread_computes() -> None:
    script = """
import warnings; warnings.simplefilter("ignore")
npattn.set_num_threads(3)
expected = attend().tobytes()
stop = False
def call():
    while not stop: attend()
caller = threading.Thread(target=call)
caller.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        os._exit(0 if attend().tobytes() == expected else 1)
    if os.waitpid(child, 0)[1] != 0: sys.exit("a child failed")
stop = True
caller.join()
print("done")
"""
    assert run(script) == "done"


@LINUX
def test_refused_threads_are_done_without() -> None:
    script = """
import resource
with npattn.threads(1): expected = attend().tobytes()
before = thread_count()
if os.geteuid() == 0: os.setuid(54321)  # the limit does not bind root
resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))
with npattn.threads(8): same = all(attend().tobytes() == expected for _ in range(20))
print(same, thread_count() - before <= 2)
"""
    assert run(script) == "True True"


LONG = {
    "attention": "attend(60000)",
    "product": "npattn.matmul(np.ones((20000, 2000), np.float32), np.ones((2000, 20000), np.float32))",
    "float16": "npattn.matmul(np.ones((20000, 2000), np.float16), np.ones((2000, 20000), np.float16))",
    "batch": "npattn.matmul(np.ones((9, 6000, 2000), np.float32), np.ones((9, 2000, 6000), np.float32))",
}


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
@pytest.mark.parametrize("call", LONG)
@pytest.mark.parametrize("n", [1, 2])
def test_ctrl_c_ends_a_long_call(n: int, call: str) -> None:
    script = f"""
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have had it ignored
npattn.set_num_threads({n})
expected = attend().tobytes()
sent = []
def send():
    sent.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)
threading.Timer(0.5, send).start()
try:
    {LONG[call]}
    print("not interrupted")
except KeyboardInterrupt:
    print("late" if time.perf_counter() - sent[0] > 0.5 else "in time", attend().tobytes() == expected)
"""
    assert run(script) == "in time True"


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
def test_a_signal_handler_may_compute_and_raise() -> None:
    script = """
npattn.set_num_threads(2)
expected = attend().tobytes()
class Mine(Exception): pass
calls = []
def handler(*_):
    calls.append(attend().tobytes() == expected)
    if len(calls) == 3: raise Mine
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
try:
    attend(60000)
except Mine:
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(calls)
"""
    assert run(script) == "[True, True, True]"


def test_the_process_ends_while_a_daemon_thread_computes() -> None:
    script = """
npattn.set_num_threads(2)
def call():
    while True: attend()
threading.Thread(target=call, daemon=True).start()
time.sleep(0.3)
print("end")
"""
    assert run(script) == "end"


@FORK
def test_a_forked_child_changes_its_copy_of_a_cache_that_is_read() -> None:
    """Readers of the parent are not in the child; nor are those of the child in its own children."""
    script = """
import warnings; warnings.simplefilter("ignore")
one = np.ones((1, 1, 1, 4), np.float32)
cache, paged = npattn.KVCache(1, 1, 4), npattn.PagedKVCache(4, 32, 1, 4)
sequence = paged.add_sequence()
def change():
    cache.append(one, one)
    paged.append([sequence], one, one)
    return len(cache) + paged.lengths([sequence])[0]
change()
def read(held, leave):
    with cache._reading, paged._reading:
        held.set()
        leave.wait()
def in_child(length):
    held, leave = threading.Event(), threading.Event()
    reader = threading.Thread(target=read, args=(held, leave))
    reader.start(); held.wait()
    child = os.fork()
    if child == 0:
        ended = change() == length and (length == 6 or in_child(length + 2))
        os._exit(0 if ended else 1)
    ended = os.waitpid(child, 0)[1] == 0
    try:
        change()
        ended = False
    except RuntimeError:
        pass  # it is still being read here
    leave.set(); reader.join()
    return ended
print(in_child(4), change())
"""
    assert run(script) == "True 4"


@FORK
def test_a_thread_that_forks_inside_its_own_access() -> None:
    """It goes on in the child, where it gives back what it took; nobody else's is given back for it."""
    script = """
import warnings; warnings.simplefilter("ignore")
cache, one = npattn.KVCache(1, 1, 4), np.ones((1, 1, 1, 4), np.float32)
for access in ("_reading", "_writing"):
    with getattr(cache, access):
        child = os.fork()
        if child == 0 and access == "_reading":
            cache.append(one, one)  # this process counts its own
            other = cache._reading
            other.__enter__()
    if child == 0:
        refused = access == "_writing"
        if access == "_reading":
            try:
                cache.append(one, one)
            except RuntimeError:
                refused = True
            other.__exit__(None, None, None)
        cache.append(one, one)
        os._exit(0 if refused and len(cache) == 1 + (access == "_reading") else 1)
    assert os.waitpid(child, 0)[1] == 0, access
print(len(cache))
"""
    assert run(script) == "0"


@FORK
def test_a_cache_half_changed_when_its_process_forked_is_refused() -> None:
    script = """
import warnings; warnings.simplefilter("ignore")
cache, one = npattn.KVCache(1, 1, 4), np.ones((1, 1, 1, 4), np.float32)
held, leave = threading.Event(), threading.Event()
def change():
    with cache._writing:
        held.set()
        leave.wait()
writer = threading.Thread(target=change)
writer.start(); held.wait()
child = os.fork()
if child == 0:
    try:
        len(cache)
    except RuntimeError as error:
        os._exit(0 if "when this process was forked" in str(error) else 2)
    os._exit(1)
print(os.waitpid(child, 0)[1])
leave.set(); writer.join()
cache.append(one, one)
"""
    assert run(script) == "0"
