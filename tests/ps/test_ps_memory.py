"""What a parameter server takes for a large model: no copy of the weights that it does not need."""

from __future__ import annotations

import os
import subprocess
import sys

from elasticcb.cluster.role import common_environment

# The most that updates and reads take for each byte of weights. Five are needed: weights, two slots, a gradient, and
# what workers pull; XLA takes the others. What libraries take, more with some processors, the smaller model has, too.
_MOST = 7.5
_SMALL, _LARGE = 4, 20  # layers of 12 MB

# Servers that are forked, as a job's are: they share the import.
_SERVERS = """
import os
import sys

import keras
import numpy as np
from elasticcb.ps.parameters import Parameters
from elasticcb.sharding.push import Push
from elasticcb.rpc.tensors import aligned
from elasticcb.sharding.partition import VariableSpec, partition

def resident(kind):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(kind))

def serve(layers):
    specs = [VariableSpec(f"dense_{i}/kernel", (1732, 1732), "float32", True) for i in range(layers)]
    before = resident("VmRSS")
    zeros = {i: np.zeros(spec.shape, np.float32) for i, spec in enumerate(specs)}
    server = Parameters(specs, partition(specs, 1, True)[0], lambda count: [keras.optimizers.Adam(0.001)], zeros)
    del zeros
    gradient = aligned((sum(spec.elements for spec in specs),), np.float32)
    gradient[:] = 1.0
    for _ in range(4):
        server.apply(Push(tuple(range(layers)), {"float32": gradient}, {}, updated=frozenset(range(layers))))
        server.weights()
    print(resident("VmHWM") - before, gradient.nbytes, flush=True)

for layers in map(int, sys.argv[1:]):
    if os.fork() == 0:
        serve(layers)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_an_update_of_a_large_model_takes_few_copies_of_it():
    environment = os.environ | common_environment("INFO") | {"CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-c", _SERVERS, str(_SMALL), str(_LARGE)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    (small, small_weights), (large, large_weights) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert (large - small) / (large_weights - small_weights) < _MOST
