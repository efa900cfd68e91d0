"""Keras and Python objects as bytes."""
