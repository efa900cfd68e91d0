"""Parameter servers of real jobs, killed while workers train: others take their places with what they held."""

import re
import signal

import numpy as np
import pytest

from jobs import TRUE_WEIGHTS, number, train_flags, write_model_file

MODEL_FILE = """
    import elasticcb
    import keras

    def custom_model():
        ids = keras.Input((1,), dtype="int64", name="id")
        numbers = keras.Input((4,), name="numbers")
        row = keras.layers.Flatten()(elasticcb.layers.Embedding(1, embeddings_initializer="zeros")(ids))
        outputs = keras.layers.Add()([keras.layers.Dense(1)(numbers), row])
        return keras.Model({"id": ids, "numbers": numbers}, outputs)

    def loss(labels, predictions):
        return keras.losses.mean_squared_error(labels, predictions)

    def optimizer():
        return keras.optimizers.Adagrad(0.3)

    def feed(dataset, mode, metadata):
        def split(record):
            features = {"id": record["id"], "numbers": record["numbers"]}
            return features if mode == "prediction" else (features, record["y"])
        return dataset.map(split)

    def eval_metrics_fn():
        return {"error": keras.metrics.MeanAbsoluteError(), "rows": Rows()}

    class Rows(keras.metrics.Sum):
        "Counts the records that were evaluated."

        def update_state(self, labels, predictions, sample_weight=None):
            super().update_state(keras.ops.ones_like(labels))
"""
RECORDS, IDS = 6_000, 40
IS_BACK = r"Parameter server \d is back after [\d.]+ s, from its recovery files; \d+ updates"


@pytest.fixture
def data(tmp_path):
    """Records of a linear function with an offset for each id, and a model file for them."""
    write_model_file(tmp_path, MODEL_FILE, "offsets")
    generator = np.random.default_rng(0)
    offsets = generator.normal(size=IDS)
    for name, count in (("train", RECORDS), ("test", 1_000)):
        numbers = generator.normal(size=(count, 4)).astype("float32")
        ids = generator.integers(0, IDS, size=(count, 1))
        y = numbers @ TRUE_WEIGHTS + offsets[ids[:, 0]]
        np.savez(tmp_path / f"{name}.npz", id=ids, numbers=numbers, y=y.astype("float32")[:, None])
    return tmp_path


def flags(folder, **more):
    return train_flags(folder, "offsets", **{"checkpoint_interval": 0.2, **more})


def test_killed_servers_are_replaced_alone_and_the_model_learns_on(data, start_job):
    more = {"num_ps": 2, "num_epochs": 4, "evaluation_steps": 400, "max_staleness": 2}
    job = start_job("train", *flags(data, **more))
    for index in (0, 1):
        job.wait_for_line(r"Evaluation at version")
        workers = [process.pid for process in job.children("worker")]
        job.kill("ps", index)
        job.wait_for_line(IS_BACK)
        assert [process.pid for process in job.children("worker")] == workers
    job.kill("ps", 0, signal.SIGTERM)
    assert " 0 updates" in job.wait_for_line(IS_BACK)
    assert job.finish() == 0, job.output
    for epoch in range(1, 5):
        assert number(job.output, f"records trained in epoch {epoch}") == RECORDS
    assert re.search(r"parameter servers lost +3, of them replaced: 3", job.output)
    assert number(job.output, "workers lost") == 0
    assert {int(float(n)) for n in re.findall(r"Evaluation at version .*rows ([\d.]+)", job.output)} == {1_000}
    error = float(re.findall(r"Evaluation at version .*error ([\d.]+)", job.output)[-1])
    assert error < 0.1  # 1.6 at the start, 0.8 with offsets that are not learned
    job.assert_no_orphans()


def test_server_of_an_evaluation_is_replaced_with_the_checkpoint(data, start_job):
    training = start_job("train", *flags(data, num_epochs=1, checkpoint_dir=data / "ckpt", num_ps=2))
    assert training.finish() == 0, training.output
    more = {"checkpoint_dir_for_init": data / "ckpt", "num_ps": 2, "minibatch_size": 1, "num_minibatches_per_task": 5}
    unwanted = ("training_data", "checkpoint_interval")
    given = [flag for flag in flags(data, **more) if not flag.startswith(tuple(f"--{name}=" for name in unwanted))]
    job = start_job("evaluate", *given)
    job.wait_for_line(r"The model starts from")
    job.kill("ps", 1)
    assert job.finish() == 0, job.output
    assert number(job.output, "records evaluated, once each") == 1_000
    assert re.search(r"rows +1,?000", job.output)
    assert re.search(r"parameter servers lost +1, of them replaced: 1", job.output)
    after_training = re.findall(r"Evaluation at version .*error ([\d.e-]+)", training.output)[-1]
    again = re.findall(r"error +([\d.e-]+)", job.output)[-1]
    assert float(again) == pytest.approx(float(after_training), abs=1e-3)
