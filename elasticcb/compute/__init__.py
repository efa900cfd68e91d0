"""The seam to the framework that computes: `backend.py` is the interface, each backend stands in `registry.py`."""
