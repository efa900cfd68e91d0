"""Variables that an optimizer updates as one: the same weights as one by one, whatever a push updates."""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

from deep_cases import deep_but
from elasticcb.ps import joined
from elasticcb.ps.joined import groups_of, parted
from elasticcb.sharding.partition import VariableSpec
from helpers_ps import Part, gradients, initial_values

pytestmark = pytest.mark.usefixtures("early_xla")

SPECS = (
    VariableSpec("embedding/embeddings", (12, 4), "float32", True),
    VariableSpec("dense/kernel", (4, 6), "float32", True),
    VariableSpec("dense/bias", (6,), "float32", True, no_weight_decay=True),
    VariableSpec("norm/moving_mean", (6,), "float32", False),
    VariableSpec("norm/gamma", (5,), "float32", True, no_weight_decay=True),
    VariableSpec("head/kernel", (6, 3), "float32", True),
    VariableSpec("head/bias", (), "float32", True),
)
DENSE = [index for index, spec in enumerate(SPECS) if spec.trainable]
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.05, l1_regularization_strength=0.001),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "Lion": lambda: keras.optimizers.Lion(0.003),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.5),
}


def groups(part: Part) -> list[tuple[int, ...]]:
    return part.parameters.optimizers.groups


@pytest.mark.parametrize("name", deep_but(OPTIMIZERS, "Adam"))
def test_variables_that_are_joined_have_the_weights_of_variables_on_their_own(name, monkeypatch):
    values = initial_values(SPECS)
    whole = Part(OPTIMIZERS[name], values, SPECS)
    assert groups(whole) == [(0, 1, 5, 6), (2, 4)]
    monkeypatch.setattr(joined, "MOST_ELEMENTS", 1)
    single = Part(OPTIMIZERS[name], values, SPECS)
    assert not groups(single)
    for step in range(6):
        given = gradients(step, SPECS)
        for part in (whole, single):
            if step == 4:  # takes apart what is joined
                part.push({i: given[i] for i in (1, 2)}, {0: ([7, 2], given[0][:2])})
            else:
                part.push(given)
    assert groups(whole) == [(5, 6)]
    for joined_value, value in zip(whole.values(), single.values(), strict=True):
        np.testing.assert_allclose(joined_value, value, rtol=2e-6, atol=1e-6)
    states = [part.parameters.optimizers.state() for part in (whole, single)]
    for kind in ("slots", "extras", "shared"):
        one, other = (getattr(state, kind) for state in states)
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_allclose(one[key], other[key], rtol=2e-6, atol=1e-6, err_msg=str(key))


def test_updates_of_some_of_the_joined_variables_equal_keras():
    values = initial_values(SPECS)
    part = Part(OPTIMIZERS["Adam"], values, SPECS)
    variables = {index: keras.Variable(values[index]) for index in DENSE}
    optimizer = OPTIMIZERS["Adam"]()
    optimizer.build(list(variables.values()))
    for step, taken in enumerate([DENSE, [1, 2], DENSE, [5], [0, 1, 2, 4], DENSE]):
        given = {index: gradients(step, SPECS)[index] for index in taken}
        part.push(given)
        optimizer.apply([tf.constant(given[index]) for index in taken], [variables[index] for index in taken])
    for index in DENSE:
        np.testing.assert_allclose(part.values()[index], variables[index].numpy(), rtol=1e-5, atol=1e-6)


def test_a_server_that_takes_the_place_of_another_goes_on_to_the_bit():
    values = initial_values(SPECS)
    part = Part(OPTIMIZERS["Adam"], values, SPECS)

    def push(part, step):
        given = gradients(step, SPECS)
        part.push({index: given[index] for index in (1, 4, 5, 6)}, {0: ([7, 2], given[0][:2])})

    push(part, 0)
    push(part, 1)
    assert groups(part) == [(1, 5, 6)]
    kept = part.parameters.dense()
    weights = {index: array.copy() for index, array in kept.weights.items()}
    held = part.parameters.snapshot()
    before = {dtype: block.copy() for dtype, block in held.weights.items()}
    other = Part(OPTIMIZERS["Adam"], [kept.weights.get(i, value) for i, value in enumerate(values)], SPECS)
    other.parameters.restore_optimizers(kept)
    other.parameters.version = kept.version
    for step in (2, 3):
        for each in (part, other):
            push(each, step)
    assert groups(other) == [(1, 5, 6)]
    for one, another in zip(part.values(), other.values(), strict=True):
        np.testing.assert_array_equal(one, another)
    for index, array in weights.items():
        np.testing.assert_array_equal(kept.weights[index], array)  # what was given away is never written again
    for dtype, block in before.items():
        np.testing.assert_array_equal(held.weights[dtype], block)


def test_the_learning_rate_stays_when_variables_are_taken_apart():
    part = Part(OPTIMIZERS["SGD"], initial_values(SPECS), SPECS)
    part.parameters.set_learning_rate(0.25)
    part.push(gradients(0, SPECS))
    part.parameters.apply(part.make({1: gradients(1, SPECS)[1]}, learning_rate=0.5))
    assert part.parameters.learning_rate == 0.25
    assert int(part.parameters.optimizers.parts[0].shared["iterations"].numpy()) == 2


@pytest.mark.parametrize("name", deep_but(["Adam", "AdamW", "Lamb", "Adam with clipnorm"], "Lamb"))
def test_xla_gets_nothing_to_put_together(name):
    make = OPTIMIZERS | {
        "Lamb": lambda: keras.optimizers.Lamb(0.01),
        "Adam with clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=1.0),
    }
    part = Part(make[name], initial_values(SPECS), SPECS)
    kind = tf.types.experimental.ConcreteFunction
    known = [each for each in gc.get_objects() if isinstance(each, kind)]
    others = {id(each) for each in known}
    for step in range(3):
        part.push(gradients(step, SPECS))
    part.values()
    made = [each for each in gc.get_objects() if isinstance(each, kind) and id(each) not in others]
    found = [each for function in made for each in (function.function_def, *_called_by(function))]
    compiled = [each for each in found if each.attr["_XlaMustCompile"].b]
    assert compiled
    for each in compiled:
        operations = {node.op for node in each.node_def}
        assert not operations & {"ConcatV2", "Pack", "GatherV2", "DynamicStitch"}, operations


def _called_by(function):
    return function.graph.as_graph_def().library.function


def test_constraints_clipping_by_a_norm_and_own_classes_keep_variables_apart():
    class Own(keras.optimizers.Adam):
        elementwise = True

    for make in (
        lambda: Own(0.01),
        lambda: keras.optimizers.Adam(0.01, clipnorm=1.0),
        lambda: keras.optimizers.Lamb(0.01),
    ):
        assert not groups(Part(make, initial_values(SPECS), SPECS))
    constraint = '{"module": "keras.constraints", "class_name": "NonNeg", "config": {}, "registered_name": null}'
    specs = [*SPECS[:5], VariableSpec("head/kernel", (6, 3), "float32", True, constraint=constraint), SPECS[6]]
    part = Part(OPTIMIZERS["Adam"], initial_values(specs), specs)
    assert groups(part) == [(0, 1, 6), (2, 4)]
    part.push(gradients(0, specs))
    assert (part.values()[5] >= 0).all()


def test_groups_are_of_one_kind_and_not_too_large(monkeypatch):
    monkeypatch.setattr(joined, "MOST_ELEMENTS", 10)
    sizes = {0: 4, 1: 6, 2: 4, 3: 11, 4: 5, 5: 1, 6: 1}
    kinds = {0: "a", 1: "a", 2: "a", 3: "a", 4: "a", 5: "b", 6: "b"}
    assert groups_of(kinds, sizes) == [(0, 1), (5, 6)]
    assert groups_of({}, {}) == []


def test_the_order_of_updates_makes_no_difference_to_what_stays_joined():
    kinds = [((0, 1, 2), ()), ((2, 3, 4), (7,)), ((5, 6), (0,))]
    found = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        left = [tuple(range(10))]
        for place in order:
            left = parted(left, *kinds[place])
        found.append(sorted(left))
    assert found[0] == found[1] == found[2] == [(3, 4), (5, 6), (8, 9)]


def test_large_joined_variables_are_loaded_at_once():
    specs = [VariableSpec(f"dense_{i}/kernel", (3, 5), "float32", True) for i in range(20)]
    part = Part(OPTIMIZERS["Adam"], initial_values(specs), specs)
    values = initial_values(specs, seed=7)
    state = part.parameters.optimizers.state()
    for place, key in enumerate(state.slots):
        state.slots[key] = np.full((3, 5), place, np.float32)
    part.parameters.load(dict(enumerate(values)), state, 5)
    for got, value in zip(part.values(), values, strict=True):
        np.testing.assert_array_equal(got, value)
    for key, slot in part.parameters.optimizers.state().slots.items():
        np.testing.assert_array_equal(slot, state.slots[key])
