"""Facilities of a single process: logs, signals, limits and statistics."""
