"""Generates tables of the docs from the settings and from tables in the code.

`python lint/reference.py docs/*.md` updates the pages; a test fails if they are outdated.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import rich_click as click
from prometheus_client.samples import Sample

from elasticcb.cli.command import help_of, metavar_of
from elasticcb.cli.serve import rollback, serve
from elasticcb.errors import ExitCode
from elasticcb.master.members import Role
from elasticcb.master.prometheus import JobCollector
from elasticcb.master.snapshot import JobSnapshot, PartitionLag, ProcessSnapshot
from elasticcb.master.task import TaskState, TaskType
from elasticcb.process.stats import TableSize, histograms
from elasticcb.serving.exports import Export
from elasticcb.serving.service import ServingMetrics
from elasticcb.settings import Command, written
from elasticcb.settings.definition import ALL, CLUSTER, PANELS, Setting, settings_of
from elasticcb.settings.names import EVERYDAY, GROUPED, GROUPS, SETTINGS
from elasticcb.settings.table import TableOptions

_MEANINGS = {
    ExitCode.DONE: "The job succeeded.",
    ExitCode.JOB_FAILED: (
        "The job failed: because of the model file, the data, a callback, or lost processes; or it is done, but its "
        "last checkpoint could not be written; or an image could not be built or pushed."
    ),
    ExitCode.WRONG_USAGE: "Flags or the config file are invalid or contradictory; nothing was started.",
    ExitCode.INTERRUPTED: "Interrupted with Ctrl-C, or a job by SIGTERM.",
}


def options_tables() -> str:
    """One Markdown table for each group of flags, as `--help` groups them."""
    return "\n\n".join(f"### {panel}\n\n{_options_table(panel)}" for panel in PANELS)


def exit_codes_table() -> str:
    rows = [f"| {code.value} | `{code.name}` | {_MEANINGS[code]} |" for code in ExitCode]
    return "\n".join(["| code | name | when |", "|---|---|---|", *rows])


def _options_table(panel: str) -> str:
    options = [option for option in SETTINGS.values() if option.panel == panel]
    # A column only where the commands differ.
    differ = len({option.commands for option in options}) > 1
    intro = "" if differ or options[0].commands == ALL else f"For {_commands(options[0].commands)}.\n\n"
    rows = []
    for option in options:
        value = metavar_of(option).replace("|", "\\|")
        flags = ", ".join((f"`--{option.name}={value}`", *(f"`--{alias}`" for alias in option.aliases)))
        default = written(option.default_text, False) or ("" if option.default is None else f"`{option.default}`")
        commands = f" {'all' if option.commands == ALL else _commands(option.commands)} |" if differ else ""
        rows.append(f"| {flags} | {default} |{commands} {help_of(option)} |")
    titles = ["flag", "default", *(["commands"] if differ else []), "what it does"]
    return intro + "\n".join([f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), *rows])


def _commands(commands: frozenset[Command]) -> str:
    return ", ".join(command.value for command in Command if command in commands)


def serve_flags_table() -> str:
    """The flags of `elasticcb serve`, and of its `rollback`."""
    return "\n\n".join(f"`elasticcb {name} FOLDER`:\n\n{_flags_table(command)}" for name, command in _SERVE.items())


_SERVE = {"serve": serve, "serve rollback": rollback}


def _flags_table(command: click.Command) -> str:
    rows = []
    for option in command.params:
        if isinstance(option, click.Option):
            flag = option.opts[0] if option.is_flag else f"{option.opts[0]}={option.metavar}"
            default = f"`{option.default}`" if option.show_default is True else option.show_default or ""
            rows.append(f"| `{flag}` | {default} | {option.help} |")
    return "\n".join(["| flag | default | what it does |", "|---|---|---|", *rows])


def arguments_table() -> str:
    """The arguments of `Cluster` that are settings, with their flags: its own, then the fields of each group."""
    own = sorted(EVERYDAY.values(), key=lambda setting: setting.panel != CLUSTER)
    rows = [("Cluster(…)", own)]
    rows += [(f"{group}=elasticcb.{owner.__name__}(…)", GROUPED[group]) for group, owner in GROUPS.items()]
    lines = [f"| `{call}` | {', '.join(map(_with_flag, settings))} |" for call, settings in rows]
    return "\n".join(["| arguments of | and their flags |", "|---|---|", *lines])


def _with_flag(setting: Setting) -> str:
    name = setting.argument or setting.field
    return f"`{name}`" + ("" if setting.name == name else f" (`--{setting.name}`)")


def table_settings() -> str:
    """The settings of one embedding table."""
    rows = [f"| `{option.field}` | {option.help} |" for option in settings_of(TableOptions)]
    return "\n".join(["| setting | what it does |", "|---|---|", *rows])


def metrics_table() -> str:
    """What Prometheus is served, of a job that has everything."""
    measured: dict[str, Any] = {"cpu_seconds": 0.0, "resident_bytes": 1, "certificate_expires": 1.0}
    processes = tuple(ProcessSnapshot(role=role.label, index=0, state="up", **measured) for role in Role)
    seen = JobSnapshot(
        command=Command.TRAIN,
        loss=0.0,
        tasks={(kind.value.lower(), state.value.lower()): 0 for kind in TaskType for state in TaskState},
        free_disk_bytes=dict.fromkeys(("job", "checkpoint"), 0),
        processes=processes,
        checkpoint_age_seconds=0.0,
        export_age_seconds=0.0,
        metrics={"accuracy": 0.0},
        stream={"clicks/0": PartitionLag(offset=0, records=0, seconds=0.0)},
        tables={"table": TableSize(0, 0)},
        histograms=histograms(),
        **measured,
    )
    rows = []
    for metric in JobCollector(lambda: seen).collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        names = [name for name in metric.samples[0].labels if name != "le"]  # which is that of a histogram's bounds
        labels = (_label(name, metric.samples) for name in names)
        cells = (f"`{name}`", metric.type, "; ".join(labels), metric.documentation)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])


def serving_metrics_table() -> str:
    """What Prometheus is served by `elasticcb serve`."""
    metrics = ServingMetrics(_ServedNow())  # type: ignore[arg-type]
    metrics.requests.labels("rest", "200")
    rows = []
    for metric in metrics.registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = ", ".join(f"`{label}`" for label in metric.samples[0].labels if label != "le")
        rows.append(f"| `{name}` | {metric.type} | {labels} | {metric.documentation} |")
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])


class _ServedNow:
    """In the place of a `ServedModel` that has everything."""

    problem, age, rows = "", 0.0, {"table": 0}
    export = Export(0, None, "", "", 0, 0.0)


def _label(name: str, samples: Iterable[Sample]) -> str:
    """A label with its values, where they are always the same."""
    values = dict.fromkeys(sample.labels[name] for sample in samples)
    return f"`{name}`: {', '.join(values)}" if len(values) > 1 else f"`{name}`"


TABLES: dict[str, Callable[[], str]] = {
    "options": options_tables,
    "exit codes": exit_codes_table,
    "arguments of Cluster": arguments_table,
    "settings of a table": table_settings,
    "metrics": metrics_table,
    "flags of serve": serve_flags_table,
    "metrics of serve": serving_metrics_table,
}


def update(page: str) -> str:
    """`page` with the text between its `<!-- NAME -->` and `<!-- end of NAME -->` marks regenerated."""
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
        for found in pattern.findall(page):
            page = page.replace(found, start + table() + end)
    return page


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
