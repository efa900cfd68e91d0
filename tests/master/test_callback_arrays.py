"""What callbacks hold in arrays survives the master."""

from __future__ import annotations

import json

import keras
import ml_dtypes
import numpy as np
import pytest

from elasticcb.callbacks.saved_state import CallbackStates
from elasticcb.master import callback_arrays
from elasticcb.master.callback_arrays import CallbackArrays

WEIGHTS = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, ml_dtypes.bfloat16), np.float64(3)[None]]


def opened(folder, entry=None):
    said: list[str] = []
    return CallbackArrays(folder / "recovery", entry, said.append), said


def files(folder):
    return sorted(path.name for path in (folder / "recovery").glob("*"))


def test_best_weights_of_early_stopping_come_back(tmp_path):
    stopping = keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)
    callbacks = CallbackStates([keras.callbacks.History(), stopping], print)
    stopping.on_train_begin()
    callbacks.begin()
    stopping.best, stopping.best_weights = 0.25, WEIGHTS
    stopping.odd = {"names": np.array(["a"]), "weights": np.ones(2)}  # text is not kept, so the dict is not
    taken: dict = {}
    states = json.loads(json.dumps(callbacks.save(taken)))
    assert len(taken) == 3
    entry = json.loads(json.dumps(opened(tmp_path)[0].keep(taken)))

    again = keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)
    again.on_train_begin()
    CallbackStates([keras.callbacks.History(), again], print).restore(states, opened(tmp_path, entry)[0].load())
    assert again.best == 0.25
    assert not hasattr(again, "odd")
    for restored, expected in zip(again.best_weights, WEIGHTS, strict=True):
        assert restored.dtype == expected.dtype
        np.testing.assert_array_equal(restored, expected)


def test_large_state_without_arrays_is_kept_in_the_file_too(tmp_path):
    history = keras.callbacks.History()
    callbacks = CallbackStates([history], print)
    history.seen = [number + 0.123456789 for number in range(100_000)]
    taken: dict = {}
    states = json.dumps(callbacks.save(taken))
    assert len(states) < 100
    entry = opened(tmp_path)[0].keep(taken)
    again = keras.callbacks.History()
    CallbackStates([again], print).restore(json.loads(states), opened(tmp_path, entry)[0].load())
    assert again.seen == history.seen


def test_file_is_written_when_arrays_have_changed_and_replaced_when_the_journal_says_so(tmp_path):
    arrays, _ = opened(tmp_path)
    first = arrays.keep({"a": WEIGHTS[0]})
    assert arrays.keep({"a": WEIGHTS[0].copy()}) == first
    assert files(tmp_path) == ["callbacks-1.safetensors"]
    second = arrays.keep({"a": WEIGHTS[0] + 1})
    assert files(tmp_path) == ["callbacks-1.safetensors", "callbacks-2.safetensors"]  # a kill here leaves the first
    np.testing.assert_array_equal(opened(tmp_path, first)[0].load()["a"], WEIGHTS[0])
    arrays.drop_others()
    assert files(tmp_path) == ["callbacks-2.safetensors"]
    after, _ = opened(tmp_path, second)
    assert after.keep({"a": WEIGHTS[0] + 1}) == second
    assert after.keep({}) is None
    after.drop_others()
    assert files(tmp_path) == []


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x" * 300)])
def test_file_that_is_gone_or_damaged_is_named_and_the_rest_is_restored(tmp_path, damage):
    history = keras.callbacks.History()
    callbacks = CallbackStates([history], print)
    history.epoch, history.kept = [0, 1], np.ones(3)
    taken: dict = {}
    states = callbacks.save(taken)
    entry = opened(tmp_path)[0].keep(taken)
    damage(tmp_path / "recovery" / "callbacks-1.safetensors")
    arrays, said = opened(tmp_path, entry)
    again = keras.callbacks.History()
    CallbackStates([again], print).restore(states, arrays.load())
    assert again.epoch == [0, 1]
    assert not hasattr(again, "kept")
    assert "callbacks-1.safetensors" in said[0]


def test_arrays_that_can_not_be_kept_are_told_of_once_and_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(callback_arrays, "MOST_BYTES", 100)
    arrays, said = opened(tmp_path)
    assert arrays.keep({"a": np.ones(50)}) is None
    assert arrays.keep({"a": np.ones(60)}) is None
    assert len(said) == 1
    assert "are not saved" in said[0]
    (tmp_path / "recovery").write_text("a file where the folder should be")
    arrays, said = opened(tmp_path)
    assert arrays.keep({"a": np.ones(5)}) is None
    assert "are not saved" in said[0]
