"""The serialized job of `Cluster.fit` (model, data, callbacks), sent from the caller to workers and servers; and the
callbacks of any job: the user's, and those required by its settings.

It is pickled, so it is only sent to and read by processes with the job's token.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from elasticcb.data.batches import BatchSource
from elasticcb.errors import ElasticCBError, ModelFileError, UsageError, describe, user_traceback
from elasticcb.keras_private import layers_of, seed_generators_of
from elasticcb.model.model_file import building
from elasticcb.model.spec import Spec, input_names
from elasticcb.model.weights import constraint_name
from elasticcb.optimizers.traits import model_optimizers
from elasticcb.process.import_path import adopt_path, caller_path
from elasticcb.serialization import carry, own_modules, process_state
from elasticcb.serialization.library_objects import buffers_of
from elasticcb.serialization.reducers import Hollow
from elasticcb.settings import Command, JobSettings, Mode

if TYPE_CHECKING:
    import keras

    from elasticcb.model.spec import Spec


@dataclass(frozen=True)
class Program:
    """A model, its data by mode, and the callbacks that run on workers.

    Attributes:
        of_servers: further objects that travel without their content, because servers hold it: rows of tables.
        elsewhere: whether workers are other processes.
        rehearsal: what workers are to compute before they train (compute/first_batch.py); None: nothing.
        has_hooks: whether hooks of the user's, or steps, may change attributes after training has begun.
    """

    model: keras.Model
    sources: Mapping[str, BatchSource]
    callbacks: Sequence[keras.callbacks.Callback] = ()
    of_servers: Sequence[Any] = ()
    rehearsal: Any = None
    has_hooks: bool = False
    elsewhere: bool = True

    def dumps(self, folder: Path | None = None) -> tuple[bytes, dict[int, Any], dict[int, Any]]:
        """Serializes it for `ProgramSpec`; returns also the variables that it carries besides the weights, by number:
        those of layers, losses, callbacks and data, but not those of metrics and optimizers. And, if hooks of the
        caller's may set attributes that workers read, all objects, by number.

        Args:
            folder: folder for large arrays, which all processes see.

        Raises:
            UsageError: something in it can't be pickled.
        """
        optimizers = model_optimizers(self.model)
        buffers = buffers_of(layers_of(self.model))
        content_on_servers = Hollow(self.model.weights, self.of_servers, optimizers, buffers=buffers)
        unused_optimizers = Hollow(optimizers=optimizers, portable=True)
        parts = {"model": self.model, "registered": _registered()}
        others = {
            "data": dict(self.sources),
            "callbacks": list(self.callbacks),
            "rehearsal": self.rehearsal,
            "state": process_state.read(),
        }
        program, variables, objects = carry.dumps_graph(
            parts, others, self._names(), content_on_servers, folder, self.elsewhere
        )
        users = [*self.model.metrics, *optimizers]
        own = {id(variable) for user in users for variable in user.variables}
        job = _Job(
            shared=tuple(place for place, variable in enumerate(variables) if id(variable) not in own),
            follows=self.has_hooks,
            process=os.getpid(),
            sys_path=caller_path(),
            program=program,
            optimizers=carry.dumps(optimizers, "model.optimizer", hollow=unused_optimizers),
            constraints=carry.dumps(_constraints(self.model), "a constraint of the model"),
            switches=carry.dumps(process_state.read_switches(), "keras.config"),
        )
        return pickle.dumps(job), {place: variables[place] for place in job.shared}, objects if self.has_hooks else {}

    def _names(self) -> dict[str, Any]:
        """What messages call the objects of the user."""
        given = {f"the {mode} data": each.given for mode, each in self.sources.items()}
        callbacks = {f"callbacks[{type(each).__name__}]": each for each in self.callbacks}
        return {"model": self.model, **given, **callbacks}


@dataclass(frozen=True)
class _Job:
    """Workers read the program; servers, which may use another backend, the optimizers."""

    shared: tuple[int, ...]  # numbers of the variables that processes share besides the weights
    follows: bool  # whether hooks of the caller's may set attributes that workers read
    process: int  # the caller's, whose threads may run the job
    sys_path: list[str]
    program: bytes
    optimizers: bytes
    constraints: bytes
    switches: bytes


class _SpecOfProgram(Spec):
    """Where it is defined, for messages."""

    path = "the model"
    loss_advice = "Pass a loss to `compile`, or let the model add its own losses."

    @property
    def inputs(self) -> Sequence[str] | None:
        return input_names(self.build_model())

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            with building:
                return function(*args, **kwargs)
        except ElasticCBError:
            raise
        except Exception as error:
            raise ModelFileError(
                f"{self.path} can't be used in this process: {describe(error)}", user_traceback(error)
            ) from error


class ProgramSpec(_SpecOfProgram):
    """A serialized job where it runs.

    Args:
        data: result of `Program.dumps`.
        before: that of an earlier job, whose model nobody uses any more.
    """

    is_built = True

    def __init__(self, data: bytes, before: ProgramSpec | None) -> None:
        self._job: _Job = pickle.loads(data)
        self._is_elsewhere = self._job.process != os.getpid()
        self._has_followed = False  # whether attributes were set, besides variables
        self._graph: carry.Graph | None = None
        self._before = before
        with building:
            # The caller's modules are imported from the same paths as in the caller.
            adopt_path(self._job.sys_path)
            if self._is_elsewhere:
                process_state.set_switches(carry.loads(self._job.switches))
            # Servers create constraints from their configs.
            keras.saving.get_custom_objects().update(carry.loads(self._job.constraints))

    def _part(self, name: str) -> Any:
        """One object graph, of which all parts are read at once."""
        if self._graph is None:
            self._graph = self.call(self._read)
        return {**self._graph.parts, **self._graph.others}[name]

    def _read(self) -> carry.Graph:
        before, self._before = self._before, None
        same = before is not None and replace(before._job, program=self._job.program) == self._job
        graph = carry.Graph(self._job.program, before=before._graph if before is not None and same else None)
        if not self._job.follows:
            graph.objects = {}
        if self._is_elsewhere:
            given, used = process_state.write(graph.others["state"])
            if given is not None:
                graph.variables = {n: used if each is given else each for n, each in graph.variables.items()}
            for name, item in graph.parts["registered"].items():
                package, _, own_name = name.rpartition(">")
                with contextlib.suppress(ValueError):  # a class that Keras would not register
                    keras.saving.register_keras_serializable(package, own_name)(item)
        return graph

    @property
    def is_steady(self) -> bool:
        """A hook of a callback may change anything."""
        is_steady = self._graph is not None and self._graph.is_steady and not self._has_followed
        return is_steady and not self._part("callbacks")

    @property
    def followed(self) -> Mapping[int, Any]:
        return {} if self._graph is None else self._graph.objects

    def follow(self) -> None:
        self._has_followed = True
        for source in self._part("data").values():
            source.follow()

    def batch_source(self, mode: Mode) -> BatchSource | None:
        source: BatchSource | None = self._part("data").get(mode)
        return source

    def build_model(self) -> keras.Model:
        model: keras.Model = self._part("model")
        return model

    @property
    def rehearsal(self) -> Any:
        return self._part("rehearsal")

    def make_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The optimizers of the caller's model, as before their first step; new instances."""
        made: list[keras.optimizers.Optimizer] = self.call(carry.loads, self._job.optimizers)
        return made

    def make_callbacks(self) -> list[keras.callbacks.Callback]:
        callbacks: list[keras.callbacks.Callback] = self._part("callbacks")
        return callbacks

    @property
    def variables(self) -> Mapping[int, Any]:
        """The variables that came with their values, by number."""
        assert self._graph is not None
        return {place: self._graph.variables[place] for place in self._job.shared}

    def use_own_seeds(self, index: int) -> None:
        """Makes random layers and functions of this worker draw other numbers than those of workers with other
        indices. The first worker continues with those of the caller."""
        if not index or not self._is_elsewhere:
            return
        process_state.use_own_seeds(index)
        for layer in layers_of(self.build_model()):
            for generator in seed_generators_of(layer):
                process_state.diverge(generator, index)


class CallerSpec(_SpecOfProgram):
    """The job in the process of its caller: the caller's own model and callbacks."""

    def __init__(self, program: Program, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self._program = program
        self._callbacks = list(callbacks)

    def batch_source(self, mode: Mode) -> BatchSource | None:
        return self._program.sources.get(mode)

    def build_model(self) -> keras.Model:
        return self._program.model

    def make_optimizers(self) -> list[keras.optimizers.Optimizer]:
        return model_optimizers(self._program.model)

    def make_callbacks(self) -> list[keras.callbacks.Callback]:
        return self._callbacks


def _registered() -> dict[str, Any]:
    """Classes and functions of the user's that Keras finds by name."""
    objects = keras.saving.get_custom_objects()
    return {name: item for name, item in objects.items() if own_modules.is_of_user(getattr(item, "__module__", ""))}


def _constraints(model: keras.Model) -> dict[str, Any]:
    """What servers need to create the user's own constraints, by the name in `VariableSpec.constraint`."""
    found: dict[str, list[Any]] = {}
    for variable in model.weights:
        constraint = variable.constraint
        if constraint is not None and type(constraint).__module__.partition(".")[0] != "keras":
            found.setdefault(constraint_name(constraint), []).append(constraint)
    return {name: _constraint_source(each) for name, each in found.items()}


def _constraint_source(used: Sequence[Any]) -> Any:
    """A function; or the class, whose config must give the same attributes; or what stands for it and has its only
    object."""
    first = used[0]
    if isinstance(first, types.FunctionType):
        return first
    with contextlib.suppress(Exception):
        copies = [type(each).from_config(each.get_config()) for each in used]
        if all(_shown(copy) == _shown(each) for copy, each in zip(copies, used, strict=True)):
            return type(first)
    if any(_shown(each) != _shown(first) for each in used):
        raise UsageError(
            f"The model has different constraints of the class {type(first).__name__}, which servers can't tell apart: "
            "its get_config() must return all arguments of its constructor."
        )
    return _Given(first)


def _shown(thing: Any) -> str:
    return repr(sorted(vars(thing).items()))


@dataclass(frozen=True)
class _Given:
    """Stands for a class where Keras creates an object from a config."""

    constraint: Any

    def from_config(self, config: Mapping[str, Any]) -> Any:
        return self.constraint


def job_callbacks(spec: Spec, settings: JobSettings) -> list[keras.callbacks.Callback]:
    """Creates the callback objects of one process of the job."""
    import keras

    from elasticcb.callbacks import PeriodicExport, ProgressiveMetrics, SavedModelExporter

    callbacks = spec.make_callbacks()
    if settings.command is not Command.TRAIN and settings.model.definition:
        # The moving averages stay in the training job; its checkpoints and exports have the averaged weights.
        callbacks = [callback for callback in callbacks if not isinstance(callback, keras.callbacks.SwapEMAWeights)]
    wants_export = settings.command is Command.TRAIN and settings.output
    if wants_export and not any(isinstance(callback, SavedModelExporter) for callback in callbacks):
        # First, so that an uploader among the others finds the model.
        callbacks.insert(0, SavedModelExporter())
    if settings.stream.progressive and not any(isinstance(each, ProgressiveMetrics) for each in callbacks):
        callbacks.insert(0, ProgressiveMetrics())
    exports = settings.exports
    if settings.command is Command.TRAIN and exports.directory:
        callbacks.append(PeriodicExport(exports.directory, exports.every, exports.full_every, exports.keep))
    return callbacks


def callback_params(settings: JobSettings, worker_id: int = -1, steps: int | None = None) -> dict[str, Any]:
    """`callback.params`; `worker_id` is -1 on the master. Only the master knows `steps`, the batches of an epoch."""
    exported = settings.output if settings.command is Command.TRAIN else ""
    return {
        "batch_size": settings.training.minibatch_size,
        "epochs": settings.training.num_epochs,
        "steps": steps,
        "verbose": 1,
        "saved_model_path": exported or os.path.join(settings.directory, "saved_model"),
        "checkpoint_path": settings.checkpoint.directory,
        "job_directory": settings.directory,
        "worker_id": worker_id,
        **settings.callback_params,
    }
