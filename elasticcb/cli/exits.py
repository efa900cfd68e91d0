"""How a command ends: its exit code and its error message."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import rich_click as click

from elasticcb.cli.command import CommandRun
from elasticcb.errors import ElasticCBError, ExitCode, JobInterrupted
from elasticcb.process.log_files import may_reach_nobody
from elasticcb.process.system import describe_scarcity, is_scarcity


def exit_code(run: Callable[[], Any], session: CommandRun) -> int:
    """Calls `run`, shows what it raises, and returns the exit code."""
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
        if isinstance(error, PermissionError) and error.filename:
            text = f"Error: {error.filename}: {error.strerror}. Run the command as its owner, or choose another folder."
            return _end(text, ExitCode.WRONG_USAGE, session)
        session.debug = True
        text = f"Error: ElasticCB itself failed, not your code: {type(error).__name__}: {error}"
        return _end(f"{text}\nPlease report this with the traceback above.", ExitCode.JOB_FAILED, session)
    return ExitCode.DONE


def _end(message: str, code: ExitCode, session: CommandRun) -> int:
    with may_reach_nobody(sys.stderr):
        if session.debug:
            traceback.print_exc()
        # Keras makes words in its messages bold, even outside terminals.
        print(message if sys.stderr.isatty() else click.unstyle(message), file=sys.stderr, flush=True)
    return code


def _describe(error: ElasticCBError) -> str:
    # The user asked for it, so it is not an error.
    text = str(error) if isinstance(error, JobInterrupted) else f"Error: {error}"
    if error.user_traceback:
        text += "\n\n" + error.user_traceback.rstrip()
    return text


def _describe_usage(error: click.ClickException) -> str:
    """The message of an error of click, with the help to look at."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "elasticcb"
    return f"Error: {error.format_message()}\nRun `{command} --help` for usage."
