"""Callbacks: where their hooks run, and the built-in ones.

`__init__.pyi` lists the names. They are imported on first use, so that `elasticcb.callbacks.placement` can be imported
without Keras and TensorFlow.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
