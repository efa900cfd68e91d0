"""Whether a user clicks on an item."""

import keras

import elasticcb


def custom_model():
    user, item = (keras.Input((), dtype="int64", name=name) for name in ("user", "item"))
    vectors = [elasticcb.layers.Embedding(16, name=f"{each.name}s")(each) for each in (user, item)]
    score = keras.ops.sum(vectors[0] * vectors[1], axis=-1, keepdims=True)
    bias = [elasticcb.layers.Embedding(1, name=f"bias_of_{each.name}s")(each) for each in (user, item)]
    outputs = keras.layers.Activation("sigmoid", name="clicked")(score + bias[0] + bias[1])
    return keras.Model({"user": user, "item": item}, {"clicked": outputs})


def loss(labels, predictions):
    return keras.losses.binary_crossentropy(labels[:, None], predictions["clicked"])


def optimizer():
    return keras.optimizers.Adagrad(0.3)
