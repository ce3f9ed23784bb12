"""The command line: demo, info, look; what it prints, in which encodings, and how it fails."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import npattn
import numpy as np
import pytest
from npattn import __main__ as cli
from npattn import _demo, _info, _selfcheck, _terminal
from npattn._demo import eight_heads, one_head, png, speed

FIRST_LINE = "b1 = 0.245*v1 + 0.015*v2 + 0.245*v3 + 0.496*v4"


class Stream(io.TextIOWrapper):
    """An in-memory stream of any encoding that may claim to be a terminal."""

    def __init__(self, encoding="utf-8", terminal=False):
        super().__init__(io.BytesIO(), encoding=encoding)
        self.terminal = terminal

    def isatty(self):
        return self.terminal

    def text(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture(autouse=True)
def short_timing(monkeypatch):
    monkeypatch.setattr(speed, "SECONDS", 0.01)
    monkeypatch.setattr(speed, "LENGTH", 64)


@pytest.fixture
def demo_text():
    stream = Stream()
    _demo.run(stream)
    return stream.text()


def run_module(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "npattn", *arguments],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        timeout=120,
    )


def test_first_line_comes_from_its_vectors():
    scores = [
        sum(q * k for q, k in zip(one_head.QUERY[0], key, strict=True)) / math.sqrt(2) for key in one_head.KEY
    ]
    total = sum(map(math.exp, scores))
    weights = [math.exp(score) / total for score in scores]
    assert "b1 = " + " + ".join(f"{w:.3f}*v{i + 1}" for i, w in enumerate(weights)) == FIRST_LINE
    for array in (one_head.QUERY, one_head.KEY, one_head.VALUE):
        np.testing.assert_array_equal(array, array.round(1))  # one decimal at most


def test_demo_shows_every_stage(demo_text):
    lines = [line for line in demo_text.splitlines() if "*v1" in line]
    assert FIRST_LINE in lines[0]
    assert len(lines) == 4
    for phrase in (
        "1.000000, 1.000000, 1.000000, 1.000000",
        "4 × 512",
        "8 × 4 × 64",
        "not trained",
        "猫 追 老鼠 or 老鼠 追 猫?",
        "times as fast",
        "interleaved rounds",
        "max error",
        npattn.isa.active(),
        f"{npattn.get_num_threads()} for npattn",
        _info.cpu_model(),
    ):
        assert phrase in demo_text
    assert demo_text.splitlines()[-1] == "Next: python -m npattn bench"
    assert "\x1b" not in demo_text


def test_weights_are_aligned_under_wide_words(demo_text):
    lines = demo_text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Weights:"))
    columns = []
    for line in lines[start + 2 : start + 6]:
        points = [i for i, character in enumerate(line) if character == "."]
        columns.append([_terminal.display_width(line[:point]) for point in points])
    assert len(columns[0]) == 4
    assert columns == [columns[0]] * 4


def test_attention_without_positions_cannot_tell_order():
    rows = {row[0]: row[1:] for row in eight_heads.order_section().blocks[1].rows}
    assert max(map(float, rows["no positions"][:3])) < 1e-5
    assert min(map(float, rows["sinusoidal"][:3])) > 1e-2
    assert min(map(float, rows["RoPE"][:3])) > 1e-2
    assert rows["no positions"][3].startswith("no")
    assert rows["RoPE"][3] == "yes"


def test_timing_takes_turns():
    calls = []
    times = speed.interleaved(lambda: calls.append("a"), lambda: calls.append("b"))
    assert calls == ["a", "b"] * (len(calls) // 2)
    assert times.shape == (len(calls) // 2 - 1, 2)
    assert 3 <= len(times) <= speed.ROUNDS


@pytest.mark.parametrize(("load", "busy"), [(0.5, False), (1e4, True)])
def test_a_busy_machine_is_said_to_be_busy(monkeypatch, load, busy):
    monkeypatch.setattr(speed, "_load", lambda: load)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    rows = dict(speed._machine())
    assert ("busy" in rows) == busy
    assert "OPENBLAS_NUM_THREADS=1" in rows["set here"]


def test_plain_numpy_side_is_attention():
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 5, 4))
    expected = npattn.reference.scaled_dot_product_attention(query, key, value)
    np.testing.assert_allclose(speed.numpy_attention(query, key, value), expected, rtol=1e-12)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "gbk", "cp437"])
def test_demo_in_a_narrow_encoding(encoding):
    stream = Stream(encoding)
    _demo.run(stream)
    text = stream.text()
    assert FIRST_LINE in text
    assert "\\u" not in text
    assert ("shendu" in text) == (encoding != "gbk")


def test_demo_in_a_c_locale():
    result = run_module("demo", LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0", PYTHONIOENCODING="")
    assert result.returncode == 0, result.stderr
    assert FIRST_LINE in result.stdout.decode("ascii")
    assert result.stderr == b""


@pytest.mark.parametrize(
    ("terminal", "environment", "expected"),
    [
        (True, {"TERM": "xterm"}, True),
        (False, {"TERM": "xterm"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),  # no-color.org: set and not empty
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colour_only_where_welcome(monkeypatch, terminal, environment, expected):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = Stream(terminal=terminal)
    _terminal.Terminal(stream).matrix(np.array([[0.25, np.nan]]), ["a"], ["b", "c"], shaded=True)
    assert ("\x1b[" in stream.text()) == expected


@pytest.mark.parametrize(("text", "width"), [("abc", 3), ("深度", 4), ("e\u0301", 1), ("", 0), ("ｈｉ", 4)])
def test_display_width(text, width):
    assert _terminal.display_width(text) == width
    assert _terminal.display_width(_terminal.pad(text, 7)) == 7


class Page(HTMLParser):
    """Checks that tags nest and collects what accessibility needs."""

    VOID = ("meta",)

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_self_contained_and_accessible(tmp_path):
    path = tmp_path / "demo.html"
    stream = Stream()
    _demo.run(stream, html_path=str(path))
    assert f"Page: {path}" in stream.text()
    source = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(source)
    assert page.open == []
    tags = [tag for tag, _ in page.seen]
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert "://" not in source
    assert ("html", {"lang": "en"}) in page.seen
    assert "prefers-color-scheme: dark" in source
    assert tags.count("h1") == 1
    assert tags.count("caption") == 4
    assert tags.count("table") == tags.count("tbody") == 10
    assert tags.count("thead") == 4 + 3  # the matrices, the vectors, the sentences, the times
    assert '<span lang="zh">深度</span>' in source
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in page.seen if tag == "th")
    assert FIRST_LINE in source


def test_png_needs_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["demo", "--png", str(tmp_path / "a.png")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""  # said at once, not after the work
    assert captured.err == 'npattn: a picture needs matplotlib: pip install "npattn[plot]"\n'


def test_png(tmp_path):
    pytest.importorskip("matplotlib", reason="extra [plot] is not installed")
    path = tmp_path / "demo.png"
    png.save(str(path), [one_head.section(), eight_heads.layer_section()])
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["demo", "--html", "/no/such/page.html"], 1, "npattn: cannot write /no/such/page.html"),
        (["demo", "--html", "/"], 1, "npattn: cannot write /: it is a directory"),
        (["look", "--model", "/no/such/model", "text"], 1, "npattn: "),
    ],
)
def test_user_errors_are_one_line(arguments, code, message, capsys):
    assert cli.main(arguments) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [[], ["dance"], ["look", "text"], ["demo", "--loud"]])
def test_usage_errors_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m npattn" in capsys.readouterr().err


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("info", "demo", "look", "bench"))


def test_info(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert npattn.__version__ in text
    assert all(name in text for name in npattn.isa.available())
    count = len(_selfcheck.CHECKS) * len(npattn.isa.available())
    assert text.splitlines()[-1] == f"passed: {count} of {count}"


@pytest.mark.parametrize("error", [1e-3, math.nan])
def test_info_fails_where_the_numbers_do(monkeypatch, capsys, error):
    def wrong(rng, dtype):
        expected = rng.standard_normal(8)
        return (expected + error).astype(dtype), expected, 1

    monkeypatch.setitem(_selfcheck.CHECKS, "softmax", wrong)
    before = npattn.isa.active()
    assert cli.main(["info"]) == 1
    assert f"FAILED: softmax on {before}" in capsys.readouterr().out
    assert npattn.isa.active() == before


def test_show_config(capsys):
    config = npattn.show_config(mode="dicts")
    assert config["version"] == npattn.__version__
    assert config["isa"]["active"] in config["isa"]["available"]
    assert config["threads"]["count"] == npattn.get_num_threads()
    assert npattn.show_config() is None
    assert config["cpu"] in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"mode must be .* got 'yaml'"):
        npattn.show_config(mode="yaml")


def test_forced_isa_is_named_as_the_reason():
    result = run_module("info", NPATTN_ISA="generic")
    assert result.returncode == 0, result.stderr
    assert b"generic: NPATTN_ISA=generic" in result.stdout


@pytest.mark.parametrize("command", ["info", "demo", "bench"])
@pytest.mark.parametrize(("name", "value"), [("NPATTN_NUM_THREADS", "zero"), ("NPATTN_ISA", "bogus")])
def test_wrong_settings_are_one_line(command, name, value):
    result = run_module(command, **{name: value})
    assert result.returncode == 2
    assert result.stdout == b""
    message = result.stderr.decode()
    assert message.startswith(f"npattn: {name}")
    assert value in message
    assert message.count("\n") == 1


def test_look(monkeypatch, capsys):
    from npattn.models import minilm

    tokens = ["[CLS]", "深度", "[SEP]"]
    weights = np.stack([np.full((2, 3, 3), 1 / 3), np.broadcast_to(np.eye(3)[[1, 1, 0]], (2, 3, 3))])
    encoder = SimpleNamespace(attend=lambda text: (tokens, weights), count_unseen=len)
    monkeypatch.setattr(minilm, "load", lambda directory: encoder)
    assert cli.main(["look", "--model", "here", "深度"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "npattn: text cut at 3 tokens, 2 not seen\n"
    text = captured.out
    assert "Layer 2, mean of its 2 heads" in text
    assert "[CLS]: 深度 1.000" in text
    assert "Rollout over 2 layers" in text
    assert cli.main(["look", "--model", "here", "--query", "猫", "深度"]) == 1
    assert "npattn: query '猫' is none of the tokens" in capsys.readouterr().err


def test_a_closed_pipe_is_quiet():
    command = f"{sys.executable} -m npattn info | true"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(command, shell=True, capture_output=True, env=environment, timeout=120)
    assert result.stderr == b""
