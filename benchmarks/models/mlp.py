"""784-512-512-10 with Adam, on random numbers: 669,706 weights."""

ROWS = 16_384


def model(keras, ops):
    return keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def optimizer(keras):
    return keras.optimizers.Adam(1e-3)


def loss(keras):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def arrays(random):
    return {
        "images": random.random((ROWS, 784), "float32"),
        "labels": random.integers(0, 10, ROWS, "int64"),
    }
