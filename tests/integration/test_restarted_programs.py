"""Programs that call `Cluster.fit`, end in the midst of it, and are run again with the same `job_dir`."""

import os
import re
import signal
import textwrap
from collections import Counter

import fsspec
import keras
import numpy as np
import pytest
import tensorflow as tf
from stores import S3Server

import elasticcb
from elasticcb.callbacks import runs_on
from elasticcb.errors import ClusterLostError, JobFailedError, UsageError
from warm import WarmProcess

BATCHES = 100
SCRIPT = """
    import os, signal, sys, time
    import elasticcb, fsspec, keras, numpy as np, psutil
    from elasticcb.callbacks import runs_on

    run, what, fit, epoch, batch = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    present = [0, 0]  # fit and epoch

    class Rows(keras.utils.PyDataset):
        "Writes down which batches of which epoch it was asked for."
        epoch = -1

        def __init__(self, fit):
            super().__init__()
            self.fit = fit

        def __len__(self):
            return 100

        def on_epoch_begin(self):
            self.epoch += 1

        def __getitem__(self, index):
            with open(f"ledger-{run}", "a") as file:
                file.write(f"{self.fit} {self.epoch} {index}\\n")
            x = np.random.default_rng(index).normal(size=(8, 4)).astype("float32")
            return x, x.sum(axis=1, keepdims=True)

    job_dir = os.environ.get("JOB_DIR", "job")

    def copied():
        "Whether the end of the epoch before is where another machine finds it."
        if "://" not in job_dir:
            return True
        files, place = fsspec.core.url_to_fs(f"{job_dir}/fit-{fit}/journal", use_listings_cache=False)
        return any(f'"ended_epochs":{epoch}'.encode() in files.cat_file(each) for each in files.find(place))

    @runs_on("master")
    class Ends(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            present[1], self.batches = epoch, 0
            print("epoch", epoch, flush=True)

        def on_train_batch_end(self, number, logs=None):
            self.batches += 1
            if [*present, self.batches] == [fit, epoch, batch]:
                print("now", flush=True)
                if what == "server":
                    next(p for p in psutil.Process().children(recursive=True) if p.name() == "ps-0").kill()
                else:
                    while not copied():
                        time.sleep(0.05)
                    os.kill(os.getpid(), getattr(signal, what))

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    with elasticcb.handle_restartable_error(), elasticcb.Cluster(
        2,
        job_dir=job_dir,
        checkpoint=elasticcb.CheckpointOptions(interval_seconds=0.2),
        recovery=elasticcb.RecoveryOptions(max_ps_restarts=0),
    ) as cluster:
        for number, epochs in enumerate((1, 3), start=1):
            present[0] = number
            history = cluster.fit(model, Rows(number), epochs=epochs, verbose=0, callbacks=[Ends()])
            print("fit", number, history.epoch, len(history.history["loss"]), flush=True)
    print("updates", int(model.optimizer.iterations), "loss", history.history["loss"][-1])
"""


class Program:
    """A script, which is run again and again."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "program.py").write_text(textwrap.dedent(SCRIPT))
        self.runs = 0

    def run(self, what="nothing", fit=0, epoch=0, batch=0):
        """Runs it to its end, which `what` brings about there; its exit code, and what it printed."""
        self.runs += 1
        arguments = [str(self.runs), what, str(fit), str(epoch), str(batch)]
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        program = WarmProcess(arguments, self.folder, environment, self.folder / "program.py")
        output = program.stdout.read()
        return program.wait(), output

    def read(self, run):
        """How often each (fit, epoch, batch) was read in a run."""
        lines = (self.folder / f"ledger-{run}").read_text().splitlines()
        return Counter(tuple(map(int, line.split())) for line in lines)


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


@pytest.fixture
def left(monkeypatch, faults):
    """Returns which files of fits are in the `job_dir` of a program, below a URL of a real S3 server."""
    faults.shorten("elasticcb.storage.store_lock.SILENCE_SECONDS", 5.0)  # for a program on another machine
    faults.shorten("elasticcb.storage.store_lock.BEAT_SECONDS", 0.5)
    with S3Server("programs") as s3:
        for name, value in {**s3.environment, "JOB_DIR": "s3://programs/one"}.items():
            monkeypatch.setenv(name, value)
        yield lambda: fsspec.filesystem("s3", **s3.options, use_listings_cache=False).find("programs/one")


@pytest.mark.timeout(900)
def test_killed_program_whose_job_dir_is_a_url_goes_on_where_it_was(program, left):
    code, output = program.run("SIGKILL", fit=2, epoch=1, batch=60)
    assert code == -signal.SIGKILL, output
    assert left()
    code, output = program.run()
    assert code == 0, output
    assert "fit-1 of" in output.partition("was completed by an earlier run")[0]
    assert "fit-2 of" in output.partition("epochs done: 1;")[0]
    assert [line for line in output.splitlines() if line.startswith(("epoch", "fit 1", "fit 2"))] == [
        "fit 1 [0] 1", "epoch 1", "epoch 2", "fit 2 [0, 1, 2] 3",
    ]  # fmt: skip
    first, second = program.read(1), program.read(2)
    whole = {(fit, epoch, batch) for fit, epoch in ((1, 0), (2, 0), (2, 1), (2, 2)) for batch in range(BATCHES)}
    assert whole <= first.keys() | second.keys()
    again = Counter((fit, epoch) for fit, epoch, _ in first.keys() & second.keys())
    assert again[2, 1] > 0  # what was under way, and what the servers had not saved
    assert again[1, 0] == 1  # the first batch, by which the model is built
    updates, loss = re.search(r"updates (\d+) loss (.*)", output).groups()
    assert int(updates) >= 4 * BATCHES
    assert float(loss) < 0.1
    assert not left()


@pytest.mark.timeout(900)
def test_program_that_was_killed_or_ended_with_75_by_a_lost_cluster_or_sigterm_goes_on_when_it_is_run_again(program):
    code, output = program.run("server", fit=2, epoch=0, batch=20)
    assert code == 75, output
    assert "parameter server 0" in output
    assert "max_ps_restarts" in output
    assert "To resume the job: run the program again" in output
    assert "The cluster is lost. The program exits with code 75" in output
    assert "Traceback" not in output
    code, output = program.run("SIGKILL", fit=2, epoch=1, batch=60)
    assert code == -signal.SIGKILL, output
    assert "epochs done: 0;" in output
    assert list((program.folder / "job").glob("fit-*"))
    code, output = program.run("SIGTERM", fit=2, epoch=2, batch=20)
    assert code == 75, output
    assert "epochs done: 1;" in output
    assert "Received SIGTERM. The program exits with code 75" in output
    assert "Traceback" not in output
    code, output = program.run()
    assert code == 0, output
    assert "fit 2 [0, 1, 2] 3" in output
    assert not list((program.folder / "job").glob("fit-*"))
    assert float(re.search(r"loss (.*)", output)[1]) < 0.1
    for epoch, run in ((1, 2), (2, 3)):  # in which it ended
        before, after = ({b for f, e, b in program.read(each) if (f, e) == (2, epoch)} for each in (run, run + 1))
        assert before | after == set(range(BATCHES))
    assert after < set(range(BATCHES))


# ------------------------------------------------------------ in this process

X = np.random.default_rng(0).normal(size=(160, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def make(units=1, optimizer="sgd"):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])
    model.compile(optimizer, "mse")
    return model


@runs_on("master")
class Fails(keras.callbacks.Callback):
    """Raises an error in the midst of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.is_at = lambda present: present == epoch  # not a number, which would come back with what it remembers

    def on_epoch_begin(self, epoch, logs=None):
        self.present = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.is_at(self.present):
            raise ZeroDivisionError


def cluster(folder, **more):
    return elasticcb.Cluster(kind="inprocess", job_dir=folder / "job", **more)


def fit(cluster, model, x=X, y=Y, epochs=3, fails_in=-1, **more):
    return cluster.fit(model, x, y, epochs=epochs, verbose=0, callbacks=[Fails(fails_in)], **more)


def test_other_program_is_refused_in_words_and_the_same_goes_on(tmp_path, caplog):
    with cluster(tmp_path) as first, pytest.raises(ZeroDivisionError):
        fit(first, make(), fails_in=1)
    for words, model, more in [
        ("Epochs: 3 then, 4 now", make(), {"epochs": 4}),
        ("Records to train on: 160 then, 150 now", make(), {"x": X[:150], "y": Y[:150]}),
        ("Batches in an epoch: 5 then, 10 now", make(), {"batch_size": 16}),
        ("Batches to validate on: None then, 5 now", make(), {"validation_data": (X, Y)}),
        (r"Optimizers, number 1: SGD then, Adam now", make(optimizer="adam"), {}),
        (r"Weights of the model, number 1: float32\[4, 1\] then, float32\[4, 2\] now", make(2), {}),
    ]:
        with cluster(tmp_path) as other, pytest.raises(UsageError, match=words):
            fit(other, model, **more)
    with cluster(tmp_path, num_ps=2) as other, pytest.raises(UsageError, match=r"\(num_ps\): 1 then, 2 now"):
        fit(other, make())
    with cluster(tmp_path) as same:
        assert fit(same, make()).epoch == [0, 1, 2]
    assert "fit-1 of" in caplog.text
    with cluster(tmp_path) as anew:
        history = fit(anew, make(), epochs=2)
        assert history.epoch == [0, 1]


def test_fit_that_failed_goes_on_with_the_next_call(tmp_path):
    model = make()
    with cluster(tmp_path) as same:
        fit(same, model, epochs=1)
        with pytest.raises(ZeroDivisionError):
            fit(same, model, fails_in=2)
        history = fit(same, model)
    assert history.epoch == [0, 1, 2]
    assert history.history["loss"][2] < history.history["loss"][0]


def test_task_that_failed_is_tried_again_when_the_fit_goes_on(tmp_path):
    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            (tmp_path / f"read-{index}").touch()
            if index == 13 and not (tmp_path / "mended").exists():
                raise OSError("the disk is away")
            return X[index * 8 : index * 8 + 8], Y[index * 8 : index * 8 + 8]

    with cluster(tmp_path) as same:
        with pytest.raises(JobFailedError, match="the disk is away"):
            fit(same, make(), Rows(), None, epochs=1, shuffle=False)
        for path in tmp_path.glob("read-*"):
            path.unlink()
        (tmp_path / "mended").touch()
        model = make()
        fit(same, model, Rows(), None, epochs=1, shuffle=False)
    assert {f"read-{index}" for index in range(13, 20)} <= {path.name for path in tmp_path.glob("read-*")}


def test_epoch_of_data_without_an_index_begins_anew(tmp_path):
    taken = []

    def rows():
        for number in range(0, 160, 16):
            taken.append(number)
            yield X[number : number + 16], Y[number : number + 16]

    def data():
        signature = tuple(tf.TensorSpec([None, size], tf.float32) for size in (4, 1))
        return tf.data.Dataset.from_generator(rows, output_signature=signature)

    with cluster(tmp_path) as first, pytest.raises(ZeroDivisionError):
        fit(first, make(), data(), None, epochs=2, fails_in=1)
    taken.clear()
    with cluster(tmp_path) as second:
        assert fit(second, make(), data(), None, epochs=2).epoch == [0, 1]
    assert set(taken) == set(range(0, 160, 16))


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
def test_training_that_was_stopped_stays_so_where_batches_have_no_index(tmp_path, hook):
    """It is stopped in the second epoch, and the program ends before `on_train_end` is over."""

    @runs_on("master")
    class Stops(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.begun = []

        def on_epoch_begin(self, epoch, logs=None):
            self.begun.append(epoch)

        def on_train_batch_end(self, batch, logs=None):
            self.stop("on_train_batch_end")

        def on_epoch_end(self, epoch, logs=None):
            self.stop("on_epoch_end")
            if hook == "on_train_batch_end" and fails and epoch == 1:
                raise ZeroDivisionError

        def stop(self, present):
            if present == hook and self.begun == [0, 1]:
                self.model.stop_training = True

        def on_train_end(self, logs=None):
            if fails:
                raise ZeroDivisionError

    def train():
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
        stops = Stops()
        with cluster(tmp_path) as present:
            history = present.fit(make(), data, epochs=9, verbose=0, callbacks=[stops])
        return history.epoch, stops.begun

    fails = True
    with pytest.raises(ZeroDivisionError):
        train()
    fails = False
    assert train() == ([0, 1], [0, 1])


def test_job_dir_that_can_not_be_used_is_refused_in_words(tmp_path):
    with cluster(tmp_path), pytest.raises(UsageError, match="is in use by process"):
        cluster(tmp_path).start()
    with pytest.raises(UsageError, match=r"interval_seconds=0\) disables"):
        cluster(tmp_path, checkpoint=elasticcb.CheckpointOptions(interval_seconds=0))
    with pytest.raises(UsageError, match="Expected a folder or a URL, or None"):
        elasticcb.Cluster(job_dir="")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"can't be used: .*Choose another folder"):
        elasticcb.Cluster(kind="inprocess", job_dir=tmp_path / "file").start()


@pytest.mark.parametrize("code", [75, 143])
def test_only_what_another_run_may_mend_becomes_an_exit_code(code, capsys):
    with pytest.raises(SystemExit) as ended, elasticcb.handle_restartable_error(code):
        raise ClusterLostError("worker 0 was lost")
    assert ended.value.code == code
    assert f"worker 0 was lost\nThe cluster is lost. The program exits with code {code}" in capsys.readouterr().err
    for error in (
        ValueError("shapes"),
        JobFailedError("the loss holds NaN"),
        UsageError("epochs"),
        KeyboardInterrupt(),
    ):
        with pytest.raises(type(error)) as raised, elasticcb.handle_restartable_error(code):
            raise error
        assert raised.value is error


@pytest.mark.parametrize("code", [0, 256, True, "75"])
def test_exit_code_must_say_that_something_failed(code):
    with pytest.raises(UsageError, match="between 1 and 255"), elasticcb.handle_restartable_error(code):
        pass
