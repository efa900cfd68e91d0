"""ElasticCB: elastic parameter-server training for Keras 3, driven by callbacks.

`__init__.pyi` lists the names of the Python API. They, and with them Keras, are imported on first use.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
