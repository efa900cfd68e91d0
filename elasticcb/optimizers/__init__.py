"""Keras optimizers taken apart: what they are given, what they remember, and what of it can be split."""
