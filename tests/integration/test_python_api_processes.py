"""`elasticcb.Cluster` with real processes: scripts, threads, signals, processes that are killed or started by hand."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading

import keras
import numpy as np
import psutil
import pytest

import elasticcb
from elasticcb.cli.main import main
from elasticcb.clients.master import MasterClient
from elasticcb.errors import ConnectionLostError
from elasticcb.security.credentials import Access
from elasticcb.security.tls import TLS, TLSFiles
from warm import WarmProcess

X = np.linspace(0, 1, 2000, dtype="float32")[:, None]
Y = np.ones_like(X)


def make():
    """A model whose metric says how many records it has seen: all labels are 1, all outputs are above 0."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "mse", metrics=[keras.metrics.TruePositives(0.0, name="count")])
    return model


def processes(role):
    """Those of all clusters that there are; the youngest last."""
    children = [child for child in psutil.Process().children(recursive=True) if child.name().startswith(role)]
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return sorted(alive, key=psutil.Process.create_time)


class KillsOnce(keras.callbacks.Callback):
    """Kills the youngest process of a role at the beginning of an epoch."""

    def __init__(self, role, epoch):
        super().__init__()
        self.role, self.epoch = role, epoch
        self.done = False

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch and not self.done:
            self.done = True
            processes(self.role)[-1].kill()


@pytest.fixture(scope="module")
def cluster():
    """Started by a thread that has ended since."""
    made = elasticcb.Cluster(num_workers=2)
    thread = threading.Thread(target=made.start)
    thread.start()
    thread.join()
    yield made
    made.close()
    assert not processes("worker") + processes("ps")
    assert not os.path.exists(made.directory or "-")


def test_a_killed_worker_and_a_killed_server_are_replaced_and_every_record_counts(cluster):
    model, kills = make(), [KillsOnce("worker", 1), KillsOnce("ps", 3)]
    history = cluster.fit(model, X, Y, epochs=6, batch_size=10, verbose=0, callbacks=kills).history
    # Tasks that were under way, or reported before the loss of the server was noticed, count and are trained again.
    assert min(history["count"]) >= len(X)
    assert [history["count"][epoch] for epoch in (0, 2, 4, 5)] == [len(X)] * 4
    assert history["loss"][-1] < history["loss"][0]
    assert cluster.fit(model, X, Y, batch_size=100, verbose=0).history["count"] == [len(X)]


class Asks(keras.callbacks.Callback):
    """Asks at the end of the second epoch, as somebody in another terminal would."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.answers = folder, {}

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            for command in ("status", "logs", "jobs"):
                where = os.path.dirname(self.folder) if command == "jobs" else self.folder
                arguments = [sys.executable, "-m", "elasticcb", command, where]
                done = subprocess.run(arguments, capture_output=True, text=True)
                self.answers[command] = done.stdout + done.stderr


def test_commands_see_the_epochs_of_a_program_that_runs_and_how_it_has_ended(tmp_path, capsys):
    asks = Asks(str(tmp_path / "mine"))
    with elasticcb.Cluster(num_workers=1, directory=asks.folder) as cluster:
        cluster.fit(make(), X, Y, epochs=3, batch_size=100, verbose=0, callbacks=[asks])
    assert "(train): training" in asks.answers["status"]
    assert "epoch 2/3" in asks.answers["status"]
    assert re.search(r"Epoch 1/3 is done in [\d.]+ s: count 2000\.0000, loss ", asks.answers["logs"])
    assert re.search(r"^mine +program +training .* loss .*mine$", asks.answers["jobs"], re.MULTILINE)
    assert main(["status", asks.folder]) == 0
    assert "(train): done" in capsys.readouterr().out
    with elasticcb.Cluster(num_workers=1, directory=asks.folder) as cluster, pytest.raises(ValueError, match="no!"):
        cluster.fit(make(), X, Y, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_begin=_refuse)])
    assert main(["jobs", str(tmp_path)]) == 0
    assert re.search(r"^mine +program +failed .*mine$", capsys.readouterr().out, re.MULTILINE)
    assert main(["status", asks.folder]) == 0
    assert "(train): failed" in (shown := capsys.readouterr().out)
    assert "no!" in shown


def _refuse(logs):
    raise ValueError("no!")


def test_fit_runs_in_another_thread(cluster):
    found = []
    thread = threading.Thread(target=lambda: found.append(cluster.fit(make(), X, Y, batch_size=100, verbose=0)))
    thread.start()
    thread.join()
    assert found[0].history["count"] == [len(X)]


def test_policies_and_optimizers_of_each_call_are_its_own(cluster):
    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy("mixed_bfloat16")
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")])
        model.compile("adam", "mse")
        assert np.isfinite(cluster.fit(model, X, Y, batch_size=100, verbose=0).history["loss"]).all()
    finally:
        keras.config.set_dtype_policy(before)
    model = make()
    cluster.fit(model, X, Y, batch_size=100, verbose=0)
    assert {weight.dtype for weight in model.weights} == {"float32"}
    assert int(model.optimizer.iterations) == 20


# ------------------------------------------------------------ scripts


def start(text, folder, stdin=False):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    temporary = folder / "temporary"
    temporary.mkdir()
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return WarmProcess([], elsewhere, environment, path, stdin)


def read_until(process, word):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


def children(process):
    return psutil.Process(process.pid).children(recursive=True)


def test_script_uses_what_it_defines_and_modules_beside_it_and_leaves_nothing(tmp_path):
    (tmp_path / "beside.py").write_text(
        textwrap.dedent(
            """
            import keras

            class Twice(keras.layers.Layer):
                def call(self, x):
                    return 2 * x
            """
        )
    )
    script = start(
        """
        import sys
        import elasticcb, keras, numpy as np, tensorflow as tf
        from beside import Twice

        class Product(keras.layers.Layer):
            def __init__(self, units, **options):
                super().__init__(**options)
                self.units = units

            def build(self, shape):
                self.kernel = self.add_weight(shape=(shape[-1], self.units))

            def call(self, x):
                return x @ self.kernel

        def distance(labels, predictions):
            return tf.reduce_mean(tf.abs(labels - predictions), -1)

        class Batches(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.last = batch

            def on_epoch_end(self, epoch, logs=None):
                print("epoch", epoch, sorted(logs))

        class Rows(keras.utils.PyDataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                x = np.full((8, 4), index, "float32")
                return x, x[:, :1]

        def make_dataset(context):
            x = np.ones((8, 4), "float32")
            return tf.data.Dataset.from_tensors((x, x[:, :1])).repeat()

        model = keras.Sequential([Product(3), Twice(), keras.layers.Dense(1)])
        model.compile("adam", distance, metrics=["mae"])
        cluster = elasticcb.Cluster()
        for data in (Rows(), make_dataset):
            cluster.fit(model, data, steps_per_epoch=4, verbose=0, callbacks=[Batches()])
        print("predicted", cluster.predict(model, Rows(), verbose=0).shape, flush=True)
        sys.stdin.readline()
        """,
        tmp_path,
        stdin=True,
    )
    output = read_until(script, "predicted (32, 1)")
    assert output.count("epoch 0 ['loss', 'mae']") == 2
    family = children(script)
    assert len(family) == 3  # and the one that forks the others
    script.stdin.close()
    assert script.wait(30) == 0
    assert not psutil.wait_procs(family, 10)[1]
    assert not list((tmp_path / "temporary").glob("elasticcb-*"))
    assert not list((tmp_path / "elsewhere").iterdir())  # its working directory
    assert "Traceback" not in script.stdout.read()


def test_interrupt_gives_keyboard_interrupt_with_the_weights_so_far_and_a_killed_caller_leaves_no_process(tmp_path):
    script = start(
        """
        from pathlib import Path

        import elasticcb, keras, numpy as np
        from elasticcb.clients.local_job import how_it_ended

        class Tell(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if epoch == 1:
                    print("now", flush=True)

        x = np.ones((640, 4), "float32")
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        first = model.get_weights()[0]
        with elasticcb.Cluster(directory="kept") as cluster:
            try:
                cluster.fit(model, x, x[:, :1], epochs=100000, verbose=0, callbacks=[Tell()])
            except KeyboardInterrupt:
                moved = (model.get_weights()[0] != first).any()
                print(how_it_ended(Path("kept"))["phase"], moved, int(model.optimizer.iterations) >= 40, flush=True)
            cluster.fit(model, x, x[:, :1], epochs=100000, verbose=0, callbacks=[Tell()])
        """,
        tmp_path,
    )
    read_until(script, "now")
    os.killpg(script.pid, signal.SIGINT)
    output = read_until(script, "now")
    assert "interrupted True True" in output
    assert "Traceback" not in output
    family = children(script)
    assert len(family) == 3  # and the one that forks the others
    script.kill()
    assert not psutil.wait_procs(family, 10)[1]


def meaning_of(command):
    """The environment and the arguments with which a shell starts `elasticcb` by a command."""
    tell = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
    command = command.replace(" elasticcb ", f" exec {sys.executable} -c '{tell}' ")
    return json.loads(subprocess.run(command, shell=True, capture_output=True, check=True).stdout)


def test_processes_started_by_hand_need_the_token_that_is_in_a_file_of_the_cluster(tmp_path, caplog):
    started = []
    cluster = elasticcb.Cluster(kind="external", directory=tmp_path)
    cluster.start()
    try:
        commands = re.findall(r"Waiting for: (.* elasticcb .*)", caplog.text)
        assert sorted(re.findall(r" elasticcb (\w+)", caplog.text)) == ["ps", "worker"]
        tls = TLS.load(TLSFiles(re.search(r"--tls_ca=(\S+)", commands[0])[1]))
        with pytest.raises(ConnectionLostError, match="ELASTICCB_JOB_TOKEN"):
            next(MasterClient(re.search(r"--master (\S+)", commands[0])[1], access=Access("", tls)).jobs())
        token = tmp_path / "token"
        assert token.stat().st_mode & 0o077 == 0
        assert token.read_text() not in caplog.text
        for command in commands:
            environment, arguments = meaning_of(command)
            started.append(WarmProcess(arguments, tmp_path, environment))
        assert cluster.fit(make(), X, Y, batch_size=100, verbose=0).history["count"] == [len(X)]
    finally:
        cluster.close()
        ended = [process.wait(30) for process in started]
    assert ended == [0, 0]
    assert not token.exists()
