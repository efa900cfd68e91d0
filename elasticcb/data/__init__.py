"""Data readers: records of files, arrays and other sources, by ranges `[start, end)`.

`__init__.pyi` lists the names. They are imported on first use: importing this package imports neither TensorFlow nor
any format library.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
