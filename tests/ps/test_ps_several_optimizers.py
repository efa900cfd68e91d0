"""Models with several optimizers: each on its own variables, on any number of servers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import keras
import numpy as np
import pytest
from helpers_ps_steps import assert_close, assert_same_state, in_one_process, push_step

from deep_cases import deep_but
from elasticcb.checkpoint.shard_file import SavedFile
from elasticcb.checkpoint.versions import begin_version, finish_version
from elasticcb.errors import ElasticCBError, ModelFileError
from elasticcb.master.initial_model import InitialModel
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.sharding.flat_blocks import unpack_weights
from elasticcb.sharding.partition import VariableSpec
from helpers_ps import gradients, initial_values

pytestmark = pytest.mark.usefixtures("early_xla")
optimizers = keras.optimizers

GAN = (
    VariableSpec("generator/hidden/kernel", (300, 64), "float32", True, optimizer=1),
    VariableSpec("generator/hidden/bias", (64,), "float32", True, optimizer=1),
    VariableSpec("discriminator/embedding/embeddings", (40, 16), "float32", True),
    VariableSpec("discriminator/norm/moving_mean", (64,), "float32", False),
    VariableSpec("discriminator/head/kernel", (64, 2), "float32", True),
    VariableSpec("extra/scale", (), "float32", True, optimizer=2),
)
DISCRIMINATOR, GENERATOR, EXTRA = {2, 4}, {0, 1}, {5}


def three(count=3):
    return [
        optimizers.Nadam(0.01),
        optimizers.Adam(0.02, use_ema=True, ema_momentum=0.9),
        optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    ]


def some(number, variables):
    return {index: gradient for index, gradient in gradients(number, GAN).items() if index in variables}


@pytest.mark.parametrize("servers", deep_but(product([1, 2, 3], [True, False]), (1, True), (2, False)))
def test_each_optimizer_updates_its_own_variables_alone(start, servers):
    num_ps, use_async = servers
    client = start(three, GAN, num_ps, use_async=use_async)
    values = initial_values(GAN)
    client.initialize(InitialModel(values))
    # A critic that is trained more often than its generator, and a third that is trained once.
    steps = [
        some(0, DISCRIMINATOR | GENERATOR | EXTRA),
        some(1, DISCRIMINATOR),
        some(2, GENERATOR),
        some(3, DISCRIMINATOR | GENERATOR),
        some(4, {4}),
    ]
    for dense in steps:
        push_step(client, dense)
    weights, state = in_one_process(three(), GAN, values, steps)
    assert_close(unpack_weights(client.pull(), GAN, client.servers.partition), weights)
    found = client.export().optimizer
    assert_same_state(found, state)
    assert [int(found.shared[name]) for name in ("iterations", "1/iterations", "2/iterations")] == [4, 3, 1]


@pytest.mark.parametrize("num_ps", deep_but([1, 2], 2))
def test_rows_alone_advance_their_optimizer_on_every_server(start, num_ps):
    client = start(lambda count: [optimizers.Adagrad(0.1), *three()[1:]], GAN, num_ps)
    client.initialize(InitialModel(initial_values(GAN)))
    ids = np.array([3, 30])
    values = np.ones((2, 16), np.float32)
    push_step(client, {}, {2: (ids, values)})
    push_step(client, some(0, GENERATOR), {2: (ids, values)})
    dense = np.zeros((40, 16), np.float32)
    dense[ids] = values
    steps = [{2: dense}, {2: dense, **some(0, GENERATOR)}]
    made = [optimizers.Adagrad(0.1), *three()[1:]]
    weights, state = in_one_process(made, GAN, initial_values(GAN), steps)
    assert_close(unpack_weights(client.pull(), GAN, client.servers.partition), weights)
    assert_same_state(client.export().optimizer, state)
    for server in range(num_ps):
        answer = client.servers.call(client.servers.known[server], "Export", pb.ExportRequest())
        assert int(answer.tensors["shared/iterations"]) == 2
        assert int(answer.tensors["shared/1/iterations"]) == 1


def test_the_learning_rate_is_that_of_the_models_own_optimizer(start):
    def two(count):
        return [optimizers.SGD(0.5), optimizers.SGD(0.25)]

    specs = [replace(spec, optimizer=min(spec.optimizer, 1)) for spec in GAN]
    client = start(two, specs)
    client.initialize(InitialModel(initial_values(specs)))
    assert client.learning_rate == 0.5
    ones = {index: np.ones(spec.shape, np.float32) for index, spec in enumerate(specs) if spec.trainable}
    push_step(client, ones, learning_rate=2.0)
    client.set_learning_rate(4.0)
    push_step(client, ones)
    after = unpack_weights(client.pull(), specs, client.servers.partition)
    for index, before in enumerate(initial_values(specs)):
        moved = 0.0 if not specs[index].trainable else 6.0 if specs[index].optimizer == 0 else 0.5
        np.testing.assert_allclose(after[index], before - moved, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_holds_them_all(start, tmp_path):
    client = start(three, GAN)
    client.initialize(InitialModel(initial_values(GAN)))
    push_step(client, some(0, DISCRIMINATOR | GENERATOR | EXTRA))
    push_step(client, some(1, GENERATOR))
    folder = begin_version(tmp_path, 2)
    files = [SavedFile(answer.file, answer.bytes, answer.sha256) for answer in client.save(str(folder))]
    final = finish_version(folder, version=2, specs=GAN, parts=client.servers.partition, files=files)
    other = start(three, GAN, num_ps=3)
    other.initialize(InitialModel(checkpoint=str(final)))
    for each in (client, other):
        push_step(each, some(2, DISCRIMINATOR | GENERATOR | EXTRA))
    assert_same_state(other.export().optimizer, client.export().optimizer, 0)
    with pytest.raises(
        ElasticCBError, match=r"written with the optimizer Nadam, 1/Adam, 2/SGD, .* Adam, 1/Adam, 2/SGD"
    ):
        start(lambda count: [optimizers.Adam(0.01), *three()[1:]], GAN).initialize(InitialModel(checkpoint=str(final)))


def test_averages_of_one_optimizer_become_the_weights_of_its_variables_alone(start):
    client = start(three, GAN)
    client.initialize(InitialModel(initial_values(GAN)))
    for number in range(2):
        push_step(client, some(number, DISCRIMINATOR | GENERATOR))
    before = client.export()
    assert client.finish_training() == 3
    after = client.export().weights
    for index in GENERATOR:
        np.testing.assert_array_equal(after[index], before.optimizer.slots[index, "model_variables_moving_average"])
    for index in DISCRIMINATOR:
        np.testing.assert_array_equal(after[index], before.weights[index])


def test_fewer_optimizers_than_the_model_had_are_an_error(start):
    client = start(lambda count: three()[:2], GAN)
    with pytest.raises(ModelFileError, match=r"first built with 3 optimizers.* on a parameter server it has 2"):
        client.initialize(InitialModel(initial_values(GAN)))


def selecting(count=1):
    """A new optimizer for each kernel, and one for all others."""
    rest = optimizers.SGD(0.1)

    def select(variable):
        return optimizers.Adam(0.01) if variable.path.endswith("kernel") else rest

    return [optimizers.MultiOptimizer(select)]


@pytest.mark.parametrize("num_ps", deep_but([1, 2], 2))
def test_a_function_may_choose_the_optimizer_of_each_variable(start, num_ps):
    specs = [replace(spec, optimizer=0) for spec in GAN]
    client = start(selecting, specs, num_ps)
    client.initialize(InitialModel(initial_values(specs)))
    steps = [gradients(number, specs) for number in range(3)]
    for dense in steps:
        push_step(client, dense)
    weights, state = in_one_process(selecting(), specs, initial_values(specs), steps)
    assert_close(unpack_weights(client.pull(), specs, client.servers.partition), weights)
    found = client.export().optimizer
    assert_same_state(found, state)
    assert found.optimizers == ("0.0/Adam", "0.1/SGD", "0.2/Adam")
    with pytest.raises(ElasticCBError, match=r"MultiOptimizer, which has no learning rate of its own"):
        client.set_learning_rate(0.5)


def test_rows_are_updated_by_the_optimizer_that_a_function_chooses(start):
    specs = [replace(spec, optimizer=0) for spec in GAN]
    client = start(selecting, specs)
    client.initialize(InitialModel(initial_values(specs)))
    ids, values = np.array([3, 30]), np.ones((2, 16), np.float32)
    push_step(client, {}, {2: (ids, values)})
    expected = initial_values(specs)[2]
    expected[ids] -= 0.1
    np.testing.assert_allclose(unpack_weights(client.pull(), specs, client.servers.partition)[2], expected, rtol=1e-5)
