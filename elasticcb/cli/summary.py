"""The summary at the end of a job: its exact accounting, and how to use its results."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from elasticcb.cli.formats import format_count, format_places, format_seconds
from elasticcb.master.snapshot import JobSnapshot, ProcessCounts, SavedModelInput, format_metric
from elasticcb.settings import Command

_LABEL_WIDTH = 34  # width of the accounting's first column, in characters
_MOST_RUNS = 6  # groups of epochs with equally many records to list


def summary_lines(summary: JobSnapshot) -> list[str]:
    """The summary as lines of text: results, accounting, then faults if there were any."""
    verb = {Command.TRAIN: "Training", Command.EVALUATE: "Evaluation", Command.PREDICT: "Prediction"}
    assert summary.command is not None
    lines = [f"{verb[summary.command]} is done, in {format_seconds(summary.seconds)}."]
    if summary.stopped_early:
        lines.append(f"It ended early: {summary.stopped_early}")
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
    for part in (_accounting(summary), _faults(summary)):
        rows = [f"  {label:<{_LABEL_WIDTH}}{value}" for label, value in part]
        lines += ["", *rows] if rows else []
    if summary.directory:
        lines += ["", f"Logs: {summary.directory}/logs"]
    return lines


def _accounting(summary: JobSnapshot) -> Iterator[tuple[str, str]]:
    if summary.command is Command.TRAIN:
        yield "records trained", f"{format_count(summary.records_trained)}{_by_epoch(summary.records_per_epoch)}"
    if summary.command is not Command.PREDICT and (summary.records_evaluated or summary.metrics):
        yield "records evaluated, once each", format_count(summary.records_evaluated)
    if summary.command is Command.PREDICT:
        yield "records predicted", format_count(summary.records_predicted)
    yield "model version", format_count(summary.version)
    if summary.seconds_to_first_step is not None:
        yield "time to the first training step", format_seconds(summary.seconds_to_first_step)
    if summary.tasks_split:
        yield "tasks split for idle workers", format_count(summary.tasks_split)


def _by_epoch(records: Sequence[int]) -> str:
    """The number of records of each epoch, equal ones together: " (3 epochs of 120, 1 of 96)"."""
    runs = [(len(list(run)), count) for count, run in groupby(records)]
    if len(runs) > _MOST_RUNS:
        return f" ({len(records)} epochs of {format_count(min(records))} to {format_count(max(records))})"
    parts = [f"{epochs} of {format_count(count)}" for epochs, count in runs]
    if parts:
        parts[0] = parts[0].replace(" of", " epoch of" if runs[0][0] == 1 else " epochs of")
    return f" ({', '.join(parts)})" if parts else ""


# Faults that a successful job may have had, by label. A count of 0 is not shown.
FAULTS: Mapping[str, Callable[[JobSnapshot], int]] = {
    "workers lost": lambda job: job.workers.lost,
    "parameter servers lost": lambda job: job.servers.lost,
    "updates lost with them": lambda job: job.updates_lost,
    "task retries": lambda job: job.tasks_retried,
    "duplicate records (at most)": lambda job: job.records_repeated,
    "batches skipped (NaN or infinity)": lambda job: job.batches_skipped,
    "checkpoints not written": lambda job: job.checkpoints_failed,
    "recovery files not written": lambda job: job.recovery_files_failed,
    "errors in callbacks": lambda job: job.callback_errors,
}


def _faults(summary: JobSnapshot) -> Iterator[tuple[str, str]]:
    for label, count_in in FAULTS.items():
        count = count_in(summary)
        if not count:
            continue
        if label == "workers lost":
            yield label, _lost(summary.workers)
        elif label == "parameter servers lost":
            slowest = f", the slowest in {format_seconds(summary.longest_server_recovery)}"
            yield label, _lost(summary.servers, slowest if summary.servers.replaced else "")
        else:
            yield label, format_count(count)
    if summary.refused_calls:
        counts = (f"{format_count(count)} {reason}" for reason, count in summary.refused_calls.items())
        yield "calls refused", ", ".join(counts)
    if summary.stragglers_ever:
        yield "slow workers (stragglers)", format_places(summary.stragglers_ever)


def _lost(counts: ProcessCounts, details: str = "") -> str:
    return f"{format_count(counts.lost)} ({format_count(counts.replaced)} replaced{details})"


def _saved_model(summary: JobSnapshot) -> Iterator[str]:
    path = summary.saved_model_path
    yield f"SavedModel: {path}"
    yield "Use it from Python, with only TensorFlow:"
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
