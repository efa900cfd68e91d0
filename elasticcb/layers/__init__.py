"""Keras layers of ElasticCB's own."""

from elasticcb.layers.embedding import Embedding

__all__ = ["Embedding"]
