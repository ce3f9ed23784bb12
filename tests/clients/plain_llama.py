"""A decoder of the Llama type from seeded weights, its formulas written out in NumPy alone, in float64.

One sequence, no cache, no library: what the decoder of docs/recipes.md is compared with.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def seeded_state(config: dict[str, Any]) -> dict[str, Array]:
    """The weights of a checkpoint with this configuration, under its names, rounded to float16 (exact)."""
    rng = np.random.RandomState(config["seed"])  # this generator's numbers are the same for ever
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{number}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    state = {}
    for name, shape in shapes.items():
        numbers = rng.standard_normal(shape)
        numbers = 1 + numbers / 4 if len(shape) == 1 else numbers * (2 / np.sqrt(shape[1]))
        state[name] = numbers.astype(np.float16).astype(np.float64)
    return state


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def llama3_frequencies(dim: int, rope: dict[str, Any]) -> Array:
    """1 / base^(2 i / dim); waves longer than the old context / low turn `factor` times slower, those shorter
    than it / high as ever, and between the two the frequency goes from one to the other.
    """
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    frequencies = []
    for i in range(0, dim, 2):
        frequency = rope["rope_theta"] ** (-i / dim)
        turns = rope["original_max_position_embeddings"] * frequency / (2 * np.pi)  # in the old context
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        frequencies.append((1 - share) * frequency / factor + share * frequency)
    return np.array(frequencies)


def rotated(heads: Array, frequencies: Array) -> Array:
    """Element i of (L, H, E) and element i + E / 2 turned by place * frequency i."""
    angles = np.arange(heads.shape[0])[:, None, None] * frequencies
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    turned = (
        first * np.cos(angles) - second * np.sin(angles),
        second * np.cos(angles) + first * np.sin(angles),
    )
    return np.concatenate(turned, axis=-1)


def attention(x: Array, state: dict[str, Array], name: str, config: dict[str, Any]) -> Array:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, length = config["head_dim"], x.shape[0]
    query, key, value = ((x @ state[f"{name}.{p}_proj.weight"].T).reshape(length, -1, dim) for p in "qkv")
    frequencies = llama3_frequencies(dim, config["rope_parameters"])
    query, key = rotated(query, frequencies), rotated(key, frequencies)
    outputs = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        scores = query[:, head] @ key[:, group].T / np.sqrt(dim)
        scores[np.triu_indices(length, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        outputs.append(weights / weights.sum(axis=1, keepdims=True) @ value[:, group])
    return np.concatenate(outputs, axis=1) @ state[f"{name}.o_proj.weight"].T


def logits(state: dict[str, Array], config: dict[str, Any], ids: list[int]) -> Array:
    """(L, vocabulary): of what comes after each token."""
    eps = config["rms_norm_eps"]
    x = state["model.embed_tokens.weight"][ids]
    for number in range(config["num_hidden_layers"]):
        name = f"model.layers.{number}"
        normed = rms_norm(x, state[f"{name}.input_layernorm.weight"], eps)
        x = x + attention(normed, state, f"{name}.self_attn", config)
        normed = rms_norm(x, state[f"{name}.post_attention_layernorm.weight"], eps)
        gate = normed @ state[f"{name}.mlp.gate_proj.weight"].T
        up = normed @ state[f"{name}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ state[f"{name}.mlp.down_proj.weight"].T
    x = rms_norm(x, state["model.norm.weight"], eps)
    return x @ state.get("lm_head.weight", state["model.embed_tokens.weight"]).T
