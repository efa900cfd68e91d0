"""The contestant ElasticCB: `Cluster.fit` with a master in this process, workers and servers in their own.

python elastic.py WORKLOAD BATCH_SIZE 'ARGUMENTS OF Cluster AS JSON'

BENCHMARK_HOST in the environment is where the processes listen; without it, a folder of sockets. With
BENCHMARK_INSECURE they do without TLS there.
"""

import json
import os
import sys

import keras
from gate import Course, end_with_parent
from workloads import compiled_model, dataset

import elasticcb
from elasticcb.callbacks import every

# A hook gets a model with present weights; called for each batch, it would cost what a real one costs there.
STEPS_PER_STAMP = 10


@every(STEPS_PER_STAMP)
class Steps(keras.callbacks.Callback):
    """Each worker has a copy of its own, which makes its course when it is first used."""

    def __init__(self):
        super().__init__()
        self._course = None

    def on_train_batch_end(self, batch, logs=None):
        if self._course is None:
            self._course = Course()
        self._course.stepped(STEPS_PER_STAMP)


def main() -> None:
    end_with_parent()
    workload, batch_size, arguments = sys.argv[1:]
    size = int(batch_size)
    model = compiled_model(workload, legacy=False)
    given = json.loads(arguments)
    given["exchange"] = elasticcb.ExchangeOptions(**given["exchange"])
    host, insecure = os.environ.get("BENCHMARK_HOST", ""), "BENCHMARK_INSECURE" in os.environ
    network = elasticcb.NetworkOptions(host=host, insecure=insecure)
    with elasticcb.Cluster(**given, network=network) as cluster:
        cluster.fit(model, lambda: dataset(size), steps_per_epoch=1_000_000_000, callbacks=[Steps()], verbose=0)


if __name__ == "__main__":
    main()
