"""The main function of a worker."""

from __future__ import annotations

import contextlib
import gc
import logging

from elasticcb.cluster.role import RoleProcess
from elasticcb.compute.registry import backend, check_backend_of_job
from elasticcb.errors import JobOverError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.roles import process
from elasticcb.settings import Command

logger = logging.getLogger(__name__)


def run_worker(worker: RoleProcess) -> None:
    """Joins a master's cluster as a worker, and works until there are no more jobs."""
    process.begin(worker)
    from elasticcb.clients.master import MasterClient
    from elasticcb.worker.functions import FunctionWorker
    from elasticcb.worker.kept_models import KeptModels
    from elasticcb.worker.worker import run_job

    backend()  # before any computation: it may have to hide the devices from TensorFlow
    logger.info("TensorFlow is imported")
    client = MasterClient(worker.master, access=worker.access)
    with process.farewell(client, pb.WORKER, worker.index):
        kept = KeptModels()
        for settings in client.jobs():
            process.begin_job(settings, worker)
            check_backend_of_job(settings.keras_backend)
            before = kept.take(settings)
            spec = process.open_spec(settings, client, before and before.spec)
            with contextlib.suppress(JobOverError), client.joining():
                if settings.command is Command.CALL:
                    FunctionWorker(settings, client, worker.index, spec).run()
                else:
                    assert spec is not None
                    kept.add(run_job(settings, client, worker.index, spec, before))
            gc.collect()  # models and batches are reference cycles, which would keep memory and mapped files
