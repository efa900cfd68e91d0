"""Errors for steps that can't be done by gradients on servers."""

from __future__ import annotations

from collections.abc import Sequence

from elasticcb.errors import ModelFileError
from elasticcb.process.wording import how_many


def late_read(found: Sequence[tuple[str, str]]) -> ModelFileError:
    """The error of a step that reads variables after their gradients were given to an optimizer."""
    (path, optimizer), others = found[0], {path for path, _ in found} - {found[0][0]}
    more = f" (and {how_many(len(others), 'more variable')})" if others else ""
    return ModelFileError(
        f"The model's train_step reads {path!r}{more} after giving its gradient to the optimizer {optimizer!r}. In "
        "Keras it would read the updated value; here parameter servers apply gradients after the step, so it would "
        "read the old value and train a different model. Compute all losses before giving gradients to the first "
        "optimizer, and moving averages of weights at the beginning of the step. To train with several updates that "
        "build on each other, write the loop with Cluster.place, which makes each update at once, or use Keras's "
        "own fit."
    )


def assignment(path: str) -> ModelFileError:
    """The error of a step that assigns to a variable that servers update with gradients."""
    return ModelFileError(
        f"The model's step assigns a value to {path!r}, which an optimizer also updates (as "
        "keras.layers.SpectralNormalization does with the kernel of its layer). Servers update the weights from "
        "before the step, so the assigned value would be lost. Only variables that no optimizer updates can be "
        "assigned. Use a constraint of the variable, which the servers apply after each update, or compute the "
        "changed weight in the layer's call."
    )
