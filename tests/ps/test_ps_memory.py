"""What a parameter server takes for a large model: no copy of the weights that it does not need."""

from __future__ import annotations

import os
import subprocess
import sys

from elasticcb.cluster.role import common_environment

# The most that merges and reads take for each byte of weights: weights, two slots, a movement with its slots (3), what
# is read meanwhile, and new weights or one slot while they are made.
_MOST = 8.5
_SMALL, _LARGE = 4, 20  # layers of 12 MB

# Servers that are forked, as a job's are: they share the import.
_SERVERS = """
import os
import sys

import numpy as np
from elasticcb.ps.parameters import Parameters
from elasticcb.sharding.push import Push
from elasticcb.sharding.partition import VariableSpec, partition

def resident(kind):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(kind))

def serve(layers):
    specs = [VariableSpec(f"dense_{i}/kernel", (1732, 1732), "float32", True) for i in range(layers)]
    before = resident("VmRSS")
    zeros = {i: np.zeros(spec.shape, np.float32) for i, spec in enumerate(specs)}
    server = Parameters(specs, partition(specs, 1, True)[0], lambda count: [], zeros)
    del zeros
    moved = np.ones(sum(spec.elements for spec in specs), np.float32)
    names = [f"slots/{i}/{name}" for i in range(layers) for name in ("momentum", "velocity")]
    slots = {name: np.ones(specs[0].shape, np.float32) for name in names}
    for version in range(4):
        read = server.snapshot()
        server.merge([Push(1, {"float32": moved}, optimizers=slots, base=max(0, version - 1))])
    print(resident("VmHWM") - before, moved.nbytes, flush=True)

for layers in map(int, sys.argv[1:]):
    if os.fork() == 0:
        serve(layers)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_a_merge_into_a_large_model_takes_few_copies_of_it():
    environment = os.environ | common_environment("INFO") | {"CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-c", _SERVERS, str(_SMALL), str(_LARGE)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    (small, small_weights), (large, large_weights) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert (large - small) / (large_weights - small_weights) < _MOST
