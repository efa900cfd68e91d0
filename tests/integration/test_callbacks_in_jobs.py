"""Callbacks in whole jobs: each hook in its place, with its logs; rates, stopping and failures."""

import numpy as np
import pytest
import tensorflow as tf
from callback_jobs import RECORDER, RECORDS, calls, hooks, model_file, small_job, write_arrays
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elasticcb.callbacks.placement import TABLE
from elasticcb.errors import JobFailedError
from elasticcb.settings import CallbackErrors, Command
from jobs import run_job


class TestPlacement:
    def test_each_hook_runs_where_the_table_says_with_the_logs_it_says(self, tmp_path):
        path = model_file(tmp_path, RECORDER, "recorded")
        folder = str(tmp_path / "checkpoints")
        summary, _ = run_job(small_job(tmp_path, path, num_epochs=2, directory=folder))
        master = calls(tmp_path, "hooks", "master")
        workers = [calls(tmp_path, "hooks", f"worker-{index}") for index in range(2)]
        assert hooks(master) == {
            *("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_test_begin", "on_test_end")
        }
        on_workers = hooks(workers[0] + workers[1])
        assert on_workers == {
            *("on_train_begin", "on_train_end", "on_train_batch_begin", "on_train_batch_end"),
            *("on_test_batch_begin", "on_test_batch_end"),
        }
        order = [name for name, *_ in master]
        epoch = ["on_epoch_begin", "on_test_begin", "on_test_end", "on_epoch_end"]
        assert order == ["on_train_begin", *epoch, *epoch, "on_train_end"]
        for name, *_, logs in master:
            if name in ("on_epoch_end", "on_train_end"):
                assert sorted(logs) == ["loss", "mae", "val_loss", "val_mae"]
            elif name == "on_test_end":
                assert sorted(logs) == ["+metrics", "+version", "loss", "mae"]  # `+`: a loop does not see it
                assert logs["+metrics"] == {"loss": logs["loss"], "mae": logs["mae"]}
            else:
                assert logs == {}
        assert [values for name, *values, _ in master if name == "on_epoch_end"] == [[0], [1]]
        assert [logs["+version"] for name, *_, logs in master if name == "on_test_end"][-1] == summary.version

        batches, ended = [], []
        for worker in workers:
            # Once, and first; a worker that got no task calls nothing.
            assert [index for index, entry in enumerate(worker) if entry[0] == "on_train_begin"] == [0][: len(worker)]
            ended += [name for name, *_ in worker if name == "on_train_end"]
            for name, *values, logs in worker:
                if name == "on_train_batch_begin":
                    assert sorted(logs) == ["+batch", "+size", "+version"]
                    batches.append(logs["+size"])
                    began = values[0]
                elif name == "on_train_batch_end":
                    assert sorted(logs) == ["+batch", "+size", "+version", "loss", "mae"]
                    assert values[0] > began  # the model's version after the push
        assert len(ended) == 1
        assert sum(batches) == 2 * RECORDS
        self.check_moved_to_workers(tmp_path, folder)

        path = model_file(tmp_path / "predict", RECORDER, "recorded_predict")
        path.write_text(path.read_text().replace(f'FOLDER = "{tmp_path}"', f'FOLDER = "{tmp_path / "predict"}"'))
        data = str(tmp_path / "data.npz")
        settings = small_job(
            tmp_path / "predict", path, command=Command.PREDICT, prediction=data, directory_for_init=folder
        )
        run_job(settings)
        assert [name for name, *_ in calls(tmp_path / "predict", "hooks", "master")] == [
            "on_predict_begin",
            "on_predict_end",
        ]
        rows = []
        for index in range(2):
            worker = calls(tmp_path / "predict", "hooks", f"worker-{index}")
            names = [name for name, *_ in worker]
            if "on_predict_batch_end" in names:  # else it got no task
                assert (names[0], names[-1]) == ("on_predict_begin", "on_predict_end")
                assert (names.count("on_predict_begin"), names.count("on_predict_end")) == (1, 1)
            ends = [values for name, *values in worker if name == "on_predict_batch_end"]
            assert [index for index, _ in ends] == list(range(len(ends)))
            rows += [row for _, logs in ends for row in logs["+predictions"]]
        assert len(rows) == RECORDS
        assert hooks(master) | on_workers | {name for name in TABLE if "predict" in name} == set(TABLE)

    def check_moved_to_workers(self, tmp_path, folder):
        """`runs_on("worker")`: epochs and rounds as each worker sees them."""
        assert not calls(tmp_path, "moved", "master")
        losses = {0: [], 1: []}
        for index in range(2):
            moved = calls(tmp_path, "moved", f"worker-{index}")
            open_epoch = open_round = None
            for name, *values, logs in moved:
                if name == "on_epoch_begin":
                    assert open_epoch is None
                    open_epoch, trained = values[0], 0
                elif name == "on_train_batch_end":
                    assert open_epoch is not None
                    assert open_round is None
                    trained += 1
                elif name == "on_epoch_end":
                    assert (values[0], open_round) == (open_epoch, None)
                    assert sorted(logs) == ["loss", "mae"]
                    losses[open_epoch] += [(logs["loss"], trained)]
                    open_epoch = None
                elif name == "on_test_begin":
                    assert open_round is None
                    open_round = 0
                elif name == "on_test_batch_end":
                    open_round += 1
                elif name == "on_test_end":
                    assert open_round > 0
                    assert sorted(logs) == ["+metrics", "+version", "loss", "mae"]
                    open_round = None
            assert open_epoch is None
            assert open_round is None
        ends = [logs for name, *_, logs in calls(tmp_path, "hooks", "master") if name == "on_epoch_end"]
        for epoch, seen in losses.items():
            values, batches = zip(*seen, strict=True)
            assert ends[epoch]["loss"] == pytest.approx(np.average(values, weights=batches), rel=1e-5)


class TestLearningRate:
    CALLBACKS = """
class Rates(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.before = [weight.copy() for weight in self.model.get_weights()]
        if batch % 3 == 1:
            self.model.optimizer.learning_rate = 0.5 / (batch + 1)
        self.rate = float(self.model.optimizer.learning_rate)

    def on_train_batch_end(self, batch, logs=None):
        write("rates", batch, self.rate, self.before, self.model.get_weights())

class MasterRate(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        write("base", float(self.model.optimizer.learning_rate))
        self.model.optimizer.learning_rate = 0.03125

def callbacks():
    return [Rates(), MasterRate()]
"""

    def test_rate_of_a_batch_is_the_one_its_push_is_applied_with_and_the_masters_becomes_the_base(self, tmp_path):
        path = model_file(tmp_path, self.CALLBACKS, "rates_file")
        settings = small_job(
            tmp_path,
            path,
            num_epochs=2,
            num_workers=1,
            validation="",
            training=str(write_arrays(tmp_path / "data.npz")),
            num_minibatches_per_task=RECORDS // 8,
        )
        run_job(settings)
        data = np.load(tmp_path / "data.npz")
        entries = calls(tmp_path, "rates", "worker-0")
        assert len(entries) == 2 * RECORDS // 8
        for number, (version, rate, before, after) in enumerate(entries):
            assert version == number + 1
            batch = slice(number * 8 % RECORDS, number * 8 % RECORDS + 8)
            x, y = data["x"][batch], data["y"][batch]
            (kernel, bias), (kernel_after, _) = map(np.array, before[:1] + before[1:]), map(np.array, after)
            gradient = 2 * x.T @ (x @ kernel + bias - y) / len(x)
            np.testing.assert_allclose(kernel_after, kernel - rate * gradient, rtol=1e-4, atol=1e-6)
        rates = [rate for _, rate, _, _ in entries]
        assert rates[:4] == [0.125, pytest.approx(0.25), pytest.approx(0.25), pytest.approx(0.25)]
        assert calls(tmp_path, "base", "master")[0] == [0.125]
        second = rates[RECORDS // 8 :]
        assert second[0] == 0.03125  # 12 % 3 == 0: nothing set on the worker
        assert second[1] == pytest.approx(0.5 / 14)


class TestStopping:
    def test_max_step_is_exact_though_epochs_do_not_end_there(self, tmp_path):
        path = model_file(tmp_path, "", "synchronous")
        parts = {"updates": "sync", "max_step": 2 * RECORDS // 8 + 1}
        summary, _ = run_job(small_job(tmp_path, path, num_workers=2, num_epochs=9, **parts))
        assert summary.version == parts["max_step"]
        assert sum(summary.records_per_epoch) == parts["max_step"] * 8

    def test_stop_on_a_worker_and_on_the_master_ends_with_evaluation_and_train_end(self, tmp_path):
        text = """
class Stop(keras.callbacks.Callback):
    def {hook}(self, *args, logs=None):
        if {condition}:
            self.model.stop_training = True

class End(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        write("ended", self.model.get_weights())

    def on_test_end(self, logs=None):
        write("tested", logs["version"], self.model.get_weights())

def callbacks():
    return [Stop(), End()]
"""
        for hook, condition, who in (
            ("on_train_batch_end", "args[0] >= 4", "worker"),
            ("on_test_end", "True", "the master"),
        ):
            folder = tmp_path / hook
            path = model_file(folder, text.format(hook=hook, condition=condition), f"stops_in_{hook}")
            summary, _ = run_job(small_job(folder, path, num_epochs=50, evaluation_steps=10))
            assert summary.version < 50 * RECORDS // 8
            assert f"Stop.{hook}" in summary.stopped_early
            assert ("on worker" in summary.stopped_early) == (who == "worker")
            tested = calls(folder, "tested", "master")
            (ended,) = (entry for index in range(2) for entry in calls(folder, "ended", f"worker-{index}"))
            assert tested[-1][0] == summary.version
            for of_round, at_end in zip(tested[-1][1], ended[0], strict=True):
                np.testing.assert_array_equal(of_round, at_end)


class TestFailures:
    def test_on_train_end_is_retried_and_then_fails_the_job_with_the_users_traceback(self, tmp_path):
        text = """
class Fails(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        write("tried", 1)
        raise OSError("the disk is full")

def callbacks():
    return [Fails()]
"""
        path = model_file(tmp_path, text, "fails_at_end")
        with pytest.raises(JobFailedError, match="the disk is full") as caught:
            run_job(small_job(tmp_path, path, max_task_retries=2))
        tries = [entry for index in range(2) for entry in calls(tmp_path, "tried", f"worker-{index}")]
        assert len(tries) == 3
        assert "Fails" in str(caught.value)
        assert 'raise OSError("the disk is full")' in caught.value.user_traceback
        assert "elasticcb/callbacks" not in caught.value.user_traceback

    @pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
    def test_hook_that_ends_its_process_fails_the_job_in_words(self, tmp_path, hook):
        text = f"""
import sys

class Ends(keras.callbacks.Callback):
    def {hook}(self, number, logs=None):
        write("tried", 1)
        sys.exit(3)

def callbacks():
    return [Ends()]
"""
        path = model_file(tmp_path, text, f"ends_{hook}")
        with pytest.raises(JobFailedError, match="SystemExit: 3") as caught:
            run_job(small_job(tmp_path, path, num_workers=1))
        process = "master" if hook == "on_epoch_end" else "worker-0"
        assert len(calls(tmp_path, "tried", process)) == 1
        assert "sys.exit(3)" in caught.value.user_traceback

    def test_end_of_prediction_that_fails_on_a_worker_fails_the_job(self, tmp_path):
        text = """
class Fails(keras.callbacks.Callback):
    def on_predict_batch_end(self, batch, logs=None):
        pass

    def on_predict_end(self, logs=None):
        if process() != "master":
            raise OSError("can't flush")

def callbacks():
    return [Fails()]
"""
        path = model_file(tmp_path, text, "fails_at_end_of_prediction")
        data = write_arrays(tmp_path / "data.npz")
        with pytest.raises(JobFailedError, match=r"on_predict_end on worker \d+: OSError: can't flush") as caught:
            run_job(small_job(tmp_path, path, command=Command.PREDICT, prediction=data, num_workers=1))
        assert "raise OSError" in caught.value.user_traceback


class TestWarnings:
    def test_errors_and_slow_hooks_are_shown_once_and_counted_while_the_job_goes_on(self, tmp_path):
        text = """
import time

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)

class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise OSError(f"no room for batch {batch}")

    def on_epoch_end(self, epoch, logs=None):
        return logs["accuracy"]

class End(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        write("ended", 1)

def callbacks():
    return [Slow(), Fails(), End()]
"""
        path = model_file(tmp_path, text, "fails_and_goes_on")
        summary, display = run_job(small_job(tmp_path, path, num_epochs=2, callback_errors=CallbackErrors.WARN))
        assert [(end.epoch, end.epochs, *end.logs) for end in display.ends] == [
            (epoch, 2, "loss", "mae", "val_loss", "val_mae") for epoch in (1, 2)
        ]
        assert all(end.seconds > 0 and end.steps == RECORDS // 8 for end in display.ends)
        assert sum(summary.records_per_epoch) == 2 * RECORDS
        assert summary.callback_errors == 2 * RECORDS // 8 + 2
        shown = [message for message in display.messages if "failed in" in message]
        (of_batch,) = [message for message in shown if "on_train_batch_end on worker" in message]
        (of_epoch,) = [message for message in shown if "on_epoch_end on the master (epoch 0)" in message]
        assert len(shown) == 2
        assert "OSError: no room for batch" in of_batch
        assert 'raise OSError(f"no room for batch {batch}")' in of_batch
        assert 'return logs["accuracy"]' in of_epoch
        assert "callback_errors=warn" in of_batch
        (slow,) = [message for message in display.messages if "every(n)" in message]
        assert "Slow.on_train_batch_end" in slow
        assert sum(len(calls(tmp_path, "ended", f"worker-{index}")) for index in range(2)) == 1


class TestPremade:
    def test_summary_writer_stoppers_and_exporter_work_together(self, tmp_path):
        text = """
def callbacks():
    return [
        elasticcb.callbacks.SummaryWriter(),
        elasticcb.callbacks.EarlyStopper(lambda rounds: len(rounds) == 3),
        elasticcb.callbacks.MaxStepsStopper(1000),
        elasticcb.callbacks.SavedModelExporter(f"{FOLDER}/model"),
        keras.callbacks.CSVLogger(f"{FOLDER}/epochs.csv"),
    ]
"""
        path = model_file(tmp_path, text, "premade_file")
        summary, _ = run_job(small_job(tmp_path, path, num_epochs=9))
        events = EventAccumulator(str(tmp_path / "job" / "tensorboard")).Reload()
        values = events.Tensors("mae")
        assert [event.step for event in values][-1] == summary.version
        assert len(values) == 4 or len(values) == 3
        assert "EarlyStopper" in summary.stopped_early
        lines = (tmp_path / "epochs.csv").read_text().splitlines()
        assert lines[0] == "epoch,loss,mae,val_loss,val_mae"
        assert len(lines) == len(values) + 1
        served = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
        data = np.load(tmp_path / "data.npz")
        (predictions,) = served(tf.constant(data["x"])).values()
        assert np.mean(np.abs(predictions - data["y"])) == pytest.approx(summary.metrics["mae"], rel=1e-4)
