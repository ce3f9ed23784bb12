"""What this build runs on and why, for show_config and the command line."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from . import _threads, isa
from ._terminal import Terminal
from ._threads import _core


def cpu_model() -> str:
    """The processor's name as the system tells it, else its architecture.

    On x86 with family and model, as virtual machines cut names down to the brand."""
    try:
        if sys.platform == "darwin":
            import subprocess

            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        fields: dict[str, str] = dict(
            re.findall(r"^([^:\n]*?)\s*:[ \t]*(.*)$", text.partition("\n\n")[0], re.MULTILINE)
        )
        if "model name" in fields:
            numbers = {"cpu family", "model"} <= fields.keys()
            return fields["model name"] + (
                f" (family {fields['cpu family']}, model {fields['model']})" if numbers else ""
            )
    except OSError:
        pass
    return platform.processor() or platform.machine()


def openmp_runtimes() -> list[str]:
    """File names of the OpenMP libraries this process has loaded (Linux only, elsewhere empty)."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return sorted(set(re.findall(r"/([^/\n]*lib(?:gomp|omp|iomp)[^/\n]*\.so[^/\s]*)", maps)))


def _isa_reason() -> str:
    if os.environ.get("NPATTN_ISA"):
        return f"NPATTN_ISA={os.environ['NPATTN_ISA']}"
    return "the best this CPU runs" if isa.active() == isa.available()[-1] else "chosen by isa.use"


def show_config(mode: Literal["print", "dicts"] = "print") -> dict[str, Any] | None:
    """Show what npattn runs on: version, instruction set, threads, OpenMP, processor.

    Parameters
    ----------
    mode : {"print", "dicts"}
        Print it, or return it as a dictionary, as `numpy.show_config` does.

    Returns
    -------
    dict or None
        With "dicts": the keys "version", "isa", "threads", "openmp", "cpu", "python", "numpy".

    Raises
    ------
    ValueError
        If `mode` is neither.

    Examples
    --------
    >>> import npattn
    >>> npattn.show_config(mode="dicts")["version"] == npattn.__version__
    True
    """
    if mode not in ("print", "dicts"):
        raise ValueError(f'mode must be "print" or "dicts", got {mode!r}')
    if mode == "dicts":
        return _config()
    _write_config(Terminal(sys.stdout))
    return None


def _config() -> dict[str, Any]:
    from . import __version__

    return {
        "version": __version__,
        "isa": {
            "active": isa.active(),
            "reason": _isa_reason(),
            "available": list(isa.available()),
            "cpu_features": list(_core.cpu_features()),
        },
        "threads": {"count": _threads.get_num_threads(), "reason": _threads.reason()},
        "openmp": openmp_runtimes(),
        "cpu": cpu_model(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _write_config(terminal: Terminal) -> None:
    config = _config()
    chosen, threads = config["isa"], config["threads"]
    rows = {
        "npattn": config["version"],
        "ISA": f"{chosen['active']}: {chosen['reason']} (available: {', '.join(chosen['available'])})",
        "threads": f"{threads['count']}: {threads['reason']}",
        "OpenMP": ", ".join(config["openmp"]) or "none loaded",
        "CPU": config["cpu"],
        "features": " ".join(chosen["cpu_features"]) or "none beyond the baseline",
        "Python": f"{config['python']}, NumPy {config['numpy']}",
    }
    for name, text in rows.items():
        terminal.line(f"{name:10}{text}")


def run(stream: TextIO) -> int:
    """Write the configuration and the self-check; 0 if it passed, else 1."""
    from ._selfcheck import CHECKS, self_check

    terminal = Terminal(stream)
    _write_config(terminal)
    checks = self_check()
    terminal.line()
    terminal.line("Self-check against the reference, float32 and float64;")
    terminal.line("largest error as a share of the allowed 16 eps sqrt(depth) max|result|:")
    names = list(dict.fromkeys(check.isa for check in checks))
    shares = {(check.name, check.isa): check.share for check in checks}
    table = np.array([[shares[label, name] for name in names] for label in CHECKS])
    terminal.matrix(table, list(CHECKS), names)
    failed = [check for check in checks if not check.passed]
    for check in failed:
        terminal.line(f"FAILED: {check.name} on {check.isa}, {check.share:.3g} of the allowed error")
    if not failed:
        terminal.line(f"passed: {len(checks)} of {len(checks)}")
    return 1 if failed else 0
