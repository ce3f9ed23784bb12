"""Writes rope_scaling.json: the inverse frequencies and attention factors of transformers.

Run once, with torch 2.13.0 and transformers 5.24.0, which the tests do not need:

    python tests/data/make_rope_scaling.py

transformers rounds to float32 on the way; here its float32 is read as float64, so that the formulas can be
compared to the last digits.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, modeling_rope_utils

double = {name: getattr(torch, name) for name in dir(torch)}
double |= {"float": torch.float64, "float32": torch.float64}
modeling_rope_utils.torch = SimpleNamespace(**double)
torch.Tensor.float = torch.Tensor.double

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
SHORT = [1.0 + 0.02 * i for i in range(8)]
LONG = [1.05 + 4.0 * i for i in range(8)]
LONGROPE = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 4096}

# (type, head_dim, base, keys, length)
CASES = [
    ("linear", 16, 10000.0, {"factor": 2.5}, None),
    ("linear", 16, 500000.0, {"factor": 4}, 100),
    *(
        ("dynamic", 16, 10000.0, {"factor": 2.0, "max_position_embeddings": 2048}, n)
        for n in (None, 2048, 2049, 9000)
    ),
    ("dynamic", 4, 10000.0, {"factor": 4.0, "max_position_embeddings": 64}, 1000),
    ("yarn", 64, 10000.0, YARN, None),
    ("yarn", 64, 10000.0, YARN | {"truncate": False}, None),
    (
        "yarn",
        64,
        150000.0,
        YARN | {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        None,
    ),
    ("yarn", 64, 10000.0, YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, None),
    ("yarn", 64, 10000.0, YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}, None),
    ("yarn", 64, 10000.0, YARN | {"factor": 40.0, "mscale": 0.707}, None),
    ("yarn", 64, 10000.0, YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0}, None),
    ("yarn", 32, 10000.0, YARN | {"attention_factor": 1.25}, None),
    ("yarn", 16, 10000.0, {"factor": 8.0, "original_max_position_embeddings": 128}, None),
    ("yarn", 16, 10000.0, {"factor": 1.0, "original_max_position_embeddings": 128}, None),
    ("yarn", 16, 10000.0, {"factor": 8.0, "original_max_position_embeddings": 4}, None),
    (
        "yarn",
        32,
        10000.0,
        {"original_max_position_embeddings": 4096, "max_position_embeddings": 163840},
        None,
    ),
    ("longrope", 16, 10000.0, LONGROPE | {"max_position_embeddings": 131072}, None),
    ("longrope", 16, 10000.0, LONGROPE | {"max_position_embeddings": 131072}, 4096),
    ("longrope", 16, 10000.0, LONGROPE | {"max_position_embeddings": 131072}, 4097),
    ("longrope", 16, 10000.0, LONGROPE | {"factor": 16.0}, 5000),
    ("longrope", 16, 10000.0, LONGROPE | {"factor": 1.0}, 5000),
    ("longrope", 16, 10000.0, LONGROPE | {"attention_factor": 1.5, "factor": 2.0}, 1),
    ("llama3", 128, 500000.0, LLAMA3, None),
    ("llama3", 64, 500000.0, LLAMA3 | {"factor": 32.0}, None),
    ("llama3", 64, 10000.0, LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 8.0}, None),
    ("proportional", 64, 1000000.0, {"partial_rotary_factor": 0.25}, None),
    ("proportional", 64, 1000000.0, {"partial_rotary_factor": 0.3, "factor": 8.0}, None),
    ("proportional", 64, 10000.0, {}, None),
]

results = []
for kind, head_dim, base, keys, length in CASES:
    absent = {"factor": None} if kind == "yarn" else {}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=keys.get("max_position_embeddings", 131072),
        rope_parameters={"rope_type": kind, "rope_theta": base} | absent | keys,
    )
    inv_freq, factor = modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    scaling = {"rope_type": kind} | keys
    results.append(
        {
            "dim": head_dim,
            "base": base,
            "scaling": scaling,
            "length": length,
            "inv_freq": inv_freq.tolist(),
            "attention_factor": float(factor),
        }
    )

lines = ",\n".join(json.dumps(result) for result in results)
Path(__file__).with_name("rope_scaling.json").write_text(f"[\n{lines}\n]\n")
