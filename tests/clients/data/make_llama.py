"""Makes llama.json: what two small seeded Llama models of transformers generate, in double precision.

Run once, with torch 2.13.0 and transformers 5.24.0, which the tests do not need:

    python make_llama.py

The weights come from ../plain_llama.py. Kept are the configurations as config.json has them, greedy
continuations of prompts of several lengths, each generated alone with the library's cache, and the logits
after the prompt and at the last step. The library computes rotary angles and norms in float32; the logits are
off by no more than that, and the smallest lead of a chosen token is kept to tell that it does not matter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from plain_llama import seeded_state

STEPS = 80
PROMPT_LENGTHS = (12, 1, 40, 65)

SETTINGS: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def record(tied: bool, seed: int) -> dict[str, Any]:
    config = LlamaConfig(**SETTINGS, tie_word_embeddings=tied)
    config._attn_implementation = "eager"
    kept = {name: config.to_dict()[name] for name in (*SETTINGS, "tie_word_embeddings")} | {"seed": seed}
    state = {name: torch.from_numpy(array) for name, array in seeded_state(kept).items()}
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).double().eval()
    model.load_state_dict(state, strict=True)
    rng = np.random.RandomState(seed + 1)
    runs = []
    for length in PROMPT_LENGTHS:
        prompt = rng.randint(0, config.vocab_size, (1, length))
        result = model.generate(
            torch.from_numpy(prompt),
            attention_mask=torch.ones(prompt.shape, dtype=torch.int64),
            do_sample=False,
            max_new_tokens=STEPS,
            return_dict_in_generate=True,
            output_logits=True,
        )
        steps = torch.cat(result.logits)
        best = steps.topk(2).values
        runs.append(
            {
                "prompt": prompt[0].tolist(),
                "tokens": result.sequences[0, length:].tolist(),
                "lead": float((best[:, 0] - best[:, 1]).min()),
                "first_logits": steps[0].tolist(),
                "last_logits": steps[-1].tolist(),
            }
        )
    return {"config": kept, "runs": runs}


def text(name: str, recorded: dict[str, Any]) -> str:
    runs = ",\n".join(json.dumps(run) for run in recorded["runs"])
    return f'"{name}": {{"config": {json.dumps(recorded["config"])},\n"runs": [\n{runs}\n]}}'


if __name__ == "__main__":
    models = {"separate": record(False, 3), "tied": record(True, 5)}
    Path(__file__).with_name("llama.json").write_text(
        "{" + ",\n".join(text(name, recorded) for name, recorded in models.items()) + "}\n"
    )
