"""Models that are served while they are trained: exports with deltas, and what serves them."""
