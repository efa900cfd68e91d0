"""Callbacks: where their hooks run, and the ones that come with ElasticCB.

The names stand in `__init__.pyi`. They are imported when they are first used, so that `elasticcb.callbacks.placement`
can be imported without Keras and TensorFlow.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
