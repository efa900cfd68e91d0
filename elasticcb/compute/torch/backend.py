"""The PyTorch backend."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import keras
import torch

from elasticcb.compute.backend import Backend
from elasticcb.compute.movable import Allowed, movable
from elasticcb.compute.torch.arrays import as_array, tensors_of
from elasticcb.compute.torch.build import build
from elasticcb.compute.torch.gradient_computation import TorchGradients
from elasticcb.compute.torch.local_computation import TorchLocal
from elasticcb.compute.torch.lookups import problems_of
from elasticcb.compute.torch.placed import TorchPlaced
from elasticcb.process.devices import THREADS_VARIABLE
from elasticcb.settings import Mode
from elasticcb.sharding.table_spec import TableSpec
from elasticcb.tf.devices import leave_gpus

OWN_THREADS = "OMP_NUM_THREADS"  # read by PyTorch itself


class TorchBackend(Backend):
    """Keras on PyTorch."""

    build = staticmethod(build)
    computation = TorchGradients
    local_computation = TorchLocal
    placed = TorchPlaced

    forks_with_gpus = False

    def __init__(self) -> None:
        leave_gpus()
        # Otherwise PyTorch starts a thread for each core, in each of several workers on one machine.
        if OWN_THREADS not in os.environ and THREADS_VARIABLE in os.environ:
            torch.set_num_threads(int(os.environ[THREADS_VARIABLE]))

    def outputs(self, model: keras.Model, batch: Any) -> Any:
        model.eval()
        with torch.no_grad():
            return keras.tree.map_structure(as_array, model.predict_step(tensors_of(batch)))

    def data(self, model: keras.Model, batch: Any) -> Any:
        return tensors_of(batch)

    def find_tables(
        self,
        model: keras.Model,
        batch: Any,
        mode: Mode,
        allowed: Allowed,
        local: bool = False,
        validation: Callable[[], Any] | None = None,
    ) -> dict[int, TableSpec]:
        step = {Mode.TRAINING: model.train_step, Mode.EVALUATION: model.test_step}.get(mode, model.predict_step)
        problems = functools.partial(problems_of, model)
        passes = None if validation is None else (lambda: (model.test_step, tensors_of(validation())))
        return movable(model, step, tensors_of(batch), allowed, problems, passes)
