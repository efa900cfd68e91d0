"""The interface to the framework that computes: `backend.py` defines it, `registry.py` lists the backends."""
