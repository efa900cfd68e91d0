"""ElasticCB's own Keras layers."""

from elasticcb.layers.embedding import Embedding

__all__ = ["Embedding"]
