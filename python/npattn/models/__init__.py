"""Whole models on npattn (extra ``[models]``): `npattn.models.minilm`, a sentence encoder."""
