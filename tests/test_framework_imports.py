"""Which modules know TensorFlow: all others see NumPy arrays, and Keras at most."""

from __future__ import annotations

from test_layering import FILES, imports_of

# By module, or room: what it does with TensorFlow that can't be done without it. Imports within functions and for types
# alone count, and so do those of `elasticcb.tf`, which is TensorFlow's own. Take out what does so no more; add none.
TENSORFLOW = {
    "tf": "is TensorFlow's own",
    "compute.tensorflow": "is a backend",
    "compute.jax": "leaves the devices to JAX, and says when a model file calls TensorFlow",
    "compute.torch.backend": "leaves the GPUs to PyTorch",
    # The model, as it is traced and run.
    "layers": "embedding layers of dense, ragged and sparse ids; initial rows are drawn alike everywhere",
    "model.metrics": "takes a step out of its tf.function",
    "optimizers.held_state": "shares the memory of a slot with what it is restored from",
    # Data: `feed` and `fit` give and take datasets.
    "api.data": "draws the seed of a shuffle, and joins what a model predicts, as Keras does",
    "data.batch_sources": "batches of tf.data, of ragged and of sparse tensors",
    "data.custom": "ElasticDL's readers tell the dtypes of TensorFlow",
    "data.reader": "`element_spec` are TensorSpecs",
    "data.stream": "makes the dataset that `feed` is given",
    "model.input_pipeline": "batches the dataset that `feed` returns",
    # What is made for users of TensorFlow.
    "callbacks.serving_signature": "the signature of a SavedModel",
    "callbacks.summary_writer": "TensorBoard's files",
    "model.metric_messages": "ragged and sparse outputs",
    "optimizers.rowwise_adagrad": "takes gradients of rows, `tf.IndexedSlices`",
    "serving": "loads SavedModels, sets their variables, and calls their signatures",
    "serialization.library_objects": "tensors, tables and tf.functions in programs",
    "serialization.reducers": "variables in programs",
    "serialization.process_state": "seeds and switches",
    # Servers apply Keras's optimizers to rows of tables in compiled functions.
    "ps.holder": "frees what TensorFlow keeps of variables that are gone",
    "ps.table_update": "the rows that an optimizer updates are a variable; compiles the update of an embedding table",
    "ps.tables": "draws the rows of new ids",
}  # fmt: skip


def entry_of(module: str) -> str | None:
    """What of `TENSORFLOW` a module is, or is in."""
    name = module.removeprefix("elasticcb.")
    return next((entry for entry in TENSORFLOW if f"{name}.".startswith(f"{entry}.")), None)


def of_tensorflow(name: str) -> bool:
    return f"{name}.".startswith(("tensorflow.", "elasticcb.tf."))


def test_modules_that_import_tensorflow_are_those_of_the_list():
    found = {module: entry_of(module) for module in FILES if any(map(of_tensorflow, imports_of(module)))}
    assert not [module for module, entry in found.items() if entry is None], "see `TENSORFLOW`"
    unused = set(TENSORFLOW) - set(found.values())
    assert not unused, f"take them out: {unused}"


def test_pytorch_is_known_to_its_backend_alone():
    found = {module for module in FILES if any(f"{name}.".startswith("torch.") for name in imports_of(module))}
    assert found
    assert {module.startswith("elasticcb.compute.torch.") for module in found} == {True}
