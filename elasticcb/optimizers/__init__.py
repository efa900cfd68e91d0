"""Keras optimizers taken apart: what they are given, what they remember, and what of it can be split.

The public name is that of an optimizer of ElasticCB's own. It stands in `__init__.pyi`, and is imported, with Keras,
when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
