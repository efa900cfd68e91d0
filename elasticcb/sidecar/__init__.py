"""Evaluation beside training: checkpoints are evaluated as they come. See docs/evaluation_beside_training.md.

The names stand in `__init__.pyi`. They are imported when they are first used: following a folder needs no Keras, whose
import takes seconds.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
