"""Whole jobs with every kind of model file."""

import importlib.util
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticcb.errors import JobFailedError
from elasticcb.settings import Command, NonFinite
from jobs import job_settings, run_job, write_model_file

RECORDS = 96


def load_module(path):
    """The model file as a module of the test, for what plain Keras makes of it."""
    spec = importlib.util.spec_from_file_location(f"of_test_{abs(hash(str(path)))}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_arrays(path, seed=0, **arrays):
    """An .npz of `x` [RECORDS, 6], `y` (0 or 1) and `number`, which is the record's own."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(RECORDS, 6)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) + generator.normal(size=(RECORDS, 1)) > 0).astype("float32")
    np.savez(path, x=x, y=y, number=np.arange(RECORDS), **arrays)
    return str(path)


def weights_saver(folder):
    """Source of a callback that writes the final weights where `final_weights` reads them."""
    return f"""
    class SaveWeights(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            np.savez("{folder}/final.npz", *self.model.get_weights())
    """


def final_weights(folder):
    with np.load(folder / "final.npz") as saved:
        return [saved[name] for name in saved.files]


class TestElasticDL:
    """ElasticDL's model_zoo/mnist/mnist_functional_api.py, smaller.

    Renamed: `elasticdl.python.common.constants` and `elasticdl.python.worker.prediction_outputs_processor`
    to `elasticcb` and `elasticcb.callbacks`, `elasticdl.python.elasticdl.callbacks` to
    `elasticcb.callbacks`. Nothing else is changed.
    """

    MODEL_FILE = """
    import tensorflow as tf
    from elasticcb import Mode
    from elasticcb.callbacks import LearningRateScheduler, BasePredictionOutputsProcessor

    def custom_model():
        inputs = tf.keras.Input(shape=(8, 8), name="image")
        x = tf.keras.layers.Reshape((8, 8, 1))(inputs)
        x = tf.keras.layers.Conv2D(4, kernel_size=(3, 3), activation="relu")(x)
        x = tf.keras.layers.BatchNormalization()(x)
        x = tf.keras.layers.MaxPooling2D(pool_size=(2, 2))(x)
        x = tf.keras.layers.Dropout(0.25)(x)
        x = tf.keras.layers.Flatten()(x)
        outputs = tf.keras.layers.Dense(10)(x)
        return tf.keras.Model(inputs=inputs, outputs=outputs, name="mnist_model")

    def loss(labels, predictions):
        labels = tf.reshape(labels, [-1])
        return tf.reduce_mean(
            input_tensor=tf.nn.sparse_softmax_cross_entropy_with_logits(logits=predictions, labels=labels)
        )

    def optimizer(lr=0.1):
        return tf.optimizers.SGD(lr)

    def callbacks():
        def _schedule(model_version):
            return 0.0003 if model_version < 5 else 0.0002

        return [LearningRateScheduler(_schedule)]

    def feed(dataset, mode, _):
        def _parse_data(record):
            if mode == Mode.PREDICTION:
                feature_description = {"image": tf.io.FixedLenFeature([8, 8], tf.float32)}
            else:
                feature_description = {
                    "image": tf.io.FixedLenFeature([8, 8], tf.float32),
                    "label": tf.io.FixedLenFeature([1], tf.int64),
                }
            r = tf.io.parse_single_example(record, feature_description)
            features = {"image": tf.math.divide(tf.cast(r["image"], tf.float32), 255.0)}
            if mode == Mode.PREDICTION:
                return features
            else:
                return features, tf.cast(r["label"], tf.int32)

        dataset = dataset.map(_parse_data)

        if mode == Mode.TRAINING:
            dataset = dataset.shuffle(buffer_size=1024)
        return dataset

    def eval_metrics_fn():
        return {
            "accuracy": lambda labels, predictions: tf.equal(
                tf.argmax(predictions, 1, output_type=tf.int32),
                tf.cast(tf.reshape(labels, [-1]), tf.int32),
            )
        }

    class PredictionOutputsProcessor(BasePredictionOutputsProcessor):
        def __init__(self):
            self.path = "FOLDER/predicted"

        def process(self, predictions, worker_id):
            with open(f"{self.path}-{worker_id}", "a") as file:
                for row in predictions:
                    file.write(" ".join(map(str, row)) + "\\n")
    """

    def write_records(self, path):
        generator = np.random.default_rng(2)
        self.images = generator.uniform(0, 255, (RECORDS, 8, 8)).astype("float32")
        with tf.io.TFRecordWriter(str(path)) as writer:
            for number, image in enumerate(self.images):
                feature = {
                    "image": tf.train.Feature(float_list=tf.train.FloatList(value=image.reshape(-1))),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number % 10])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())
        return str(path)

    def test_file_of_its_model_zoo_trains_evaluates_and_predicts(self, tmp_path, recwarn):
        records = self.write_records(tmp_path / "digits.tfrecord")
        path = write_model_file(tmp_path, self.MODEL_FILE.replace("FOLDER", str(tmp_path)), "mnist_of_elasticdl")
        common = {"num_workers": 2, "minibatch_size": 16, "num_minibatches_per_task": 2}
        settings = job_settings(
            path,
            tmp_path / "train",
            training=records,
            validation=records,
            directory=str(tmp_path / "checkpoints"),
            num_epochs=2,
            **common,
        )
        summary, _ = run_job(settings)
        assert summary.version == 2 * RECORDS // 16
        assert summary.records_per_epoch == (RECORDS, RECORDS)
        assert 0 <= summary.metrics["accuracy"] <= 1
        assert not [w for w in recwarn if "structure of `inputs`" in str(w.message)]

        settings = job_settings(
            path,
            tmp_path / "predict",
            Command.PREDICT,
            prediction=records,
            directory_for_init=str(tmp_path / "checkpoints"),
            num_ps=2,
            **common,
        )
        summary, _ = run_job(settings)
        assert summary.records_predicted == RECORDS
        rows = [line.split() for file in tmp_path.glob("predicted-*") for line in file.read_text().splitlines()]
        predicted = np.array(rows, "float32")
        assert predicted.shape == (RECORDS, 10)
        assert len(np.unique(predicted, axis=0)) == RECORDS  # no record twice, none left out

    def test_its_data_reader_and_plain_outputs_processor_are_used(self, tmp_path):
        text = """
        import keras
        import numpy as np
        import tensorflow as tf

        class Squares:
            def __init__(self, data_origin, records_per_task, scale):
                self.origin, self.scale = data_origin, scale

            def create_shards(self):
                return {self.origin: (0, 50)}

            def read_records(self, task):
                for index in range(task.start, task.end):
                    yield [np.float32(index * self.scale)]

            @property
            def records_output_types(self):
                return [tf.float32]

            @property
            def metadata(self):
                return "of the reader"

        def custom_data_reader(data_origin, records_per_task=None, **kwargs):
            return Squares(data_origin, records_per_task, **kwargs)

        def feed(dataset, mode, metadata):
            assert metadata == "of the reader"
            return dataset.map(lambda value: tf.reshape(value, [1]))

        def custom_model():
            return keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0)])

        class PredictionOutputsProcessor:  # not derived from anything
            def process(self, predictions, worker_id):
                with open(f"FOLDER/{worker_id}.txt", "a") as file:
                    file.writelines(f"{value}\\n" for value in predictions[:, 0])
        """
        path = write_model_file(tmp_path, text.replace("FOLDER", str(tmp_path)), "reader_of_elasticdl")
        settings = job_settings(
            path,
            tmp_path / "job",
            Command.PREDICT,
            prediction="numbers",
            reader_params={"scale": 3},
            minibatch_size=4,
            num_workers=2,
        )
        run_job(settings)
        values = [float(line) for file in tmp_path.glob("*.txt") for line in file.read_text().splitlines()]
        assert sorted(values) == [6.0 * index for index in range(50)]


class TestAgainstPlainKeras:
    """One synchronous worker in a job, and plain Keras, on the same batches in the same order."""

    COMPILED = """
    import keras
    import numpy as np
    import tensorflow as tf

    def custom_model(units):
        keras.utils.set_random_seed(4)
        frozen = keras.layers.Dense(6, trainable=False, name="frozen")
        model = keras.Sequential([
            frozen,
            keras.layers.Dense(units, activation="relu", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(momentum=0.7),
            keras.layers.Dense(1, activation="sigmoid", activity_regularizer="l1"),
        ])  # without input shape: built with the first batch
        model.compile("adam", "binary_crossentropy", metrics=["accuracy", "AUC"], weighted_metrics=["mae"])
        return model

    def feed(dataset, mode, metadata):
        return dataset.map(lambda record: (record["x"], record["y"], record["weight"]))

    class KeepLogs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with open("FOLDER/logs", "a") as file:
                file.write(json.dumps(logs) + "\\n")

    import json

    def callbacks():
        return [SaveWeights(), KeepLogs()]
    """

    def test_compiled_model_with_weights_regularizers_and_moving_statistics(self, tmp_path):
        weight = np.random.default_rng(1).uniform(0, 2, RECORDS).astype("float32")
        data = write_arrays(tmp_path / "data.npz", weight=weight)
        text = self.COMPILED.replace("FOLDER", str(tmp_path)) + weights_saver(tmp_path)
        path = write_model_file(tmp_path, text, "compiled_file")
        settings = job_settings(
            path,
            tmp_path / "job",
            training=data,
            validation=data,
            minibatch_size=16,
            num_minibatches_per_task=2,
            num_epochs=2,
            use_async=False,
            shuffle_seed=2,
        )
        settings = with_params(settings, units=5)
        order = []
        run_job(settings)

        model = load_module(path).custom_model(units=5)
        arrays = np.load(data)
        x, y = arrays["x"], arrays["y"]
        model.build((None, 6))
        history = []
        for epoch in range(2):
            starts = task_order(data, 32, settings.training.shuffle_seed, epoch)
            order = np.concatenate([np.arange(start, start + 32) for start in starts])
            result = model.fit(
                x[order],
                y[order],
                sample_weight=weight[order],
                batch_size=16,
                shuffle=False,
                validation_data=(x, y, weight),
                validation_batch_size=16,
                verbose=0,
            )
            history.append({name: values[0] for name, values in result.history.items()})
        logs = [json.loads(line) for line in (tmp_path / "logs").read_text().splitlines()]
        for ours, theirs in zip(logs, history, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
        for ours, theirs in zip(final_weights(tmp_path), model.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5)

    SUBCLASS = """
    import keras
    import numpy as np
    import tensorflow as tf

    class Net(keras.Model):
        def __init__(self, rate=0.0, width=4):
            super().__init__()
            keras.utils.set_random_seed(5)
            self.hidden = keras.layers.Dense(width, activation="tanh")
            self.unused = keras.layers.Dense(3)
            self.drop = keras.layers.Dropout(rate)
            self.out = keras.layers.Dense(1)

        def call(self, x, training=False):
            self.unused(x)
            return self.out(self.drop(self.hidden(x), training=training))

    def loss(labels, predictions, weights):
        squares = tf.square(labels - predictions)[:, 0]
        return tf.reduce_sum(squares * weights) / tf.reduce_sum(weights)

    def optimizer():
        return keras.optimizers.SGD(0.1)

    def feed(dataset, mode, metadata):
        return dataset.map(lambda record: (record["x"], record["y"], record["weight"]))

    def callbacks():
        return [SaveWeights()]
    """

    def test_subclass_named_as_model_with_loss_of_three_arguments(self, tmp_path):
        weight = np.random.default_rng(1).uniform(0, 2, RECORDS).astype("float32")
        data = write_arrays(tmp_path / "data.npz", weight=weight)
        path = write_model_file(tmp_path, self.SUBCLASS + weights_saver(tmp_path), "subclass_file")
        settings = job_settings(
            path,
            tmp_path / "job",
            training=data,
            minibatch_size=16,
            num_minibatches_per_task=RECORDS // 16,
            use_async=False,
        )
        run_job(with_params(settings, definition="subclass_file.Net", width=7))

        module = load_module(path)
        model, optimizer, arrays = module.Net(width=7), module.optimizer(), np.load(data)
        for start in range(0, RECORDS, 16):
            batch = slice(start, start + 16)
            with tf.GradientTape() as tape:
                value = module.loss(arrays["y"][batch], model(arrays["x"][batch], training=True), weight[batch])
            gradients = tape.gradient(value, model.trainable_weights)
            pairs = [pair for pair in zip(gradients, model.trainable_weights, strict=True) if pair[0] is not None]
            optimizer.apply_gradients(pairs)
        assert model.unused.weights[0].path in {v.path for v in model.trainable_weights}
        for ours, theirs in zip(final_weights(tmp_path), model.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def with_params(settings, definition="", **params):
    import dataclasses

    model = dataclasses.replace(settings.model, params=params)
    if definition:
        model = dataclasses.replace(model, definition=definition)
    return dataclasses.replace(settings, model=model)


def task_order(source, records, seed, epoch):
    """The starts of the tasks of one source in an epoch, as the task queue shuffles them."""
    from elasticcb.master.task_queue import TaskQueue

    queue = TaskQueue(
        training=[(source, RECORDS)],
        records_per_task=records,
        minibatch_size=records,
        num_epochs=epoch + 1,
        shuffle_seed=seed,
    )
    starts = []
    while (lease := queue.get_task(0, 0.0).lease) is not None:
        if lease.task.epoch == epoch:
            starts.append(lease.task.shard.start)
        queue.report_done(0, lease.id)
    return starts


class TestFeatures:
    """What goes in and out of models: strings, dicts, ragged values, several outputs, shuffles and filters."""

    TWO_OUTPUTS = """
    import json

    import keras
    import numpy as np
    import tensorflow as tf

    def custom_model():
        keras.utils.set_random_seed(1)
        color = keras.Input((1,), dtype="string", name="color")
        city = keras.Input((1,), dtype="string", name="city")
        size = keras.Input((1,), name="size")
        normalize = keras.layers.Normalization(mean=2.0, variance=4.0)
        lookup = keras.layers.StringLookup(vocabulary=["red", "green"], output_mode="one_hot")
        hashed = keras.layers.Hashing(8)(city)
        embedded = keras.layers.Flatten()(keras.layers.Embedding(8, 2)(hashed))
        x = keras.layers.Concatenate()([lookup(color), normalize(size), embedded])
        x = keras.layers.Dropout(0.1)(keras.layers.Dense(4, activation="relu")(x))
        outputs = {
            "click": keras.layers.Dense(1, activation="sigmoid")(x),
            "price": keras.layers.Dense(1)(x),
        }
        return keras.Model({"color": color, "city": city, "size": size}, outputs)

    def loss(labels, predictions):
        click = keras.losses.binary_crossentropy(labels["click"], predictions["click"])
        return click + keras.losses.mean_squared_error(labels["price"], predictions["price"])

    def optimizer():
        return keras.optimizers.Adam(0.01)

    def feed(dataset, mode, metadata):
        def parse(line):
            number, color, city, size, click, price = tf.io.decode_csv(line, [[0], [""], [""], [0.0], [0.0], [0.0]])
            features = {"color": color[None], "city": city[None], "size": size[None]}
            return number, features, {"click": click[None], "price": price[None]}

        dataset = dataset.map(parse)
        if mode == "training":
            dataset = dataset.shuffle(16).filter(lambda number, features, labels: number % 4 > 0)
        return dataset.map(lambda number, features, labels: features if mode == "prediction" else (features, labels))

    def eval_metrics_fn():
        return {
            "click": {
                "auc": keras.metrics.AUC(),
                "right": lambda labels, predictions: tf.equal(labels, tf.round(predictions)),
                "average": lambda labels, predictions: tf.reduce_mean(predictions),
            },
            "price": {"mse": keras.metrics.MeanSquaredError()},
        }

    class Keep(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            with open(f"FOLDER/trained-{self.params['worker_id']}", "a") as file:
                file.write(f"{logs['size']}\\n")

        def on_test_end(self, logs=None):
            with open("FOLDER/logs.json", "w") as file:
                json.dump(logs, file)

        def on_predict_batch_end(self, batch, logs=None):
            predictions = logs["predictions"]
            assert sorted(predictions) == ["click", "price"]
            assert all(type(value) is np.ndarray for value in predictions.values())
            with open(f"FOLDER/click-{self.params['worker_id']}", "a") as file:
                file.writelines(f"{value}\\n" for value in predictions["click"][:, 0])

    def callbacks():
        return [Keep()]
    """

    def test_strings_dicts_two_outputs_shuffle_and_filter(self, tmp_path):
        generator = np.random.default_rng(3)
        rows = [
            f"{number},{generator.choice(['red', 'green', 'blue'])},city-{number % 7},{generator.normal():.3f},"
            f"{generator.integers(2)},{generator.normal():.3f}"
            for number in range(RECORDS)
        ]
        data = tmp_path / "data.csv"
        data.write_text("\n".join(rows) + "\n")
        path = write_model_file(tmp_path, self.TWO_OUTPUTS.replace("FOLDER", str(tmp_path)), "two_outputs")
        settings = job_settings(
            path,
            tmp_path / "job",
            training=str(data),
            validation=str(data),
            minibatch_size=8,
            num_minibatches_per_task=2,
            num_workers=2,
            output=str(tmp_path / "saved_model"),
            directory=str(tmp_path / "checkpoints"),
        )
        summary, _ = run_job(settings)
        assert summary.records_per_epoch == (RECORDS,)
        assert summary.records_trained_more_than_once == 0
        sizes = [int(n) for file in tmp_path.glob("trained-*") for n in file.read_text().split()]
        assert sum(sizes) == RECORDS * 3 // 4  # each record once, but for those that `feed` drops

        logs = json.loads((tmp_path / "logs.json").read_text())
        assert sorted(logs["metrics"]) == ["click", "loss", "price"]
        assert sorted(logs["metrics"]["click"]) == ["auc", "average", "right"]
        assert logs["click_auc"] == logs["metrics"]["click"]["auc"]
        assert logs["price_mse"] == logs["metrics"]["price"]["mse"]

        exported = tf.saved_model.load(str(tmp_path / "saved_model")).signatures["serving_default"]
        parsed = [row.split(",") for row in rows]
        features = {
            "color": tf.constant([[row[1]] for row in parsed]),
            "city": tf.constant([[row[2]] for row in parsed]),
            "size": tf.constant([[float(row[3])] for row in parsed]),
        }
        served = exported(**features)
        labels = np.array([[float(row[4]), float(row[5])] for row in parsed], "float32")
        auc = keras.metrics.AUC()
        auc.update_state(labels[:, :1], served["click"])
        assert logs["click_auc"] == pytest.approx(float(auc.result()), abs=1e-6)
        right = np.mean(labels[:, :1] == np.round(served["click"]))
        assert logs["metrics"]["click"]["right"] == pytest.approx(right, abs=1e-6)
        assert logs["metrics"]["click"]["average"] == pytest.approx(np.mean(served["click"]), abs=1e-5)
        assert logs["price_mse"] == pytest.approx(np.mean((labels[:, 1:] - served["price"]) ** 2), rel=1e-4)

        settings = job_settings(
            path,
            tmp_path / "predict",
            Command.PREDICT,
            prediction=str(data),
            minibatch_size=8,
            num_workers=2,
            num_ps=2,
            directory_for_init=str(tmp_path / "checkpoints"),
        )
        run_job(settings)
        clicks = [float(v) for file in tmp_path.glob("click-*") for v in file.read_text().split()]
        np.testing.assert_allclose(sorted(clicks), np.sort(served["click"].numpy()[:, 0]), rtol=1e-5)

    def test_ragged_words_and_a_loss_object(self, tmp_path):
        text = """
        import keras
        import tensorflow as tf

        def custom_model():
            words = keras.Input((None,), dtype="string", ragged=True)
            x = keras.layers.StringLookup(vocabulary=["good", "bad", "film"])(words)
            x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(8, 4)(x))
            return keras.Model(words, keras.layers.Dense(1)(x))

        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        optimizer = "adam"

        def feed(dataset, mode, metadata):
            def parse(line):
                words = tf.strings.split(line)
                return words, tf.reduce_any(words == "good")[None]

            return dataset.map(parse).ragged_batch(1).unbatch()

        def eval_metrics_fn():
            return {"accuracy": keras.metrics.BinaryAccuracy(threshold=0.0)}
        """
        path = write_model_file(tmp_path, text, "ragged_file")
        data = tmp_path / "reviews.txt"
        data.write_text("a good film\nbad\nfilm of the year\na very very good one indeed\n" * 10)
        settings = job_settings(
            path,
            tmp_path / "job",
            training=str(data),
            validation=str(data),
            minibatch_size=7,
            num_minibatches_per_task=2,
        )
        summary, _ = run_job(settings)
        assert summary.records_per_epoch == (40,)
        assert np.isfinite(summary.metrics["loss"])


class TestNonFinite:
    MODEL_FILE = """
    import keras
    import numpy as np
    import tensorflow as tf

    @keras.saving.register_keras_serializable()
    def root(x):
        return tf.sqrt(x)  # its gradient at 0 is infinite

    def custom_model():
        keras.utils.set_random_seed(1)
        return keras.Sequential([
            keras.Input((6,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1, name="last", kernel_initializer=INITIALIZER, activation=ACTIVATION),
        ])

    def loss(labels, predictions):
        return keras.losses.mean_squared_error(labels, predictions)

    def optimizer():
        return keras.optimizers.SGD(0.01)

    def feed(dataset, mode, metadata):
        return dataset.map(lambda record: (record["x"], record["y"]))

    def callbacks():
        return [SaveWeights()]
    """

    def settings(self, tmp_path, data, initializer="'ones'", activation="None", **parts):
        text = self.MODEL_FILE.replace("INITIALIZER", initializer).replace("ACTIVATION", activation)
        path = write_model_file(tmp_path, text + weights_saver(tmp_path), f"non_finite_{abs(hash(tmp_path))}")
        return job_settings(path, tmp_path / "job", training=data, minibatch_size=8, **parts)

    def data_with_nan(self, path):
        write_arrays(path)
        with np.load(path) as arrays:
            x, y = arrays["x"], arrays["y"]
        x[3], x[50] = np.nan, np.inf
        np.savez(path, x=x, y=y)
        return str(path)

    def test_infinite_gradient_stops_the_job_and_names_the_variable(self, tmp_path):
        data = write_arrays(tmp_path / "data.npz")
        with pytest.raises(JobFailedError, match=r"gradient of '.*batch_norm.* holds NaN or infinity"):
            run_job(self.settings(tmp_path, data, "'zeros'", "root"))

    def test_loss_that_is_not_finite_stops_the_job(self, tmp_path):
        with pytest.raises(JobFailedError, match="the loss holds NaN or infinity"):
            run_job(self.settings(tmp_path, self.data_with_nan(tmp_path / "data.npz")))

    def test_skipped_batches_are_counted_and_leave_no_trace(self, tmp_path):
        data = self.data_with_nan(tmp_path / "data.npz")
        summary, _ = run_job(self.settings(tmp_path, data, non_finite=NonFinite.SKIP, num_workers=2, num_ps=2))
        assert summary.batches_skipped == 2
        assert summary.version == RECORDS // 8 - 2
        for weight in final_weights(tmp_path):
            assert np.isfinite(weight).all()


def test_model_that_differs_between_processes_is_told(tmp_path):
    text = """
    import threading

    import keras

    def custom_model():
        units = 4 if threading.current_thread().name.startswith("worker") else 3
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def feed(dataset, mode, metadata):
        return dataset.map(lambda record: (record["x"], record["y"]))
    """
    path = write_model_file(tmp_path, text, "differing_model")
    settings = job_settings(path, tmp_path / "job", training=write_arrays(tmp_path / "data.npz"))
    with pytest.raises(JobFailedError, match="must build the same model in every process") as caught:
        run_job(settings)
    assert "(6, 4)" in str(caught.value)
    assert "(6, 3)" in str(caught.value)
