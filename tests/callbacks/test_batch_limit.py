from __future__ import annotations

import keras
import pytest

from elasticcb.callbacks import Dispatcher, Place, every
from elasticcb.callbacks.dispatch import HookTimes
from elasticcb.errors import ModelFileError


class Counter(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(("end", batch))

    def on_train_begin(self, logs=None):
        self.seen.append(("train", 0))


def run(dispatcher: Dispatcher, batches: int) -> list[bool]:
    """Whether the end of each batch was due."""
    due = []
    dispatcher.call("on_train_begin", {})
    for batch in range(1, batches + 1):
        dispatcher.call("on_train_batch_begin", batch, {})
        due.append(dispatcher.is_due("on_train_batch_end"))
        dispatcher.call("on_train_batch_end", batch, {})
    return due


def test_every_calls_the_hooks_of_the_nth_batches_and_all_others_as_ever() -> None:
    limited, plain = every(3)(Counter()), Counter()
    run(Dispatcher([limited, plain], Place.WORKER, {}, None), 7)
    assert run(Dispatcher([every(3)(Counter())], Place.WORKER, {}, None), 6) == [False, False, True] * 2
    assert limited.seen == [("train", 0), ("begin", 3), ("end", 3), ("begin", 6), ("end", 6)]
    assert len(plain.seen) == 1 + 2 * 7


def test_every_decorates_a_class_whose_objects_count_for_themselves() -> None:
    @every(2)
    class Limited(Counter):
        pass

    first, second = Limited(), every(5)(Limited())
    run(Dispatcher([first, second], Place.WORKER, {}, None), 5)
    assert [batch for name, batch in first.seen if name == "end"] == [2, 4]
    assert [batch for name, batch in second.seen if name == "end"] == [5]
    assert not hasattr(Counter, "_elasticcb_every")


def test_the_master_knows_who_will_look_at_the_model_within_some_batches() -> None:
    saver = keras.callbacks.ModelCheckpoint("model.keras", save_freq=10)
    limited = every(4)(Counter())
    limited._elasticcb_runs_on = "master"
    board = keras.callbacks.TensorBoard("logs", write_graph=False, update_freq=1)
    master = Dispatcher([saver, limited, board], Place.MASTER, {}, keras.Sequential())
    assert master.readers("on_train_batch_end", 3) == []
    assert master.readers("on_train_batch_end", 4) == [limited]
    assert master.readers("on_train_batch_end", 10) == [saver, limited]


def test_every_refuses_what_is_no_number_of_batches_and_what_has_no_hooks() -> None:
    for n in (0, 1.5, "2", None):
        with pytest.raises(ModelFileError, match="whole number of batches"):
            every(n)  # type: ignore[arg-type]
    with pytest.raises(ModelFileError, match="takes a callback"):
        every(2)(print)


def test_hook_slower_than_its_batch_is_told_once() -> None:
    times = HookTimes()
    for _ in range(9):
        times.note_batch(0.01)
        assert not times.note_hook("Slow.on_train_batch_end", 0.05)
    times.note_batch(0.01)
    text = times.note_hook("Slow.on_train_batch_end", 0.05)
    assert "Slow.on_train_batch_end is slow" in text
    assert "0.0500 s" in text
    assert "0.0100 s" in text
    assert not times.note_hook("Slow.on_train_batch_end", 0.05)


def test_hook_is_not_slow_for_a_single_long_call_or_when_it_is_called_seldom() -> None:
    times = HookTimes()
    for number in range(30):
        times.note_batch(0.01)
        assert not times.note_hook("Saves", 5.0 if number == 12 else 0.001)
        assert not times.note_hook("Histograms", 0.5, every=100)
