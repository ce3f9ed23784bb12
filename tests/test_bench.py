"""The benchmark itself, on rows that take no time: what it checks, what it writes."""

from __future__ import annotations

import io
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import _bench
from npattn._bench import accuracy, cases, decode, measure, plain
from npattn._bench.ceiling import measurement
from npattn._bench.peer_worker import onnx_model
from npattn._bench.problem import Case, Problem
from npattn._bench.run import run
from support import DTYPES

HALVES = ("float16", "bfloat16")
SOFTMAX = Case("softmax", "tiny", lambda: cases.softmax(8, 16))
TINY = (
    Case("prefill", "tiny", lambda: cases.attention((1, 4, 24, 16), kv_heads=2, causal=True)),
    Case("prefill", "tiny window", lambda: cases.attention((1, 2, 24, 16), causal=True, window=3)),
    Case("prefill", "tiny mask", lambda: cases.attention((1, 2, 24, 16), hidden=0.1)),
    Case("prefill", "tiny float64", lambda: cases.attention((1, 2, 24, 16), dtype="float64")),
    Case("decode", "tiny", lambda: cases.attention((1, 2, 1, 16), key_len=40, limit="read")),
    Case("matmul", "tiny", lambda: cases.matmul(8, 16, 24, packed="float32")),
    Case("matmul", "tiny transposed", lambda: cases.matmul(2, 64, 24, transposed=True)),
    Case("matmul", "tiny int8", lambda: cases.matmul(8, 16, 24, packed="int8")),
    Case("cache", "tiny", lambda: decode.cached(40, kv_heads=32)),
    Case("cache", "tiny int8", lambda: decode.cached(40, batch=2, dtype="int8")),
    Case("cache", "tiny step", lambda: decode.step(16)),
    *(
        Case("prefill", f"tiny {name}", partial(cases.attention, (1, 2, 24, 16), dtype=name))
        for name in HALVES
    ),
    *(Case("matmul", f"tiny {name}", partial(cases.matmul, 8, 16, 24, dtype=name)) for name in HALVES),
    *(Case("cache", f"tiny {name}", partial(decode.cached, 40, dtype=name)) for name in HALVES),
    *(Case("softmax", f"tiny {name}", partial(cases.softmax, 8, 16, dtype=name)) for name in HALVES),
    *(Case("rope", f"tiny {name}", partial(cases.rope, 1, 2, 8, 16, dtype=name)) for name in HALVES),
    SOFTMAX,
    Case("rope", "tiny", lambda: cases.rope(1, 2, 8, 16)),
    Case("heads", "tiny", lambda: cases.merge_heads(2, 8, 16)),
    Case("layer", "tiny", lambda: cases.layer(4, 32, 2)),
)


@pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.group} {case.name}")
def test_both_sides_of_a_row_compute_the_same(case: Case) -> None:
    problem = case.build()
    for call in (problem.npattn, problem.numpy):
        largest, rms = measure.checked_error(problem, call())
        assert rms <= largest


def test_plain_attention_is_the_reference() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, 6, 8)) for heads in (4, 2, 2))
    visible = rng.random((6, 6)) < 0.8
    visible[:, 0] = True
    expected = npattn.reference.scaled_dot_product_attention(q, k, v, visible)
    np.testing.assert_allclose(plain.attention(q, k, v, np.where(visible, 0, -np.inf)), expected, atol=1e-14)


def test_run_writes_a_row_for_every_case(tmp_path: Path) -> None:
    stream = io.StringIO()
    paths = {"json_path": str(tmp_path / "rows.json"), "markdown_path": str(tmp_path / "rows.md")}
    assert run(stream, TINY[:2], rounds=2, seconds=0.0, **paths) == 0
    lines = stream.getvalue().splitlines()
    assert sum("tiny" in line for line in lines) == 2
    found = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in found["rows"]] == ["tiny", "tiny window"]
    assert set(found["rows"][0]["contestants"]) == {"npattn", "NumPy"}
    assert found["machine"]["isa"] == npattn.isa.active()
    assert "| tiny" in (tmp_path / "rows.md").read_text(encoding="utf-8")


def test_a_wrong_result_is_not_timed() -> None:
    problem = SOFTMAX.build()
    fields = {**vars(problem), "npattn": lambda: problem.npattn() + 1}
    stream = io.StringIO()
    assert run(stream, [Case("softmax", "wrong", lambda: Problem(**fields))], rounds=1, seconds=0.0) == 1
    assert "FAILED softmax: wrong: WrongResultError: largest error 1" in stream.getvalue()


def test_rows_of_a_dtype_that_is_not_there_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    stream = io.StringIO()
    case = Case("matmul", "tiny bfloat16", partial(cases.matmul, 8, 16, 24, dtype="bfloat16"))
    assert run(stream, [case], rounds=1, seconds=0.0) == 0
    assert "matmul: tiny bfloat16 is absent: ml_dtypes is not installed." in stream.getvalue()


def test_a_contestant_that_fails_leaves_the_row() -> None:
    def prepare(problem: Problem) -> tuple[np.ndarray, measure.Timer]:
        raise RuntimeError("no such operator")

    row = measure.measure(SOFTMAX, most_rounds=1, most_seconds=0.0, threads=1, remote={"peer": prepare})
    assert row.failures == {"peer": "no such operator"}
    assert set(row.seconds) == {"npattn", "NumPy"}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("limit", ["fma", "read"])
def test_ceilings_are_positive_on_every_isa(isa: str, limit: str, dtype: np.dtype[Any]) -> None:
    problem = Problem(**{**vars(SOFTMAX.build()), "limit": limit, "dtype": dtype})
    assert measurement(problem, npattn.get_num_threads())() > 1e8


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what the benchmark would start another process for."""
    for name in _bench.BLAS_HANDICAPS:
        monkeypatch.delenv(name, raising=False)


def test_names_are_unique_and_filterable(capsys: pytest.CaptureFixture[str]) -> None:
    assert _bench.main(["--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(set(names)) == len(names) == len(cases.CASES)
    with pytest.raises(SystemExit):
        _bench.main(["--filter", "no such row"])
    assert "'no such row'" in capsys.readouterr().err


def test_table_of_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "errors.md"
    assert _bench.main(["--errors", "--filter", "MATMUL", "--markdown", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert "RMS (largest) error" in text
    assert "RMS (largest) error" in capsys.readouterr().out
    head, _, *lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert head == ["path", "inputs", "by", "float32", "float64", "float16", "bfloat16", "int8"]
    assert [line[-6] for line in lines] == ["npattn", "NumPy"] * 4
    rms = {name: float(cell.split()[0]) for name, cell in zip(head[3:], lines[0][-5:], strict=True)}
    expected = {"float32": 3e-7, "float64": 6e-16, "float16": 2e-4, "bfloat16": 1.7e-3, "int8": 1e-2}
    assert rms == pytest.approx(expected, rel=0.5)
    assert lines[1][-1] == "-"  # NumPy has no weights of 8 bits
    assert [line[-3] for line in lines[-2:]] == ["overflows"] * 2  # of 1024 products of about 100 in float16


def test_errors_of_every_path() -> None:
    """What the table would hold for normal inputs; for a dtype that is not there, a remark."""
    for path in accuracy.PATHS:
        for name in accuracy.DTYPES:
            cells = accuracy._cells(path, accuracy.INPUTS["normal"], name, None)
            assert set(cells) <= {"npattn", "NumPy"}
            assert bool(cells) == (name in path.dtypes)
            rounding = {"float64": 1e-14, "float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2, "int8": 2e-2}
            assert all(0 < float(cell.split()[0]) < rounding[name] for cell in cells.values())


def test_errors_say_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert _bench.main(["--errors", "--filter", "softmax"]) == 0
    assert "bfloat16 is left out: ml_dtypes is not installed." in capsys.readouterr().out
    for wrong in (["--filter", "no such path"], ["--list"], ["--json", "x"]):
        with pytest.raises(SystemExit):
            _bench.main(["--errors", *wrong])


def test_onnx_model_is_protobuf() -> None:
    model = onnx_model("Softmax", "", {"axis": -1}, {"a": np.zeros((2, 300), np.float32)})
    assert model.startswith(b"\x08\x08\x3a")  # ir_version 8, then the graph
    assert b"\x22\x07Softmax" in model
    assert b"\x0a\x03\x08\xac\x02" in model  # dimension 300 as a varint
