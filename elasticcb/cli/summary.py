"""What is printed when a job is over: its exact accounting, and how to use what it made."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from elasticcb.master.snapshot import JobSnapshot, SavedModelInput
from elasticcb.settings import Command

_LABEL_WIDTH = 34  # the accounting's first column, in characters


def format_seconds(seconds: float) -> str:
    """0.4 -> "0.4 s", 75 -> "1:15", 3700 -> "1:01:40"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_count(count: int) -> str:
    """1234567 -> "1,234,567"."""
    return f"{count:,}"


def format_metric(value: float) -> str:
    """Five significant digits."""
    return f"{value:.5g}"


def format_places(places: Iterable[int]) -> str:
    """(1, 3) -> "1, 3"."""
    return ", ".join(map(str, places))


def summary_lines(summary: JobSnapshot) -> list[str]:
    """The summary as lines of plain text."""
    verb = {Command.TRAIN: "Training", Command.EVALUATE: "Evaluation", Command.PREDICT: "Prediction"}
    assert summary.command is not None
    lines = [f"{verb[summary.command]} is done, in {format_seconds(summary.seconds)}."]
    if summary.stopped_early:
        lines.append(f"It ended early: {summary.stopped_early}")
    lines += ["", *(f"  {label:<{_LABEL_WIDTH}}{value}" for label, value in _accounting(summary))]
    if summary.metrics:
        what = "Metrics" if summary.command is Command.EVALUATE else "Metrics of the last evaluation"
        lines += ["", f"{what}:"]
        width = max(map(len, summary.metrics)) + 2
        lines += [f"  {name:<{width}}{format_metric(value)}" for name, value in summary.metrics.items()]
    if summary.saved_model_path:
        lines += ["", *_saved_model(summary)]
    if summary.predictions_path:
        lines += ["", f"Predictions, one row per record in the order of the data: {summary.predictions_path}"]
    if summary.checkpoint_path:
        lines += ["", f"Newest checkpoint: {summary.checkpoint_path}"]
    if summary.directory:
        lines += ["", f"Logs: {summary.directory}"]
        lines += [f"  {file}" for file in summary.log_files]
    return lines


def _accounting(summary: JobSnapshot) -> Iterator[tuple[str, str]]:
    if summary.command is Command.TRAIN:
        for epoch, records in enumerate(summary.records_per_epoch, 1):
            yield f"records trained in epoch {epoch}", format_count(records)
        more = summary.records_repeated
        yield "records trained more than once", f"{'at most ' if more else ''}{format_count(more)}"
    if summary.command is not Command.PREDICT and (summary.records_evaluated or summary.metrics):
        yield "records evaluated, once each", format_count(summary.records_evaluated)
    if summary.command is Command.PREDICT:
        yield "records predicted", format_count(summary.records_predicted)
        again = summary.records_repeated
        if again:
            yield "records predicted more than once", f"at most {format_count(again)}"
    yield "tasks tried again", format_count(summary.tasks_retried)
    if summary.command is Command.TRAIN:
        yield "gradients rejected as too old", format_count(summary.gradients_rejected)
        yield "batches skipped (NaN or infinity)", format_count(summary.batches_skipped)
    if summary.checkpoints_failed:
        yield "checkpoints not written", format_count(summary.checkpoints_failed)
    if summary.callback_errors:
        yield "errors in callbacks", format_count(summary.callback_errors)
    if summary.refused_calls:
        counts = (f"{format_count(count)} {reason}" for reason, count in summary.refused_calls.items())
        yield "calls refused", ", ".join(counts)
    yield "workers lost", f"{summary.workers.lost}, of them replaced: {summary.workers.replaced}"
    if summary.stragglers_ever:
        yield "stragglers among the workers", format_places(summary.stragglers_ever)
    if summary.tasks_split:
        yield "tasks split for idle workers", format_count(summary.tasks_split)
    yield "parameter servers lost", f"{summary.servers.lost}, of them replaced: {summary.servers.replaced}"
    if summary.servers.replaced:
        yield "longest recovery of one", format_seconds(summary.longest_server_recovery)
    if summary.updates_lost:
        yield "updates lost with them", format_count(summary.updates_lost)
    yield "model version", format_count(summary.version)
    if summary.seconds_to_first_step is not None:
        yield "time to the first training step", format_seconds(summary.seconds_to_first_step)


def _saved_model(summary: JobSnapshot) -> Iterator[str]:
    path = summary.saved_model_path
    yield f"SavedModel: {path}"
    yield "Use it from Python, with TensorFlow alone:"
    yield "  import tensorflow as tf"
    yield f"  model = tf.saved_model.load({path!r})"
    if summary.saved_model_inputs:
        yield f'  print(model.signatures["serving_default"]({_arguments(summary.saved_model_inputs)}))'
    else:
        yield '  print(model.signatures["serving_default"].structured_input_signature)'
    yield "See its inputs and outputs:"
    yield f"  saved_model_cli show --dir {shlex.quote(path)} --tag_set serve --signature_def serving_default"


def _arguments(inputs: tuple[SavedModelInput, ...]) -> str:
    """Example inputs: one record of zeros."""
    values = {
        entry.name: f"tf.zeros({[1 if size is None else size for size in entry.shape]}, {entry.dtype!r})"
        for entry in inputs
    }
    if all(name.isidentifier() for name in values):
        return ", ".join(f"{name}={value}" for name, value in values.items())
    return "**{" + ", ".join(f"{name!r}: {value}" for name, value in values.items()) + "}"
