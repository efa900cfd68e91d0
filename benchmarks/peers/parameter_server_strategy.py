"""The contestant `tf_keras` with `tf.distribute.ParameterServerStrategy`.

    python parameter_server_strategy.py WORKLOAD BATCH_SIZE WORKERS SERVERS STEPS_PER_FUNCTION

This process is the coordinator. It schedules functions of several training steps each (what `steps_per_execution`
does in `fit`, which schedules likewise), so many ahead that no worker ever waits for it.
"""

import json
import os
import socket
import subprocess
import sys
from collections import deque

import tensorflow as tf
import tf_keras
from gate import PARENT_VARIABLE, Course, end_with_parent
from workloads import compiled_model, dataset, module_of

FUNCTIONS_AHEAD = 3  # per worker: one runs, the next is at hand, one is on its way


def main() -> None:
    end_with_parent()
    if "TF_CONFIG" in os.environ:
        serve()
        return
    workload, *numbers = sys.argv[1:]
    batch_size, workers, servers, steps = map(int, numbers)
    start(workers, servers)
    train(workload, batch_size, workers, steps)


def serve() -> None:
    """What a worker or a server does."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc", start=True
    )
    server.join()


def start(workers: int, servers: int) -> None:
    """Starts the other processes."""
    cluster = {
        "worker": [f"127.0.0.1:{free_port()}" for _ in range(workers)],
        "ps": [f"127.0.0.1:{free_port()}" for _ in range(servers)],
        "chief": [f"127.0.0.1:{free_port()}"],
    }
    for role in ("worker", "ps"):
        for index in range(len(cluster[role])):
            config = {"cluster": cluster, "task": {"type": role, "index": index}}
            environment = {**os.environ, "TF_CONFIG": json.dumps(config), PARENT_VARIABLE: str(os.getpid())}
            subprocess.Popen([sys.executable, __file__], env=environment)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def train(workload: str, batch_size: int, workers: int, steps: int) -> None:
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = compiled_model(workload, legacy=True)
        optimizer = module_of(workload).optimizer(tf_keras)
        optimizer.build(model.trainable_variables)
    # As `fit` does it: the mean of the losses, gradients, one update on the servers.
    loss_of = module_of(workload).loss(tf_keras)
    loss_of.reduction = "none"  # under a strategy, tf_keras leaves it to the caller

    def step(batch):
        features, labels = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(labels, model(features, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def several_steps(iterator):
        for _ in tf.range(steps):
            strategy.run(step, args=(next(iterator),))

    batches = iter(coordinator.create_per_worker_dataset(lambda: dataset(batch_size)))
    course = Course()
    ahead: deque = deque()
    while True:
        if not ahead:
            course.wait()
        while len(ahead) < FUNCTIONS_AHEAD * workers and not course.closed:
            ahead.append(coordinator.schedule(several_steps, args=(batches,)))
        if ahead:  # a closed gate lets none be added, so all of them end before the wait
            ahead.popleft().get()
            course.note(steps)


if __name__ == "__main__":
    main()
