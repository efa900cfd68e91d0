"""A server without embedding tables needs neither TensorFlow nor Keras, and little else."""

from __future__ import annotations

import json
import subprocess
import sys

# The most that it may take before it holds a model, in MB.
_MOST_MEMORY = 120

_SERVER = """
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
    done = subprocess.run([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["weights"] == [1.0, 1.0, 1.0]
    assert found["imported"] == []
    assert found["memory"] < _MOST_MEMORY
