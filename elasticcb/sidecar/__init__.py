"""Evaluation during training: evaluates checkpoints when they appear. See docs/evaluation_beside_training.md.

`__init__.pyi` lists the names. They are imported on first use, because following a folder does not need Keras, whose
import takes seconds.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
