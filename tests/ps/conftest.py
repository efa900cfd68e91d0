from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


@pytest.fixture
def early_xla(monkeypatch):
    """From the second version on, so that a few pushes test an update both ways. Compiling takes long."""
    from elasticcb.ps import parameters

    monkeypatch.setattr(parameters, "FIRST_VERSION_BY_XLA", 1)


@pytest.fixture
def store(tmp_path):
    """Where rows that don't fit in memory go."""
    from elasticcb.storage.cold_store import ColdStore

    store = ColdStore(tmp_path / "recovery")
    yield store
    store.close()


@pytest.fixture
def start_servers():
    """Starts servers without a model; the arguments are those of `Cluster`."""
    from helpers_ps import Cluster

    with contextlib.ExitStack() as stack:

        def start(*args, **options):
            cluster = Cluster(*args, **options)
            stack.callback(cluster.close)
            return cluster

        yield start


@pytest.fixture
def start(start_servers):
    """Starts servers with the optimizers that a function makes; gives a client of them all."""
    from elasticcb.optimizers.traits import may_split

    def start(make_optimizers, specs, num_ps=2, **training):
        split = all(map(may_split, make_optimizers(9)))
        return start_servers(num_ps, specs, split=split, make_optimizers=make_optimizers, **training).client(1)

    return start


@pytest.fixture
def losing(tmp_path):
    """Starts servers that the test loses."""
    from helpers_ps_lost import Servers

    with contextlib.ExitStack() as stack:

        def start(name="job", **more):
            servers = Servers(tmp_path / name, **more)
            stack.callback(servers.close)
            return servers

        yield start


@pytest.fixture
def pool():
    with ThreadPoolExecutor() as pool:
        yield pool
