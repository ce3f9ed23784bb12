"""`python -m npattn look`: what a real sentence encoder looks at in a text of yours."""

from __future__ import annotations

import sys
from typing import TextIO

from . import inspect
from ._demo.report import Matrix, Section, Text, write_section
from ._terminal import Terminal

_TABLE_LIMIT = 12  # tokens that still fit side by side


def run(stream: TextIO, model: str, text: str, *, query: str | None = None, top: int = 5) -> None:
    """Load the encoder in directory `model`, attend over `text`, show the last layer and the rollout."""
    from .models import minilm

    encoder = minilm.load(model)
    tokens, weights = encoder.attend(text)  # weights: (layers, heads, tokens, tokens)
    unseen = encoder.count_unseen(text)
    if unseen:
        print(f"npattn: text cut at {len(tokens)} tokens, {unseen} not seen", file=sys.stderr)
    layers, heads = weights.shape[:2]

    terminal = Terminal(stream)
    names = [terminal.plain(token) for token in tokens]
    wanted = None if query is None else terminal.plain(query)

    blocks: list[Text | Matrix] = [Text(inspect.explain(weights[-1], names, query=wanted, top=top))]
    if wanted is None and len(names) <= _TABLE_LIMIT:
        mean = weights[-1].mean(axis=0)
        blocks.append(
            Matrix("As a table, a row for each query:", names, names, mean, decimals=2, shaded=True)
        )
    title = f"Layer {layers}, mean of its {heads} heads: what each token looks at"
    write_section(terminal, Section(title, blocks))

    lines = inspect.explain(inspect.rollout(weights), names, query=wanted, top=top)
    title = f"Rollout over {layers} layers: what each output token is made of"
    write_section(terminal, Section(title, [Text(lines)]))
