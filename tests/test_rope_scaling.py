"""Scaling types of RoPE, against numbers computed once with transformers (data/) and the reference."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import reference

RECORDED = json.loads((Path(__file__).parent / "data" / "rope_scaling.json").read_text())
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1, 1.02],
    "long_factor": [1.05, 64.8],
    "original_max_position_embeddings": 4096,
    "max_position_embeddings": 131072,
}
DYNAMIC = {"type": "dynamic", "factor": 2.0, "max_position_embeddings": 2048}


def name_of(recorded: dict[str, Any]) -> str:
    extra = [f"{key}={given}" for key, given in recorded["scaling"].items() if not isinstance(given, list)]
    return f"{recorded['dim']}-{recorded['length']}-{'-'.join(extra)}"


@pytest.mark.parametrize("recorded", RECORDED, ids=name_of)
@pytest.mark.parametrize(
    "function", [npattn.rope_frequencies, reference.rope_frequencies], ids=["", "reference"]
)
def test_recorded_numbers(recorded, function):
    inv_freq, factor = function(
        recorded["dim"], base=recorded["base"], scaling=recorded["scaling"], length=recorded["length"]
    )
    assert inv_freq.dtype == np.float64
    assert isinstance(factor, float)
    np.testing.assert_allclose(inv_freq, recorded["inv_freq"], rtol=1e-13, atol=0)
    assert factor == pytest.approx(recorded["attention_factor"], rel=1e-14)


@pytest.mark.parametrize("recorded", RECORDED, ids=name_of)
def test_old_spelling_and_theta_inside(recorded):
    scaling = {key: given for key, given in recorded["scaling"].items() if key != "rope_type"}
    scaling |= {"type": recorded["scaling"]["rope_type"], "rope_theta": recorded["base"]}
    inv_freq, _ = npattn.rope_frequencies(recorded["dim"], scaling=scaling, length=recorded["length"])
    np.testing.assert_allclose(inv_freq, recorded["inv_freq"], rtol=1e-13, atol=0)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"rope_type": None, "factor": None}])
def test_no_scaling(scaling):
    inv_freq, factor = npattn.rope_frequencies(6, base=100.0, scaling=scaling)
    np.testing.assert_allclose(inv_freq, [1.0, 100 ** (-1 / 3), 100 ** (-2 / 3)], rtol=1e-15)
    assert factor == 1.0


@pytest.mark.parametrize("factor", [4, 16, 32, 64, 128])
def test_yarn_attention_factor(factor):
    _, found = npattn.rope_frequencies(64, scaling=YARN | {"factor": factor})
    assert found == pytest.approx(0.1 * math.log(factor) + 1, rel=1e-15)
    assert npattn.rope_frequencies(64, scaling=YARN | {"factor": 1})[1] == 1.0
    assert npattn.rope_frequencies(64, scaling=YARN | {"factor": factor, "attention_factor": 1.0})[1] == 1.0


def test_longrope_switches_past_the_original_length():
    short, factor = npattn.rope_frequencies(4, scaling=LONGROPE, length=4096)
    long, same_factor = npattn.rope_frequencies(4, scaling=LONGROPE, length=4097)
    np.testing.assert_allclose(short, [1, 0.01 / 1.02], rtol=1e-14)
    np.testing.assert_allclose(long, [1 / 1.05, 0.01 / 64.8], rtol=1e-14)
    assert factor == same_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)), rel=1e-15)
    np.testing.assert_array_equal(npattn.rope_frequencies(4, scaling=LONGROPE)[0], short)


def test_length_defaults_to_the_largest_position():
    for scaling, limit in ((LONGROPE, 4096), (DYNAMIC, 2048)):
        for last in (limit - 1, limit, 3 * limit):
            places = np.array([0, last, 5])
            expected = npattn.rope_cos_sin(places, 4, scaling=scaling, length=last + 1, dtype=np.float64)
            found = npattn.rope_cos_sin(places, 4, scaling=scaling, dtype=np.float64)
            np.testing.assert_array_equal(found, expected)
        near, far = (npattn.rope_cos_sin([7], 4, scaling=scaling, length=n)[0] for n in (limit, limit + 1))
        assert not np.array_equal(near, far)


def test_dynamic_is_continuous_and_dim_2_is_finite():
    at, past = (npattn.rope_frequencies(16, scaling=DYNAMIC, length=n)[0] for n in (2048, 2049))
    np.testing.assert_array_equal(at, npattn.rope_frequencies(16)[0])
    np.testing.assert_allclose(past, at, rtol=2e-3)
    np.testing.assert_array_equal(npattn.rope_frequencies(2, scaling=DYNAMIC, length=9999)[0], [1.0])


def test_llama3_bands():
    plain, _ = npattn.rope_frequencies(128, base=500000.0)
    scaled, _ = npattn.rope_frequencies(128, base=500000.0, scaling=LLAMA3)
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_array_equal(scaled[turns >= 4], plain[turns >= 4])
    np.testing.assert_allclose(scaled[turns <= 1], plain[turns <= 1] / 8, rtol=1e-15)
    between = (turns > 1) & (turns < 4)
    assert between.sum() == 6
    assert np.all((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8))
    assert np.all(np.diff(scaled) < 0)


def test_cos_and_sin_carry_the_attention_factor_once():
    inv_freq, factor = npattn.rope_frequencies(64, scaling=YARN)
    cos, sin = npattn.rope_cos_sin([3, 1000], 64, scaling=YARN, dtype=np.float64)
    np.testing.assert_allclose(cos**2 + sin**2, factor**2, rtol=1e-14)
    np.testing.assert_allclose(cos, factor * np.cos(np.outer([3, 1000], inv_freq)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("base", "scaling", "message"),
    [
        (10000.0, {"rope_type": "ntk"}, "'ntk'; known types are default, mrope, linear, dynamic, yarn"),
        (10000.0, {"rope_type": ["yarn"]}, r"rope_type \['yarn'\]; known types"),
        (10000.0, {"type": "linear"}, "needs 'factor'"),
        (10000.0, {"type": "linear", "factor": 2, "fast": 1}, "unknown keys 'fast'; known are factor"),
        (10000.0, {"type": "linear", "factor": 0.5}, r"scaling\['factor'\] must be at least 1, got 0.5"),
        (10000.0, {"type": "dynamic", "factor": 2.0}, "needs 'max_position_embeddings'"),
        (10000.0, {"type": "yarn", "factor": 2.0}, "needs 'original_max_position_embeddings'"),
        (10000.0, {"type": "yarn", "original_max_position_embeddings": 8}, "needs 'factor' or 'max_pos"),
        (10000.0, YARN | {"beta_fast": 1, "beta_slow": 2}, "'beta_fast'.*must be at least 'beta_slow'"),
        (10000.0, YARN | {"attention_factor": 0}, "'attention_factor'.*must be above 0"),
        (10000.0, LLAMA3 | {"high_freq_factor": 1.0}, "'low_freq_factor'.*must be below 'high_freq_factor'"),
        (10000.0, {key: LLAMA3[key] for key in LLAMA3 if key != "factor"}, "needs 'factor'"),
        (
            10000.0,
            LONGROPE | {"short_factor": [1]},
            r"scaling\['short_factor'\] must hold 2 positive numbers",
        ),
        (10000.0, LONGROPE | {"long_factor": [1, -1]}, r"scaling\['long_factor'\] must hold 2 positive"),
        (
            10000.0,
            LONGROPE | {"max_position_embeddings": None},
            "needs 'factor' or 'max_position_embeddings'",
        ),
        (
            10000.0,
            {"type": "proportional", "partial_rotary_factor": 1.5},
            "'partial_rotary_factor'.*at most 1",
        ),
        (500.0, {"rope_theta": 5000.0}, r"base is 500, but scaling\['rope_theta'\] is 5000"),
        (1.0, None, "base must be above 1, got 1"),
    ],
)
def test_refused_values(base, scaling, message):
    with pytest.raises(ValueError, match=message):
        npattn.rope_frequencies(4, base=base, scaling=scaling)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("linear", "scaling must be a dict"),
        ({"type": "linear", "factor": "2"}, r"scaling\['factor'\] must be a number"),
        (YARN | {"truncate": 1}, r"scaling\['truncate'\] must be True or False"),
        (LONGROPE | {"long_factor": ["a", "b"]}, r"scaling\['long_factor'\] must be a list of numbers"),
    ],
)
def test_refused_types(scaling, message):
    with pytest.raises(TypeError, match=message):
        npattn.rope_frequencies(4, scaling=scaling)


@pytest.mark.parametrize(("dim", "message"), [(3, "even.*got 3"), (0, "at least 2"), (-2, "at least 2")])
def test_refused_dim(dim, message):
    with pytest.raises(ValueError, match=message):
        npattn.rope_frequencies(dim)


def test_matching_theta_is_accepted():
    inside = npattn.rope_frequencies(8, scaling={"rope_theta": 5e5})
    both = npattn.rope_frequencies(8, base=5e5, scaling={"rope_theta": 5e5})
    outside = npattn.rope_frequencies(8, base=5e5)
    np.testing.assert_array_equal(inside[0], outside[0])
    np.testing.assert_array_equal(both[0], outside[0])


def test_partial_rotary_factor_in_apply_rope():
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 2, 5, 16))
    scaling = {"rope_type": "default", "partial_rotary_factor": 0.5}
    found = npattn.apply_rope(query, key, np.arange(5), scaling=scaling)
    expected = npattn.apply_rope(query, key, np.arange(5), rotary_dim=8)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found[0][..., 8:], query[..., 8:])
    np.testing.assert_allclose(
        found, reference.apply_rope(query, key, np.arange(5), scaling=scaling), rtol=0, atol=1e-14
    )
    with pytest.raises(
        ValueError, match=r"rotary_dim is 4, but .*partial_rotary_factor.* = 0.5 turns 8 of 16"
    ):
        npattn.apply_rope(query, key, np.arange(5), scaling=scaling, rotary_dim=4)


def test_proportional_turns_the_whole_head():
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 2, 5, 16))
    scaling = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    found, _ = npattn.apply_rope(query, key, np.arange(5), scaling=scaling)
    still = [*range(2, 8), *range(10, 16)]
    np.testing.assert_array_equal(found[..., still], query[..., still])
    assert np.all(found[:, 1:, [0, 1, 8, 9]] != query[:, 1:, [0, 1, 8, 9]])


@pytest.mark.parametrize("kind", [{"type": "mrope"}, {"rope_type": "default", "type": "default"}, YARN])
def test_mrope_section_gives_the_sections(kind):
    """Qwen2-VL's config.json: the frequencies of the type, and which pairs time, height and width turn."""
    scaling = kind | {"mrope_section": [2, 3, 3]}
    plain = YARN if kind is YARN else None
    places = np.random.default_rng(0).integers(0, 50, (3, 2, 7))
    expected = npattn.rope_cos_sin(places, 16, scaling=plain, sections=[2, 3, 3], dtype=np.float64)
    for given in (None, (2, 3, 3)):
        found = npattn.rope_cos_sin(places, 16, scaling=scaling, sections=given, dtype=np.float64)
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(
        reference.rope_cos_sin(places, 16, scaling=scaling), expected, rtol=0, atol=1e-13
    )
    np.testing.assert_array_equal(
        npattn.rope_frequencies(16, scaling=scaling)[0], npattn.rope_frequencies(16, scaling=plain)[0]
    )
    query, key = np.random.default_rng(1).standard_normal((2, 2, 4, 7, 16))
    np.testing.assert_array_equal(
        npattn.apply_rope(query, key, places, scaling=scaling),
        npattn.apply_rope(query, key, places, scaling=plain, sections=[2, 3, 3]),
    )
    with pytest.raises(
        ValueError, match=r"sections is \[3, 3, 2\], but scaling\['mrope_section'\] is \[2, 3, 3\]"
    ):
        npattn.apply_rope(query, key, places, scaling=scaling, sections=[3, 3, 2])
    with pytest.raises(ValueError, match=r"positions must have shape \(3, ..., L\)"):
        npattn.rope_cos_sin(np.arange(7), 16, scaling=scaling)


def test_mrope_is_applied_as_hugging_face_does():
    """The halves of a head are cut by section * 2, and piece n takes the cosines of positions n % 3."""
    section = [2, 3, 3]
    places = np.random.default_rng(0).integers(0, 50, (3, 7))
    query, key = np.random.default_rng(1).standard_normal((2, 1, 7, 16))
    angles = places[..., None] * npattn.rope_frequencies(16)[0]
    angles = np.concatenate([angles, angles], axis=-1)
    pieces = np.split(angles, np.cumsum(section * 2)[:-1], axis=-1)
    angles = np.concatenate([piece[n % 3] for n, piece in enumerate(pieces)], axis=-1)
    half = np.concatenate([-query[..., 8:], query[..., :8]], axis=-1)
    found, _ = npattn.apply_rope(query, key, places, scaling={"type": "mrope", "mrope_section": section})
    np.testing.assert_allclose(found, query * np.cos(angles) + half * np.sin(angles), rtol=0, atol=1e-13)


@pytest.mark.parametrize("section", [16, "16", [1.5, 2], {"t": 1}])
def test_wrong_mrope_section(section):
    with pytest.raises(TypeError, match=r"mrope_section.*must be (a list of integers|an integer)"):
        npattn.rope_cos_sin(np.zeros((3, 1), int), 4, scaling={"type": "mrope", "mrope_section": section})


def test_a_layer_takes_mrope_as_it_is_in_the_config():
    rope = {"scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    x = np.random.default_rng(0).standard_normal((2, 5, 32), dtype=np.float32)
    plain, mrope = (npattn.MultiHeadAttention.random(32, 2, rng=0, rope=given) for given in ({}, rope))
    np.testing.assert_array_equal(mrope(x), plain(x))  # text stands at the same place in all three
    places = np.random.default_rng(1).integers(0, 9, (3, 5))
    assert not np.array_equal(mrope(x, positions=places), plain(x))
