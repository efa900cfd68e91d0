"""The small pre-made callbacks, each through the dispatcher as a job calls it."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from elasticcb.callbacks import (
    BasePredictionOutputsProcessor,
    Dispatcher,
    EarlyStopper,
    LearningRateScheduler,
    MaxStepsStopper,
    MaxStepsStopping,
    PeriodicExport,
    Place,
    PredictionOutputsProcessor,
    ProgressiveMetrics,
    SummaryWriter,
)
from elasticcb.errors import CallbackError, ModelFileError


def compiled(optimizer: keras.optimizers.Optimizer | None) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize("callback", [PeriodicExport("exports"), ProgressiveMetrics()])
def test_what_only_a_job_can_do_is_refused_in_plain_keras(callback: keras.callbacks.Callback) -> None:
    with pytest.raises(ModelFileError, match=r"does nothing in Keras's own fit"):
        compiled(keras.optimizers.SGD()).fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[callback])


class TestPredictionOutputsProcessor:
    @pytest.mark.parametrize("kind", ["two", "one", "keyword", "optional", "any"])
    def test_function_gets_outputs_and_worker_id_if_it_takes_one(self, kind: str) -> None:
        seen: list = []
        functions = {
            "two": lambda predictions, worker: seen.append((predictions, worker)),
            "one": lambda predictions: seen.append((predictions, 5)),
            "keyword": lambda predictions, *, worker_id: seen.append((predictions, worker_id)),
            "optional": lambda predictions, worker_id=None: seen.append((predictions, worker_id)),
            "any": lambda *args: seen.append((*args, 5)),
        }
        outputs = compiled(None).predict_on_batch(np.ones((3, 2)))
        callback = PredictionOutputsProcessor(functions[kind])
        dispatcher = Dispatcher([callback], Place.WORKER, {"worker_id": 5}, None)
        dispatcher.call("on_predict_batch_end", 0, {"predictions": outputs})
        assert len(seen) == 1
        assert seen[0][0] is outputs
        assert seen[0][1] == 5

    def test_function_of_c_code_gets_the_outputs(self) -> None:
        seen: list = []
        callback = PredictionOutputsProcessor(seen.append)
        Dispatcher([callback], Place.WORKER, {}, None).call("on_predict_batch_end", 0, {"predictions": 1})
        assert seen == [1]

    def test_subclass_overrides_process(self) -> None:
        class Mine(BasePredictionOutputsProcessor):
            def __init__(self):  # no super().__init__(): ElasticDL's base class has none
                self.seen = []

            def process(self, predictions, worker_id):
                self.seen.append((predictions, worker_id))

        mine = Mine()
        dispatcher = Dispatcher([mine], Place.WORKER, {"worker_id": 1}, None)
        dispatcher.call("on_predict_batch_end", 0, {"predictions": "outputs"})
        assert mine.seen == [("outputs", 1)]
        assert not Dispatcher([Mine()], Place.MASTER, {}, None).wants("on_predict_batch_end")

    @pytest.mark.parametrize(
        ("argument", "words"),
        [
            (None, "has nothing to call"),
            ("text", "expects a function"),
            (lambda: 0, "matches neither"),
            (lambda a, b, c: 0, "matches neither"),
        ],
    )
    def test_unusable_function_is_refused_at_once(self, argument, words) -> None:
        with pytest.raises(ModelFileError, match=words):
            PredictionOutputsProcessor(argument)


class TestLearningRateScheduler:
    def test_rate_follows_the_model_version(self) -> None:
        model = compiled(keras.optimizers.Adam(0.5))
        given = {0: 0.1, 9: 0.1, 10: np.float32(0.01), 11: tf.constant(0.25), 12: np.array(0.125), 13: 1}
        scheduler = LearningRateScheduler(given.__getitem__)
        dispatcher = Dispatcher([scheduler], Place.WORKER, {}, model)
        dispatcher.call("on_train_begin", {})
        assert float(model.optimizer.learning_rate) == pytest.approx(0.5)
        rates = []
        for version in given:
            dispatcher.call("on_train_batch_begin", version, {})
            rates.append(float(model.optimizer.learning_rate))
        assert rates == pytest.approx([0.1, 0.1, 0.01, 0.25, 0.125, 1.0])

    def test_rate_of_a_loss_scaling_optimizer_reaches_the_one_inside(self) -> None:
        inner = keras.optimizers.SGD(0.5)
        model = compiled(keras.optimizers.LossScaleOptimizer(inner))
        dispatcher = Dispatcher([LearningRateScheduler(lambda version: 0.25)], Place.WORKER, {}, model)
        dispatcher.call("on_train_batch_begin", 0, {})
        assert float(inner.learning_rate) == 0.25

    def test_optimizer_with_a_schedule_of_its_own_is_refused_before_training(self) -> None:
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
        model = compiled(keras.optimizers.SGD(schedule))
        dispatcher = Dispatcher([LearningRateScheduler(lambda version: 0.1)], Place.WORKER, {}, model)
        with pytest.raises(CallbackError, match=r"can't be set.*LearningRateSchedule.*with a number"):
            dispatcher.call("on_train_begin", {})

    def test_model_without_optimizer_is_refused_before_training(self) -> None:
        dispatcher = Dispatcher([LearningRateScheduler(lambda version: 0.1)], Place.WORKER, {}, compiled(None))
        with pytest.raises(CallbackError, match=r'must have a "learning_rate" attribute\. Received: no optimizer'):
            dispatcher.call("on_train_begin", {})

    @pytest.mark.parametrize("value", [None, "0.1", True, [0.1], float("nan"), float("inf"), np.ones(1)])
    def test_schedule_must_return_a_finite_number(self, value) -> None:
        model = compiled(keras.optimizers.SGD(0.5))
        dispatcher = Dispatcher([LearningRateScheduler(lambda version: value)], Place.WORKER, {}, model)
        with pytest.raises(CallbackError, match=r"should be a finite number\. Got: .* for model version 3"):
            dispatcher.call("on_train_batch_begin", 3, {})

    def test_schedule_that_is_no_function_is_refused(self) -> None:
        with pytest.raises(ModelFileError, match="expects a function that takes the model version"):
            LearningRateScheduler(0.1)


class TestStoppers:
    def test_early_stopper_sees_all_rounds_and_stops(self) -> None:
        seen = []

        def worse(rounds):
            seen.append([metrics["loss"] for metrics in rounds])
            return len(rounds) > 1 and rounds[-1]["loss"] > rounds[-2]["loss"]

        dispatcher = Dispatcher([EarlyStopper(worse)], Place.MASTER, {}, compiled(None))
        for version, loss in enumerate([3.0, 2.0, 2.5]):
            assert not dispatcher.stop_requested
            dispatcher.call("on_test_end", {"metrics": {"loss": loss}, "loss": loss, "version": version})
        assert dispatcher.stop_requested
        assert "EarlyStopper.on_test_end" in dispatcher.stop_reason
        assert seen == [[3.0], [3.0, 2.0], [3.0, 2.0, 2.5]]

    def test_early_stopper_takes_truths_of_numpy_and_tensorflow(self) -> None:
        for answer in (np.bool_(True), tf.constant(True), np.array(True)):
            dispatcher = Dispatcher([EarlyStopper(lambda rounds, a=answer: a)], Place.MASTER, {}, compiled(None))
            dispatcher.call("on_test_end", {"metrics": {}})
            assert dispatcher.stop_requested

    @pytest.mark.parametrize("answer", [None, 1, "yes"])
    def test_early_stopper_wants_a_bool(self, answer) -> None:
        dispatcher = Dispatcher([EarlyStopper(lambda rounds: answer)], Place.MASTER, {}, compiled(None))
        with pytest.raises(CallbackError, match=r"should be a bool\. Got: "):
            dispatcher.call("on_test_end", {"metrics": {}})
        with pytest.raises(ModelFileError, match="expects a function"):
            EarlyStopper(answer)

    def test_max_steps_stopper_stops_at_the_version(self) -> None:
        dispatcher = Dispatcher([MaxStepsStopper(max_steps=3)], Place.WORKER, {}, compiled(None))
        for version in (1, 2):
            dispatcher.call("on_train_batch_end", version, {})
        assert not dispatcher.stop_requested
        dispatcher.call("on_train_batch_end", 3, {})
        assert dispatcher.stop_requested
        assert MaxStepsStopping is MaxStepsStopper

    @pytest.mark.parametrize("steps", [0, -1, 1.5, "9", None])
    def test_max_steps_stopper_wants_a_whole_number(self, steps) -> None:
        with pytest.raises(ModelFileError, match="whole number of at least 1"):
            MaxStepsStopper(steps)


class TestSummaryWriter:
    def scalars(self, folder: Path) -> dict[str, list[tuple[int, float]]]:
        events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
        events.Reload()
        return {
            tag: [
                (event.step, pytest.approx(float(tensor_util.make_ndarray(event.tensor_proto))))
                for event in events.Tensors(tag)
            ]
            for tag in events.Tags()["tensors"]
        }

    def test_scalars_of_every_round_are_in_the_event_file_by_version(self, tmp_path: Path) -> None:
        dispatcher = Dispatcher([SummaryWriter(tmp_path)], Place.MASTER, {}, compiled(None))
        for version, value in ((10, 0.5), (20, np.float32(0.75))):
            metrics = {"accuracy": value, "loss": tf.constant(1.0)}
            dispatcher.call("on_test_end", {"metrics": metrics, **metrics, "version": version})
        assert self.scalars(tmp_path) == {"accuracy": [(10, 0.5), (20, 0.75)], "loss": [(10, 1.0), (20, 1.0)]}

    def test_folder_is_in_the_job_directory_and_outputs_are_nested(self, tmp_path: Path) -> None:
        dispatcher = Dispatcher([SummaryWriter()], Place.MASTER, {"job_directory": str(tmp_path)}, None)
        metrics = {"click": {"auc": 0.5}, "buy": {"f1": np.array([0.25, 0.75])}}
        dispatcher.call("on_test_end", {"metrics": metrics})
        assert self.scalars(tmp_path / "tensorboard") == {
            "click/auc": [(0, 0.5)],
            "buy/f1/0": [(0, 0.25)],
            "buy/f1/1": [(0, 0.75)],
        }

    def test_no_folder_is_told_in_words(self) -> None:
        with pytest.raises(CallbackError, match="no folder to write to"):
            Dispatcher([SummaryWriter()], Place.MASTER, {}, None).call("on_test_end", {"metrics": {}})
