"""What goes in and out of models: strings, dicts, ragged values, several outputs, shuffles and filters."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from model_file_jobs import RECORDS, write_arrays

from elasticcb.errors import JobFailedError
from elasticcb.settings import Command
from jobs import job_settings, run_job, write_model_file

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
                json.dump({**logs, "metrics": logs["metrics"], "version": logs["version"]}, file)

        def on_predict_batch_end(self, batch, logs=None):
            predictions = logs["predictions"]
            assert sorted(predictions) == ["click", "price"]
            assert all(type(value) is np.ndarray for value in predictions.values())
            with open(f"FOLDER/click-{self.params['worker_id']}", "a") as file:
                file.writelines(f"{value}\\n" for value in predictions["click"][:, 0])

    def callbacks():
        return [Keep()]
"""


def test_strings_dicts_two_outputs_shuffle_and_filter(tmp_path):
    generator = np.random.default_rng(3)
    rows = [
        f"{number},{generator.choice(['red', 'green', 'blue'])},city-{number % 7},{generator.normal():.3f},"
        f"{generator.integers(2)},{generator.normal():.3f}"
        for number in range(RECORDS)
    ]
    data = tmp_path / "data.csv"
    data.write_text("\n".join(rows) + "\n")
    path = write_model_file(tmp_path, TWO_OUTPUTS.replace("FOLDER", str(tmp_path)), "two_outputs")
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
    assert summary.records_repeated == 0
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
