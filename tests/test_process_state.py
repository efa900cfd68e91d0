"""The state of a process, where it is given to another one."""

import random
import sys
from pathlib import Path

import pytest

from elasticcb.serialization import process_state


def test_random_state_of_pytorch_is_left_out_where_it_is_not_imported(monkeypatch):
    given = process_state.read()
    given["random"]["torch"] = "the state of a caller that uses PyTorch besides"
    drawn = random.random()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    process_state.write(given)
    assert random.random() == drawn


def test_workers_draw_other_random_numbers_of_pytorch():
    torch = pytest.importorskip("torch")
    given, drawn = process_state.read(), []
    for index in (1, 2):
        process_state.write(given)
        process_state.use_own_seeds(index)
        drawn.append(float(torch.rand(())))
    process_state.write(given)
    assert drawn[0] != drawn[1]


def test_seed_of_tensorflow_is_replaced_once_on_workers_after_the_first(monkeypatch):
    seeds = []
    monkeypatch.setattr(process_state.tf.random, "set_seed", seeds.append)
    monkeypatch.setattr(process_state, "_seeding", process_state._Seeding())
    given = process_state.read()
    seeded = {**given, "random": {**given["random"], "tensorflow": (7, 1)}}
    for _ in range(2):
        process_state.write(seeded)
        process_state.use_own_seeds(2)
    assert seeds == [7, 9]
    process_state.write(given)


def test_relative_paths_are_those_of_the_caller_where_its_folder_exists(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = process_state.read()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    process_state.write({**given, "directory": "/folder/of/another/machine"})
    assert Path.cwd() == tmp_path / "elsewhere"
    process_state.write(given)
    assert Path.cwd() == tmp_path
