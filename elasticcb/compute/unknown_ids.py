"""Reasons why parameter servers can't hold the rows of a table: a batch's rows are not known before its step runs."""

from __future__ import annotations

OTHER_USES = (
    "the step uses its variable in other ways than by calling the layer (as the weights of an output layer, in a loss, "
    "in an assignment), for which all rows are needed."
)
IN_A_LOOP = (
    "it is called inside a loop, a condition or a function of its own (a layer that runs an inner layer step by step, "
    "such as TimeDistributed; keras.ops.cond, scan, while_loop, map; @tf.function), where its ids can't be known "
    "before the step runs. Call it from the model's `call` itself, on the ids of all steps at once: it takes ids of "
    "any shape."
)
BY_ROWS = (
    "its ids depend on rows of an embedding, so that they can't be known before these rows are there. Compute ids only "
    "from the features."
)


def by_weights(path: str) -> str:
    return (
        f"its ids depend on the weights {path!r}, which change from step to step. Compute ids only from the features."
    )


def by_changed(what: str) -> str:
    """For a variable that the step itself changes, as the state of random numbers."""
    return (
        f"its ids depend on {what}, which the step changes. Compute ids only from the features; draw random ids in "
        "the input pipeline."
    )
