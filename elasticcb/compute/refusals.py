"""What is told of a step that servers can't do by gradients."""

from __future__ import annotations

from collections.abc import Sequence

from elasticcb.errors import ModelFileError


def late_read(found: Sequence[tuple[str, str]]) -> ModelFileError:
    """The error of a step that reads variables, each with the optimizer that was given its gradient before."""
    (path, optimizer), others = found[0], {path for path, _ in found} - {found[0][0]}
    more = f" (and {len(others)} more variable{'s' if len(others) > 1 else ''})" if others else ""
    return ModelFileError(
        f"The model's train_step reads {path!r}{more} after it has given the optimizer {optimizer!r} its gradient. In "
        "Keras it would read the updated value; here parameter servers apply gradients after the step, so it would "
        "read the value from before, and train another model. Compute all losses before the first optimizer is "
        "given gradients, and a moving average of weights at the beginning of the step. To train with several updates "
        "that build on each other, write the loop with Cluster.place, which makes each update at once, or use Keras's "
        "own fit."
    )


def assignment(path: str) -> ModelFileError:
    """The error of a step that assigns to a variable that servers update with gradients."""
    return ModelFileError(
        f"The model's step assigns a value to {path!r}, which an optimizer updates as well: as "
        "keras.layers.SpectralNormalization does with the kernel of its layer. Servers update the weights from "
        "before the step, so the value would be lost. Only non-trainable variables, and those "
        "that no optimizer is given, can be assigned to: use a constraint of the variable, which the servers "
        "apply after each update, or compute the changed weight in the layer's call."
    )
