"""Optimizers and their options on a cluster end where Keras's own `fit` ends; of models, tests/programs shows it.

The tables of docs/keras_support.md are these: `python tests/integration/test_matrix.py` writes them anew.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import keras
import numpy as np
import pytest

import elasticcb
from catalogue import BATCH, dense, normal
from comparison import EPOCHS, SAME, assert_close, assert_histories_equal
from deep_cases import deep_but
from matrix_optimizers import (
    CLASSES,
    NOT_TO_TRAIN_WITH,
    OPTIONS,
    SCHEDULES,
    exported_classes,
    exported_schedules,
)
from programs import CASES

PAGE = Path(__file__).parents[2] / "docs" / "keras_support.md"


@pytest.fixture(scope="module")
def cluster():
    with elasticcb.Cluster(1, 1, updates="sync", log_level="WARNING") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_workers():
    with elasticcb.Cluster(2, 2, kind="inprocess", log_level="WARNING") as cluster:
        yield cluster


# ---------------------------------------------------------------- one synchronous worker


@pytest.fixture(scope="module")
def local_worker():
    with elasticcb.Cluster(1, 1, kind="inprocess", updates="local", local_steps=3, log_level="WARNING") as cluster:
        yield cluster


X, Y = normal(6), normal(1)
FIT = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def fresh(make_optimizer):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    model = dense(optimizer=make_optimizer())
    if isinstance(model.optimizer, keras.optimizers.ScheduleFreeAdamW):
        # Keras's `fit` builds it in a way that leaves out the weights that it starts from.
        model.optimizer.build(model.trainable_variables)
    return model


def optimizer_variables(model):
    """Without the scale of the loss, which is the worker's."""
    return [
        variable.numpy()
        for variable in model.optimizer.variables
        if not variable.path.endswith(("dynamic_scale", "step_counter"))
    ]


MAKERS = {name: case.make for name, case in CLASSES.items()}
MAKERS |= {name: lambda make=make: keras.optimizers.SGD(make()) for name, make in SCHEDULES.items()}
MAKERS |= OPTIONS
TOLERANCES = {name: case.tolerance for name, case in CLASSES.items()}


KEPT_OPTIMIZERS = (
    "Adam", "Muon", "ScheduleFreeAdamW", "`global_clipnorm`", "`gradient_accumulation_steps` with `clipnorm`",
    "`gradient_accumulation_steps` with `global_clipnorm` (one server)", "a custom optimizer",
)  # fmt: skip


@pytest.mark.parametrize("name", deep_but(MAKERS, *KEPT_OPTIMIZERS))
def test_optimizer_ends_where_fit_ends(cluster, name):
    compare_optimizer_with_fit(cluster, name)


@pytest.mark.parametrize("name", deep_but(CLASSES, "Adam"))
def test_an_optimizer_on_a_worker_ends_where_fit_ends(local_worker, name):
    compare_optimizer_with_fit(local_worker, name)


def compare_optimizer_with_fit(cluster, name):
    expected, model = fresh(MAKERS[name]), fresh(MAKERS[name])
    history = expected.fit(X, Y, epochs=EPOCHS, **FIT).history
    found = cluster.fit(model, X, Y, epochs=EPOCHS, **FIT).history
    tolerance = TOLERANCES.get(name, 1e-5)
    assert_histories_equal(found, history, tolerance)
    assert_close(model.get_weights(), expected.get_weights(), tolerance)
    assert_close(optimizer_variables(model), optimizer_variables(expected), tolerance)
    assert int(model.optimizer.iterations) == int(expected.optimizer.iterations) > 0


def test_steps_that_overflow_change_nothing_as_in_fit(cluster):
    def make():
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**18, dynamic_growth_steps=2)
        keras.utils.set_random_seed(3)
        return dense(optimizer=scaled, dtype="mixed_float16")

    expected, model = make(), make()
    expected.fit(X, Y, epochs=2, **FIT)
    cluster.fit(model, X, Y, epochs=2, **FIT)
    assert_close(model.get_weights(), expected.get_weights(), 1e-5)
    assert int(expected.optimizer.iterations) == int(model.optimizer.iterations) < 2 * len(X) // BATCH


def test_every_optimizer_and_schedule_that_keras_exports_is_in_the_tables():
    assert exported_classes() == {*CLASSES, *NOT_TO_TRAIN_WITH}
    assert exported_schedules() == {*SCHEDULES}


# ---------------------------------------------------------------- two asynchronous workers, two servers


@pytest.mark.parametrize("name", deep_but(["functional", "resnet", "statistics"], "resnet"))
def test_two_workers_train_and_evaluate_as_the_weights_that_come_back(two_workers, name):
    given = CASES[name].make()
    fit = {"epochs": 12, "batch_size": 4, "verbose": 0, "sample_weight": given.sample_weight}
    losses = two_workers.fit(given.model, given.x, given.y, **fit).history["loss"]
    assert losses[-1] < 0.97 * losses[0]
    test = {"batch_size": 4, "sample_weight": given.sample_weight, "verbose": 0, "return_dict": True}
    expected = given.model.evaluate(given.x, given.y, **test)
    found = two_workers.evaluate(given.model, given.x, given.y, **test)
    assert list(found) == list(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=SAME, err_msg=key)


# ---------------------------------------------------------------- one fit after another

GOES_ON = {
    "schedule": lambda: keras.optimizers.Adam(SCHEDULES["ExponentialDecay"]()),
    "averages of weights": OPTIONS["`ema_overwrite_frequency`"],
}


@pytest.mark.parametrize("name", GOES_ON)
def test_second_fit_goes_on_where_the_first_ended(cluster, name):
    expected, model = fresh(GOES_ON[name]), fresh(GOES_ON[name])
    expected.fit(X, Y, epochs=4, **FIT)
    cluster.fit(model, X, Y, epochs=2, **FIT)
    assert int(model.optimizer.iterations) == 2 * len(X) // BATCH
    cluster.fit(model, X, Y, epochs=4, initial_epoch=2, **FIT)
    assert_close(model.get_weights(), expected.get_weights(), 1e-5)
    assert_close(optimizer_variables(model), optimizer_variables(expected), 1e-5)
    assert int(model.optimizer.iterations) == 4 * len(X) // BATCH


@pytest.mark.parametrize("kind", ["cluster", "local_worker"])
def test_second_fit_goes_on_with_several_optimizers(request, kind):
    cluster, given, model = request.getfixturevalue(kind), CASES["gan"].make(), CASES["gan"].make().model
    for fit in (given.model.fit, functools.partial(cluster.fit, model)):
        fit(given.x, epochs=2, **FIT)
        fit(given.x, epochs=2, **FIT)
    assert_close(model.get_weights(), given.model.get_weights(), 1e-5)
    for found, expected in ((model.d_optimizer, given.model.d_optimizer), (model.g_optimizer, given.model.g_optimizer)):
        assert_close([v.numpy() for v in found.variables], [v.numpy() for v in expected.variables], 1e-5)


def test_fit_here_goes_on_where_one_on_the_cluster_ended_and_the_other_way_round(cluster):
    expected, model = fresh(CLASSES["Adam"].make), fresh(CLASSES["Adam"].make)
    expected.fit(X, Y, epochs=3, **FIT)
    cluster.fit(model, X, Y, **FIT)
    model.fit(X, Y, **FIT)
    cluster.fit(model, X, Y, **FIT)
    assert_close(model.get_weights(), expected.get_weights(), 1e-5)


def test_weights_and_learning_rate_that_are_set_between_two_fits_count(cluster):
    expected, model = fresh(CLASSES["SGD"].make), fresh(CLASSES["SGD"].make)
    for own, fit in ((expected, expected.fit), (model, lambda *data, **options: cluster.fit(model, *data, **options))):
        fit(X, Y, **FIT)
        own.set_weights([0.5 * value for value in own.get_weights()])
        own.optimizer.learning_rate = 0.01
        own.optimizer.variables[-1].assign(keras.ops.zeros_like(own.optimizer.variables[-1]))
        fit(X, Y, **FIT)
    assert_close(model.get_weights(), expected.get_weights(), 1e-5)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)


def test_a_model_is_saved_with_its_optimizer_and_goes_on_when_it_is_loaded(cluster, tmp_path):
    expected, model = fresh(CLASSES["Adam"].make), fresh(CLASSES["Adam"].make)
    expected.fit(X, Y, epochs=2, **FIT)
    cluster.fit(model, X, Y, **FIT)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations) == len(X) // BATCH
    cluster.fit(loaded, X, Y, **FIT)
    assert_close(loaded.get_weights(), expected.get_weights(), 1e-5)


def test_the_callers_model_keeps_its_own_methods(cluster):
    model = CASES["own_steps"].make().model
    before = set(vars(model))
    cluster.fit(model, X, Y, **FIT)
    assert not {"train_step", "test_step", "compute_metrics"} & (set(vars(model)) - before)
    model.fit(X, Y, **FIT)


# ---------------------------------------------------------------- the page


def tables() -> dict[str, str]:
    """The generated parts of the page, by name."""
    models: list[str] = []
    group = ""
    for case in CASES.values():
        if case.group != group:
            group = case.group
            models += ["", f"**{group}**", ""] if models else [f"**{group}**", ""]
        models.append(f"- {case.what}{_unless_usual(case.tolerance)}")
    optimizers = ["| optimizer | |", "|---|---|"]
    optimizers += [
        f"| `{name}`{_unless_usual(case.tolerance)} | {case.what} |" for name, case in sorted(CLASSES.items())
    ]
    optimizers += [f"| `{name}` | not supported: {why} |" for name, why in NOT_TO_TRAIN_WITH.items()]
    options = [f"- `schedules.{name}`" for name in sorted(SCHEDULES)]
    options += [f"- {name}" for name in OPTIONS]
    parts = {"models": models, "optimizers": optimizers, "options": options}
    return {name: "\n".join(lines) for name, lines in parts.items()}


def _unless_usual(tolerance: float) -> str:
    """The difference that a test allows, unless it is 1e-05."""
    return "" if tolerance == 1e-5 else f" ({tolerance:g})"


def with_tables(text: str) -> str:
    for name, table in tables().items():
        block = f"<!-- {name} -->\n\n{table}\n\n<!-- end -->"
        text = re.sub(rf"<!-- {name} -->\n.*?<!-- end -->", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def test_page_has_these_tables():
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->" in text for name in tables())
    assert with_tables(text) == text, "run: python tests/integration/test_matrix.py"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
