"""The package as a user meets it: what it imports, what it documents, what it ships."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.metadata
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import npattn
import pytest

PACKAGE = Path(npattn.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = [name for name in npattn.__all__ if inspect.isroutine(getattr(npattn, name))]
CLASSES = [name for name in npattn.__all__ if inspect.isclass(getattr(npattn, name))]
# Sections 1.1 to 1.5 of the design: what `import npattn` promises.
PROMISED = {
    *("scaled_dot_product_attention", "attention_weights", "attention_scores", "varlen_attention"),
    *("merge_attention", "attention_summary", "AttentionSummary", "MultiHeadAttention"),
    *("softmax", "log_softmax", "logsumexp", "matmul", "pack_matrix", "PackedMatrix"),
    *("split_heads", "merge_heads", "sinusoidal_encoding", "alibi_slopes", "rope_frequencies"),
    *("rope_cos_sin", "rotary_embedding", "apply_rope", "isa", "reference", "inspect"),
    *("set_num_threads", "get_num_threads", "threads", "show_config"),
    *("KVCache", "PagedKVCache"),
}
OPTIONAL = {"plot", "models", "dask"}  # public submodules that need more than numpy


def interpreter(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter that ran this code, with these environment variables."""
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


def fresh(code: str, **environment: str) -> str:
    """What it prints."""
    run = interpreter(code, **environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


def modules() -> list[str]:
    """The package's modules that need numpy alone."""
    names = [module.name for module in pkgutil.walk_packages([str(PACKAGE)], "npattn.")]
    needy = {f"npattn.{name}" for name in (*OPTIONAL, "__main__", "_core")}
    return [name for name in names if not any(f"{name}.".startswith(f"{other}.") for other in needy)]


def test_public_names() -> None:
    assert set(PROMISED) <= set(npattn.__all__)
    assert len(set(npattn.__all__)) == len(npattn.__all__)
    for name in npattn.__all__:
        assert not name.startswith("_") or name == "__version__"
        assert getattr(npattn, name) is not None
    assert set(npattn.__all__) <= set(dir(npattn))


def test_import_brings_numpy_and_the_standard_library_alone() -> None:
    """No package but the two, and of the standard library what is light."""
    code = "import sys, numpy; before = set(sys.modules); import npattn; print(*set(sys.modules) - before)"
    loaded = fresh(code).split()
    tops = {name.split(".")[0] for name in loaded}
    assert tops - set(sys.stdlib_module_names) - {"numpy"} == {"npattn"}
    heavy = {"asyncio", "multiprocessing", "unittest", "http", "email", "xml", "ssl", "sqlite3"}
    heavy |= {"concurrent", "subprocess", "logging", "argparse", "json", "tempfile", "decimal", "doctest"}
    assert not {name for name in loaded if name in heavy or name.split(".")[0] in heavy}


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_import_starts_no_thread_and_prints_nothing() -> None:
    code = "import os, npattn; print(len(os.listdir('/proc/self/task')))"
    numpy_alone = fresh(code.replace("npattn", "numpy"))
    assert fresh(code) == numpy_alone


def test_environment_chooses_the_isa() -> None:
    for name in npattn.isa.available():
        assert fresh("import npattn; print(npattn.isa.active())", NPATTN_ISA=name) == f"{name}\n"
    best = npattn.isa.available()[-1]
    assert fresh("import npattn; print(npattn.isa.active())", NPATTN_ISA="") == f"{best}\n"
    run = interpreter("import npattn", NPATTN_ISA="avx1024")
    assert run.returncode != 0
    assert "avx1024" in run.stderr
    assert "generic" in run.stderr


def test_from_import_is_enough() -> None:
    code = """
import numpy as np
from npattn import scaled_dot_product_attention
print(scaled_dot_product_attention(np.ones((1, 2)), np.ones((1, 2)), np.ones((1, 1)))[0, 0])
"""
    assert fresh(code) == "1.0\n"


def test_reference_shows_its_functions_alone() -> None:
    assert dir(npattn.reference) == sorted(npattn.reference.__all__)


def test_reference_needs_no_extension() -> None:
    assert "attention" in {path.stem for path in (PACKAGE / "reference").glob("*.py")}
    for path in (PACKAGE / "reference").glob("*.py"):
        assert "_core" not in path.read_text(), f"{path.name} uses the extension"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_documented(name: str) -> None:
    check_documentation(getattr(npattn, name))


@pytest.mark.parametrize(
    "name", ["isa.active", "isa.available", "isa.use", "inspect.explain", "inspect.rollout"]
)
def test_functions_of_submodules_are_documented(name: str) -> None:
    module, function = name.split(".")
    check_documentation(getattr(getattr(npattn, module), function))


def check_documentation(function: Any) -> None:
    """numpydoc: every parameter, what comes back, and an example."""
    documented = inspect.getdoc(function) or ""
    parameters = set(inspect.signature(function).parameters) - {"self", "cls"}
    assert documented.splitlines()[0].strip().endswith((".", ":")), "the first line is one sentence"
    if parameters:
        pattern = r"^Parameters\n-{10}\n(.*?)(?=^\w+\n-+$|\Z)"
        found = re.search(pattern, documented, re.MULTILINE | re.DOTALL)
        assert found is not None
        entries = " ".join(line.split(" : ")[0] for line in found[1].splitlines() if line[:1].strip())
        assert parameters <= set(re.findall(r"\w+", entries))
    for section in ("Returns", "Examples"):
        assert re.search(rf"^{section}\n-+$", documented, re.MULTILINE), f"{function}: no section {section}"


@pytest.mark.parametrize("name", CLASSES)
def test_classes_are_documented(name: str) -> None:
    documented_class = getattr(npattn, name)
    assert re.search(r"^Examples\n-+$", inspect.getdoc(documented_class) or "", re.MULTILINE)
    for method_name, method in vars(documented_class).items():
        if isinstance(method, classmethod):
            method = method.__func__
        if inspect.isfunction(method) and (method_name == "__call__" or not method_name.startswith("_")):
            check_documentation(method)


@pytest.mark.parametrize("name", FUNCTIONS + CLASSES)
def test_public_names_are_typed(name: str) -> None:
    public: Any = getattr(npattn, name)
    function = public.__init__ if inspect.isclass(public) else public
    if not inspect.isfunction(function) or (
        function.__name__ == "__init__" and "__init__" not in vars(public)
    ):
        return
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name != "self":
            assert parameter.annotation is not inspect.Parameter.empty, parameter.name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reference_has_the_same_signature(name: str) -> None:
    """The reference takes what the public function takes, but `out` and what concerns memory alone."""
    if not hasattr(npattn.reference, name):
        assert name in {"set_num_threads", "get_num_threads", "threads", "show_config"}
        return
    public = inspect.signature(getattr(npattn, name)).parameters
    plain = inspect.signature(getattr(npattn.reference, name)).parameters
    assert set(public) - set(plain) <= {"out", "copy", "dtype"}
    assert set(plain) <= set(public)
    for parameter in plain.values():
        assert public[parameter.name].default == parameter.default, parameter.name
        assert public[parameter.name].kind == parameter.kind, parameter.name


@pytest.mark.parametrize("name", modules())
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def stub_names(stub: ast.Module) -> dict[str, ast.stmt]:
    named = (ast.FunctionDef, ast.ClassDef)
    found = {node.name: node for node in stub.body if isinstance(node, named)}
    annotated = (node for node in stub.body if isinstance(node, ast.AnnAssign))
    assigned = {node.target.id: node for node in annotated if isinstance(node.target, ast.Name)}
    return {**found, **assigned}


def test_stub_agrees_with_the_extension() -> None:
    """_core.pyi names what the extension has, nothing else, with the same parameters."""
    core = importlib.import_module("npattn._core")
    stub = stub_names(ast.parse((PACKAGE / "_core.pyi").read_text()))
    actual = {name for name in vars(core) if not name.startswith("__")}
    assert {name for name in stub if not name.startswith("__")} == actual
    for name, node in stub.items():
        documented = getattr(getattr(core, name, None), "__doc__", None) or ""
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            listed = re.match(rf"{name}\((.*)\) ->", documented)
            assert listed, f"{name} has no signature"
            count = len(re.findall(r"\b\w+: ", listed[1]))
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            assert len(arguments) == count, f"{name}: {documented.splitlines()[0]}"


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_the_version_is_that_of_pyproject() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'^version = "(.+)"$', project, re.MULTILINE) == [npattn.__version__]
    try:
        installed = importlib.metadata.version("npattn")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("npattn is imported from a build tree")
    assert installed == npattn.__version__


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("nm") is None, reason="reads an ELF file with nm")
def test_the_extension_exports_its_initialisation_alone() -> None:
    core = importlib.import_module("npattn._core")
    command = ["nm", "--dynamic", "--defined-only", str(core.__file__)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert [line.split()[-1] for line in listing.splitlines()] == ["PyInit__core"]


def test_no_file_is_long() -> None:
    """300 lines are a smell, 400 the limit."""
    patterns = ("cpp/**/*.[ch]pp", "python/**/*.py*", "tests/**/*.py", "cpp/**/*.py", "cmake/*", ".ci/*")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    texts = [path for path in files if path.is_file() and path.suffix not in (".pyc", ".pyd")]
    assert len(texts) > 50
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in texts}
    assert {name: count for name, count in lines.items() if count > 400} == {}


def test_no_fast_math() -> None:
    for path in [*ROOT.glob("cmake/*.cmake"), ROOT / "CMakeLists.txt", *ROOT.glob("cpp/**/*.[ch]pp")]:
        assert not re.search(r"-ffast-math|-Ofast|funsafe-math", path.read_text()), path
