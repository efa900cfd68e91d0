"""The `elasticcb` command: its subcommands, and how it ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import rich_click as click
from click.core import ParameterSource

from elasticcb import __version__
from elasticcb.cli.command import CONTEXT, Session, config_file
from elasticcb.cli.evaluate import evaluate
from elasticcb.cli.jobs import jobs
from elasticcb.cli.logs import logs
from elasticcb.cli.master import master
from elasticcb.cli.predict import predict
from elasticcb.cli.ps import ps
from elasticcb.cli.resume import resume
from elasticcb.cli.scale import scale
from elasticcb.cli.status import status
from elasticcb.cli.stop import stop
from elasticcb.cli.table import table
from elasticcb.cli.train import train
from elasticcb.cli.worker import worker
from elasticcb.cli.zoo.commands import zoo
from elasticcb.errors import ElasticCBError, ExitCode, JobInterrupted
from elasticcb.process.limits import allow_many_files, describe_scarcity, is_scarcity
from elasticcb.process.signals import heed_sigterm


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="elasticcb")
@click.command_panel("Jobs", commands=["train", "resume", "status", "logs", "scale", "stop", "evaluate", "predict"])
@click.command_panel("Jobs on Kubernetes", commands=["zoo", "jobs"])
@click.command_panel("Looking into checkpoints", commands=["table"])
@click.command_panel("Single processes, to start on several machines by hand", commands=["master", "ps", "worker"])
def elasticcb() -> None:
    """Elastic parameter-server training for Keras 3, driven by callbacks.

    \b
    Examples:
      elasticcb train --config model_zoo/digits/job.yaml
      elasticcb train --help
    """


for _command in (train, resume, status, scale, evaluate, predict, zoo, jobs, logs, stop, table, master, ps, worker):
    elasticcb.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code (`elasticcb.errors.ExitCode`).

    Args:
        arguments: without the program's name; None takes those of this process.
    """
    own_process = arguments is None
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if own_process:
        heed_sigterm()
        allow_many_files()
    session = Session(own_process=own_process, debug=os.environ.get("ELASTICCB_DEBUG", "") not in ("", "0"))
    given = arguments or ["--help"]
    return exit_code(
        lambda: elasticcb.main(args=given, prog_name="elasticcb", standalone_mode=False, obj=session), session
    )


def exit_code(run: Callable[[], Any], session: Session) -> int:
    """Calls `run`, shows what it raises, and answers the exit code."""
    try:
        run()
    except (KeyboardInterrupt, click.Abort):
        return _end("Interrupted.", ExitCode.INTERRUPTED, session)
    except ElasticCBError as error:
        return _end(_describe(error), error.exit_code, session)
    except click.ClickException as error:
        return _end(_describe_usage(error), ExitCode.WRONG_USAGE, session)
    except Exception as error:
        if isinstance(error, OSError) and is_scarcity(error):
            return _end(f"Error: {describe_scarcity(error)}", ExitCode.JOB_FAILED, session)
        session.debug = True
        text = f"Error: ElasticCB itself failed, not your code: {type(error).__name__}: {error}"
        return _end(f"{text}\nPlease report it, with the traceback above.", ExitCode.JOB_FAILED, session)
    return ExitCode.DONE


def _end(message: str, code: ExitCode, session: Session) -> int:
    if session.debug:
        traceback.print_exc()
    # Keras makes words in its messages bold, wherever they go.
    print(message if sys.stderr.isatty() else click.unstyle(message), file=sys.stderr, flush=True)
    return code


def _describe(error: ElasticCBError) -> str:
    # What the user asked for is no error.
    text = str(error) if isinstance(error, JobInterrupted) else f"Error: {error}"
    if error.user_traceback:
        text += "\n\n" + error.user_traceback.rstrip()
    return text


def _describe_usage(error: click.ClickException) -> str:
    """click's own complaint, with the config file it is about and where to look."""
    text = error.format_message()
    context = getattr(error, "ctx", None)
    parameter = getattr(error, "param", None)
    config = config_file(context)
    if context is not None and config is not None and parameter is not None:
        from_config = context.get_parameter_source(parameter.name) is ParameterSource.DEFAULT_MAP
        text += f" (in {config.path})" if from_config else ""
    command = context.command_path if context is not None else "elasticcb"
    return f"Error: {text}\nRun `{command} --help` for what it understands."
