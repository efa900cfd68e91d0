"""`elasticcb train --dry_run`: one batch by one worker, and what the job would do; nothing is kept.

No hook of a callback runs: hooks may write anywhere. Only where each would run is shown.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elasticcb.cli.figures import format_count
from elasticcb.cli.job_folders import JOBS
from elasticcb.errors import UsageError
from elasticcb.master.snapshot import EpochEnd, JobSnapshot, format_metric
from elasticcb.process.log_files import print_line
from elasticcb.settings import MODEL_FOLDER, CheckpointSettings, ClusterSettings, Command, JobSettings, Mode
from elasticcb.settings.job import PeriodicExportSettings

_KIND = "local"  # the cluster that it runs on
_WRITTEN_BY = ("filepath", "filename", "log_dir", "backup_dir")  # attributes of callbacks that name what they write


def dry_run(settings: JobSettings, job_dir: str) -> None:
    """Runs one batch of a training job, and prints what was found.

    Args:
        settings: of the whole job; its directory is a temporary folder, which the caller removes.
        job_dir: the folder or URL that the job would have; "": a new one.

    Raises:
        UsageError: the command does not train.
        ElasticCBError: the job would fail.
    """
    if settings.command is not Command.TRAIN:
        raise UsageError(
            f"--dry_run of `{settings.command.value}` needs --cluster=kubernetes; others apply only to `train`. Remove "
            "it."
        )
    from elasticcb.roles.master import running_cluster

    hosts: list[Any] = []

    def make_host(settings: JobSettings) -> Any:
        from elasticcb.master.keras_host import ModelHost  # imports Keras, while other processes start

        hosts.append(ModelHost(settings))
        return hosts[-1]

    print_line("Dry run: one batch, one worker. Nothing is kept, and no hook of a callback runs.")
    display, one_batch = _LastEpoch(), _one_batch(settings)
    with running_cluster(one_batch, display, make_host=make_host) as run:
        run(one_batch)
        lines = list(_report(settings, one_batch, hosts[0], display.end, job_dir))
    for line in lines:
        print_line(line)


def _one_batch(settings: JobSettings) -> JobSettings:
    checkpoint, cluster = settings.checkpoint, settings.cluster
    return replace(
        settings,
        dry_run=True,
        output="",
        store="",
        exports=PeriodicExportSettings(),
        data=replace(settings.data, bad_records="fail"),
        model=replace(settings.model, callbacks=""),
        checkpoint=CheckpointSettings(
            interval_seconds=0,
            directory_for_init=checkpoint.directory_for_init,
            init_from=checkpoint.init_from,
            init_map=checkpoint.init_map,
        ),
        training=replace(settings.training, num_epochs=1, max_step=1, evaluation_steps=0),
        # As many servers: it depends on them which variables can be tables.
        cluster=ClusterSettings(kind=_KIND, num_workers=1, num_ps=cluster.num_ps),
    )


class _LastEpoch:
    """Shows warnings of the job, and keeps the results of its epoch."""

    end: EpochEnd | None = None

    def update(self, status: JobSnapshot) -> None: ...

    def message(self, text: str) -> None:
        print_line(text)

    def evaluated(self, text: str, of_epoch: bool) -> None: ...

    def epoch_ended(self, end: EpochEnd) -> None:
        self.end = end

    def finish(self, summary: JobSnapshot) -> None: ...

    def close(self) -> None: ...


def _report(
    settings: JobSettings, one_batch: JobSettings, host: Any, end: EpochEnd | None, job_dir: str
) -> Iterator[str]:
    from elasticcb.model.model_file import ModelSpec
    from elasticcb.model.program import job_callbacks

    callbacks = job_callbacks(ModelSpec(settings.model), settings)
    sections: Mapping[str, Iterator[tuple[str, str]]] = {
        "Data": _data(one_batch, host),
        "Model": _model(host),
        "One step": _step(end),
        "Callbacks": _hooks(callbacks, settings),
        "The job would write": _written(callbacks, settings, host, job_dir),
    }
    for title, rows in sections.items():
        listed = list(rows)
        width = max((len(label) for label, _ in listed), default=0) + 2
        yield ""
        yield title
        for label, value in listed:
            yield f"  {label:<{width}}{value}".rstrip()


def _data(settings: JobSettings, host: Any) -> Iterator[tuple[str, str]]:
    from elasticcb.model.input_pipeline import open_pipeline

    for mode, origin in ((Mode.TRAINING, settings.data.training), (Mode.EVALUATION, settings.data.validation)):
        if not origin:
            continue
        yield f"{mode.value} data", origin
        batch = open_pipeline(settings, host.spec, mode).first_batch()
        parts = batch if isinstance(batch, tuple) else (batch,)
        for name, part in zip(("features", "labels", "sample_weight"), parts, strict=False):
            yield from _leaves(f"  {name}", part)


def _leaves(name: str, part: Any) -> Iterator[tuple[str, str]]:
    """Name, dtype and shape of each tensor of a structure."""
    if isinstance(part, Mapping):
        for key, inner in part.items():
            yield from _leaves(f"{name} {key}", inner)
    elif isinstance(part, (tuple, list)):
        for index, inner in enumerate(part):
            yield from _leaves(f"{name} {index}", inner)
    elif part is not None:
        kind = type(part).__name__.replace("EagerTensor", "")
        yield name, f"{kind} {part.dtype.name} {list(part.shape)}".lstrip()


def _model(host: Any) -> Iterator[tuple[str, str]]:
    for spec in host.variables:
        if spec.table:
            rows = f"{format_count(spec.shape[0])} rows" if spec.shape[0] else "rows made on first use"
            yield spec.path, f"{spec.dtype}, a table on the servers: {rows}, of {spec.shape[1]} numbers each"
        else:
            fixed = "" if spec.trainable else ", not trainable"
            yield spec.path, f"{spec.dtype} {list(spec.shape)}{fixed}"


def _step(end: EpochEnd | None) -> Iterator[tuple[str, str]]:
    for name, value in ({} if end is None else end.logs).items():
        yield name, format_metric(value)


def _hooks(callbacks: Sequence[Any], settings: JobSettings) -> Iterator[tuple[str, str]]:
    """Where the hooks of each would run. Raises `UsageError` when the job can't have them."""
    from elasticcb.callbacks.placement import Place, hooks_at, overridden_hooks
    from elasticcb.callbacks.shared_attributes import check_hooks

    check_hooks(callbacks, settings)
    for callback in callbacks:
        hooks = overridden_hooks(callback).keys()
        placed = {place.value: hooks_at(callback, place, hooks) for place in (Place.MASTER, Place.WORKER)}
        shown = "; ".join(
            f"{place}: {', '.join(hook for hook in hooks if hook in here)}" for place, here in placed.items() if here
        )
        yield type(callback).__name__, shown or "no hooks"
    if not callbacks:
        yield "none", ""


def _written(callbacks: Sequence[Any], settings: JobSettings, host: Any, job_dir: str) -> Iterator[tuple[str, str]]:
    checkpoint = settings.checkpoint
    recovery = f", and recovery files every {checkpoint.interval_seconds:g} s" if checkpoint.interval_seconds else ""
    yield "job's folder", f"{job_dir or os.path.join(JOBS, f'train-{settings.name}-TIME')}: logs, status{recovery}"
    if checkpoint.directory:
        when = f"every {format_count(checkpoint.steps)} versions and at the end" if checkpoint.steps else "at the end"
        kept = f"the newest {checkpoint.keep_max}" if checkpoint.keep_max else "all"
        place = f"{MODEL_FOLDER} in the job's folder" if settings.keeps_model_in_folder else checkpoint.directory
        yield "checkpoints", f"{place}: {when}; {kept} are kept"
    if settings.output:
        inputs = ", ".join(f"{each.name} {each.dtype}" for each in host.saved_model_inputs())
        yield "SavedModel", f"{settings.output}{f', with the inputs {inputs}' if inputs else ''}"
    for callback in callbacks:
        for attribute in _WRITTEN_BY:
            path = getattr(callback, attribute, None)
            if isinstance(path, (str, os.PathLike)) and os.fspath(path):
                yield type(callback).__name__, os.fspath(path)
