"""The state of a process, where it is given to another one."""

import random
import sys

from elasticcb.serialization import process_state


def test_random_state_of_pytorch_is_left_out_where_it_is_not_imported(monkeypatch):
    given = process_state.read()
    given["random"]["torch"] = "the state of a caller that uses PyTorch besides"
    drawn = random.random()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    process_state.write(given)
    assert random.random() == drawn
