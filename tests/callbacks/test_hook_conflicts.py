"""What hooks in several processes would do differently from `fit` is refused; what is harmless is not."""

from __future__ import annotations

import dataclasses
import logging
import time

import keras
import pytest

from elasticcb.callbacks import runs_on
from elasticcb.callbacks.shared_attributes import check_hooks, left_on_workers
from elasticcb.errors import UsageError
from elasticcb.settings import ClusterSettings, Command, JobSettings, ModelSettings

ONE, TWO = (JobSettings(command=Command.TRAIN, cluster=ClusterSettings(num_workers=number)) for number in (1, 2))
COMMAND = dataclasses.replace(ONE, model=ModelSettings(definition="file.custom_model"))

seen: list[float] = []


class Average(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.average = self.model.get_weights()

    def on_train_batch_end(self, batch, logs=None):
        self.average = [0.9 * old + 0.1 * new for old, new in zip(self.average, self.model.get_weights(), strict=True)]

    def on_test_begin(self, logs=None):
        self.model.set_weights(self.average)


class OneCycle(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.step = 0

    def rate(self):
        return 1 / (1 + self.step)

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        optimizer = self.model.optimizer
        optimizer.learning_rate = self.rate()


class OfEpochs(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        print(self.epoch, batch)


class Losses(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


class Means(Losses):
    def on_epoch_end(self, epoch, logs=None):
        print(sum(self.losses))


class Clips(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.set_weights(self.model.get_weights())


class Harmless(keras.callbacks.Callback):
    """Counts, times and logs."""

    def __init__(self):
        super().__init__()
        self.batches, self.logger = 0, logging.getLogger("harmless")

    def on_epoch_begin(self, epoch, logs=None):
        self.started = time.monotonic()

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches % 100 == 0:
            self.logger.info("batch %d: %s", self.batches, logs)

    def on_epoch_end(self, epoch, logs=None):
        self.logger.info("%.1f s, of at most %s", time.monotonic() - self.started, self.params["steps"])


class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if logs["loss"] < 0.01:
            self.model.stop_training = True


def of_functions():
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]),
        on_epoch_end=lambda epoch, logs: print(sum(seen)),
    )


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (Average, TWO, r"Average.on_train_batch_end .* Average.on_test_begin .* share self.average.*num_workers=1"),
        (Average, COMMAND, r"share self.average.*runs_on\(\"master\"\)"),
        (Means, TWO, r"Means.on_epoch_end \(on the master\) share self.losses.*runs_on\(\"master\"\)"),
        (of_functions, TWO, "share the variable seen"),
        (OneCycle, TWO, r"OneCycle.on_train_batch_end sets the learning rate .* keeps self.step.*num_workers=1"),
        (OfEpochs, COMMAND, "share self.epoch"),
    ],
)
def test_what_would_differ_is_refused_with_hooks_attribute_and_what_to_do(make, settings, words) -> None:
    with pytest.raises(UsageError, match=words):
        check_hooks([make()], settings)


@pytest.mark.parametrize("settings", [ONE, TWO, COMMAND])
def test_harmless_callbacks_are_not_refused(settings, tmp_path) -> None:
    k = keras.callbacks
    check_hooks(
        [
            Harmless(),
            Stops(),
            Losses(),
            Clips(),
            runs_on("master")(type("Moved", (Average,), {}))(),
            k.History(),
            k.EarlyStopping(),
            k.TerminateOnNaN(),
            k.ModelCheckpoint(str(tmp_path / "model.keras"), save_freq=5),
            k.TensorBoard(str(tmp_path), update_freq=5),
            k.ProgbarLogger(),
        ],
        settings,
    )


def test_in_a_program_one_worker_shares_all_and_several_follow_the_master() -> None:
    check_hooks([Average(), Means(), OneCycle(), OfEpochs(), of_functions()], ONE)
    check_hooks([OfEpochs()], TWO)


def test_what_several_workers_collect_is_told_to_the_caller() -> None:
    (warning,) = left_on_workers([Losses(), Harmless()], TWO)
    assert "Losses.on_train_batch_end changes self.losses on 2 workers" in warning.text
    assert not list(left_on_workers([Losses()], ONE))
    (warning,) = left_on_workers([Freezes()], TWO)
    assert "Freezes.on_train_batch_end sets something of the model on 2 workers" in warning.text
    assert not list(left_on_workers([Freezes()], ONE))


class Freezes(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.layers[0].trainable = batch < 9


class Locked(OneCycle):
    """Sets the rate in a method of its own, after a guard."""

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        if self.step < 5:
            return
        self.apply(0.1)

    def apply(self, rate):
        keras.backend.set_value(self.model.optimizer.learning_rate, rate)


class Scheduled(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.shown = batch
        rate = 1 / (1 + batch)
        self.model.optimizer.learning_rate.assign(rate)


def test_a_hook_that_sets_something_of_the_model_may_not_read_what_it_keeps() -> None:
    with pytest.raises(UsageError, match=r"Locked.on_train_batch_end sets the learning rate .* keeps self.step"):
        check_hooks([Locked()], TWO)
    check_hooks([Scheduled()], TWO)
