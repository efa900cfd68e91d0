"""What Keras does not declare public is used in one module, `elasticcb.keras_private`."""

from __future__ import annotations

import ast
import functools
import inspect

import keras
from test_layering import FILES, imports_of

ALONE = "elasticcb.keras_private"

# Attributes of other objects with a name that Keras has as well.
OWN = {
    ("elasticcb.ps.row_update", "self._rows._path"),
    ("elasticcb.data.batch_sources.record_batches", "step._inputs"),
    ("elasticcb.data.batch_sources.iterables", "dataset._inputs"),
}
# What it carries are the attributes of Keras's objects, which no public way reads.
CARRIES = "elasticcb.serialization.reducers"


@functools.cache
def private_names() -> set[str]:
    """Attributes with an underscore of Keras's objects."""
    inputs = keras.Input((2,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Embedding(3, 2)(inputs))
    model.compile("adam", "mse", metrics=["mae"])
    model.compute_loss(y=keras.ops.zeros((1, 2, 2)), y_pred=keras.ops.zeros((1, 2, 2)))
    things = [
        inputs, model, *model.layers, model.weights[0], keras.metrics.Mean(), keras.callbacks.TensorBoard(),
        keras.losses.MeanSquaredError(), keras.optimizers.Nadam(), keras.optimizers.AdamW(weight_decay=0.1),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ]  # fmt: skip
    if hasattr(keras.optimizers, "MultiOptimizer"):
        things.append(keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD()))
    names = {name for thing in things for name in [*vars(thing), *dir(type(thing))]}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def private_uses(module: str) -> set[str]:
    """Imports of `keras.src` by a module, and uses of private attributes of Keras's objects."""
    private = private_names()
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in private]
    found = {ast.unparse(use) for use in uses if ast.unparse(use.value) not in ("self", "cls", "super()")}
    return found | {name for name in imports_of(module) if f"{name}.".startswith("keras.src.")}


def test_only_one_module_uses_what_keras_does_not_declare_public():
    uses = {(module, use) for module in FILES if module not in (ALONE, CARRIES) for use in private_uses(module)}
    assert not uses - OWN
    assert private_uses(ALONE)
    assert not {use for use in private_uses(CARRIES) if use.startswith("keras.src.")}


def test_each_entry_names_the_public_way():
    import elasticcb.keras_private as alone

    functions = [each for _, each in inspect.getmembers(alone, inspect.isfunction) if each.__module__ == ALONE]
    assert len(functions) > 20
    assert not [each.__name__ for each in functions if "Public: " not in (each.__doc__ or "")]
