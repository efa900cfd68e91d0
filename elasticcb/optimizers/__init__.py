"""Inspects Keras optimizers: their variables, their state, and how updates can be split.

The public name is ElasticCB's own optimizer. It is declared in `__init__.pyi`, and imported, with Keras, on first
use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
