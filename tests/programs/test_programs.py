"""Programs of the catalogue end on a cluster where Keras's own `fit` ends.

On JAX and PyTorch this file runs in a process of its own. One program by hand:
`KERAS_BACKEND=jax python -m pytest -m "" tests/programs/test_programs.py -k deep_fm`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import keras
import pytest

import elasticcb
from comparison import compare_with_fit
from deep_cases import deep_but
from programs import CASES

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
NAMES = [name for name, case in CASES.items() if ON_TENSORFLOW or case.everywhere]

# One of a kind, on TensorFlow and on the others; `make test-deep` has all.
KEPT = (
    "annealing", "annealing_eagerly", "average", "changed_globals", "counting", "curriculum", "deep_fm",
    "drawing_hooks", "fixed_batch_size", "forgetful_config", "functional", "gan", "hooks_that_set", "lent_variable",
    "lookups", "masked_lstm", "metrics_read_by_hooks", "metrics_that_do_not_add_up", "mixed_float16",
    "objects_without_config", "optimizer_in_optimizer", "own_methods", "own_optimizers", "own_steps", "py_dataset",
    "saving", "sequential_without_input", "set_back", "shared_temperature", "shuffled_dataset", "staged",
    "states_of_python", "target_network", "transfer_learning", "variational_autoencoder",
)  # fmt: skip
KEPT_ELSEWHERE = (
    "annealing", "annealing_eagerly", "boosted_optimizer", "changed_globals", "counting", "curriculum", "deep_fm",
    "drawing_hooks", "forgetful_config", "lent_variable", "metrics_that_do_not_add_up", "metrics_with_state",
    "objects_without_config", "optimizer_in_optimizer", "py_dataset", "random_loss", "saving",
    "shared_temperature", "staged", "target_network", "tied_autoencoder", "transfer_learning", "uneven_steps",
    "variational_autoencoder",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster():
    with elasticcb.Cluster(log_level="WARNING") as cluster:
        yield cluster


@pytest.mark.parametrize("name", deep_but(NAMES, *(KEPT if ON_TENSORFLOW else KEPT_ELSEWHERE)))
def test_a_program_ends_where_fit_ends(cluster, name):
    compare_with_fit(cluster, CASES[name])


@pytest.fixture(scope="module")
def in_rounds():
    with elasticcb.Cluster(updates="sync", log_level="WARNING") as cluster:
        yield cluster


@pytest.mark.skipif(not ON_TENSORFLOW, reason="tests/backends shows rounds on other backends")
@pytest.mark.parametrize("name", deep_but(NAMES, *({"functional", "gan", "lent_variable"} & {*NAMES})))
def test_a_program_in_rounds_of_one_batch_ends_where_fit_ends(in_rounds, name):
    compare_with_fit(in_rounds, CASES[name])


@pytest.mark.deep  # what each backend promises is in tests/backends
@pytest.mark.skipif(not ON_TENSORFLOW, reason="this is that process")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("backend", "which"), [("torch", "some"), ("jax", "all")])
def test_programs_on_another_backend(backend, which):
    if find_spec(backend) is None:
        pytest.skip(f"the package {backend!r} is not installed")
    chosen = ["-m", "" if which == "all" else "not deep"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen, __file__]
    # Without CI, where tests are skipped for few reasons. What JAX compiles runs a few times.
    others = {name: value for name, value in os.environ.items() if name != "CI"}
    environment = others | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "KERAS_BACKEND": backend}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
