"""Reading attention weights: what a word looks at, and what a whole stack of layers looks at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._check import as_array, as_integer
from ._terminal import display_width, pad

__all__ = ["explain", "rollout"]


def explain(
    weights: ArrayLike,
    tokens: Sequence[str],
    *,
    query: SupportsIndex | str | None = None,
    top: int = 5,
) -> str:
    """Say in words where each query looks: one line a query, its largest weights first.

    Parameters
    ----------
    weights : array_like, (..., query_len, key_len)
        Attention weights, as from `attention_weights`. Leading axes (batch, heads) are averaged.
    tokens : sequence of str, key_len
        The keys' names. They name the queries too if there are as many queries as keys; otherwise a
        query goes by its number.
    query : int or str, optional
        One query: its index (negative counts from the end) or its token, in which case every query of
        that name is shown. By default all.
    top : int
        How many keys a line names at most.

    Returns
    -------
    str
        Lines without a trailing newline, aligned for wide characters.

    Raises
    ------
    ValueError
        If the shapes do not agree, `query` names nothing, or `top` is not positive.
    TypeError
        If `weights` are not numbers, `tokens` no sequence, or `query` or `top` no integers.

    Examples
    --------
    >>> import npattn
    >>> tokens = ["I", "like", "deep", "learning"]
    >>> print(npattn.inspect.explain([[0.245, 0.015, 0.245, 0.495]], tokens, top=2))
    0: learning 0.495, I 0.245
    """
    table = as_array("weights", weights).astype(np.float64)
    if not isinstance(tokens, Iterable):
        raise TypeError(f"tokens must be a sequence of str, one for each key, got {tokens!r}")
    names = [str(token) for token in tokens]
    if table.ndim < 2 or table.shape[-1] != len(names):
        raise ValueError(
            f"weights must have shape (..., query_len, {len(names)}), one column for each of the "
            f"{len(names)} tokens, got {table.shape}"
        )
    count = as_integer("top", top, minimum=1)
    query_len, key_len = table.shape[-2:]
    if 0 in table.shape[:-2]:
        raise ValueError(f"weights must not be empty on its leading axes, got {table.shape}")
    table = table.mean(axis=tuple(range(table.ndim - 2)))

    labels = names if query_len == key_len else [str(index) for index in range(query_len)]
    chosen = _chosen(query, labels)
    width = max((display_width(labels[index]) for index in chosen), default=0)
    lines = []
    for index in chosen:
        # Stable, so that equal weights keep the order of the keys; hidden keys have weight 0 and no name.
        order = np.argsort(-table[index], kind="stable")[:count]
        seen = ", ".join(f"{names[key]} {table[index, key]:.3f}" for key in order if table[index, key] != 0)
        lines.append(f"{pad(labels[index] + ':', width + 1)} {seen or '(nothing)'}")
    return "\n".join(lines)


def _chosen(query: SupportsIndex | str | None, labels: Sequence[str]) -> list[int]:
    if query is None:
        return list(range(len(labels)))
    if isinstance(query, str):
        found = [index for index, label in enumerate(labels) if label == query]
        if not found:
            raise ValueError(f"query {query!r} is none of the tokens: {', '.join(labels)}")
        return found
    index = as_integer("query", query)
    if not -len(labels) <= index < len(labels):
        raise ValueError(f"query must lie in [{-len(labels)}, {len(labels)}), got {index}")
    return [index % len(labels)]


def rollout(weights_per_layer: Iterable[ArrayLike]) -> NDArray[np.float64]:
    """Attention rollout: how much of each input token reaches each output token of a stack of layers.

    Every layer mixes its tokens by ``A = (W + I) / 2``, with W the mean of its heads' weights and I the
    residual connection, rows scaled to sum to 1; the layers' mixtures are multiplied, the last on the left.

    Parameters
    ----------
    weights_per_layer : iterable of array_like, each (..., num_heads, length, length)
        Self-attention weights, the first layer first. A 2-D array is one head. Heads may differ in number.

    Returns
    -------
    ndarray of float64, (..., length, length)
        Row i says what the last layer's token i is made of. Rows sum to 1.

    Raises
    ------
    ValueError
        If there is no layer, or a layer's weights are not square or differ in length from the others.
    TypeError
        If `weights_per_layer` is not iterable, or a layer's weights are not numbers.

    References
    ----------
    Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, section 3.

    Examples
    --------
    >>> import npattn
    >>> layer = [[0.5, 0.5], [0.0, 1.0]]
    >>> npattn.inspect.rollout([layer, layer])
    array([[0.5625, 0.4375],
           [0.    , 1.    ]])
    """
    if not isinstance(weights_per_layer, Iterable):
        raise TypeError(f"weights_per_layer must be an iterable of arrays, got {weights_per_layer!r}")
    mixture: NDArray[np.float64] | None = None
    for number, layer in enumerate(weights_per_layer):
        weights = as_array(f"weights_per_layer[{number}]", layer).astype(np.float64)
        if weights.ndim < 2 or weights.shape[-1] != weights.shape[-2]:
            raise ValueError(
                f"weights_per_layer[{number}] must have shape (..., num_heads, length, length), "
                f"got {weights.shape}"
            )
        if mixture is not None and weights.shape[-1] != mixture.shape[-1]:
            raise ValueError(
                f"weights_per_layer[{number}] must have length {mixture.shape[-1]} as the layers before it, "
                f"got {weights.shape}"
            )
        if weights.ndim > 2:
            weights = weights.mean(axis=-3)
        mixed = weights + np.eye(weights.shape[-1])
        mixed /= mixed.sum(axis=-1, keepdims=True)
        mixture = mixed if mixture is None else mixed @ mixture
    if mixture is None:
        raise ValueError("weights_per_layer must hold at least one layer, got none")
    return mixture
