"""The decoder of docs/recipes.md, as it stands there, generates what other implementations do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import plain_llama
import pytest
from pages import names_of

RECORDED = json.loads((Path(__file__).parent / "data" / "llama.json").read_text())

# Recorded logits, of up to 10, come from norms and angles in float32 (see data/make_llama.py).
WITHIN = 2e-5
SINGLE = 2e-4  # three layers in float32; the chosen tokens lead by 1e-3 and more


def recipe(name: str) -> Any:
    return names_of("docs/recipes.md")[name]


@pytest.fixture(scope="module", params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> Any:
    return np.dtype(request.param)


@pytest.fixture(scope="module", params=list(RECORDED))
def recorded(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The configuration of a model, and the prompts, tokens and logits of its runs."""
    return RECORDED[request.param]


@pytest.fixture(scope="module")
def model(recorded: dict[str, Any], dtype: Any) -> Any:
    state = plain_llama.seeded_state(recorded["config"])
    return recipe("Llama")({name: array.astype(dtype) for name, array in state.items()}, recorded["config"])


def stepwise(model: Any, prompt: list[int], tokens: list[int], chunk: int) -> Any:
    """The logits after the prompt and after each of the tokens but the last; the prompt comes in chunks."""
    caches = model.caches(1)
    for start in range(0, len(prompt), chunk):
        hidden = model(np.array([prompt[start : start + chunk]]), caches)
    rows = [hidden[0, -1]] + [model(np.array([[token]]), caches)[0, 0] for token in tokens[:-1]]
    assert {tuple(cache.lengths) for cache in caches} == {(len(prompt) + len(tokens) - 1,)}
    return model.logits(np.stack(rows))


def test_the_formulas_give_what_was_recorded(recorded: dict[str, Any]) -> None:
    """Over the whole text each recorded token is the likeliest after those before it."""
    config = recorded["config"]
    state = plain_llama.seeded_state(config)
    for run in recorded["runs"]:
        logits = plain_llama.logits(state, config, run["prompt"] + run["tokens"][:-1])
        logits = logits[len(run["prompt"]) - 1 :]
        assert logits.argmax(axis=1).tolist() == run["tokens"]
        np.testing.assert_allclose(logits[0], run["first_logits"], rtol=0, atol=WITHIN)
        np.testing.assert_allclose(logits[-1], run["last_logits"], rtol=0, atol=WITHIN)
        assert run["lead"] > 5 * SINGLE
        assert len(set(run["tokens"])) > 30  # no text that repeats one word


def test_each_prompt_alone(recorded: dict[str, Any], model: Any, isa: str) -> None:
    generate = recipe("generate")
    for run in recorded["runs"]:
        tokens = generate(model, [run["prompt"]], len(run["tokens"]))
        assert tokens.tolist() == [run["tokens"]]


def test_prompts_of_several_lengths_together(recorded: dict[str, Any], model: Any, isa: str) -> None:
    runs = recorded["runs"]
    tokens = recipe("generate")(model, [run["prompt"] for run in runs], len(runs[0]["tokens"]))
    assert tokens.tolist() == [run["tokens"] for run in runs]


def test_logits_with_and_without_a_cache(recorded: dict[str, Any], model: Any, dtype: Any, isa: str) -> None:
    """Of the formulas, of the decoder without a cache, and with one after prompts at once and in chunks."""
    config, run = recorded["config"], recorded["runs"][2]
    prompt, tokens = run["prompt"], run["tokens"]
    whole = prompt + tokens[:-1]
    exact = plain_llama.logits(plain_llama.seeded_state(config), config, whole)[len(prompt) - 1 :]
    allowed = {"rtol": 0, "atol": SINGLE if dtype == np.float32 else 1e-11}
    uncached = model.logits(model(np.array([whole])))[0, len(prompt) - 1 :]
    np.testing.assert_allclose(uncached, exact, **allowed)
    for chunk in (len(prompt), 33, 7):
        cached = stepwise(model, prompt, tokens, chunk)
        assert cached.dtype == dtype
        np.testing.assert_allclose(cached, exact, **allowed)
        np.testing.assert_allclose(cached[0], run["first_logits"], rtol=0, atol=SINGLE)
        np.testing.assert_allclose(cached[-1], run["last_logits"], rtol=0, atol=SINGLE)


def test_without_a_cache_the_whole_for_each_token(recorded: dict[str, Any], model: Any) -> None:
    run = recorded["runs"][0]
    ids = list(run["prompt"])
    for _ in run["tokens"]:
        ids.append(int(model.logits(model(np.array([ids])))[0, -1].argmax()))
    assert ids == run["prompt"] + run["tokens"]


def test_a_draft_is_taken_back(recorded: dict[str, Any], model: Any) -> None:
    """Speculative decoding: guesses of a cheaper model are tried together, the wrong ones cropped."""
    run = recorded["runs"][0]
    text = run["prompt"] + run["tokens"]
    caches, known = model.caches(1), len(run["prompt"])
    model(np.array([run["prompt"][:-1]]), caches)
    rng = np.random.default_rng(0)
    while known + 8 < len(text):
        good = int(rng.integers(0, 7))  # so many of the seven guesses are right
        draft = [(t + (i >= good)) % 97 for i, t in enumerate(text[known : known + 7])]
        logits = model.logits(model(np.array([[text[known - 1], *draft]]), caches))[0]
        likeliest = logits.argmax(axis=-1).tolist()
        assert likeliest[: good + 1] == text[known : known + good + 1]
        known += good + 1
        for cache in caches:
            cache.crop(known - 1)


def test_branches(recorded: dict[str, Any], model: Any) -> None:
    """Two prompts, then both rows go on with the second; a copy of the caches goes on by itself."""
    first, second = recorded["runs"][2], recorded["runs"][3]
    prompts = [first["prompt"], second["prompt"][: len(first["prompt"])]]
    caches = model.caches(2)
    model(np.array(prompts), caches)
    for cache in caches:
        cache.reorder([1, 1])
    copies = [cache.copy() for cache in caches]
    for n in range(len(prompts[1]), 60):
        here = second["prompt"][n]
        hidden = model(np.array([[here], [(here + 1) % 97]]), caches)  # the second row is another text now
        alone = model(np.array([second["prompt"][: n + 1]]))[0, -1]
        np.testing.assert_allclose(hidden[0, 0], alone, rtol=0, atol=SINGLE)
        assert np.abs(hidden[1, 0] - alone).max() > 0.1
        both = model(np.array([[here], [here]]), copies)
        np.testing.assert_array_equal(both[0], both[1])
        np.testing.assert_allclose(both[0, 0], alone, rtol=0, atol=SINGLE)
