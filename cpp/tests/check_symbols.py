"""Read the symbols of every object compiled for one instruction set: python check_symbols.py BUILD_DIR

Code compiled with machine flags must not be linked into anything else. An inline function or a template
that two differently compiled units share comes out weak (W, V or u), the linker keeps one of them, and
AVX-512 code ends up on a machine without it. So each object exports the one table of its kernel family, in
its own namespace, has no weak symbol, and calls nothing of the C++ library.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
# What is compiled only for an ISA that adds to another one, and what else that may compile.
PAIRS = {"dot", "attention_pairs", "cached_pairs"}
AGAIN = {"int8", "cached"}
WEAK = {"W": "weak", "V": "weak object", "u": "unique"}


def objects_by_isa(build: Path) -> dict[str, list[Path]]:
    """The objects of each ISA's library in a CMake build tree."""
    found: dict[str, list[Path]] = {}
    for path in sorted(build.rglob("npattn_*.dir/**/kernels/*.o*")):
        match = re.search(r"npattn_(\w+)\.dir", str(path))
        if match:
            found.setdefault(match.group(1), []).append(path)
    return found


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(type, name) of every symbol, as nm prints them."""
    listing = subprocess.run(["nm", *options, path], check=True, capture_output=True, text=True).stdout
    lines = re.findall(r"^[0-9a-fA-F]*\s+(\S) (.+)$", listing, re.MULTILINE)
    return [(kind, name) for kind, name in lines]


def faults(isa: str, path: Path) -> list[str]:
    """What is wrong with one object; empty if nothing is."""
    family = path.name.split(".")[0]
    table = f"npattn::{isa}::{family}_table"
    found = []
    exported = []
    for kind, name in symbols(path, "--demangle"):
        if kind in WEAK:
            found.append(f"{WEAK[kind]} symbol {name}")
        elif kind.isupper() and kind != "U":
            exported.append(name)
    if exported != [table]:
        found.append(f"exports {exported or 'nothing'}, expected {table} alone")
    found += [f"calls {name}" for kind, name in symbols(path) if kind == "U" and name.startswith("_Z")]
    return [f"{isa}/{family}: {fault}" for fault in found]


def check(build: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The families compiled for each ISA, and every fault of their objects."""
    families = {path.stem for path in KERNELS.glob("*.cpp")}
    objects = objects_by_isa(build)
    compiled, found = {}, []
    for isa, paths in objects.items():
        compiled[isa] = sorted(path.name.split(".")[0] for path in paths)
        missing, beyond = families - PAIRS - set(compiled[isa]), set(compiled[isa]) & PAIRS
        if any(isa != other and isa.startswith(other) for other in objects):  # the rest is the other's
            missing, beyond = PAIRS - set(compiled[isa]), set(compiled[isa]) - PAIRS - AGAIN
        if missing or beyond:
            found.append(
                f"{isa}: compiled {compiled[isa]}; missing {sorted(missing)}, not expected {sorted(beyond)}"
            )
        for path in paths:
            found += faults(isa, path)
    if not compiled:
        found.append(f"{build} holds no kernel objects")
    return compiled, found


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    compiled, found = check(Path(sys.argv[1]))
    for fault in found:
        print(fault)
    for isa, families in compiled.items():
        print(f"{isa}: {len(families)} objects")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
