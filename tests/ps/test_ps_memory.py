"""What a parameter server takes: for a large model no copy that it does not need, and little before it has one."""

from __future__ import annotations

import json
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


# ---------------------------------------------------------------- without embedding tables: no TensorFlow, no Keras


# The most that it may take before it holds a model, in MB.
_MOST_AT_THE_START = 120

_STARTED = """
import json, re, sys

import numpy as np

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.server import PSServer
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Frame
from elasticcb.settings import Command, JobSettings, ModelSettings
from elasticcb.sharding.partition import VariableSpec

def never(count):
    raise AssertionError("the user's program is opened")

server = PSServer(JobSettings(command=Command.TRAIN, name="job", directory="", model=ModelSettings()), never)
server.start()
connection = Connection(server.address, "the server", patience_seconds=5)
spec = VariableSpec("kernel", (3,), "float32", True)
request = pb.InitializeRequest(variables=[spec.to_message()], num_ps=1, optimizers=["Adam"], learning_rate=0.5)
zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
connection.call(PS_METHODS["Initialize"], Frame(request, {"weights/float32": zeros}))
push = pb.ExchangeRequest(worker_id=1, sequence=1, batches=1, base=0, known_version=-1, pull=True)
answer = connection.call(PS_METHODS["Exchange"], Frame(push, {"moved/float32": ones, "slots/0/momentum": ones}))
print(json.dumps({
    "weights": answer.tensors["weights/float32"].tolist(),
    "imported": [name for name in ("tensorflow", "keras", "jax", "torch") if name in sys.modules],
    "memory": int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024,
}))
connection.close()
server.stop(0)
"""


def test_a_server_without_tables_trains_without_keras():
    done = subprocess.run([sys.executable, "-c", _STARTED], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["weights"] == [1.0, 1.0, 1.0]
    assert found["imported"] == []
    assert found["memory"] < _MOST_AT_THE_START
