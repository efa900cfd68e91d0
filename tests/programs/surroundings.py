"""What a program has around its model: data that it makes itself, and global state."""

from __future__ import annotations

import functools

import keras
import numpy as np
import tensorflow as tf
from absl import flags
from keras import layers, ops

from catalogue import BATCH, RECORDS, Given, case, compiled, dense, integers, normal

data = functools.partial(case, "Data that the program makes", everywhere=True)
state = functools.partial(case, "Global state", everywhere=True)

# ---------------------------------------------------------------- data


@data("a `PyDataset` with arguments, a closure and random numbers by its index")
def py_dataset():
    def noise(index):
        return 0.1 * np.random.default_rng(index).normal(size=(BATCH, 6)).astype("float32")

    class Noisy(keras.utils.PyDataset):
        def __init__(self, x, y, augment, **kwargs):
            super().__init__(**kwargs)
            self.x, self.y, self.augment = x, y, augment

        def __len__(self):
            return RECORDS // BATCH

        def __getitem__(self, index):
            part = slice(index * BATCH, (index + 1) * BATCH)
            return self.x[part] + self.augment(index), self.y[part]

    x, y = normal(6), normal(1)
    return Given(dense(), Noisy(x, y, noise), test=(x, y), options={"validation_data": (x, y)})


@data("a generator with `steps_per_epoch`")
def generator():
    x, y = normal(6), normal(1)

    def batches():
        index = 0
        while True:
            rows = np.arange(index, index + BATCH) % RECORDS
            yield x[rows], y[rows]
            index += BATCH

    options = {"steps_per_epoch": 3, "validation_data": (x, y)}
    return Given(dense(), batches(), test=(x, y), options=options)


@data("a `PyDataset` of which a callback sets an attribute (a curriculum)")
def curriculum():
    class Cut(keras.utils.PyDataset):
        def __init__(self, x, y):
            super().__init__()
            self.x, self.y, self.level, self.order = x, y, 0.2, [*range(RECORDS // BATCH)]

        def __len__(self):
            return RECORDS // BATCH

        def __getitem__(self, index):
            rows = slice(self.order[index] * BATCH, (self.order[index] + 1) * BATCH)
            return np.clip(self.x[rows], -self.level, self.level), self.y[rows]

        def on_epoch_end(self):
            self.order = self.order[1:] + self.order[:1]

    x, y = normal(6), normal(1)
    data = Cut(x, y)
    rise = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(data, "level", data.level * 2))
    options = {"callbacks": [rise], "epochs": 3, "validation_data": (x, y)}
    return Given(dense(), data, test=(x, y), options=options)


@data("`steps_per_epoch` with data that ends within an epoch")
def uneven_steps():
    return Given(dense(), normal(6), normal(1), options={"steps_per_epoch": 3, "epochs": 3})


@case("Data that the program makes", "a `tf.data.Dataset` that shuffles with a seed")
def shuffled_dataset():
    x, y = normal(6), normal(1)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(RECORDS, seed=3).batch(BATCH)
    return Given(dense(), dataset, test=(x, y), options={"epochs": 3, "validation_data": (x, y)})


@data("a `tf.data.Dataset` with closures, `py_function` and lookups in its maps")
def dataset_of_closures():
    x, y, offsets = normal(6), normal(1), np.linspace(0, 1, 6, dtype="float32")
    shift = tf.Variable(0.25)

    def augment(x, y):
        moved = tf.numpy_function(lambda a: np.float32(np.sin(a)), [x], tf.float32)
        return tf.ensure_shape(moved, (6,)) + offsets + shift, y

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).map(augment).filter(lambda x, y: y[0] > -1.5).batch(BATCH)
    # Not Adam: of a dataset of unknown size, Keras counts one step too many in each epoch.
    return Given(dense(optimizer="sgd"), dataset.prefetch(1), test=(x, y), options={"validation_data": (x, y)})


@data("batches of `(x, y, sample_weight)` of a dict")
def weighted_dicts():
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2,), name="b")}
    outputs = {"u": layers.Dense(1, name="u")(layers.Concatenate()(list(inputs.values())))}
    model = keras.Model(inputs, outputs)
    model.compile("adam", {"u": "mse"}, weighted_metrics={"u": ["mae"]})
    weights = np.linspace(0.1, 2, RECORDS, dtype="float32")
    x, y = {"a": normal(3), "b": normal(2)}, {"u": normal(1)}
    batches = tf.data.Dataset.from_tensor_slices((x, y, {"u": weights})).batch(BATCH)
    return Given(model, batches, test=(x, y), options={"validation_data": batches})


@data("class weights, `validation_split`, a shorter last batch")
def class_weights():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = dense(units=3, loss=loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    options = {
        "class_weight": {0: 0.5, 1: 2.0, 2: 1.0},
        "validation_split": 0.25,
        "validation_data": None,
        "batch_size": 5,
    }
    return Given(model, normal(6), integers(3, 1), options=options)


@data("a table of pandas")
def data_frame():
    import pandas as pd

    table = pd.DataFrame(normal(6), columns=list("abcdef"))
    target = table.pop("f")
    model = compiled(keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh"), layers.Dense(1)]))
    return Given(model, table, target.to_numpy()[:, None])


# ---------------------------------------------------------------- global state

RATE = 1.0
SETTINGS = {"scale": 1.0, "parts": [1.0]}
flags.DEFINE_float("programs_factor", 1.0, "a factor", allow_override=True)


def scaled(x):
    return x * RATE * SETTINGS["scale"] * sum(SETTINGS["parts"])


class Counted(layers.Layer):
    factor = 1.0

    def call(self, x):
        return scaled(x) * self.factor * flags.FLAGS.programs_factor


@state("globals, class attributes and absl flags that the program changes")
def changed_globals():
    global RATE
    RATE, Counted.factor = 0.5, 3.0
    SETTINGS.update(scale=0.7, parts=[0.5, 0.8])
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    flags.FLAGS.programs_factor = 0.4
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), Counted(), layers.Dense(1)])
    return Given(compiled(model), normal(6), normal(1))


@state("`keras.config.set_epsilon`")
def epsilon():
    keras.config.set_epsilon(0.05)

    class Normalized(layers.Layer):
        def call(self, x):
            return x / (ops.mean(ops.abs(x), -1, keepdims=True) + keras.config.epsilon())

    model = keras.Sequential([keras.Input((6,)), Normalized(), layers.Dense(1, "sigmoid")])
    return Given(compiled(model, loss="binary_crossentropy"), normal(6), integers(2, 1).astype("float32"))


@state("`keras.config.set_image_data_format`")
def image_data_format():
    keras.config.set_image_data_format("channels_first")

    class Channels(layers.Layer):
        def call(self, x):
            axis = 1 if keras.config.image_data_format() == "channels_first" else -1
            return x - ops.mean(x, axis=axis, keepdims=True)

    inputs = keras.Input((2, 4, 4))
    x = layers.GlobalAveragePooling2D()(layers.UpSampling2D()(Channels()(ops.tanh(inputs))))
    return Given(compiled(keras.Model(inputs, layers.Dense(1)(x))), normal(2, 4, 4), normal(1))


@state("`keras.config.set_dtype_policy` (mixed precision)", tolerance=1e-2)
def dtype_policy():
    keras.config.set_dtype_policy("mixed_bfloat16")

    class Inner(layers.Layer):
        def build(self, shape):
            self.dense = layers.Dense(4, "tanh")
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

    model = keras.Sequential([keras.Input((6,)), Inner(), layers.Dense(1, dtype="float32")])
    return Given(compiled(model, optimizer="sgd"), normal(6), normal(1))


@case("Global state", "`keras.config.set_floatx`", tolerance=1e-10)
def float_type():
    keras.config.set_floatx("float64")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1)])
    return Given(compiled(model), normal(6).astype("float64"), normal(1).astype("float64"))
