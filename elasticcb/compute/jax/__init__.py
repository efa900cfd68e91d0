"""Keras on JAX: one compiled function per kind of batch, around the stateless form of a model's own steps."""
