from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


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
