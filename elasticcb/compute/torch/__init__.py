"""PyTorch as a backend."""
