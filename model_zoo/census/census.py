"""Adult census income: does a person earn more than 50,000 dollars a year? Wide and deep.

The model of Cheng et al., "Wide & Deep Learning for Recommender Systems" (2016): a linear part over crossed
categories memorizes, a deep part over embeddings generalizes. All preprocessing is made of Keras layers
inside the model, so the exported model takes the columns as they are in the file, by name.
"""

import keras
import tensorflow as tf

# Columns of the file, in order; the label is `>50K` or `<=50K`.
COLUMNS = [
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation",
    "relationship", "race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country",
]  # fmt: skip

# Mean and variance of numeric columns; of log(1 + x) for the two that are mostly 0 and else large.
NUMERIC = {"age": (38.6, 186.1), "education_num": (10.1, 6.6), "hours_per_week": (40.4, 152.5)}
LOGARITHMIC = {"capital_gain": (0.73, 6.03), "capital_loss": (0.35, 2.51)}

# What is missing ("?") or in no vocabulary gets an index of its own, 0.
VOCABULARIES = {
    "workclass": [
        "Federal-gov", "Local-gov", "Never-worked", "Private", "Self-emp-inc", "Self-emp-not-inc",
        "State-gov", "Without-pay",
    ],
    "education": [
        "Preschool", "1st-4th", "5th-6th", "7th-8th", "9th", "10th", "11th", "12th", "HS-grad", "Some-college",
        "Assoc-voc", "Assoc-acdm", "Bachelors", "Masters", "Prof-school", "Doctorate",
    ],
    "marital_status": [
        "Divorced", "Married-AF-spouse", "Married-civ-spouse", "Married-spouse-absent", "Never-married",
        "Separated", "Widowed",
    ],
    "occupation": [
        "Adm-clerical", "Armed-Forces", "Craft-repair", "Exec-managerial", "Farming-fishing",
        "Handlers-cleaners", "Machine-op-inspct", "Other-service", "Priv-house-serv", "Prof-specialty",
        "Protective-serv", "Sales", "Tech-support", "Transport-moving",
    ],
    "relationship": ["Husband", "Not-in-family", "Other-relative", "Own-child", "Unmarried", "Wife"],
    "race": ["Amer-Indian-Eskimo", "Asian-Pac-Islander", "Black", "Other", "White"],
    "sex": ["Female", "Male"],
}  # fmt: skip
COUNTRY_BINS = 64  # countries are hashed: no list to keep
AGE_BOUNDARIES = [18, 25, 30, 35, 40, 45, 50, 55, 60, 65]
# Pairs that say more together, with the number of bins that their combinations are hashed to.
CROSSES = [("education", "occupation", 512), ("marital_status", "occupation", 256), ("age_group", "sex", 64)]


def custom_model(embedding_units=8):
    layers = keras.layers
    inputs = {name: keras.Input((), name=name, dtype="float32") for name in [*NUMERIC, *LOGARITHMIC]}
    inputs |= {name: keras.Input((), name=name, dtype="string") for name in [*VOCABULARIES, "native_country"]}

    categories = {"native_country": layers.Hashing(COUNTRY_BINS)(inputs["native_country"])}
    sizes = {"native_country": COUNTRY_BINS}
    for name, vocabulary in VOCABULARIES.items():
        categories[name] = layers.StringLookup(vocabulary=vocabulary)(inputs[name])
        sizes[name] = len(vocabulary) + 1
    categories["age_group"] = layers.Discretization(AGE_BOUNDARIES)(inputs["age"])
    sizes["age_group"] = len(AGE_BOUNDARIES) + 1

    wide = [layers.CategoryEncoding(sizes[name], "one_hot")(index) for name, index in categories.items()]
    for left, right, bins in CROSSES:
        cross = layers.HashedCrossing(bins, output_mode="one_hot")
        wide.append(cross((categories[left], categories[right])))

    deep = [
        layers.Embedding(sizes[name], embedding_units, name=f"{name}_embedding")(index)
        for name, index in categories.items()
    ]
    for name, (mean, variance) in (NUMERIC | LOGARITHMIC).items():
        column = layers.Reshape((1,))(inputs[name])
        if name in LOGARITHMIC:
            column = keras.ops.log1p(column)
        deep.append(layers.Normalization(mean=mean, variance=variance)(column))

    x = layers.Concatenate()(deep)
    for units in (64, 32):
        x = layers.Dense(units, activation="relu")(x)
    score = layers.Add()([layers.Dense(1)(layers.Concatenate()(wide)), layers.Dense(1)(x)])
    probability = layers.Activation("sigmoid", name="probability")(score)
    return keras.Model(inputs, probability, name="census")


def loss(labels, predictions):
    return keras.losses.binary_crossentropy(labels, predictions)


def optimizer():
    return keras.optimizers.Adam(1e-3)


def feed(dataset, mode, metadata):
    """Selects lines. One file serves both: a fifth of them, told by a hash, is kept for validation."""
    if mode == "prediction":
        return dataset
    return dataset.filter(lambda line: _is_held_out(line) == (mode == "evaluation"))


def feed_batch(lines, mode, metadata):
    """Lines like `39, State-gov, 77516, Bachelors, …, <=50K` become columns by name and the labels."""
    fields = tf.strings.strip(tf.strings.split(lines, ",").to_tensor())
    columns = dict(zip(COLUMNS, tf.unstack(fields[:, : len(COLUMNS)], len(COLUMNS), axis=1), strict=True))
    features = {name: tf.strings.to_number(columns[name]) for name in [*NUMERIC, *LOGARITHMIC]}
    features |= {name: columns[name] for name in [*VOCABULARIES, "native_country"]}
    if mode == "prediction":
        return features
    return features, tf.cast(fields[:, len(COLUMNS) : len(COLUMNS) + 1] == ">50K", tf.float32)


def _is_held_out(line):
    return tf.strings.to_hash_bucket_fast(line, 5) == 0


def eval_metrics_fn():
    return {"accuracy": keras.metrics.BinaryAccuracy(), "auc": keras.metrics.AUC()}
