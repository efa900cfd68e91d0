"""Whether a user clicks on an item."""

import keras

import elasticcb


def custom_model():
    user, item = (keras.Input((), dtype="int64", name=name) for name in ("user", "item"))
    vectors = [vectors_of(user, "users"), vectors_of(item, "items")]
    score = keras.layers.Dot(-1)(vectors)
    return keras.Model({"user": user, "item": item}, keras.layers.Activation("sigmoid", name="clicked")(score))


def vectors_of(ids, name):
    initializer = keras.initializers.RandomNormal(stddev=0.3)
    return elasticcb.layers.Embedding(8, embeddings_initializer=initializer, name=name)(ids)


def loss(labels, predictions):
    return keras.losses.binary_crossentropy(labels[:, None], predictions)


def optimizer():
    return keras.optimizers.Adam(0.02)


def eval_metrics_fn():
    return {"auc": keras.metrics.AUC()}
