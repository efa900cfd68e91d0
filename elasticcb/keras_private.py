"""All uses of what Keras does not declare public: imports from `keras.src`, and attributes with an underscore.

Each entry names the public way, and why it is not enough. Only this module knows where Keras's releases differ.
`tests/test_keras_private.py` checks that no other module does this; `.ci/run` tests with Keras's nightly release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

# Shapes of a function's outputs without running it. Public: only keras.Layer.compute_output_spec, which does not build
# the layers inside a subclassed model on PyTorch.
from keras.src.backend import compute_output_spec as compute_output_spec

# Whose attributes a program carries, and the state of the process that its results depend on. Public: configs, which
# classes of users leave incomplete; keras.config, without the generator of random seeds.
from keras.src.backend.common import KerasVariable as KerasVariable
from keras.src.backend.common import global_state as global_state
from keras.src.ops.node import Node as Node
from keras.src.saving.keras_saveable import KerasSaveable as KerasSaveable

# How `fit` reads its arguments `x` and `y`. Public: only `fit` itself.
from keras.src.trainers import data_adapters as data_adapters

# The metrics of `compile`, as an item of `model.metrics`. Public: none.
from keras.src.trainers.compile_utils import CompileMetrics as CompileMetrics
from keras.src.trainers.data_adapters import array_data_adapter as array_data_adapter
from keras.src.trainers.data_adapters import array_slicing as array_slicing
from keras.src.trainers.data_adapters import data_adapter_utils as data_adapter_utils
from keras.src.trainers.data_adapters import generator_data_adapter as generator_data_adapter
from keras.src.trainers.data_adapters import py_dataset_adapter as py_dataset_adapter
from keras.src.trainers.data_adapters import tf_dataset_adapter as tf_dataset_adapter
from keras.src.utils import tracking as tracking
from keras.src.utils.backend_utils import DynamicBackend as DynamicBackend

# Whether `fit` warns of an epoch without a batch if the number of batches is unknown. Public: none.
WARNS_OF_EMPTY_EPOCHS = tuple(map(int, keras.version().split(".")[:2])) < (3, 16)

# ------------------------------------------------------------ models and layers


def layers_of(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The model itself, and all layers inside it at any depth, each once.

    Public: `model.layers`, which is one level, and which plain layers lack.
    """
    return list(model._flatten_layers(include_self=True, recursive=True))


def check_compiled(model: keras.Model, method: str) -> None:
    """Raises Keras's `ValueError` if the model is not compiled. Public: `model.compiled`, without the message."""
    model._assert_compile_called(method)


def metrics_in_order(model: keras.Model, logs: Mapping[str, Any]) -> Any:
    """The values of `logs` as `evaluate` returns them. Public: `model.metrics_names`, which is not their order."""
    return model._flatten_metrics_in_order(logs)


def build_symbolically(model: keras.Model, batch: Any) -> None:
    """Builds what `fit` builds before its first batch. Public: `model.build`, which builds neither loss nor metrics."""
    model._symbolic_build(data_batch=batch)


def takes_training(model: keras.Model) -> bool:
    """Whether `call` has the argument `training`. Public: none; its signature leaves out that of `**kwargs`."""
    return bool(model._call_has_training_arg)


def compute_loss(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """The loss of a training step. Public: `model.compute_loss`, which older models override without `training`."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)


def seed_generators_of(layer: keras.layers.Layer) -> list[keras.random.SeedGenerator]:
    """The generators of a layer. Public: none; `layer.variables` holds their states."""
    return list(layer._seed_generators)


def layer_that_returns(tensor: Any) -> Any:
    """The layer or operation whose output a symbolic tensor is. Public: none."""
    return tensor._keras_history.operation


def embeddings_of(layer: Any) -> Any:
    """The variable of an embedding layer. Public: `layer.embeddings`, which computes a value if the layer is quantized
    or has LoRA; it also is the name of the variable's value in `elasticcb.layers.Embedding`."""
    return layer._embeddings


# ------------------------------------------------------------ variables


def value_of(variable: Any) -> Any:
    """What a variable holds: a tf.Variable, a JAX array or a PyTorch parameter. Public: `variable.value`, which casts
    it within an autocast scope, and in a stateless scope returns another."""
    return variable._value


def set_value_of(variable: Any, value: Any) -> None:
    """Replaces what a variable holds. Public: `variable.assign`, which copies into it, and checks the shape."""
    variable._value = value


def initialize(variable: Any, tensor: Any) -> None:
    """Replaces what a variable holds as its first value does. Public: as for `set_value_of`."""
    variable._initialize(tensor)


def set_shape_of(variable: Any, shape: Iterable[int]) -> None:
    """Changes a variable's shape. Public: none; `shape` can't be set."""
    variable._shape = tuple(shape)


def set_path_of(variable: Any, path: str) -> None:
    """Changes a variable's path. Public: name scopes, which make a new name unique among those of the process."""
    variable._path = path


# ------------------------------------------------------------ optimizers


def updates_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """The variable that counts an optimizer's steps. Public: `optimizer.iterations`, which is a quotient without
    `assign` if gradients are accumulated."""
    return optimizer._iterations


def rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """A variable, a schedule or a function. Public: `optimizer.learning_rate`, which is its present value."""
    return optimizer._learning_rate


def multiply_rate(optimizer: keras.optimizers.Optimizer, factor: float) -> None:
    """Multiplies the rate of updates and weight decay. Public: a setter, which refuses schedules."""
    rate = optimizer._get_current_learning_rate
    object.__setattr__(optimizer, "_get_current_learning_rate", lambda: rate() * factor)


def trained_by(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The variables on which an optimizer was built. Public: none; `optimizer.variables` are its own."""
    return list(optimizer._trainable_variables)


def key_in(optimizer: keras.optimizers.Optimizer, variable: Any) -> Any:
    """The key by which an optimizer identifies a variable: the same for a Keras variable and the tf.Variable in it.
    Public: none."""
    return optimizer._var_key(variable)


def inner_optimizer_of(optimizer: Any, variable: Any) -> Any:
    """What a MultiOptimizer takes for a variable. Public: `optimizer.optimizers`, which does not say for what."""
    if optimizer.built:  # a function that chooses may create a new one in each call
        return optimizer.optimizers[optimizer._var_to_optimizer_idx[key_in(optimizer, variable)]]
    return optimizer._optimizer_map(variable)


def product_of(optimizer: keras.optimizers.Nadam) -> Any:
    """Nadam's product of momentums. Public: `optimizer.variables`, where it has no certain place."""
    return optimizer._u_product


def has_own_weight_decay(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether its class decays weights in its own way. Public: none."""
    return type(optimizer)._apply_weight_decay is not keras.optimizers.Optimizer._apply_weight_decay


def decays(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Whether weight decay applies to `variable`. Public: `exclude_from_weight_decay`, which only sets it.

    Until Keras 3.15 this is decided when a step meets the variable; on TensorFlow by the name of the `tf.Variable`,
    which includes names of layers, except for classes with their own weight decay (Muon). Since 3.16 it is decided when
    the optimizer is built, by the name of the Keras variable.
    """
    if hasattr(optimizer, "_is_excluded_from_weight_decay"):
        if key_in(optimizer, variable) in getattr(optimizer, _DECAYS, ()):
            return bool(optimizer._use_weight_decay(variable))
        return not optimizer._is_excluded_from_weight_decay(variable)
    is_variable = hasattr(variable.value, "assign")  # as of TensorFlow; other values are arrays
    own = has_own_weight_decay(optimizer)
    return bool(optimizer._use_weight_decay(variable.value if is_variable and not own else variable))


_DECAYS = "_weight_decay_by_var_key"  # since Keras 3.16


def set_decays(optimizer: keras.optimizers.Optimizer, decayed: Iterable[tuple[Any, bool]]) -> None:
    """Decides for a built optimizer whether weight decay applies to each variable. Public: as for `decays`, which is
    refused once the optimizer is built."""
    kept = _DECAYS if hasattr(optimizer, "_is_excluded_from_weight_decay") else "_exclude_from_weight_decay_cache"
    decided = {key_in(optimizer, variable): decay for variable, decay in decayed}
    object.__setattr__(optimizer, kept, {**getattr(optimizer, kept, {}), **decided})


# ------------------------------------------------------------ callbacks and data


def traces(callback: keras.callbacks.TensorBoard) -> bool:
    """Whether a TensorBoard profiles batches. Public: none; `profile_batch` is not kept."""
    return bool(callback._should_trace)


def arrays_of_adapter(adapter: Any) -> Any:
    """The arrays of an adapter. Public: none."""
    return adapter._inputs


def standardized_batch(adapter: Any, batch: Any) -> Any:
    """A batch of a `PyDataset` as `fit` passes it to the model. Public: none."""
    return adapter._standardize_batch(batch)


def joined_outputs(tensors: list[Any]) -> Any:
    """Outputs of batches, dense or ragged, as `predict` joins them. Public: `predict` itself."""
    from keras.src.backend.tensorflow.trainer import convert_to_np_if_not_ragged, potentially_ragged_concat

    return convert_to_np_if_not_ragged(potentially_ragged_concat(tensors))
