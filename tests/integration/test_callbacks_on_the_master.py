"""What callbacks on the master see of all workers' batches, and what becomes of a model that they change."""

import numpy as np
import pytest
from callback_jobs import RECORDER, RECORDS, calls, model_file, small_job

from jobs import run_job


class TestBatchesOnTheMaster:
    FOLLOWS = """
@runs_on("master")
class Follows(keras.callbacks.Callback):
    pass

class Keeps(keras.callbacks.History):  # of a class of Keras's own, so it stays on the master
    pass

for name in TABLE:
    setattr(Follows, name, hook(name))
Follows.file = "follows"
Keeps.file = "keeps"
for name in ("on_train_batch_begin", "on_train_batch_end"):
    setattr(Keeps, name, hook(name))

@runs_on("master")
class Steps(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        write("steps", int(self.model.optimizer.iterations), logs["version"])

def callbacks():
    return [Follows(), Keeps(), Steps()]
"""

    @pytest.mark.parametrize("parts", [{}, {"updates": "sync", "num_ps": 2}])
    def test_they_see_the_batches_of_all_workers_in_order_of_version(self, tmp_path, parts):
        path = model_file(tmp_path, RECORDER + self.FOLLOWS, f"follows_{len(parts)}")
        summary, _ = run_job(small_job(tmp_path, path, num_epochs=3, num_minibatches_per_task=1, **parts))
        entries = calls(tmp_path, "follows", "master")
        ends = [entry for entry in entries if entry[0] == "on_train_batch_end"]
        begins = [entry for entry in entries if entry[0] == "on_train_batch_begin"]
        batches = RECORDS // 8
        assert [index for _, index, _ in ends] == [index for _, index, _ in begins] == [*range(batches)] * 3
        versions = [logs["+version"] for *_, logs in ends]
        assert versions == sorted(versions)
        assert versions[-1] <= summary.version == 3 * batches  # they are counted from the worker's last merge
        assert [steps for steps, _ in calls(tmp_path, "steps", "master")] == versions
        assert all(sorted(logs) == ["+size", "+version", "loss", "mae"] for *_, logs in ends)
        assert all(sorted(logs) == ["+size", "+version"] for *_, logs in begins)
        # An epoch's batches come between its beginning and its end.
        order = [name for name, *_ in entries if name.startswith(("on_epoch", "on_train_batch_end"))]
        assert order == ["on_epoch_begin", *["on_train_batch_end"] * batches, "on_epoch_end"] * 3
        tested = [values for name, *values, _ in entries if name == "on_test_batch_end"]
        assert [index for (index,) in tested] == [*range(batches)] * 3
        assert not calls(tmp_path, "follows", "worker-0")
        self.check_logs_of_keras(tmp_path, entries, batches)

    def check_logs_of_keras(self, tmp_path, entries, batches):
        """Means over the epoch so far, and nothing but the metrics."""
        kept = [entry for entry in calls(tmp_path, "keeps", "master") if entry[0] == "on_train_batch_end"]
        ends = [logs for name, *_, logs in entries if name == "on_train_batch_end"]
        of_epochs = [logs for name, *_, logs in entries if name == "on_epoch_end"]
        for number, (_, index, logs) in enumerate(kept):
            since = ends[number - index : number + 1]
            assert sorted(logs) == ["loss", "mae"]
            assert logs["loss"] == pytest.approx(np.mean([each["loss"] for each in since]))
            if index == batches - 1:
                assert logs["loss"] == pytest.approx(of_epochs[number // batches]["loss"], rel=1e-4)

    def test_they_can_end_training_and_be_limited(self, tmp_path):
        text = """
@elasticcb.callbacks.every(4)
@runs_on("master")
class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        write("seen", batch, logs["version"])
        self.model.stop_training = batch >= 7

def callbacks():
    return [Stops()]
"""
        path = model_file(tmp_path, text, "stops_by_batch")
        summary, _ = run_job(small_job(tmp_path, path, num_epochs=200, validation="", updates="async"))
        assert "Stops.on_train_batch_end" in summary.stopped_early
        seen = calls(tmp_path, "seen", "master")
        assert [batch for batch, _ in seen[:2]] == [3, 7]
        assert len(seen) <= summary.version // 4


class TestModelOnTheMaster:
    def test_weights_that_a_hook_sets_are_trained_on(self, tmp_path):
        text = """
class Sets(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.set_weights([np.full_like(weight, 3.0) for weight in self.model.get_weights()])

class Sees(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        write("sees", batch, self.model.get_weights())

def callbacks():
    return [Sets(), Sees()]
"""
        path = model_file(tmp_path, text, "sets_weights")
        summary, _ = run_job(small_job(tmp_path, path, num_epochs=2, num_workers=1, num_ps=2, validation=""))
        seen = calls(tmp_path, "sees", "worker-0")
        assert len(seen) == 2 * RECORDS // 8
        version, weights = seen[RECORDS // 8]
        assert version == RECORDS // 8 + 1  # setting them is a version of its own
        assert all(np.all(np.asarray(weight) == 3.0) for weight in weights)
        assert summary.version == 2 * RECORDS // 8 + 1

    def test_weights_that_on_test_begin_sets_are_those_of_the_round_alone(self, tmp_path):
        text = """
class Zeros(keras.callbacks.Callback):
    def on_test_begin(self, logs=None):
        self.before = self.model.get_weights()
        self.model.set_weights([np.zeros_like(weight) for weight in self.before])

    def on_test_end(self, logs=None):
        write("round", self.model.get_weights(), logs["mae"])
        self.model.set_weights(self.before)

class Sees(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        write("sees", batch, self.model.get_weights())

def callbacks():
    return [Zeros(), Sees()]
"""
        path = model_file(tmp_path, text, "zero_rounds")
        summary, _ = run_job(small_job(tmp_path, path, num_epochs=2, num_workers=1, num_ps=2))
        data = np.load(tmp_path / "data.npz")
        for weights, mae in calls(tmp_path, "round", "master"):
            assert all(np.all(np.asarray(weight) == 0.0) for weight in weights)
            assert mae == pytest.approx(np.mean(np.abs(data["y"])), rel=1e-5)
        assert summary.version == 2 * RECORDS // 8  # nothing was set on the servers
        _, weights = calls(tmp_path, "sees", "worker-0")[RECORDS // 8]
        assert np.any(np.asarray(weights[0]) != 0.0)

    def test_optimizers_state_is_there_for_who_asks_and_goes_back_when_it_is_changed(self, tmp_path):
        text = """
def optimizer():
    return keras.optimizers.SGD(0.01, momentum=0.9)

class Forgets(keras.callbacks.Callback):
    needs_optimizer_state = True

    def on_epoch_end(self, epoch, logs=None):
        for variable in self.model.optimizer.momentums:
            write("momentum", np.abs(variable.numpy()).max(), int(self.model.optimizer.iterations.numpy()))
            variable.assign(np.zeros(variable.shape))

    def on_epoch_begin(self, epoch, logs=None):
        write("begins", [np.abs(variable.numpy()).max() for variable in self.model.optimizer.momentums])

def callbacks():
    return [Forgets()]
"""
        path = model_file(tmp_path, text, "forgets_momentum")
        run_job(small_job(tmp_path, path, num_epochs=2, num_ps=2, validation="", updates="async"))
        momentum = calls(tmp_path, "momentum", "master")
        assert [steps for _, steps in momentum] == [12, 12, 24, 24]
        assert all(largest > 0 for largest, _ in momentum)
        assert calls(tmp_path, "begins", "master") == [[[0.0, 0.0]], [[0.0, 0.0]]]
