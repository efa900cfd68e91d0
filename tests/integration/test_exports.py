"""Jobs that export for serving while they train, with real processes that are killed meanwhile."""

import contextlib
import json
import re
import subprocess
import textwrap
import threading
import time
from collections import deque
from types import SimpleNamespace
from unittest.mock import MagicMock

import fsspec
import keras
import numpy as np
import pytest
import requests
import tensorflow as tf
from exported import Export, current
from stores import S3Server
from waiting import wait_until

import elasticcb
from elasticcb.callbacks import PeriodicExport
from elasticcb.checkpoint.manifest import read_manifest, specs_in
from elasticcb.checkpoint.parts import load_model
from elasticcb.checkpoint.remote import Files
from elasticcb.checkpoint.versions import find_latest
from elasticcb.errors import CallbackError, CheckpointError, ElasticCBError, ModelFileError
from elasticcb.master import exports as exports_of_master
from elasticcb.master.exports import PeriodicExports
from elasticcb.serving.export_folder import ExportFolder
from elasticcb.serving.exports import version_of, way_to
from elasticcb.sharding.table_state import whole
from jobs import offsets_job, train_flags
from serving_process import PREDICT, Serving

RECORDS, TESTED, IDS = 4_000, 400, 60

PACE = """
    import os
    import time

    class Pace(keras.callbacks.Callback):
        "Trains until the test has made a file."

        def on_train_batch_end(self, version, logs=None):
            time.sleep(0.1)
            if is_there("enough"):
                self.model.stop_training = True

    def is_there(name):
        return os.path.exists(os.path.join(os.path.dirname(__file__), name))

    def callbacks():
        return [Pace()]
"""
TOLD = """
    class Told(elasticcb.callbacks.PeriodicExport):
        def on_train_end(self, logs=None):
            "The next master finds that all is trained, and exports the last version."
            if not is_there("killed"):
                open(os.path.join(os.path.dirname(__file__), "killed"), "w").close()
                os.kill(os.getpid(), 9)

        def on_export_end(self, version, path):
            print("EXPORTED", version, path, flush=True)

    def callbacks():
        return [Pace(), Told(os.path.join(os.path.dirname(__file__), "exports"), every=1, full_every=8)]
"""


def at_the_end(folder):
    """What the servers had at the end of a job: weights by index, rows by index and id."""
    latest = find_latest(folder)
    manifest = read_manifest(latest)
    part = load_model(Files(str(latest)), manifest, specs_in(manifest))
    tables = {index: whole(source) for index, source in part.tables.items()}
    return part.weights, {index: dict(zip(each.ids, each.rows, strict=True)) for index, each in tables.items()}


def assert_same(export, weights, tables):
    """The export says what the servers had, without rows that were removed."""
    assert export.dense.keys() == weights.keys()
    for index, expected in weights.items():
        np.testing.assert_allclose(export.dense[index], expected, atol=1e-6)
    assert export.tables.keys() == tables.keys()
    for index, rows in tables.items():
        assert export.tables[index].keys() == rows.keys()
        for id, row in rows.items():
            np.testing.assert_allclose(export.tables[index][id], row, atol=1e-6)


@pytest.mark.timeout(900)
def test_exports_say_what_the_servers_have_although_processes_are_killed(tmp_path, start_job):
    offsets_job(tmp_path, IDS, train=RECORDS, test=TESTED)
    folder, checkpoints = tmp_path / "exports", tmp_path / "ckpt"
    with (tmp_path / "offsets.py").open("a") as file:
        file.write(textwrap.dedent(PACE + TOLD))
    more = {"num_ps": 2, "num_epochs": 1000, "checkpoint_dir": checkpoints, "checkpoint_interval": 0.2}
    rows = {"embedding_when_full": "evict", "embedding_tables": "{embedding: {max_rows: 40}}"}
    job = start_job("train", *train_flags(tmp_path, "offsets", **more, **rows))

    def exported(kind, number=1):
        for _ in range(number):
            line = job.wait_for_line(rf"EXPORTED \d+ .*/{kind}-")
        return int(re.search(r"EXPORTED (\d+)", line)[1])

    first = exported("full")
    exported("delta", 2)
    by_first_master = current(folder).exporter
    assert version_of(current(folder).full) == first
    job.kill("ps", 1)  # what the others add to has no sequel
    job.wait_for_line(r"Parameter server 1 recovered in")
    after_server = exported("full")
    exported("delta")
    assert first < after_server
    job.master.kill()
    job.wait_for_line(r"The master recovered in")
    after_master = exported("full")
    exported("delta")
    assert current(folder).exporter != by_first_master
    aside = folder.rename(tmp_path / "aside")
    folder.write_text("")
    job.wait_for_line(r"Exports can't be written now: .* Training continues\.")
    folder.unlink()
    aside.rename(folder)
    job.wait_for_line(r"Exports can be written again\.")
    (tmp_path / "enough").touch()
    job.wait_for_line(r"The master was killed by SIGKILL")
    last = exported("full")
    assert job.finish() == 0, job.output
    job.assert_no_orphans()

    now = current(folder)
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    assert all((folder / name / "manifest.json").is_file() for name in names)  # nothing unfinished is left
    assert [now.full, *now.deltas] == way_to(names)
    assert now.version == max(map(version_of, names)) >= last > after_master
    assert now.model == "offsets"
    export = Export(folder, [now.full, *now.deltas])
    assert_same(export, *at_the_end(checkpoints))
    assert export.gone or Export(folder, way_to(names, version_of(now.full) - 1)).gone
    fulls = sorted(version_of(name) for name in names if name.startswith("full"))
    assert {first, after_server, after_master} <= {*fulls}
    # Every full export is what the full one before and the deltas from there say, where there is a way.
    for version in fulls:
        way = way_to([name for name in names if name != f"full-{version:08d}"], version)
        if way and version_of(way[-1]) == version:
            same, other = Export(folder, [f"full-{version:08d}"]), Export(folder, way)
            for index, rows in same.tables.items():
                assert rows.keys() == other.tables[index].keys()
                np.testing.assert_array_equal([rows[id] for id in rows], [other.tables[index][id] for id in rows])
    features = {"id": tf.constant([[1], [2]], tf.int64), "numbers": tf.ones([2, 4])}
    answers = export.model.signatures["serving_default"](**features)["predictions"]
    assert answers.shape == (2, 1)


@pytest.fixture(scope="module")
def s3():
    with S3Server("exported") as server:  # a bucket of its own: all servers of a process share their buckets
        yield server


def test_a_program_exports_to_a_store_and_at_the_end_what_it_has_trained(s3, monkeypatch, tmp_path):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "s3", s3.options)
    told, url = [], "s3://exported/clicks"

    class Told(PeriodicExport):
        def on_export_end(self, version, path):
            told.append((version, path))

    inputs = {"id": keras.Input((2,), dtype="int64", name="id"), "word": keras.Input((1,), dtype="string", name="word")}
    own = elasticcb.layers.Embedding(4)
    parts = [
        keras.layers.Embedding(50, 4)(inputs["id"]),
        own(keras.layers.StringLookup(vocabulary=["a", "b"])(inputs["word"])),
    ]
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Concatenate(axis=1)(parts)))
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    random = np.random.default_rng(0)
    x = {"id": random.integers(0, 50, (64, 2)), "word": random.choice(["a", "b", "c"], (64, 1))}
    with elasticcb.Cluster(kind="inprocess", embedding=elasticcb.EmbeddingOptions(threshold_bytes=0)) as cluster:
        cluster.fit(model, x, np.ones((64, 1)), epochs=2, verbose=0, callbacks=[Told(url, every="1h")])
    fsspec.filesystem("s3", **s3.options).get(f"{url}/", f"{tmp_path}/exports/", recursive=True)
    folder = tmp_path / "exports"
    now = current(folder)
    way = [now.full, *now.deltas]
    assert [path for _, path in told] == [f"{url}/{name}" for name in way]
    assert told[-1][0] == now.version
    assert len(way) > 1  # a busy machine has one more
    assert {path.name for path in folder.iterdir()} == {*way, "current.json", ".exports.lock"}
    (owner,) = (folder / ".exports.lock" / "owners").iterdir()
    assert json.loads(owner.read_text())["ended"]
    weights = dict(enumerate(model.get_weights()))
    tables = {0: dict(enumerate(weights.pop(0))), 1: dict(zip(own.rows()[0], weights.pop(1), strict=True))}
    assert_same(Export(folder, way), weights, tables)
    features = {name: tf.constant(values) for name, values in x.items()}
    with elasticcb.ServedModel(url) as served:
        answer = served.predict(features)
    assert answer.version == now.version
    np.testing.assert_allclose(answer["predictions"], model(features), atol=1e-6)


class Asking:
    """Asks `elasticcb serve` all the time for everything that an offsets model knows: what each version has answered.

    Attributes:
        served: the process; None: there is none now.
        orders: the versions in the order of the answers, of each process.
    """

    def __init__(self):
        self.served, self.answers, self.orders = None, {}, []
        self._over, self._wrong = threading.Event(), []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def start(self, folder, **given):
        self.orders.append([])
        self.served = Serving(folder, **given)
        return self.served

    def _run(self):
        numbers = np.concatenate([np.zeros((IDS + 1, 4)), np.eye(4)])
        inputs = {"id": [[id] for id in [*range(IDS + 1), *[IDS] * 4]], "numbers": numbers.tolist()}  # IDS has no row
        while not self._over.is_set():
            time.sleep(0.02)
            with contextlib.suppress(requests.ConnectionError, AttributeError):
                answer = requests.post(f"{self.served.url}{PREDICT}", json={"inputs": inputs}, timeout=60)
                if answer.status_code == 503:
                    continue
                version = int(answer.headers.get("X-Model-Version", -1))
                outputs = np.array(answer.json().get("outputs", [[np.nan]]))[:, 0]
                self.orders[-1].append(version)
                if not np.allclose(outputs, self.answers.setdefault(version, outputs), atol=1e-6):
                    self._wrong.append((version, answer.text))

    def count(self):
        return len(self.orders[-1])

    def finish(self):
        self._over.set()
        self._thread.join()

    def assert_answers_are_those_of_whole_versions(self, folder):
        """Of the exports in the folder, which keeps all that were served; never an older one after a newer one."""
        assert not self._wrong
        names = [path.name for path in folder.iterdir() if (path / "manifest.json").is_file()]
        for version, outputs in self.answers.items():
            way = way_to(names, version)
            assert version_of(way[-1]) == version
            export = Export(folder, way)
            ((_, rows),) = export.tables.items()
            kernel, bias = sorted(export.dense.values(), key=lambda array: -array.size)
            expected = [bias[0] + sum(rows.get(id, [0.0])) for id in range(IDS + 1)]
            np.testing.assert_allclose(outputs, [*expected, *(bias + kernel)[:, 0]], atol=1e-5)
        for order in self.orders:
            assert order == sorted(order)


@pytest.fixture
def asking():
    asking = Asking()
    yield asking
    asking.finish()
    if asking.served is not None:
        asking.served.process.process.kill()


def start_exporting(folder, start_job, exports, **more):
    offsets_job(folder, IDS, train=RECORDS, test=TESTED)
    with (folder / "offsets.py").open("a") as file:
        file.write(textwrap.dedent(PACE))
    given = {"num_workers": 1, "num_epochs": 1000, "checkpoint_interval": 0.2, "export_full_every": "6s", **more}
    return start_job("train", *train_flags(folder, "offsets", export_dir=exports, export_every="1s", **given))


@contextlib.contextmanager
def small_disk(folder):
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def full(disk):
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    yield
    (disk / "filler").unlink()


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_full_disks_of_exports_and_of_a_server_delay_versions_only(tmp_path, start_job, asking, monkeypatch):
    with small_disk(tmp_path / "disk") as disk, small_disk(tmp_path / "cache") as cache:
        folder = disk / "exports"
        job = start_exporting(tmp_path, start_job, folder)
        monkeypatch.setenv("TMPDIR", str(cache))
        served = asking.start(f"file://{folder}", cwd=tmp_path)

        def follows():
            before = served.health["version"] or 0
            wait_until(lambda: served.health["version"] > before and not served.health["problem"])

        wait_until(lambda: served.health["version"])
        follows()
        with full(cache):
            wait_until(lambda: "No space left" in served.health["problem"])
            before, answered = served.health["version"], asking.count()
            wait_until(lambda: asking.count() > answered + 5)
            assert served.health["version"] == before
        follows()
        with full(disk):
            job.wait_for_line(r"xports can't be written now: .*(No space left|disk is full).* Training continues\.")
            assert served.health["version"]
        job.wait_for_line(r"Exports can be written again\.")
        follows()
        (tmp_path / "enough").touch()
        assert job.finish() == 0, job.output
        wait_until(lambda: served.health["version"] == current(folder).version)
        asking.finish()
        asking.assert_answers_are_those_of_whole_versions(folder)
        served.process.process.kill()
        served.process.finish()


REFUSED = {
    "another": "is in use by process",
    "file": "is not a folder",
    "two": "has 2 PeriodicExports",
    "ragged": "features",
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_job_that_can_not_export_is_refused_before_it_trains(tmp_path, case):
    folder, other = tmp_path / "exports", None
    if case == "another":
        other = ExportFolder(str(folder))
        other.own("of another job", "jobs/other", print)
    elif case == "file":
        folder.write_text("")
    trained = []

    class Batches(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            trained.append(batch)

    inputs = keras.Input((None,), dtype="int64", ragged=case == "ragged")
    model = keras.Model(inputs, keras.layers.Dense(1)(elasticcb.layers.Embedding(2, combiner="sum")(inputs)))
    model.compile("sgd", "mse")
    exports = [PeriodicExport(folder) for _ in range(2 if case == "two" else 1)]
    ids = tf.ragged.constant([[1, 2], [3]] * 8) if case == "ragged" else np.ones((16, 2), "int64")
    data = tf.data.Dataset.from_tensor_slices((ids, np.ones((16, 1)))).batch(8)
    with elasticcb.Cluster(kind="inprocess") as cluster, pytest.raises(ElasticCBError, match=REFUSED[case]):
        cluster.fit(model, data, verbose=0, callbacks=[*exports, Batches()])
    assert not trained
    if other is not None:
        other.leave()


def test_arguments_that_can_not_be_are_refused():
    with pytest.raises(ModelFileError, match="expects every as a time"):
        PeriodicExport("exports", every="soon")
    with pytest.raises(ModelFileError, match="expects keep as a time"):
        PeriodicExport("exports", keep=0)
    with pytest.raises(ModelFileError, match="a folder or a URL"):
        PeriodicExport("")


@pytest.mark.parametrize(("told", "is_waited_for"), [(0, True), (4, True), (5, False)])
def test_the_last_full_export_is_waited_for_if_nothing_else_leads_to_the_last_version(told, is_waited_for, monkeypatch):
    full = SimpleNamespace(export=SimpleNamespace(version=5, name="full"), snapshot="snapshot", process=MagicMock())
    looks, exports = [], object.__new__(PeriodicExports)
    vars(exports).update(
        _changed=threading.Condition(), _closing=False, _finishing=True, _full=full, _untold=[], _version=told,
        _base=SimpleNamespace(), _folder=MagicMock(),
    )  # fmt: skip

    def take_full():
        looks.append(1)
        if len(looks) == 3:
            exports._full = None

    monkeypatch.setattr(exports_of_master, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(exports, "_take_full", take_full)
    monkeypatch.setattr(exports, "_export", lambda: None)
    exports._run()
    assert full.process.close.called != is_waited_for


def test_weights_that_are_set_at_the_end_are_exported_after_a_full_export_that_is_being_written(tmp_path):
    class SetsWeights(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            self.model.set_weights([np.full_like(weight, 7) for weight in self.model.get_weights()])

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    folder = tmp_path / "exports"
    with elasticcb.Cluster(kind="inprocess") as cluster:
        callbacks = [PeriodicExport(folder, every="1h"), SetsWeights()]
        cluster.fit(model, np.ones((16, 4)), np.ones((16, 1)), verbose=0, callbacks=callbacks)
    now = current(folder)
    assert_same(Export(folder, [now.full, *now.deltas]), {0: np.full((4, 1), 7), 1: np.full(1, 7)}, {})


def test_an_export_is_told_when_current_json_leads_to_it(tmp_path):
    """After a server was lost, deltas are written while the next full export is."""
    exports, names = object.__new__(PeriodicExports), ["full-00000001", "delta-00000001-00000003"]
    later = ["full-00000005", "delta-00000005-00000006"]
    vars(exports).update(
        _own=dict.fromkeys([*names, later[1]], 1.0), _untold=[*names, later[1]], _told=deque(), _current="", _version=0,
        _exporter="a", _name="m", _earlier={}, _leftovers=[], _folder=ExportFolder(str(tmp_path)), _master=MagicMock(),
        _callback=SimpleNamespace(keep=float("inf")),
    )  # fmt: skip
    exports._publish()
    assert current(tmp_path).version == 3
    assert list(exports._told) == [(version_of(name), f"{tmp_path}/{name}") for name in names]
    exports._told.clear()
    exports._own[later[0]] = 2.0
    exports._untold.append(later[0])
    exports._publish()
    assert current(tmp_path).version == 6
    assert list(exports._told) == [(version_of(name), f"{tmp_path}/{name}") for name in later]
    assert not exports._untold


def test_a_full_export_that_fails_after_an_earlier_one_does_not_end_the_job():
    process = MagicMock(**{"files.side_effect": CallbackError("it can't be exported")})
    full, exports = SimpleNamespace(process=process), object.__new__(PeriodicExports)
    for earlier, error in (("", CallbackError), ("{}", CheckpointError)):
        exports._current = earlier
        with pytest.raises(error, match="it can't be exported"):
            exports._files_of(full)


def test_an_error_that_nobody_expects_does_not_end_the_exports():
    exports = object.__new__(PeriodicExports)
    vars(exports).update(_troubles={}, _closing=False, _master=MagicMock())
    for _ in range(2):
        with exports._forgiving("Exports"):
            raise RuntimeError("can't start new thread")
    said = "Exports can't be written now: RuntimeError: can't start new thread. Training continues."
    exports._master.print.assert_called_once_with(said)


def test_any_time_between_exports_can_be_waited_for():
    exports = object.__new__(PeriodicExports)
    vars(exports).update(_changed=threading.Condition(), _closing=False, _finishing=False)
    waiting = threading.Thread(target=exports._wait, args=[float("inf")])
    waiting.start()
    with exports._changed:
        exports._finishing = True
        exports._changed.notify()
    waiting.join()
