"""The PyTorch backend."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import keras
import torch

from elasticcb.compute.backend import Backend
from elasticcb.compute.dense_batches import arrays_of, repeated
from elasticcb.compute.first_batch import check_batch, fixed_batch_size, told_with_batch
from elasticcb.compute.movable import Allowed, movable
from elasticcb.compute.priming import kept, make_variables, prime_training
from elasticcb.compute.torch.arrays import as_array, tensors_of
from elasticcb.compute.torch.computation import TorchComputation, step_variables
from elasticcb.compute.torch.lookups import problems_of
from elasticcb.model.model_file import building
from elasticcb.model.spec import Spec
from elasticcb.optimizers.variables import StepVariables
from elasticcb.process.devices import THREADS_VARIABLE
from elasticcb.settings import Mode
from elasticcb.sharding.table_spec import TableSpec
from elasticcb.tf.devices import leave_gpus


def build(spec: Spec, model: keras.Model, batch: Any, mode: Mode) -> StepVariables | None:
    """See `Backend.build`."""
    check_batch(spec, model, batch, mode)
    with told_with_batch(spec, batch, mode), building:
        make_variables(model, tensors_of(batch))
        size = fixed_batch_size(model)
        tensors = tensors_of(batch if size is None else repeated(arrays_of(batch), size))
        if mode is Mode.TRAINING:
            return prime_training(model, tensors, _run_unchanged, step_variables)
        _run_unchanged(model, model.test_step if mode is Mode.EVALUATION else model.predict_step, tensors)
    return None


def _run_unchanged(model: keras.Model, step: Callable[[Any], Any], batch: Any) -> None:
    """Runs a step and restores the model, including changes by layers in `call` and the seeds that they use."""
    model.eval()
    with kept(model), torch.no_grad():
        step(batch)


OWN_THREADS = "OMP_NUM_THREADS"  # read by PyTorch itself


class TorchBackend(Backend):
    """Keras on PyTorch."""

    build = staticmethod(build)
    computation = TorchComputation
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
        validation: Callable[[], Any] | None = None,
    ) -> dict[int, TableSpec]:
        step = {Mode.TRAINING: model.train_step, Mode.EVALUATION: model.test_step}.get(mode, model.predict_step)
        problems = functools.partial(problems_of, model)
        passes = None if validation is None else (lambda: (model.test_step, tensors_of(validation())))
        return movable(model, step, tensors_of(batch), allowed, problems, passes)
