"""Whole models on npattn (extra ``[models]``): `npattn.models.minilm`, a sentence encoder."""

from __future__ import annotations

from . import minilm

__all__ = ["minilm"]
