"""Models as users write them, for `any_model.Comparison`: source by name, of what tests/programs has none for."""

XY = """
def arrays():
    return {"x": normal(48, 6), "y": normal(48, 1)}
"""

MODELS = {
    "loss_scale": XY
    + """
def custom_model():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(1)])
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(rate), 4.0, dynamic_growth_steps=2)
    model.compile(scaled, "mse", metrics=["mae"])
    return model
""",
    "mixed_float16": XY
    + """
def custom_model():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([
        keras.Input((6,)), layers.Dense(8, "tanh", dtype="mixed_float16"), layers.Dense(1, dtype="mixed_float16")
    ])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**18, dynamic_growth_steps=2)
    model.compile(scaled, "mse", metrics=["mae"])
    return model
""",
}

OWN_STEP = """
class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.norm, self.out = layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dense(1)
        self.unused = layers.Dense(2)

    def build(self, shape):
        self.hidden.build(shape)
        self.norm.build((None, 8))
        self.out.build((None, 8))
        self.unused.build((None, 8))

    def call(self, x, training=False):
        return self.out(self.norm(self.hidden(x), training=training))
{body}
def custom_model():
    keras.utils.set_random_seed(3)
    model = Model()
    model.compile(keras.optimizers.Adam(0.01), "mse"{options})
    model.build((None, 6))
    return model
"""

STEPS = {
    "apply_with_variables": (
        """
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}
""",
        "",
    ),
    "apply_without_variables": (
        """
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        if not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}
""",
        "",
    ),
    "apply_gradients_of_watched_variables": (
        """
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = tape.watched_variables()
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables))
        return {"norm": tf.linalg.global_norm(gradients), "loss": loss}
""",
        "",
    ),
    "decorated_with_tf_function": (
        """
    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            if loss > 1.0:
                loss = 2.0 * loss
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"double": loss}
""",
        "",
    ),
    "run_eagerly": (
        """
    def train_step(self, data):
        x, y = data
        assert tf.executing_eagerly()
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": float(loss.numpy())}
""",
        ", run_eagerly=True",
    ),
}
MODELS |= {name: XY + OWN_STEP.format(body=body, options=options) for name, (body, options) in STEPS.items()}


MODELS |= {
    # The target follows the online network, and no optimizer knows it, though its weights are trainable.
    "target_network": XY
    + """
class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.online = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1)])
        self.target = keras.models.clone_model(self.online)
        self.target.set_weights(self.online.get_weights())
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.steps = self.add_weight((), "zeros", dtype="int32", trainable=False, name="steps")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self.online(x) - y - 0.1 * self.target(x)) ** 2)
        variables = self.online.trainable_variables
        for slow, fast in zip(self.target.weights, self.online.weights):
            slow.assign(0.9 * slow + 0.1 * fast)
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.steps.assign_add(1)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

def custom_model():
    keras.utils.set_random_seed(3)
    model = Model()
    model.compile(keras.optimizers.SGD(0.1))
    return model
""",
    "trackers_of_a_vae_like_model": XY
    + """
class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        self.decoder = keras.Sequential([keras.Input((3,)), layers.Dense(6)])
        self.total = keras.metrics.Mean(name="total_loss")
        self.parts = [keras.metrics.Mean(name="reconstruction"), keras.metrics.Mean(name="kl")]

    @property
    def metrics(self):
        return [self.total, *self.parts]

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            code = self.encoder(x)
            reconstruction = ops.mean((self.decoder(code) - x) ** 2)
            kl = ops.mean(code ** 2)
            total = reconstruction + 0.1 * kl
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        self.total.update_state(total)
        self.parts[0].update_state(reconstruction)
        self.parts[1].update_state(kl)
        return {"all": self.total.result(), "parts": {"reconstruction": self.parts[0].result(),
            "latent": self.parts[1].result()}}

def custom_model():
    keras.utils.set_random_seed(3)
    model = Model()
    model.compile(keras.optimizers.Adam(0.01))
    return model
""",
    "several_inputs_and_outputs": """
def arrays():
    return {"a": normal(48, 3), "b": normal(48, 2), "u": normal(48, 1), "v": generator.integers(0, 3, 48),
            "w": generator.uniform(0, 2, 48).astype("float32")}

def example(r):
    return {"a": r["a"], "b": r["b"]}, {"u": r["u"], "v": r["v"]}, {"u": r["w"], "v": r["w"] ** 2}

def custom_model():
    keras.utils.set_random_seed(3)
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2,), name="b")}
    hidden = layers.Dense(5, "tanh", activity_regularizer="l2")(layers.Concatenate()([inputs["a"], inputs["b"]]))
    shared = layers.Dense(5, kernel_regularizer="l1")
    outputs = {"u": layers.Dense(1, name="u")(shared(hidden)),
               "v": layers.Dense(3, "softmax", name="v")(shared(shared(hidden)))}
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), {"u": "mse", "v": "sparse_categorical_crossentropy"},
        loss_weights={"u": 0.3, "v": 2.0}, metrics={"u": ["mae"]}, weighted_metrics={"v": ["accuracy"], "u": ["mse"]})
    return model
""",
    "preprocessing_of_strings": """
def arrays():
    return {"text": np.array(["to be or not", "be", "that is", "the question is"] * 12),
            "kind": np.array(["a", "b", "c"] * 16), "n": normal(48, 2) * 5, "y": normal(48, 1)}

def prepare(dataset):
    def example(r):
        return {"text": r["text"], "kind": r["kind"], "n": r["n"]}, r["y"]
    return dataset.map(example)

def custom_model():
    keras.utils.set_random_seed(3)
    text, kind, n = (keras.Input(shape, dtype=d, name=name) for shape, d, name in
        [((), "string", "text"), ((), "string", "kind"), ((2,), "float32", "n")])
    vectorize = layers.TextVectorization(output_mode="multi_hot", vocabulary=["be", "is", "to", "the"])
    normalize = layers.Normalization()
    normalize.adapt(np.arange(20.0, dtype="float32").reshape(10, 2))
    look_up = layers.StringLookup(vocabulary=["a", "b"])
    encoded = layers.CategoryEncoding(3, "one_hot")(look_up(kind))
    parts = [vectorize(text), encoded, normalize(n)]
    model = keras.Model([text, kind, n], layers.Dense(1)(layers.Concatenate()(parts)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model
""",
    "sparse_inputs": """
def arrays():
    return {"x": normal(48, 6) * (generator.uniform(size=(48, 6)) < 0.3), "y": normal(48, 1)}

def prepare(dataset):
    return dataset.map(lambda r: (tf.sparse.from_dense(tf.cast(r["x"], "float32")), r["y"]))

def custom_model():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,), sparse=True), layers.Dense(4), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model
""",
    "gradients_of_none": XY
    + """
def custom_model():
    keras.utils.set_random_seed(3)
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = layers.Dense(1), layers.Dense(2)
        def call(self, x):
            self.unused(x)
            return self.used(x)
    model = Model()
    model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), "mse", metrics=["mae"])
    return model
""",
}

DENSE_MODEL = """
def custom_model():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.{optimizer}, "mse", metrics=["mae"])
    return model
"""
OPTIMIZERS = {
    "accumulation_with_clipvalue": "SGD(0.3, clipvalue=0.02, gradient_accumulation_steps=2)",
    "several_inside_one": "MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1, clipnorm=0.01), "
    "{'.*kernel': keras.optimizers.Adam(0.01, global_clipnorm=0.1)}))",
    "weight_decay_and_ema": "AdamW(0.05, weight_decay=0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2)",
}
MODELS |= {name: XY + DENSE_MODEL.format(optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()}
