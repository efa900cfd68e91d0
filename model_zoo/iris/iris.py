"""Iris flowers, Fisher's 150: a small dense network that is returned compiled.

A compiled model brings its loss, optimizer and metrics itself, so this file needs no `loss`,
`optimizer` or `eval_metrics_fn`. `train.csv` (120 flowers) and `test.csv` (30) are next to it.
"""

import keras
import tensorflow as tf

SPECIES = ["setosa", "versicolor", "virginica"]
# Mean and variance of the measurements in centimeters, over train.csv.
MEAN = [5.857, 3.049, 3.759, 1.207]
VARIANCE = [0.725, 0.198, 3.171, 0.583]


def custom_model(units=16):
    model = keras.Sequential(
        [
            keras.Input((4,), name="measurements"),
            keras.layers.Normalization(mean=MEAN, variance=VARIANCE),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(len(SPECIES), activation="softmax", name="probabilities"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def feed_batch(lines, mode, metadata):
    """Lines like `4.8,3.0,1.4,0.3,setosa` become four measurements and the number of the species."""
    fields = tf.strings.split(lines, ",").to_tensor()
    measurements = tf.ensure_shape(tf.strings.to_number(fields[:, :4]), (None, 4))
    if mode == "prediction":
        return measurements
    return measurements, tf.argmax(fields[:, 4:] == SPECIES, axis=1)
