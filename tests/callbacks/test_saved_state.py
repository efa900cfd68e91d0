"""What callbacks remember comes back: a training that is interrupted after any epoch ends as one that is not."""

from __future__ import annotations

import enum
import functools
import json
import operator
import re
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import keras
import numpy as np
import pytest

from deep_cases import deep_but
from elasticcb.callbacks import Dispatcher, LearningRateScheduler, Place, SummaryWriter
from elasticcb.callbacks.dispatch import HookLogs
from elasticcb.callbacks.placement import place_of
from elasticcb.callbacks.saved_state import (
    CallbackStates,
    MissingArray,
    NameNotFound,
    NotPlain,
    Writer,
    keep_files,
    read,
)

EPOCHS, BATCHES = 7, 2
# From the third epoch on, less than `DELTA` is gained.
LOSSES = [1.0, 0.6, 0.2, 0.15, 0.12, 0.1, 0.09]
DELTA = 0.25


class Held:
    """What the servers hold of a training: weights and the optimizer's variables."""

    def __init__(self, model):
        self.take(model)

    def take(self, model):
        self.values = [variable.numpy().copy() for variable in variables(model)]

    def give(self, model):
        for variable, value in zip(variables(model), self.values, strict=True):
            variable.assign(value)


def variables(model):
    return [*model.weights, *model.optimizer.variables]


class Training:
    """A training of `EPOCHS` epochs, as the master of a job drives its callbacks.

    Args:
        make: makes new callbacks, given the training's folder.
    """

    def __init__(self, folder, make):
        folder.mkdir()
        self.folder, self.make = folder, make
        self.held = None  # until a process has made the model
        self.saved = None  # at the end of the last epoch: states, arrays
        self.rate_before = None  # the epoch that runs
        self.epoch, self.stopped, self.said = 0, False, []
        self.rates = []  # by epoch
        self.start()

    def start(self):
        """Another process takes over, or the first one begins."""
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.5, use_ema=True), "mse")
        model.optimizer.build(model.trainable_variables)
        again = self.held is not None
        self.model, self.callbacks = model, self.make(self.folder)
        self.held = self.held or Held(model)
        self.held.give(model)
        place = place_of(self.callbacks[0]) or Place.MASTER
        params = {"epochs": EPOCHS, "steps": BATCHES, "verbose": 0, "job_directory": str(self.folder), "worker_id": 0}
        self.dispatcher = Dispatcher(self.callbacks, place, params, model)
        if again:
            keep_files(self.callbacks)
        self.states = CallbackStates(self.callbacks, self.said.append)
        self.call("on_train_begin", {}, again=again)
        self.states.begin()
        if self.saved is not None:
            self.states.restore(*self.saved)
        if again and self.rate_before is not None:
            model.optimizer.learning_rate = self.rate_before
            self.call("on_epoch_begin", self.epoch, {}, again=True)

    def call(self, hook, *args, again=False):
        self.dispatcher.call(hook, *args)
        self.held.give(self.model) if again else self.held.take(self.model)

    def begin_epoch(self):
        self.rate_before = float(self.model.optimizer.learning_rate.numpy())
        self.call("on_epoch_begin", self.epoch, {})

    def end_epoch(self):
        self.rates.append(float(self.model.optimizer.learning_rate.numpy()))
        for batch in range(BATCHES):
            self.call("on_train_batch_begin", batch, {})
            self.model.set_weights([weight + 1 for weight in self.model.get_weights()])
            self.call("on_train_batch_end", batch, {"loss": LOSSES[self.epoch]})
        self.call("on_test_begin", {})
        logs = {"loss": LOSSES[self.epoch]}
        self.call("on_test_end", HookLogs(logs, metrics=logs, version=self.epoch))
        self.call("on_epoch_end", self.epoch, {"loss": LOSSES[self.epoch], "val_loss": LOSSES[self.epoch]})
        arrays = {}
        states = json.loads(json.dumps(self.states.save(arrays)))
        self.saved = states, {name: array.copy() for name, array in arrays.items()}
        self.epoch += 1
        self.rate_before = None
        self.stopped = self.dispatcher.stop_requested

    def run(self, interrupted_in=None):
        """To its end; in the epoch `interrupted_in` another process takes over."""
        while self.epoch < EPOCHS and not self.stopped:
            self.begin_epoch()
            if self.epoch == interrupted_in:
                self.start()
            self.end_epoch()
        self.call("on_train_end", {})
        return self

    def end(self):
        """All that may be compared with another training."""
        states, arrays = self.saved
        files = {path.relative_to(self.folder): path.read_text() for path in self.folder.rglob("*.csv")}
        values = [*self.held.values, *(array for _, array in sorted(arrays.items()))]
        text = json.dumps(states).replace(str(self.folder), "FOLDER")
        return self.epoch, self.rates, files, text, [value.tolist() for value in values]


# ------------------------------------------------------------ three of users


class Patience(keras.callbacks.Callback):
    """Derives a function and a sign at the first epoch's end, as `EarlyStopping` does; the function is NumPy's."""

    def __init__(self):
        super().__init__()
        self.better, self.delta, self.best, self.bad = None, DELTA, None, 0

    def on_epoch_end(self, epoch, logs=None):
        if self.better is None:
            self.better = np.less
            self.delta *= -1
        if self.best is None or self.better(logs["val_loss"] - self.delta, self.best):
            self.best, self.bad = logs["val_loss"], 0
        else:
            self.bad += 1
        self.model.stop_training = self.bad >= 2


class Collects(keras.callbacks.Callback):
    """Keeps its epochs in many kinds of containers, and its function as a method, or a part of one."""

    def __init__(self):
        super().__init__()
        self.seen, self.pairs, self.last, self.by_epoch = set(), (), deque(maxlen=2), {}
        self.by_sign, self.counts, self.ordered = defaultdict(list), Counter(), OrderedDict()
        self.compare = self.close = self.rule = None

    def is_less(self, one, other):
        return one < other - self.delta

    def on_epoch_begin(self, epoch, logs=None):
        self.rate_in = float(self.model.optimizer.learning_rate.numpy())
        self.model.optimizer.learning_rate = self.rate_in * 0.5
        self.begun = [*getattr(self, "begun", ()), (epoch, self.rate_in)]
        self.file = (Path(self.params["job_directory"]) / f"{epoch}.csv").open("w")

    def on_epoch_end(self, epoch, logs=None):
        if self.compare is None:
            self.delta = 0.0
            self.compare, self.rule = self.is_less, operator.lt
            self.close = functools.partial(np.isclose, atol=0.02)
            self.path = Path("somewhere")
        self.seen.add(epoch)
        self.pairs += ((epoch, logs["loss"]),)
        self.last.append(logs["loss"])
        self.by_epoch[epoch] = {"loss": logs["loss"], "near": bool(self.close(self.last[0], self.last[-1]))}
        self.by_sign[self.compare(logs["loss"], 0.5)].append(epoch)
        self.counts[self.rule(logs["loss"], 0.5)] += 1
        self.ordered[epoch] = np.float32(logs["loss"])
        with self.file as file:
            file.write(f"{epoch}: {len(self.seen)}, {self.begun}\n")


class Averages(keras.callbacks.Callback):
    """Sets the model's weights, and remembers arrays."""

    def on_train_begin(self, logs=None):
        self.sums, self.epochs = [np.zeros_like(weight) for weight in self.model.get_weights()], 0
        self.model.set_weights([weight * 100 for weight in self.model.get_weights()])

    def on_epoch_begin(self, epoch, logs=None):
        self.model.set_weights([weight * 2 for weight in self.model.get_weights()])

    def on_epoch_end(self, epoch, logs=None):
        self.sums = [total + weight for total, weight in zip(self.sums, self.model.get_weights(), strict=True)]
        self.epochs += 1

    def on_train_end(self, logs=None):
        self.model.set_weights([total / self.epochs for total in self.sums])


def decayed(epoch, rate):
    return rate * 0.9


K = keras.callbacks
CALLBACKS = {
    "BackupAndRestore": lambda folder: K.BackupAndRestore(str(folder / "backup")),
    "BackupAndRestore of batches": lambda folder: K.BackupAndRestore(str(folder / "backup"), save_freq=2),
    "CSVLogger": lambda folder: K.CSVLogger(str(folder / "log.csv")),
    "EarlyStopping": lambda folder: K.EarlyStopping(min_delta=DELTA, patience=2),
    "EarlyStopping that restores": lambda folder: K.EarlyStopping(
        "loss", min_delta=DELTA, patience=3, restore_best_weights=True
    ),
    "EarlyStopping, max": lambda folder: K.EarlyStopping(min_delta=DELTA, patience=3, mode="max"),
    "History": lambda folder: K.History(),
    "LambdaCallback": lambda folder: K.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    "LearningRateScheduler": lambda folder: K.LearningRateScheduler(decayed),
    "ModelCheckpoint": lambda folder: K.ModelCheckpoint(str(folder / "best.keras"), save_best_only=True),
    "ModelCheckpoint of batches": lambda folder: K.ModelCheckpoint(
        str(folder / "{epoch}-{batch}.weights.h5"), save_freq=3, save_weights_only=True
    ),
    "ProgbarLogger": lambda folder: K.ProgbarLogger(),
    "ReduceLROnPlateau": lambda folder: K.ReduceLROnPlateau(min_delta=DELTA, patience=2, cooldown=1),
    "RemoteMonitor": lambda folder: K.RemoteMonitor("http://127.0.0.1:9"),
    "SwapEMAWeights": lambda folder: K.SwapEMAWeights(),
    "SwapEMAWeights on epochs": lambda folder: K.SwapEMAWeights(swap_on_epoch=True),
    "TensorBoard": lambda folder: K.TensorBoard(str(folder / "board"), update_freq=2),
    "TerminateOnNaN": lambda folder: K.TerminateOnNaN(),
    "SummaryWriter": lambda folder: SummaryWriter(),
    "LearningRateScheduler of versions": lambda folder: LearningRateScheduler(lambda version: 0.1),
    "of a user: Patience": lambda folder: Patience(),
    "of a user: Collects": lambda folder: Collects(),
    "of a user: Averages": lambda folder: Averages(),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """How a training ends that nobody interrupts, by callback."""

    @functools.cache
    def end(name):
        training = Training(tmp_path_factory.mktemp("whole") / "job", lambda folder: [CALLBACKS[name](folder)])
        return training.run().end()

    return end


@pytest.mark.filterwarnings("ignore:Could not reach RemoteMonitor")
@pytest.mark.parametrize("interrupted_in", deep_but(range(EPOCHS), 1))
@pytest.mark.parametrize("name", CALLBACKS)
def test_training_that_is_interrupted_ends_as_one_that_is_not(tmp_path, whole, name, interrupted_in):
    training = Training(tmp_path / "job", lambda folder: [CALLBACKS[name](folder)]).run(interrupted_in)
    assert training.end() == whole(name)
    assert training.said == []


def test_that_trainings_end_early_and_lower_their_rates_is_not_by_chance(whole):
    epochs, rates = ({name: whole(name)[part] for name in CALLBACKS} for part in (0, 1))
    assert epochs["EarlyStopping"] == epochs["of a user: Patience"] == 5
    assert epochs["EarlyStopping that restores"] == 6
    assert epochs["EarlyStopping, max"] == 4
    assert rates["ReduceLROnPlateau"][-1] < 0.5
    assert rates["LearningRateScheduler"] == pytest.approx([0.5 * 0.9**n for n in range(1, EPOCHS + 1)])


def test_every_callback_of_keras_is_tried():
    of_keras = {name for name in dir(K) if isinstance(getattr(K, name), type)}
    assert of_keras - {name.partition(" ")[0].rstrip(",") for name in CALLBACKS} == {
        "Callback", "CallbackList", "OrbaxCheckpoint"
    }  # fmt: skip


# ------------------------------------------------------------ what can't be saved


class Lambda(keras.callbacks.Callback):
    better = None

    def on_epoch_end(self, epoch, logs=None):
        self.epochs = epoch
        if self.better is None:
            self.better = lambda one, other: one < other


def test_callback_with_a_nameless_function_begins_anew_and_the_user_is_told_once(tmp_path):
    training = Training(tmp_path / "job", lambda folder: [Lambda(), K.History()])
    for _ in range(2):
        training.begin_epoch()
        training.end_epoch()
    (said,) = training.said
    assert (
        "The state of Lambda can't be saved: after training started, its attribute better was set to a function" in said
    )
    assert "Lambda.on_epoch_end.<locals>.<lambda>" in said
    training.start()
    assert not hasattr(training.callbacks[0], "epochs")
    assert training.callbacks[1].epoch == [0, 1]


class Signed(keras.callbacks.Callback):
    """Holds secrets from its making on, one of which it reads when training begins."""

    def __init__(self):
        super().__init__()
        self.storage_options, self.seen, self.left = {"secret": "hush-1"}, [], 3

    def on_train_begin(self, logs=None):
        self.left = 2
        self.seen.append("begin")

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(epoch)
        self.left = 3 if epoch else 1


def test_what_callbacks_were_made_with_is_not_saved(tmp_path):
    training = Training(tmp_path / "job", lambda folder: [Signed()])
    for left in (1, 3):  # the last is what it was made with, but not what it has when training begins again
        training.begin_epoch()
        training.end_epoch()
        assert "hush" not in json.dumps(training.saved[0])
        training.start()
        assert training.callbacks[0].left == left
    assert training.callbacks[0].seen == ["begin", 0, 1]
    assert training.callbacks[0].storage_options == {"secret": "hush-1"}


def test_function_that_is_gone_leaves_its_callback_as_it_began(tmp_path):
    callback, said = Patience(), []
    states = CallbackStates([callback, K.History()], said.append)
    name = {"elasticcb": ["name", ["numpy", "lesser"]]}
    states.restore([["Patience", {"delta": -DELTA, "better": name}], ["History", {"epoch": [1]}]], {})
    assert callback.delta == DELTA
    assert "The state of Patience can't be restored: " in said[0]
    assert "lesser" in said[0]
    assert len(said) == 1


def test_values_that_are_not_plain_are_left_out():
    loop = []
    loop.append(loop)
    local = enum.Enum("Local", "A B")
    nameless = (object(), (lambda: 1), "x".join, re.I | re.M, local.A)
    for value in (*nameless, open, loop, {1: {2: object()}}, np.array(["a"])):
        if value is open:
            assert read(Writer().write("", value), {}) is open
            continue
        taken = {}
        with pytest.raises(NotPlain):
            Writer(arrays=taken).write("", [np.ones(2), value])
        assert not taken
    with pytest.raises(MissingArray):
        read({"elasticcb": ["array", "gone"]}, {})
    with pytest.raises(NameNotFound):
        read({"elasticcb": ["name", ["no_such_module", "f"]]}, {})
    names = {"elasticcb": ["name", ["os", "system"]]}
    for value in ({"elasticcb": 1}, names, {1: 2, "1": 3}, {(1, 2): [None, True]}, [re.I, Place.MASTER]):
        assert read(json.loads(json.dumps(Writer().write("", value))), {}) == value
