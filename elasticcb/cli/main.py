"""The `elasticcb` command and its subcommands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import rich_click as click

from elasticcb import __version__
from elasticcb.cli.command import CONTEXT, CommandRun
from elasticcb.cli.exits import exit_code
from elasticcb.cli.export import export
from elasticcb.cli.job_folders import clean
from elasticcb.cli.resume import resume
from elasticcb.cli.run import evaluate, master, predict, ps, train, worker
from elasticcb.cli.running import dashboard, logs, scale, stop
from elasticcb.cli.serve import serve
from elasticcb.cli.status import jobs, status
from elasticcb.cli.table import table
from elasticcb.cli.zoo.commands import zoo
from elasticcb.errors import UsageError
from elasticcb.process.signals import heed_sigterm
from elasticcb.process.system import allow_many_files


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="elasticcb")
@click.command_panel(
    "Jobs",
    commands=[
        "train",
        "resume",
        "jobs",
        "status",
        "dashboard",
        "logs",
        "scale",
        "stop",
        "evaluate",
        "predict",
        "export",
        "clean",
    ],
)
@click.command_panel("Serving", commands=["serve"])
@click.command_panel("Jobs on Kubernetes", commands=["zoo"])
@click.command_panel("Inspecting embedding tables", commands=["table"])
@click.command_panel("Single processes, to start manually on several machines", commands=["master", "ps", "worker"])
def elasticcb() -> None:
    """Elastic parameter-server training for Keras 3, driven by callbacks.

    \b
    Examples:
      elasticcb train --config model_zoo/digits/job.yaml
      elasticcb train --help
    """


for _command in (
    train, resume, status, dashboard, scale, evaluate, predict, export, serve, zoo, jobs, logs, stop, clean,
    table, master, ps, worker,
):  # fmt: skip
    elasticcb.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code (`elasticcb.errors.ExitCode`)."""
    own_process = arguments is None
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if own_process:
        heed_sigterm()
        allow_many_files()
    session = CommandRun(own_process=own_process, debug=os.environ.get("ELASTICCB_DEBUG", "") not in ("", "0"))

    def run() -> None:
        _check_text(arguments)
        elasticcb.main(args=arguments or ["--help"], prog_name="elasticcb", standalone_mode=False, obj=session)

    return exit_code(run, session)


def _check_text(arguments: Sequence[str]) -> None:
    """Raises `UsageError` for an argument that is not UTF-8: flags are sent to other processes as text."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"The argument {os.fsencode(argument)!r} is not valid UTF-8. Rename the file or folder; if the name "
                "is UTF-8, run the command in a UTF-8 locale, such as LC_ALL=C.UTF-8."
            ) from None
