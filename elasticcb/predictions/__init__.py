"""Predictions as columns and as files."""
