"""The master's Keras side: the model that callbacks see, the metrics of evaluation passes, and the settings of each
embedding table: by table name, else by its layer, else for all tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from elasticcb.callbacks import ProgressiveMetrics, SavedModelExporter
from elasticcb.callbacks.dispatch import Dispatcher, HookLogs, check_monitors
from elasticcb.callbacks.placement import Place, holds_predictions, takes_predictions
from elasticcb.callbacks.serving_signature import names_of_outputs, serving_inputs
from elasticcb.callbacks.shared_attributes import check_hooks, shares_state, without_traces
from elasticcb.checkpoint.manifest import read_manifest
from elasticcb.checkpoint.versions import find_latest
from elasticcb.compute.first_batch import check_batch, rehearse
from elasticcb.compute.registry import backend, runs_eagerly
from elasticcb.data.batch_sources.keras_data import warn_of_missing_data
from elasticcb.errors import CallbackError, ElasticCBError, ModelFileError, UsageError
from elasticcb.keras_private import WARNS_OF_EMPTY_EPOCHS
from elasticcb.layers.table_layers import held_ids, held_used, install
from elasticcb.master.callback_arrays import SharedCallbacks
from elasticcb.master.evaluation import Merged
from elasticcb.master.prediction_output import PredictionOutput
from elasticcb.master.snapshot import SavedModelInput
from elasticcb.master.source_counts import SourceCounts
from elasticcb.model.input_pipeline import Pipeline, Sources, open_pipeline
from elasticcb.model.metric_messages import PROGRESSIVE, flatten_outputs, unflatten_outputs
from elasticcb.model.metrics import ModelMetrics
from elasticcb.model.model_file import ModelSpec
from elasticcb.model.program import callback_params, job_callbacks
from elasticcb.model.weights import variable_specs
from elasticcb.optimizers.held_state import (
    check_restored,
    held_variables,
    read_optimizers,
    set_final_weights,
    write_optimizers,
)
from elasticcb.optimizers.state import Key, ModelState, Optimizers, OptimizerState
from elasticcb.optimizers.traits import (
    is_own_class,
    learning_rate_variable,
    may_serve_rows,
    may_split,
    model_optimizers,
    sets_final_weights,
    steps_made,
    unwrapped,
)
from elasticcb.optimizers.variables import StepVariables, described, leaves_of
from elasticcb.predictions.files import check, columns_of
from elasticcb.rpc.tensors import Array
from elasticcb.settings import Command, JobSettings, Mode, WhenFull, written
from elasticcb.settings.table import TableOptions, read_table_options
from elasticcb.sharding.table_state import TableSpec, tables_named
from elasticcb.storage.cold_store import missing_library


class ModelHost:
    """Builds the model once, and holds it for callbacks, metrics and the initial weights.

    Args:
        rehearses: whether workers are to compare their results for the first batch with those here.

    Raises:
        ModelFileError: the model file is unusable.
        DataError: the data can't be read.

    Attributes:
        features_spec: as for `add_serving_endpoint`.
        progressive: whether each batch is evaluated before it is trained.
        stream: the source of training records that grows; None: it has a known size.
    """

    def __init__(self, settings: JobSettings, spec: Any = None, rehearses: bool = False) -> None:
        self.spec = ModelSpec(settings.model) if spec is None else spec
        self.trains, self.in_program = settings.command is Command.TRAIN, not settings.model.definition
        self.of_one_worker = shares_state(settings)
        predicts = settings.command is Command.PREDICT
        self.collects_predictions = predicts and (spec is not None or bool(settings.output))
        self.model: keras.Model = self.spec.build_model()
        self._had_stopped = not self.trains and bool(getattr(self.model, "stop_training", False))
        if self.trains:
            self.spec.require_trainable(self.model)
        self.metrics = ModelMetrics(self.model, self.spec.make_eval_metrics())
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.release)
            mode = Mode.of(settings.command)
            pipeline = open_pipeline(settings, self.spec, mode)
            self.open_ended, self.repeatable = pipeline.open_ended, pipeline.repeatable
            self.stream = pipeline.stream
            pipelines: dict[str, Pipeline] = {mode: pipeline}
            if mode is Mode.TRAINING and (settings.data.validation or self.spec.batch_source(Mode.EVALUATION)):
                pipelines[Mode.EVALUATION] = open_pipeline(settings, self.spec, Mode.EVALUATION)
            self._counts = SourceCounts(settings, pipelines)
            on_error.callback(self._counts.stop)  # the user may have interrupted the job
            with without_traces(self.model, runs_eagerly(self.model)):
                batch, step = self._build(pipelines, mode)
            # A hook may compile the model again, or set attributes that say which slots an optimizer has.
            self.optimizer, self._all_optimizers = getattr(self.model, "optimizer", None), model_optimizers(self.model)
            self._at_start = [(each, _settings_of(each)) for each in map(unwrapped, self._all_optimizers)]
            self.sources: dict[str, Sources] = self._counts.result()
            # With metrics as the first batch has built them.
            self.metrics.reset()
            with without_traces(self.model):
                replayed = self.metrics.try_out(batch)
                data = backend().data(self.model, batch)
                self.rehearsal = rehearse(self.model, batch, data) if rehearses else None
            self.metrics.reset()
            if mode is Mode.TRAINING:
                self.metrics.replayed = replayed
            element = pipeline.element_spec
            self.features_spec = element[0] if mode is not Mode.PREDICTION and isinstance(element, tuple) else element
            self.tables = self._find_tables(settings, batch, pipelines, step)
            self.variables = variable_specs(self.model, step, self.tables)
            self._given = {} if step is None else step.given
            if self.trains and not self.tables and any(map(is_own_class, self._all_optimizers)):
                # It may make variables that it does not list, such as those of an optimizer that it holds.
                held_variables(self.all_optimizers(), self.model.weights, self.variables)
            self.callbacks = Dispatcher(
                job_callbacks(self.spec, settings),
                Place.MASTER,
                callback_params(settings, steps=self._batches(settings)),
                self.model,
                on_error=settings.training.callback_errors,
                in_program=self.in_program,
                one_worker=self.of_one_worker,
            )
            check_hooks(self.callbacks.callbacks, settings)
            callbacks = self.callbacks.callbacks
            self.progressive = self.trains and any(isinstance(each, ProgressiveMetrics) for each in callbacks)
            if self.progressive:
                self.metrics.check_progressive()
            if self.trains and not self.in_program and Mode.EVALUATION not in pipelines:
                check_monitors(self.callbacks.callbacks)
            self.shared_callbacks = SharedCallbacks(self.callbacks.callbacks, settings, self.model, bool(self.tables))
            self.metrics.give_directions(self.callbacks.callbacks)
            # Callbacks on workers may hold results until their hooks have ended.
            self.holds_predictions = predicts and holds_predictions(self.callbacks.callbacks)
            if predicts:
                self._check_predictions(settings, pipeline)
            on_error.pop_all()

    def _build(self, pipelines: Mapping[str, Pipeline], mode: Mode) -> tuple[Any, StepVariables | None]:
        """Builds the model with its first batch; returns the batch, and what its step gives to optimizers."""
        try:
            batch = pipelines[mode].first_batch()
            step = backend().build(self.spec, self.model, batch, mode, pipelines[mode].fixed)
            if mode is Mode.TRAINING and Mode.EVALUATION in pipelines:
                validation = pipelines[Mode.EVALUATION].first_batch()
                if self.metrics.own_steps:
                    backend().build(self.spec, self.model, validation, Mode.EVALUATION)
                else:
                    check_batch(self.spec, self.model, validation, Mode.EVALUATION)
            return batch, step
        except ElasticCBError:
            self._counts.result()  # damaged data explains the error better
            raise

    def _check_predictions(self, settings: JobSettings, pipeline: Pipeline) -> None:
        """Raises `ModelFileError` when nothing would use the predictions, or --output can't have one row per record."""
        if not self.collects_predictions and not takes_predictions(self.callbacks.callbacks):
            raise ModelFileError(
                f"Nothing would take the predictions: no callback that `{settings.model.callbacks}` of "
                f"{self.spec.path} returns has an on_predict_batch_end. Add --output=FILE, such as "
                "--output=predictions.csv, or a callback such as elasticcb.callbacks.PredictionOutputsProcessor."
            )
        if not settings.output:
            return
        if not pipeline.keeps_order:
            raise ModelFileError(
                f"{pipeline.fed_by} drops, multiplies or reorders records in prediction, so "
                "rows of --output can't be matched to records. When `mode` is Mode.PREDICTION, return one example per "
                "record, in their order; or process the predictions in a callback."
            )
        for column in columns_of(
            flatten_outputs(backend().outputs(self.model, pipeline.first_batch())), names_of_outputs(self.model)
        ):
            check(column, settings.output_format)

    def prediction_output(self, settings: JobSettings) -> PredictionOutput:
        """Collects workers' predictions for --output."""
        return PredictionOutput(
            Path(settings.output),
            settings.output_format,
            Path(settings.directory),
            self.sources[Mode.PREDICTION],
            names_of_outputs(self.model),
        )

    def _find_tables(
        self, settings: JobSettings, batch: Any, pipelines: Mapping[str, Pipeline], step: StepVariables | None
    ) -> dict[int, TableSpec]:
        """Which variables are embedding tables, by index: as in the checkpoint that the job starts from, else by
        size."""
        optimizers = self._all_optimizers
        num_ps = settings.cluster.num_ps
        saved: set[int] | None = None
        if settings.checkpoint.directory_for_init:
            manifest = read_manifest(find_latest(settings.checkpoint.directory_for_init))
            saved = {index for index, variable in enumerate(manifest["variables"]) if variable.get("table")}

        def allowed(index: int, size: int) -> bool:
            is_table = size >= settings.embedding.threshold_bytes if saved is None else index in saved
            if not is_table or not self.trains:
                return is_table
            optimizer = optimizers[0 if step is None else step.updated.get(index, 0)]
            if unwrapped(optimizer).global_clipnorm:  # over all gradients, which a worker clips
                return False
            return may_serve_rows(optimizer, num_ps) and (step is None or index in step.updated)

        mode = Mode.of(settings.command)
        validates = mode is Mode.TRAINING and Mode.EVALUATION in pipelines
        validation = pipelines[Mode.EVALUATION].first_batch if validates else None
        found = backend().find_tables(self.model, batch, mode, allowed, validation)
        paths = {index: self.model.weights[index].path.rpartition("/")[0] for index in found}
        return with_settings(found, paths, settings)

    def weights(self) -> tuple[list[Array], dict[int, Array]]:
        """All weights, and the ids of embedding table rows, as in `ModelState`."""
        return [variable.numpy() for variable in self.model.weights], {
            index: ids for index in self.tables if (ids := held_ids(self.model, index)) is not None
        }

    def used(self) -> dict[int, Array]:
        """When embedding table rows were last trained, as in `ModelState`."""
        if not self._continues:  # versions restart at 0
            return {}
        return {index: used for index in self.tables if (used := held_used(self.model, index)) is not None}

    def assign(
        self, weights: Sequence[Array], ids: Mapping[int, Array], used: Mapping[int, Array] | None = None
    ) -> None:
        """Sets all weights; `ids` and `used` as in `ModelState`."""
        for index, (variable, value) in enumerate(zip(self.model.weights, weights, strict=True)):
            if index in ids:
                install(self.model, index, ids[index], value, (used or {}).get(index))
            else:
                variable.assign(value)

    def _batches(self, settings: JobSettings) -> int | None:
        """Batches of an epoch, or of all evaluated or predicted records; None if unknown."""
        size = settings.training.minibatch_size
        if self.stream is not None and settings.stream.records_per_epoch:
            return -(-settings.stream.records_per_epoch // size)
        if self.open_ended or self.stream is not None:
            return None
        return sum(-(-count // size) for _, count in self.sources[Mode.of(settings.command)])

    def saved_model_inputs(self) -> tuple[SavedModelInput, ...]:
        """Inputs of the exported model; empty when it can't be exported."""
        try:
            specs = serving_inputs(self.model, self.features_spec)
        except CallbackError:
            return ()  # the exporter reports why
        return tuple(SavedModelInput(name=spec.name, dtype=spec.dtype.name, shape=tuple(spec.shape)) for spec in specs)

    @property
    def exports(self) -> bool:
        """Whether the job will export a SavedModel."""
        return any(isinstance(callback, SavedModelExporter) for callback in self.callbacks.callbacks)

    @property
    def version(self) -> int:
        """Version of the model at the start: how many updates its optimizers have made."""
        return steps_made(self.optimizers) if self.trains else 0

    def optimizer_state(self) -> OptimizerState | None:
        """State of the optimizers at the start; None if fresh."""
        if not self._continues:
            return None
        return read_optimizers(self.all_optimizers(), self.model.weights, self.variables)

    def fresh_state(self) -> tuple[ModelState, set[Key]]:
        """Weights of an untrained model, and the slots and classes of its optimizers."""
        held = held_variables(self.all_optimizers(), self.model.weights, self.variables)
        weights, ids = self.weights()
        return ModelState(weights, OptimizerState(optimizers=held.optimizers), ids=ids), set(held.slots)

    @property
    def _continues(self) -> bool:
        return self.version > 0

    def set_state(self, state: ModelState) -> None:
        """Sets the model and its optimizers to the servers' state."""
        self.assign(state.weights, state.ids, state.used)
        if self.trains:
            now = [(each, {name: getattr(each, name) for name in settings}) for each, settings in self._at_start]
            _set_all(self._at_start)
            try:
                write_optimizers(state.optimizer, self.all_optimizers(), self.model.weights, self.variables)
            finally:
                _set_all(now)
        if state.ids:
            self.model.train_function = None  # functions traced by Keras have slots with fewer rows

    @property
    def finalizes(self) -> bool:
        """Whether the optimizers set final weights, such as moving averages."""
        found = leaves_of(self._all_optimizers, self.variables, self.model.weights)
        return any(sets_final_weights(leaf.optimizer) for leaf in found)

    def set_final_weights(self, state: ModelState) -> None:
        """Sets the model to the servers' state, and lets the optimizers set the final weights."""
        self.set_state(state)
        set_final_weights(self.all_optimizers(), self.model.weights, self.variables)

    def check_restored(self, state: OptimizerState, checkpoint: str) -> str:
        """A warning of what of the optimizers is not in a checkpoint; "": nothing. Raises `CheckpointError` when the
        checkpoint has something else."""
        if not self.trains:
            return ""
        return check_restored(state, self.all_optimizers(), self.model.weights, self.variables, checkpoint)

    def find_index(self, mode: Mode, file: str) -> bytes:
        """Byte offsets of a file's records, as `FileIndex.to_bytes`; b"" if unknown."""
        return self._counts.find_index(mode, file)

    def release(self) -> None:
        """Returns the model to its owner, in its original state."""
        self.metrics.release()
        if self._had_stopped:  # only `fit` sets it back
            self.model.stop_training = True

    @property
    def may_split(self) -> bool:
        """Whether weights may be split between servers."""
        return self.optimizer is not None and all(map(may_split, self.optimizers))

    @property
    def described(self) -> Optimizers:
        """What servers know of the optimizers."""
        if not self.trains:
            return Optimizers()
        return described(self._all_optimizers, self.variables, self.model.weights)

    @property
    def learning_rate(self) -> keras.Variable | None:
        """The optimizer's learning rate; None with a schedule."""
        return learning_rate_variable(self.optimizer)

    def all_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """All optimizers; those of the model's own step are built in the order in which it gives them variables."""
        found = self._all_optimizers
        for place, optimizer in enumerate(found):
            given = [index for index, own in self._given.items() if own == place]
            if not optimizer.built and any(self.variables[index].trainable for index in given):
                optimizer.build([self.model.weights[index] for index in given])
        return found

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The optimizers that train something. A part of the model that was trained before has its own."""
        used = {spec.optimizer for spec in self.variables if spec.trainable}
        return [each for index, each in enumerate(self._all_optimizers) if index in used]

    @property
    def merges_by_itself(self) -> bool:
        """Whether some metric's states can't be summed."""
        return bool(self.metrics.merging_units)

    def round_logs(self, merged: Merged, version: int) -> HookLogs:
        """`logs` of `on_test_end`, from the states of all tasks of a round."""
        self.metrics.load(merged.states, map(unflatten_outputs, merged.batches))
        results, nested = self.metrics.results(), self.metrics.nested_results()
        return HookLogs(sorted(results.items()), metrics=nested, version=version)

    def warn_of_missing_data(self) -> None:
        """Warns, like Keras, that training data ended too early."""
        if WARNS_OF_EMPTY_EPOCHS or not self.open_ended:
            warn_of_missing_data()

    def training_logs(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Training loss and metrics from the states of an epoch's tasks; 0 if there were no batches."""
        merging = self.metrics.merging_units
        states = {
            name: self.metrics.merge_states(name, values) if name in merging else values
            for name, values in states.items()
        }
        before = {name.removeprefix(PROGRESSIVE): own for name, own in states.items() if name.startswith(PROGRESSIVE)}
        self.metrics.load({name: own for name, own in states.items() if not name.startswith(PROGRESSIVE)})
        logs = self.metrics.results(step="train")
        progressive = self.metrics.results_of(before, "test") if before else {}
        return {**logs, **{f"progressive_{name}": value for name, value in progressive.items()}}


def _settings_of(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    plain = (bool, int, float, str)
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, plain) and name != "built"}


def _set_all(settings: Iterable[tuple[keras.optimizers.Optimizer, Mapping[str, Any]]]) -> None:
    for optimizer, own in settings:
        vars(optimizer).update(own)


def with_settings(
    tables: Mapping[int, TableSpec], paths: Mapping[int, str], settings: JobSettings
) -> dict[int, TableSpec]:
    """The tables with all their settings.

    Raises `UsageError` for a name without a table, and for settings that this job does not support.
    """
    if settings.command is not Command.TRAIN:
        return dict(tables)
    embedding, sets = settings.embedding, written("{embedding_tables} sets", settings.in_program)
    by_name: dict[int, TableOptions] = {}
    for name, given in embedding.tables.items():
        index = _named(name, paths, settings)
        if index in by_name:
            raise UsageError(f"{sets} {paths[index]!r} twice. Remove one of them.")
        by_name[index] = read_table_options(given)[0]
        if not tables[index].initializer:
            _check_given_rows(sets, name, by_name[index])
    of_all = TableOptions(min_count=embedding.min_count, max_age=embedding.max_age, rows_dtype=embedding.rows_dtype)
    found = {}
    for index, table in tables.items():
        options = by_name.get(index, TableOptions()).over(table.options).over(of_all)
        found[index] = replace(table, options=options)
    _check_disk(found, settings)
    return found


def _check_disk(tables: Mapping[int, TableSpec], settings: JobSettings) -> None:
    if not tables or settings.embedding.when_full is not WhenFull.DISK:
        return
    if missing := missing_library():
        raise UsageError(written("{embedding_when_full:disk} is invalid: ", settings.in_program) + missing)
    if not settings.embedding.memory_bytes and not any(table.options.max_rows for table in tables.values()):
        text = (
            "{embedding_when_full:disk} moves rows to disk when tables are full, but this job has no limit for its "
            "tables. Set {embedding_memory_bytes}, or max_rows of a table; or remove {embedding_when_full}."
        )
        raise UsageError(written(text, settings.in_program))


def _named(name: str, paths: Mapping[int, str], settings: JobSettings) -> int:
    """The table with this name: the path of its layer, or the end of it."""
    found = tables_named(name, paths)
    if len(found) == 1:
        return found[0]
    known = ", ".join(repr(path) for path in paths.values()) or "none"
    sets = written("{embedding_tables} sets", settings.in_program)
    if found:
        raise UsageError(
            f"{sets} {name!r}, which matches {len(found)} tables. The tables of the model are: "
            f"{known}. Use one of these names."
        )
    threshold = written("{embedding_threshold_bytes}", settings.in_program)
    raise UsageError(
        f"{sets} {name!r}, which is not an embedding table of the model. Its tables are: {known}. (A "
        f"keras.layers.Embedding becomes a table at {threshold}.)"
    )


def _check_given_rows(sets: str, name: str, options: TableOptions) -> None:
    for setting, value in dataclasses.asdict(options).items():
        if value and setting not in ("learning_rate_multiplier", "rows_dtype"):
            raise UsageError(
                f"{sets} {setting}={value} for {name!r}, a keras.layers.Embedding, which creates all its rows at the "
                "start. Remove the setting, or use an elasticcb.layers.Embedding."
            )
