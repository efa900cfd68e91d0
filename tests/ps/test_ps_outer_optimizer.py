"""Servers that apply the movements of local training by an outer optimizer."""

import json

import keras
import numpy as np
import pytest

from elasticcb.checkpoint.parts import load_slices
from elasticcb.errors import CheckpointError, UsageError
from elasticcb.optimizers.outer import outer_optimizer
from elasticcb.ps.parameters import Parameters
from elasticcb.sharding.bucket_map import even
from elasticcb.sharding.partition import VariableSpec, pack, partition, unpack
from elasticcb.sharding.push import Push
from helpers_ps import CUT, SPECS, TRAINABLE, alone, initial_values, saved

FIRST = initial_values()


def text_of(optimizer):
    return json.dumps(keras.optimizers.serialize(optimizer))


MEAN = text_of(keras.optimizers.SGD(1.0))
NESTEROV = text_of(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))


def inner():
    return keras.optimizers.SGD(0.5, momentum=0.9)


class Server:
    """One server's parameters, without a server around them."""

    def __init__(self, outer, specs=SPECS, num_ps=1, index=0, part=None, make=inner):
        self.specs, self.slices = specs, partition(specs, num_ps, True)[index]
        values = part.weights if part is not None else self.cut(initial_values(specs))
        version = 0 if part is None else part.version
        self.parameters = Parameters(specs, self.slices, alone(make), values, version, outer_optimizer=outer)
        if part is not None:
            self.parameters.restore_optimizers(part)

    def cut(self, values):
        return {
            part.variable: values[part.variable]
            .reshape(-1)[part.start : part.stop]
            .reshape(part.shape(self.specs[part.variable]))
            for part in self.slices
        }

    def merge(self, *workers):
        """A round of (how far each worker has moved all weights, its batches, the version that it began with)."""
        pushes = []
        for seed, batches, base in workers:
            held = tuple(part.variable for part in self.slices if self.specs[part.variable].trainable)
            blocks = pack(movement(seed, self.specs), self.specs, self.slices, True)
            pushes.append(Push(held, blocks, {}, state_base=base, batches=batches))
        self.parameters.merge(pushes)

    def values(self):
        arrays = [np.zeros(spec.shape, spec.dtype) for spec in self.specs]
        for trainable, blocks in ((True, self.parameters.weights()), (False, self.parameters.snapshot().state)):
            unpack(blocks, self.specs, self.slices, trainable, arrays)
        return arrays


def movement(seed, specs=SPECS):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=spec.shape).astype(spec.dtype) for spec in specs]


def rounds(server, count, first=0):
    """Rounds of two workers, and of a third one that comes late."""
    for number in range(first, first + count):
        version = server.parameters.version
        server.merge((3 * number, 4, version), (3 * number + 1, 6, version), (3 * number + 2, 5, max(version - 8, 0)))


def whole(servers):
    return [sum(arrays[1:], arrays[0]) for arrays in zip(*(server.values() for server in servers), strict=True)]


def assert_same(mine, other, tolerance=0.0):
    for one, two in zip(mine, other, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=tolerance)


def test_sgd_with_the_rate_1_is_the_mean():
    plain, outer = Server(""), Server(MEAN)
    for server in (plain, outer):
        rounds(server, 4)
        server.merge((90, 3, server.parameters.version))  # a worker that is alone
    assert plain.parameters.version == outer.parameters.version == 63
    assert_same(plain.values(), outer.values(), 1e-6)
    mine, other = plain.parameters.optimizer_state(True), outer.parameters.optimizer_state(True)
    assert mine.slots.keys() == other.slots.keys()  # workers hear nothing of the outer optimizer
    assert mine.shared.keys() == other.shared.keys()
    assert int(mine.shared["iterations"]) == int(other.shared["iterations"])


def test_nesterov_momentum_goes_by_the_means_of_rounds():
    server = Server(NESTEROV)
    expected = [value.astype("float64") for value in FIRST]
    velocity = [np.zeros(spec.shape) for spec in SPECS]
    for first, second in ((1, 2), (3, 4), (5, 6)):
        version = server.parameters.version
        server.merge((first, 4, version), (second, 12, version))
        one, two = movement(first), movement(second)
        for index in TRAINABLE:
            gradient = -(4 * one[index] + 12 * two[index]) / 16
            velocity[index] = 0.9 * velocity[index] - 0.7 * gradient
            expected[index] = expected[index] + 0.9 * velocity[index] - 0.7 * gradient
    assert_same(server.values(), expected, 1e-5)


def test_a_constraint_holds_of_what_an_outer_optimizer_makes():
    constraint = json.dumps(keras.saving.serialize_keras_object(keras.constraints.NonNeg()))
    specs = (VariableSpec("bias", (40,), "float32", True, constraint=constraint),)
    server = Server(NESTEROV, specs)
    rounds(server, 2)
    (value,) = server.values()
    assert value.min() == 0 < value.max()


def test_weights_of_16_bits_are_moved():
    specs = (VariableSpec("kernel", (8, 4), "bfloat16", True), VariableSpec("bias", (4,), "float16", True))
    plain, outer = Server("", specs), Server(MEAN, specs)
    for server in (plain, outer):
        rounds(server, 2)
    for mine, other in zip(plain.values(), outer.values(), strict=True):
        np.testing.assert_allclose(mine.astype("float32"), other.astype("float32"), atol=0.1)


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD(0.5, momentum=0.9), keras.optimizers.Adam(0.1)])
def test_what_an_outer_optimizer_holds_is_in_checkpoints_for_any_number_of_servers(tmp_path, optimizer, caplog):
    outer = text_of(optimizer)
    before = [Server(outer, CUT, 2, index) for index in range(2)]
    for server in before:
        rounds(server, 2)
    folder = saved(tmp_path, before, CUT, before[0].parameters.version)
    after = [
        Server(outer, CUT, 3, index, load_slices(folder, CUT, slices, index, even(3)))
        for index, slices in enumerate(partition(CUT, 3, True))
    ]
    for server in [*before, *after]:
        rounds(server, 2, first=5)
    assert_same(whole(before), whole(after))
    assert not caplog.records


@pytest.mark.parametrize(
    ("first", "second"), [("", MEAN), (NESTEROV, ""), (NESTEROV, text_of(keras.optimizers.Adam()))]
)
def test_a_job_with_another_outer_optimizer_takes_what_a_checkpoint_holds_of_the_models(first, second, caplog):
    before = Server(first)
    rounds(before, 2)
    after = Server(second, part=before.parameters.dense())
    assert_same(before.values(), after.values())
    assert after.parameters.optimizer_state(True).shared["iterations"] == 0
    assert ("starts fresh" in caplog.text) == bool(second)
    rounds(after, 1)
    with pytest.raises(CheckpointError, match="with the optimizer SGD, but the job has Adam"):
        Server(second, part=before.parameters.dense(), make=keras.optimizers.Adam)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "sdg",
            "--outer_optimizer=sdg is invalid. Expected one of Keras's optimizers: its name, such as sgd, or the JSON",
        ),
        ('{"class_name": "SGD"', "Keras reports: JSONDecodeError"),
        ('{"class_name": "Dense", "config": {"units": 3}}', "Expected one of Keras's optimizers"),
        ('{"class_name": "SGD", "config": {"rate": 3}}', "not recognized: {'rate': 3}"),
        (text_of(keras.optimizers.SGD(global_clipnorm=1.0)), "Use clipnorm, which clips each variable"),
        (text_of(keras.optimizers.SGD(use_ema=True)), "final weights differ from the weights that it trains"),
    ],
)
def test_what_can_be_no_outer_optimizer_is_refused(text, words):
    with pytest.raises(UsageError) as caught:
        outer_optimizer(text)
    assert words in str(caught.value)


def test_names_and_configs_are_outer_optimizers():
    assert isinstance(outer_optimizer("adam"), keras.optimizers.Adam)
    decay = keras.optimizers.schedules.CosineDecay(1.0, 10)
    made = outer_optimizer(text_of(keras.optimizers.SGD(decay, momentum=0.3)))
    assert (made.momentum, made._learning_rate.decay_steps) == (0.3, 10)
