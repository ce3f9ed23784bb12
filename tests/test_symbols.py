"""No object compiled with machine flags shares a symbol with another: see cpp/tests/check_symbols.py."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import npattn
import pytest

ROOT = Path(__file__).resolve().parents[1]
CHECKER = ROOT / "cpp" / "tests" / "check_symbols.py"
COMPILER = os.environ.get("CXX") or "c++"

needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler is installed")


def run(*command: object, directory: str | None = None) -> None:
    done = subprocess.run(list(map(str, command)), cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_symbols", CHECKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build tree: that of NPATTN_BUILD_DIR, else the kernels alone, compiled here.

    Without optimisation: that is quick, and an inline function which the optimiser might hide shows.
    """
    if "NPATTN_BUILD_DIR" in os.environ:
        return Path(os.environ["NPATTN_BUILD_DIR"])
    if shutil.which("cmake") is None or shutil.which(COMPILER) is None:
        pytest.skip("neither NPATTN_BUILD_DIR nor cmake with a C++ compiler")
    tree = tmp_path_factory.mktemp("kernels")
    run("cmake", "-S", ROOT, "-B", tree, "-DNPATTN_PYTHON=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON")
    units = json.loads((tree / "compile_commands.json").read_text())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_quickly, [unit for unit in units if "/cpp/kernels/" in unit["file"]]))
    return tree


def compile_quickly(unit: dict[str, str]) -> None:
    """One entry of compile_commands.json, without optimisation."""
    command = ["-O0" if word == "-O3" else word for word in shlex.split(unit["command"])]
    output = Path(unit["directory"], command[command.index("-o") + 1])
    output.parent.mkdir(parents=True, exist_ok=True)
    run(*command, directory=unit["directory"])


@needs_nm
def test_every_isa_object_stands_alone(checker: ModuleType, build: Path) -> None:
    compiled, faults = checker.check(build)
    assert faults == []
    assert set(npattn.isa.available()) <= set(compiled)


@needs_nm
@needs_compiler
@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("template <class T> T twice(T x) { return x + x; }", "weak symbol"),
        ("inline int shared() { static int calls = 0; return ++calls; }", "symbol shared()::calls"),
        ("int twice(int x) { return x + x; }", "exports"),
    ],
)
def test_the_checker_finds_shared_code(checker: ModuleType, tmp_path: Path, body: str, fault: str) -> None:
    """The same check, on objects that break the rule."""
    use = "twice(2)" if "twice" in body else "shared()"
    source = tmp_path / "softmax.cpp"
    source.write_text(f"""
{body}
namespace npattn::generic {{
extern const int softmax_table;
namespace {{ int local() {{ return {use}; }} }}
const int softmax_table = local();
}}
""")
    folder = tmp_path / "npattn_generic.dir" / "kernels"
    folder.mkdir(parents=True)
    run(COMPILER, "-std=c++20", "-c", source, "-o", folder / "softmax.cpp.o")
    (paths,) = checker.objects_by_isa(tmp_path).values()
    found = checker.faults("generic", paths[0])
    assert any(fault in line for line in found), found
