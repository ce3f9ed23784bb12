"""Makes recipes.npz: attention layers of small seeded models, their inputs and outputs in float64.

Run once, with torch 2.13.0, transformers 5.24.0 and safetensors installed:

    python make_recipes.py

Each model is whole, of two layers, runs in double precision with its plain ("eager") attention and its own
masks and positions. Kept are the weights of one attention layer under the names of its checkpoint (rounded to
float16 before the run: small and exact), what went into that layer and what came out. The library computes
rotary angles and, but for BERT and GPT-2, the softmax in float32; the numbers are off by no more than that.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 24, 4, 2, 10, 9

COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = COMMON | {"num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}

# name: (model, configuration, the attention module of layer 1, part of its names in the checkpoint)
MODELS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "bert": ("Bert", COMMON, "encoder.layer.1.attention", "layer.1.attention."),
    "gpt2": (
        "GPT2",
        {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": 2, "n_positions": 64, "vocab_size": 50}
        | {"bos_token_id": None, "eos_token_id": None, "scale_attn_by_inverse_layer_idx": True},
        "h.1.attn",
        "h.1.attn.",
    ),
    "vit": (
        "ViT",
        {key: COMMON[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
        | {"num_attention_heads": HEADS, "image_size": 12, "patch_size": 4},
        "layers.1.attention",
        "layer.1.attention.",
    ),
    "llama": ("Llama", GROUPED | {"rope_parameters": LLAMA3}, "layers.1.self_attn", "layers.1.self_attn."),
    "qwen2": (
        "Qwen2",
        GROUPED | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        "layers.1.self_attn",
        "layers.1.self_attn.",
    ),
    "qwen3": (
        "Qwen3",
        GROUPED | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        "layers.1.self_attn",
        "layers.1.self_attn.",
    ),
    "gemma2": (
        "Gemma2",
        GROUPED
        | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "sliding_window": 4}
        | {"layer_types": ["full_attention", "sliding_attention"]}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        "layers.1.self_attn",
        "layers.1.self_attn.",
    ),
    "gpt_oss": (
        "GptOss",
        GROUPED
        | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": YARN},
        "layers.1.self_attn",
        "layers.1.self_attn.",
    ),
}


def run(name: str, number: int) -> dict[str, Any]:
    """The arrays to keep of one model, under "name/..."."""
    model_name, settings, module_name, part = MODELS[name]
    config = getattr(transformers, f"{model_name}Config")(**settings)
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, f"{model_name}Model")(config).double().eval()
    rng = np.random.RandomState(number)
    with torch.no_grad():
        for parameter in model.parameters():
            values = rng.standard_normal(tuple(parameter.shape)) / np.sqrt(parameter.shape[0])
            parameter.copy_(torch.from_numpy(values.astype(np.float16).astype(np.float64)))

    kept: dict[str, Any] = {}

    def keep(module: Any, args: Any, keywords: Any, output: Any) -> None:
        kept["x"] = (args[0] if args else keywords["hidden_states"]).numpy()
        kept["output"] = (output[0] if isinstance(output, tuple) else output).numpy()

    module = model.get_submodule(module_name)
    if (
        name == "bert"
    ):  # BERT's module ends with the residual and the norm; its projection is what is compared
        module.self.register_forward_pre_hook(
            lambda module, args, keywords: kept.update(x=(args or [keywords["hidden_states"]])[0].numpy()),
            with_kwargs=True,
        )
        module.output.dense.register_forward_hook(
            lambda module, args, output: kept.update(output=output.numpy())
        )
    else:
        module.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        if name == "vit":
            model(torch.from_numpy(rng.standard_normal((2, 3, 12, 12))))
        else:
            ids = torch.from_numpy(rng.randint(0, 50, (2, LENGTH)))
            mask = torch.ones_like(ids)
            if name == "bert":
                mask[1, 5:] = 0
            model(input_ids=ids, attention_mask=mask)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        for key, tensor in load_file(Path(directory) / "model.safetensors").items():
            if part in key and "LayerNorm" not in key and not key.endswith((".bias_mask", ".masked_bias")):
                kept[key] = tensor.numpy().astype(np.float16)
        kept["config"] = np.array(json.dumps(json.loads((Path(directory) / "config.json").read_text())))
    return {f"{name}/{key}": array for key, array in kept.items()}


def run_torch() -> dict[str, Any]:
    """torch.nn.MultiheadAttention: self attention, and cross attention with keys of another width."""
    kept: dict[str, Any] = {}
    rng = np.random.RandomState(99)
    for name, widths in (("torch", {}), ("torch_cross", {"kdim": 10, "vdim": 10})):
        module = torch.nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True, **widths).double().eval()
        with torch.no_grad():
            for parameter in module.parameters():
                values = rng.standard_normal(tuple(parameter.shape)) / np.sqrt(parameter.shape[0])
                parameter.copy_(torch.from_numpy(values.astype(np.float16).astype(np.float64)))
            x = torch.from_numpy(rng.standard_normal((2, LENGTH, HIDDEN)))
            context = torch.from_numpy(rng.standard_normal((2, 6, 10))) if widths else x
            output, weights = module(x, context, context, average_attn_weights=False)
        arrays = {key: tensor.numpy().astype(np.float16) for key, tensor in module.state_dict().items()}
        arrays |= {
            "x": x.numpy(),
            "context": context.numpy(),
            "output": output.numpy(),
            "weights": weights.numpy(),
        }
        kept |= {f"{name}/{key}": array for key, array in arrays.items()}
    return kept


arrays = run_torch()
for number, name in enumerate(MODELS):
    arrays |= run(name, number)
np.savez_compressed(Path(__file__).with_name("recipes.npz"), **arrays)
