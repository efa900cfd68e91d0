from __future__ import annotations

import contextlib
import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


@pytest.fixture(autouse=True)
def early_xla(monkeypatch):
    """From the second version on, so that a few pushes test an update both ways."""
    from elasticcb.ps import parameters

    monkeypatch.setattr(parameters, "FIRST_VERSION_BY_XLA", 1)


@pytest.fixture
def start():
    """Starts servers with the optimizers that a function makes; gives a client of them all."""
    from ps_clients import TrainingControl

    from elasticcb.optimizers.traits import may_split
    from elasticcb.ps.server import PSServer
    from elasticcb.settings import Command, JobSettings, ModelSettings, TrainingSettings

    with contextlib.ExitStack() as stack:

        def servers(make_optimizers, specs, num_ps=2, **training):
            settings = JobSettings(
                command=Command.TRAIN,
                name="test",
                directory="",
                model=ModelSettings(zoo="", definition=""),
                training=TrainingSettings(**training),
            )
            addresses = []
            for _ in range(num_ps):
                server = PSServer(settings, make_optimizers)
                stack.callback(server.stop, 0)
                server.start()
                addresses.append(server.address)
            split = all(map(may_split, make_optimizers(9)))
            client = TrainingControl(addresses, specs, split, 1, not training.get("use_async", True), 5.0)
            stack.callback(client.close)
            return client

        yield servers


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
