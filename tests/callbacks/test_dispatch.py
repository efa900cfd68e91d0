from __future__ import annotations

import keras
import pytest

from elasticcb.callbacks import Dispatcher, Place
from elasticcb.callbacks.dispatch import HookLogs, check_monitors
from elasticcb.errors import CallbackError, ConnectionLostError, ModelFileError
from elasticcb.settings import CallbackErrors


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


class Recorder(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def on_train_begin(self, logs=None):
        self.calls.append(("on_train_begin", logs))

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(("on_train_batch_begin", batch, logs))

    def on_test_end(self, logs=None):
        self.calls.append(("on_test_end", logs))


def test_only_overridden_hooks_of_the_place_are_wanted_and_called(model) -> None:
    recorder = Recorder()
    dispatcher = Dispatcher([recorder, keras.callbacks.Callback()], Place.WORKER, {"batch_size": 8}, model)
    assert dispatcher.wants("on_train_batch_begin")
    assert not dispatcher.wants("on_test_end")
    assert not dispatcher.wants("on_train_batch_end")
    dispatcher.call("on_train_begin", {})
    dispatcher.call("on_train_batch_begin", 7, {"batch": 0, "size": 8})
    dispatcher.call("on_test_end", {})
    assert recorder.calls == [
        ("on_train_begin", {}),
        ("on_train_batch_begin", 7, {"batch": 0, "size": 8}),
    ]
    assert recorder.params == {"batch_size": 8}
    assert recorder.model is model


def test_beginning_that_failed_is_tried_again_for_that_callback_alone(model) -> None:
    class Slow(keras.callbacks.Callback):
        attempts = 0

        def on_train_begin(self, logs=None):
            self.attempts += 1
            if self.attempts == 1:
                raise OSError("not yet")

    recorder, slow = Recorder(), Slow()
    dispatcher = Dispatcher([recorder, slow], Place.MASTER, {}, model)
    with pytest.raises(CallbackError, match="not yet"):
        dispatcher.call("on_train_begin", {})
    for _ in range(2):
        dispatcher.call("on_train_begin", {})
    assert slow.attempts == 2
    assert recorder.calls == [("on_train_begin", {})]


def test_failing_hook_is_told_with_callback_hook_process_version_and_the_users_traceback(model) -> None:
    class Broken(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            try:
                {}["first"]
            except KeyError as error:
                raise ValueError("no such thing") from error

    dispatcher = Dispatcher([Broken()], Place.WORKER, {"worker_id": 3}, model)
    with pytest.raises(CallbackError) as caught:
        dispatcher.call("on_train_batch_end", 12, {})
    assert str(caught.value) == (
        "Callback Broken failed in on_train_batch_end on worker 3 (model version 12): ValueError: no such thing"
    )
    assert "elasticcb/callbacks/dispatch.py" not in caught.value.user_traceback
    assert caught.value.user_traceback.count("test_dispatch.py") == 2
    assert "KeyError: 'first'" in caught.value.user_traceback
    assert caught.value.user_traceback.endswith("ValueError: no such thing\n")


@pytest.mark.parametrize(
    ("hook", "args", "where"),
    [
        ("on_epoch_end", (2, {}), r"the master \(epoch 2\):"),
        ("on_test_end", ({"version": 40},), r"the master \(model version 40\):"),
        ("on_test_begin", ({},), "the master:"),
    ],
)
def test_failing_hook_on_the_master_tells_epoch_or_version(model, hook, args, where) -> None:
    def fail(self, *args):
        raise RuntimeError("boom")

    broken = type("Broken", (keras.callbacks.Callback,), {hook: fail})()
    with pytest.raises(CallbackError, match=where):
        Dispatcher([broken], Place.MASTER, {}, model).call(hook, *args)


def test_lost_connection_inside_a_hook_stays_one(model) -> None:
    class Reader(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            raise ConnectionLostError("parameter server 0 is gone")

    with pytest.raises(ConnectionLostError):
        Dispatcher([Reader()], Place.MASTER, {}, model).call("on_test_end", {})


def test_failing_set_model_is_an_error_of_the_callback_and_never_a_warning(model) -> None:
    class Broken(keras.callbacks.Callback):
        def set_model(self, model):
            raise RuntimeError("wrong model")

    with pytest.raises(CallbackError, match="Broken failed in set_model on a worker: RuntimeError: wrong model"):
        Dispatcher([Broken()], Place.WORKER, {}, model, on_error=CallbackErrors.WARN)


def test_own_set_model_and_set_params_need_not_call_the_base(model) -> None:
    class Own(keras.callbacks.Callback):
        def __init__(self):  # without super().__init__(), as in many user classes
            self.seen = []

        def set_model(self, model):
            self.seen.append("model")

        def set_params(self, params):
            self.seen.append("params")

        def on_test_begin(self, logs=None):
            self.seen.append("begin")

    own = Own()
    Dispatcher([own], Place.MASTER, {}, model).call("on_test_begin", {})
    assert own.seen == ["model", "params", "begin"]


def test_stop_training_set_in_a_hook_is_requested_with_its_reason(model) -> None:
    class Stopper(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    model.stop_training = True  # left over from an earlier use of the model
    dispatcher = Dispatcher([Stopper()], Place.MASTER, {}, model)
    dispatcher.call("on_epoch_end", 0, {})
    assert not dispatcher.stop_requested
    dispatcher.call("on_epoch_end", 1, {})
    assert dispatcher.stop_requested
    assert dispatcher.stop_reason == "Stopper.on_epoch_end set model.stop_training (epoch 1)"
    dispatcher.call("on_epoch_end", 2, {})
    assert dispatcher.stop_requested


@pytest.mark.parametrize(
    ("item", "hint"),
    [
        (keras.callbacks.History, r"Create an instance: History\(\)"),
        (len, "Derive its class"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_callback_is_refused_with_a_hint(model, item, hint) -> None:
    with pytest.raises(ModelFileError, match=f"Item 1 .*{hint}"):
        Dispatcher([keras.callbacks.Callback(), item], Place.MASTER, {}, model)


def test_callback_whose_hooks_all_run_elsewhere_is_not_given_the_model(model, tmp_path) -> None:
    board = keras.callbacks.TensorBoard(str(tmp_path / "board"))
    Dispatcher([board], Place.WORKER, {}, model)
    assert not (tmp_path / "board").exists()  # it writes the model's graph in set_model
    Dispatcher([board], Place.MASTER, {}, model)
    assert (tmp_path / "board").exists()


def test_callbacks_of_keras_get_the_logs_that_keras_gives(model) -> None:
    seen = {}

    class Own(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            seen["own"] = logs

    class Derived(keras.callbacks.History):
        def on_test_end(self, logs=None):
            seen["derived"] = logs

        def on_train_batch_end(self, batch, logs=None):
            seen["batch"] = logs

    logs = HookLogs({"mae": 1.0}, metrics={"mae": 1.0}, version=3)
    dispatcher = Dispatcher([Own(), Derived()], Place.MASTER, {}, model)
    dispatcher.call("on_test_end", logs)
    assert seen == {"own": {"mae": 1.0}, "derived": {"mae": 1.0}}
    assert (seen["own"]["version"], seen["own"].get("metrics"), "size" in seen["own"]) == (3, {"mae": 1.0}, False)
    dispatcher.call("on_train_batch_end", 3, HookLogs({"mae": 1.0}, size=8), keras_logs={"mae": 2.0})
    assert seen["batch"] == {"mae": 2.0}


def test_what_a_callback_adds_to_the_logs_is_there_for_those_after_it(model) -> None:
    class Adds(keras.callbacks.History):
        def on_epoch_end(self, epoch, logs=None):
            logs["learning_rate"] = 0.5

        def on_test_end(self, logs=None):
            logs["learning_rate"] = 0.5

    class Sees(keras.callbacks.History):
        def on_epoch_end(self, epoch, logs=None):
            assert logs["learning_rate"] == 0.5

        def on_test_end(self, logs=None):
            assert logs["learning_rate"] == 0.5

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            assert logs["learning_rate"] == 0.5

    dispatcher = Dispatcher([Adds(), Sees(), Own()], Place.MASTER, {}, model)
    dispatcher.call("on_epoch_end", 0, {"loss": 1.0})
    dispatcher.call("on_test_end", HookLogs({"loss": 1.0}, version=3))


class Fails(keras.callbacks.Callback):
    def on_test_end(self, logs=None):
        raise ValueError("of the user")


def test_error_of_a_hook_can_be_a_warning_after_which_the_others_are_called(model, caplog) -> None:
    warnings, recorder = [], Recorder()
    dispatcher = Dispatcher(
        [Fails(), recorder], Place.MASTER, {}, model, on_error=CallbackErrors.WARN, warn=warnings.append
    )
    dispatcher.call("on_test_end", {"version": 40})
    dispatcher.call("on_test_end", {"version": 50})
    assert [name for name, *_ in recorder.calls] == ["on_test_end"] * 2
    assert [warning.subject for warning in warnings] == ["Fails.on_test_end failed"] * 2
    assert [warning.errors for warning in warnings] == [1, 1]
    assert "on the master (model version 40): ValueError: of the user" in warnings[0].text
    assert 'raise ValueError("of the user")' in warnings[0].text
    assert caplog.text.count("ValueError: of the user") == 3  # the second time in one line
    assert caplog.text.count('raise ValueError("of the user")') == 1


def test_error_in_what_the_job_is_for_is_never_a_warning(model) -> None:
    class Export(Fails):
        essential = True

    with pytest.raises(CallbackError, match="of the user"):
        Dispatcher([Export()], Place.MASTER, {}, model, on_error=CallbackErrors.WARN).call("on_test_end", {})


def test_what_needs_the_export_goes_after_it_in_whichever_order(model) -> None:
    order = []

    class Late(keras.callbacks.Callback):
        after_export = True

        def on_train_end(self, logs=None):
            order.append("late")

    class Early(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            order.append("early")

    dispatcher = Dispatcher([Late(), Early()], Place.WORKER, {}, model)
    dispatcher.call("on_train_end", {})
    assert order == ["early", "late"]
    dispatcher.call("on_train_end", {}, after_export=True)
    dispatcher.call("on_train_end", {}, after_export=False)
    assert order[2:] == ["late", "early"]


def test_what_a_hook_on_the_master_of_a_command_warns_of_is_shown_with_the_name_of_its_callback(model, recwarn) -> None:
    shown: list[str] = []
    stopping = keras.callbacks.EarlyStopping("val_loss")
    dispatcher = Dispatcher([stopping], Place.MASTER, {}, model, warn=lambda warning: shown.append(warning.text))
    dispatcher.call("on_train_begin", {})
    dispatcher.call("on_epoch_end", 0, {"loss": 1.0})
    assert len(shown) == 1
    assert shown[0].startswith(
        "EarlyStopping warns: Early stopping conditioned on metric `val_loss` which is not available"
    )


class Validates(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["val_own"] = 1.0


@pytest.mark.parametrize(
    ("callbacks", "refused"),
    [
        ([keras.callbacks.EarlyStopping("val_loss")], "EarlyStopping monitors 'val_loss'"),
        ([keras.callbacks.History(), keras.callbacks.ReduceLROnPlateau("val_auc")], "ReduceLROnPlateau monitors"),
        ([keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True)], "ModelCheckpoint monitors"),
        ([keras.callbacks.ModelCheckpoint("last.keras")], ""),
        ([keras.callbacks.EarlyStopping("loss")], ""),
        ([Validates(), keras.callbacks.EarlyStopping("val_own")], ""),
        ([keras.callbacks.EarlyStopping("val_own"), Validates()], "EarlyStopping monitors"),
    ],
)
def test_a_callback_that_would_never_act_without_validation_data_is_refused(callbacks, refused) -> None:
    if not refused:
        check_monitors(callbacks)
        return
    with pytest.raises(ModelFileError, match=f"{refused}.*no validation data.*Add validation data"):
        check_monitors(callbacks)
