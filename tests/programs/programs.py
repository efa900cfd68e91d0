"""All programs: `CASES` of the catalogue, which the modules of programs fill."""

from __future__ import annotations

import matrix_layers  # noqa: F401
import matrix_models  # noqa: F401
import matrix_steps  # noqa: F401
import own_layers  # noqa: F401
import own_parts  # noqa: F401
import own_train_steps  # noqa: F401
import own_training  # noqa: F401
import recommenders  # noqa: F401
import sequences  # noqa: F401
import surroundings  # noqa: F401
from catalogue import CASES

__all__ = ["CASES"]
