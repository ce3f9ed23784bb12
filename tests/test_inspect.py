"""npattn.inspect: weights in words, and rollout over layers."""

from __future__ import annotations

import npattn
import numpy as np
import pytest
from npattn import _terminal

WORDS = ["我", "喜欢", "深度", "学习"]
WEIGHTS = np.array(
    [[0.245, 0.015, 0.245, 0.495], [0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
)


def test_explain_orders_and_aligns():
    lines = npattn.inspect.explain(WEIGHTS, WORDS).splitlines()
    assert lines == [
        "我:   学习 0.495, 我 0.245, 深度 0.245, 喜欢 0.015",
        "喜欢: 学习 0.400, 深度 0.300, 喜欢 0.200, 我 0.100",
        "深度: (nothing)",
        "学习: 我 1.000",
    ]
    starts = {_terminal.display_width(line[: line.index(": ") + 2 + (line[2] == " ") * 2]) for line in lines}
    assert starts == {6}


@pytest.mark.parametrize("query", [1, -3, np.int64(1), "喜欢"])
def test_explain_one_query(query):
    assert npattn.inspect.explain(WEIGHTS, WORDS, query=query, top=2) == "喜欢: 学习 0.400, 深度 0.300"


def test_explain_shows_every_query_of_a_name():
    text = npattn.inspect.explain(np.eye(3), ["a", "b", "a"], query="a")
    assert text == "a: a 1.000\na: a 1.000"


def test_explain_averages_heads_and_numbers_foreign_queries():
    weights = np.array([[[1.0, 0.0, 0.0]], [[0.0, 0.0, 1.0]]])
    assert npattn.inspect.explain(weights, ["x", "y", "z"]) == "0: x 0.500, z 0.500"
    assert npattn.inspect.explain(np.zeros((0, 2)), ["x", "y"]) == ""


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((WEIGHTS, WORDS[:3]), {}, r"weights must have shape \(\.\.\., query_len, 3\).*got \(4, 4\)"),
        ((WEIGHTS[0], WORDS), {}, r"weights must have shape .* got \(4,\)"),
        ((np.zeros((0, 2, 2)), ["a", "b"]), {}, r"empty on its leading axes, got \(0, 2, 2\)"),
        ((WEIGHTS, WORDS), {"top": 0}, "top must be at least 1, got 0"),
        ((WEIGHTS, WORDS), {"query": 4}, r"query must lie in \[-4, 4\), got 4"),
        ((WEIGHTS, WORDS), {"query": "猫"}, "query '猫' is none of the tokens: 我, 喜欢"),
    ],
)
def test_explain_errors(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        npattn.inspect.explain(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((WEIGHTS, WORDS), {"top": 1.5}, "top must be an integer, got 1.5"),
        ((WEIGHTS, WORDS), {"query": 1.5}, "query must be an integer, got 1.5"),
        ((WEIGHTS, None), {}, "tokens must be a sequence of str, .* got None"),
        ((None, WORDS), {}, "weights must be an array, got None"),
    ],
)
def test_explain_wrong_types(arguments, options, message):
    with pytest.raises(TypeError, match=message):
        npattn.inspect.explain(*arguments, **options)


def test_rollout_wrong_types():
    with pytest.raises(TypeError, match="weights_per_layer must be an iterable of arrays, got None"):
        npattn.inspect.rollout(None)
    with pytest.raises(ValueError, match=r"weights_per_layer\[0\] cannot be made an array"):
        npattn.inspect.rollout([[[1.0], [1.0, 2.0]]])


def test_rollout_follows_the_paper():
    rng = np.random.default_rng(0)
    layers = [rng.dirichlet(np.ones(5), (2, 3, 5)) for _ in range(4)]
    expected = np.eye(5)
    for layer in layers:
        expected = (0.5 * layer.mean(axis=1) + 0.5 * np.eye(5)) @ expected
    actual = npattn.inspect.rollout(iter(layers))
    np.testing.assert_allclose(actual, expected, rtol=1e-13)
    np.testing.assert_allclose(actual.sum(axis=-1), 1, rtol=1e-13)
    assert actual.shape == (2, 5, 5)


def test_rollout_reads_the_path_backwards_through_the_layers():
    copy_from_first = np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    copy_from_second = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    reached = npattn.inspect.rollout([copy_from_first, copy_from_second])
    np.testing.assert_array_equal(reached[2], [0.25, 0.25, 0.5])  # 2 <- 1 (half), which is half 0


def test_rollout_keeps_a_token_that_sees_nothing():
    hidden = np.array([[0.0, 0.0], [0.5, 0.5]])
    np.testing.assert_array_equal(npattn.inspect.rollout([hidden]), [[1.0, 0.0], [0.25, 0.75]])
    assert npattn.inspect.rollout([hidden.astype(np.float32)]).dtype == np.float64


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "at least one layer"),
        ([np.ones(3)], r"weights_per_layer\[0\] must have shape .* got \(3,\)"),
        ([np.ones((2, 3))], r"weights_per_layer\[0\] must have shape .* got \(2, 3\)"),
        ([np.eye(3), np.eye(4)], r"weights_per_layer\[1\] must have length 3 .* got \(4, 4\)"),
    ],
)
def test_rollout_errors(layers, message):
    with pytest.raises(ValueError, match=message):
        npattn.inspect.rollout(layers)
