"""Jobs that train on a stream, as records come, with a real broker."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter

import numpy as np
import pytest
from brokers import FaultyBrokers, broker
from waiting import wait_until

from jobs import number, train_flags, write_model_file
from metrics_scrapes import Scrape

MODEL = """
    import json

    import keras
    import tensorflow as tf

    import elasticcb

    def custom_model():
        user = keras.Input((), dtype="int64", name="user")
        rows = elasticcb.layers.Embedding(1, embeddings_initializer="zeros", name="users")(user)
        return keras.Model({"user": user}, keras.layers.Flatten()(rows))

    def loss(labels, predictions):
        return keras.losses.mean_squared_error(labels, predictions)

    def optimizer():
        return keras.optimizers.SGD(0.5)

    LEDGER = elasticcb.__file__ and __file__ + ".ledger"

    def note(values):
        with open(LEDGER, "ab") as file:
            file.write(b"".join(value + b"\\n" for value in values))
        return values

    def feed_batch(records, mode, metadata):
        values = records["value"]
        if mode == "training":
            values = tf.ensure_shape(tf.numpy_function(note, [values], tf.string), [None])
        numbers = tf.io.decode_csv(values, [[0], [0.0]])
        return {"user": tf.cast(numbers[0], tf.int64)}, numbers[1][:, None]

    class Ends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with open(__file__ + ".epochs", "a") as file:
                file.write(f"{epoch} {sorted(logs)}\\n")

    def callbacks():
        return [Ends()]
"""


@pytest.fixture(scope="module")
def kafka():
    with broker() as found:
        yield found


def clicks(first, last):
    return [b"%d,%d" % (n, n % 2) for n in range(first, last)]


def flags(folder, url, **more):
    write_model_file(folder, MODEL, "stream")
    given = {"training_data": url, "checkpoint_interval": 0.5, "num_minibatches_per_task": 4, **more}
    return ["train", *(each for each in train_flags(folder, "stream", **given) if "validation_data" not in each)]


def read(folder):
    """How often each value was read for training."""
    return Counter((folder / "stream.py.ledger").read_bytes().split())


def test_every_record_is_trained_through_kills_and_an_absent_broker(tmp_path, kafka, start_job):
    url = kafka.topic("faults")
    kafka.send("faults", clicks(0, 400))
    job = start_job(*flags(tmp_path, url, records_per_epoch=200, metrics_port=0))
    address = re.search(r"http://(\S+)/metrics", job.wait_for_line(r"Metrics are served at"))[1]
    job.wait_for_line(r"Epoch 1 ")
    job.kill("worker")
    kafka.send("faults", clicks(400, 800))
    job.wait_for_line(r"Epoch 3 ")
    wait_until(lambda: Scrape(address).find("elasticcb_stream_lag_records", partition="faults/1") is not None)
    kafka.pause()
    job.kill("ps")
    job.wait_for_line(r"does not answer")
    kafka.go_on()
    kafka.send("faults", clicks(800, 1200))
    job.master.kill()
    job.wait_for_line(r"recovered in")
    job.wait_for_line(r"Epoch 5 ")
    epochs = tmp_path / "stream.py.epochs"
    wait_until(lambda: len(epochs.read_text().splitlines()) == 6)
    assert len(read(tmp_path)) == 1200
    job.interrupt()
    assert job.finish() == 130
    job.assert_no_orphans()
    kafka.send("faults", clicks(1200, 1400))
    resumed = start_job("resume", tmp_path / "job")
    wait_until(lambda: len(epochs.read_text().splitlines()) == 7)
    assert len(read(tmp_path)) == 1400
    resumed.interrupt()
    assert resumed.finish() == 130
    assert [int(line.split()[0]) for line in epochs.read_text().splitlines()] == list(range(7))


@pytest.fixture
def faulty():
    with contextlib.closing(FaultyBrokers()) as found:
        yield found


def test_errors_of_brokers_and_new_leaders_cost_no_record(tmp_path, faulty, start_job):
    url = faulty.topic("errors")
    faulty.send("errors", clicks(0, 100))
    job = start_job(*flags(tmp_path, url, records_per_epoch=100, lost_offsets="skip"))
    job.wait_for_line(r"Epoch 1 ")
    not_leader, timed_out, not_there, storage, loading = 6, 7, 8, 56, 14
    for request in (1, 2, 3):
        faulty.fail(request, not_leader, timed_out, storage, not_there)
    faulty.fail(8, loading, not_there)
    faulty.send("errors", clicks(100, 200))
    job.wait_for_line(r"Epoch 2 ")
    faulty.set_up(1, False)
    for partition in (0, 1):
        faulty.lead("errors", partition, 2 + partition)
    faulty.send("errors", clicks(200, 300))
    job.wait_for_line(r"Epoch 3 ")
    faulty.set_up(1, True)
    for partition in (0, 1):
        faulty.lead("errors", partition, 1)
    faulty.set_up(2, False)
    faulty.send("errors", clicks(300, 400))
    job.wait_for_line(r"Epoch 4 ")
    job.interrupt()
    assert job.finish() == 130
    first = clicks(0, 16)[::2]  # of which the processes have built their models
    assert all(count == 1 or value in first for value, count in read(tmp_path).items())
    assert len(read(tmp_path)) == 400
    faulty.send("errors", clicks(400, 600))
    faulty.remove("errors", 0, 230)  # of 300
    resumed = start_job("resume", tmp_path / "job")
    resumed.wait_for_line(r"Epoch 5 ")
    wait_until(lambda: len(read(tmp_path)) == 570)
    resumed.interrupt()
    assert resumed.finish() == 130
    assert json.loads((tmp_path / "job" / "status.json").read_text())["records_lost"] == 30


def test_a_job_stops_at_the_newest_record_and_counts_them(tmp_path, kafka, start_job):
    url = kafka.topic("stops", 3)
    kafka.send("stops", clicks(0, 333), 3)
    job = start_job(*flags(tmp_path, url, data_reader_params="stop=latest", num_workers=1))
    assert job.finish() == 0
    first = clicks(0, 24)[::3]  # of which the master and the worker have built their models
    assert read(tmp_path) == Counter(clicks(0, 333)) + Counter(2 * first)
    assert number(job.output, "records trained") == 333


TIMED = """
    import json
    import keras
    import tensorflow as tf

    import elasticcb
    from elasticcb.data import Partition

    class Timed(elasticcb.data.UnboundedSource):
        \"\"\"Records whose times, in seconds, are in a file, by partition.\"\"\"

        element_spec = tf.TensorSpec((), tf.float32)
        has_times = True

        def __init__(self, path):
            self.path, self.told = path, {}

        @property
        def times(self):
            with open(self.path) as file:
                return json.load(file)

        def partitions(self, known):
            now = {name: len(own) for name, own in self.times.items()}
            grown = {name: end for name, end in now.items() if name not in known or end != self.told.get(name)}
            self.told = now
            return {name: Partition(0, 0, end) for name, end in grown.items()}

        def time_of(self, name, offset):
            return self.times[name][offset]

        def offset_at(self, name, time):
            return next((place for place, own in enumerate(self.times[name]) if own >= time), None)

        def beginning(self, records):
            return "a", 0, records

        def read(self, name, start, end):
            yield from self.times[name][start:end]

    def custom_data_reader(data_origin):
        return Timed(data_origin)

    def custom_model():
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, trainable=False)])

    def loss(labels, predictions):
        return keras.ops.mean(keras.ops.minimum(labels, 1e4))  # of the records' times

    def optimizer():
        return keras.optimizers.SGD(0.0)

    def feed_batch(records, mode, metadata):
        return records[:, None], records[:, None]

    class Ends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with open(__file__ + ".epochs", "a") as file:
                file.write(f"{epoch} {logs['event_time']:.0f} {logs['loss']:.2f} {logs['progressive_loss']:.2f}\\n")

    def callbacks():
        return [Ends()]
"""


def test_epochs_are_periods_of_event_time_also_after_kills(tmp_path, start_job):
    times = {"a": [0.0, 10.0, 50.0, 70.0, 65.0, 90.0, 400.0], "b": [20.0, 30.0]}

    def tell():
        (tmp_path / "new.json").write_text(json.dumps(times))
        (tmp_path / "new.json").rename(tmp_path / "times.json")

    tell()
    write_model_file(tmp_path, TIMED, "timed")
    given = {"training_data": tmp_path / "times.json", "checkpoint_interval": 0.5, "minibatch_size": 2}
    given |= {"epoch_event_time": "1m", "progressive": "true", "num_epochs": 6}
    flags = [each for each in train_flags(tmp_path, "timed", **given) if "validation_data" not in each]
    job = start_job("train", *flags)
    epochs = tmp_path / "timed.py.epochs"
    wait_until(lambda: epochs.exists() and len(epochs.read_text().splitlines()) == 3)
    job.master.kill()
    job.wait_for_line(r"recovered in")
    times["b"] += [40.0, 4e9, 500.0]  # one is too late, and one in the future
    times["c"] = [530.0]
    tell()
    wait_until(lambda: len(epochs.read_text().splitlines()) == 5)
    job.kill("worker")
    times["a"].append(1000.0)
    tell()
    assert job.finish() == 0
    assert epochs.read_text().splitlines() == [
        "0 60 22.00 22.00",
        "1 120 75.00 75.00",
        "2 420 400.00 400.00",
        "3 480 40.00 40.00",
        "4 540 3676.67 3676.67",
        "5 1020 1000.00 1000.00",
    ]


LINES = """
    import keras
    import tensorflow as tf

    def custom_model():
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    def loss(labels, predictions):
        return keras.losses.mean_squared_error(labels, predictions)

    def optimizer():
        return keras.optimizers.SGD(0.01)

    def feed_batch(records, mode, metadata):
        x, y = tf.io.decode_csv(records, [[0.0], [0.0]])
        return x[:, None], y[:, None]
"""


def write_lines(folder, name, lines):
    """A file appears when it is complete."""
    folder.mkdir(exist_ok=True)
    (folder / f"_{name}").write_text("".join(f"{line}\n" for line in lines))
    (folder / f"_{name}").rename(folder / name)


def trained(job):
    """A function that returns the records that a job with metrics has trained."""
    address = re.search(r"http://(\S+)/metrics", job.wait_for_line(r"Metrics are served at"))[1]
    return lambda: Scrape(address).find("elasticcb_records_total", type="training") or 0


def test_files_that_are_added_are_trained_once_without_their_bad_records(tmp_path, start_job):
    folder, bad = tmp_path / "lines", tmp_path / "bad"
    first = ["first,batch", *(f"{n / 100},{n / 50}" for n in range(99))]  # of which each process makes its model
    write_lines(folder, "a.csv", first)
    write_model_file(tmp_path, LINES, "lines_model")
    given = {"training_data": folder, "checkpoint_interval": 0.5, "epoch_every": "1s", "bad_records": bad}
    given |= {"data_reader_params": "settle_seconds=0", "follow": "true", "progressive": "true", "metrics_port": 0}
    flags = [each for each in train_flags(tmp_path, "lines_model", **given) if "validation_data" not in each]
    job = start_job("train", *flags)
    records = trained(job)
    job.wait_for_line(r"Epoch 1 .*progressive_loss")
    write_lines(folder, "0.csv", [*(f"{n / 100},{n / 50}" for n in range(40)), "0.5,half", "1,2"])
    wait_until(lambda: records() == 142)
    job.interrupt()
    assert job.finish() == 130
    assert re.search(r"Record 0 of .*a\.csv is skipped", job.output)
    assert sorted(path.read_text() for path in bad.glob("*.record")) == ["0.5,half", "first,batch"]
    write_lines(folder, "b.csv", [f"{n / 100},{n / 50}" for n in range(30)])
    resumed = start_job("resume", tmp_path / "job")
    records = trained(resumed)
    wait_until(lambda: records() == 172)
    resumed.interrupt()
    assert resumed.finish() == 130
    status = json.loads((tmp_path / "job" / "status.json").read_text())
    assert (status["records_trained"], status["bad_records"]) == (172, 2)
    resumed.assert_no_orphans()


def test_fit_on_a_stream_trains_like_fit_on_its_records(kafka):
    import keras

    import elasticcb

    kafka.topic("fit", 1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 2)).round(3)
    kafka.send("fit", [{"a": float(a), "b": float(b), "y": float(a - 2 * b)} for a, b in x], 1)

    def model():
        keras.utils.set_random_seed(1)
        inputs = {name: keras.Input((1,), name=name) for name in "ab"}
        out = keras.layers.Dense(1)(keras.layers.Concatenate()([*inputs.values()]))
        built = keras.Model(inputs, out)
        built.compile(keras.optimizers.SGD(0.1), "mse")
        return built

    by_fit, by_stream = model(), model()
    columns = {"a": x[:, 0].astype("float32"), "b": x[:, 1].astype("float32")}
    y = (x[:, 0] - 2 * x[:, 1]).astype("float32")
    expected = by_fit.fit(columns, y, batch_size=8, shuffle=False, epochs=3, steps_per_epoch=4, verbose=0)
    stream = elasticcb.data.Kafka(kafka.address, "fit", columns=dict.fromkeys(("a", "b", "y"), "float32"))
    data = elasticcb.data.read(stream, label="y")
    with elasticcb.Cluster(num_workers=1, kind="inprocess") as cluster:
        found = cluster.fit(by_stream, data, batch_size=8, epochs=3, steps_per_epoch=4, verbose=0)
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"], rtol=1e-5)
    for one, other in zip(by_fit.get_weights(), by_stream.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
