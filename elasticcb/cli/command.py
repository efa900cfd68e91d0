"""Turns the table of flags into click commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import rich_click as click
from click.core import ParameterSource

from elasticcb.cluster.registry import backends
from elasticcb.cluster.role import RoleProcess
from elasticcb.settings import Command, Given, written
from elasticcb.settings.definition import JOB, PANELS, Kind, Setting
from elasticcb.settings.given import normalize, read_config
from elasticcb.settings.names import SETTINGS

# Flags that most jobs need; --help shows these, --help-all shows all.
BASIC = frozenset({
    "model_zoo", "model_def", "model_params",
    "training_data", "validation_data", "prediction_data", "label", "data_reader_params",
    "num_epochs", "updates", "minibatch_size",
    "checkpoint_dir", "checkpoint_dir_for_init", "output", "output_format", "follow",
    "cluster", "num_workers", "num_ps", "autoscale",
    "job_dir",
})  # fmt: skip


def options_of(commands: Iterable[Command]) -> list[Setting]:
    """The flags that apply to any of `commands`, in the order of the panels."""
    wanted = frozenset(commands)
    found = [option for option in SETTINGS.values() if option.commands & wanted]
    return sorted(found, key=lambda option: PANELS.index(option.panel))


def help_of(option: Setting) -> str:
    """The help of a flag."""
    if option.name == "cluster":
        return " ".join(f"{name}: {backend.summary}." for name, backend in backends().items())
    return written(option.help, False)


def metavar_of(option: Setting) -> str:
    """The placeholder of a flag's value."""
    return "|".join(backends()) if option.name == "cluster" else option.metavar


F = TypeVar("F", bound=Callable[..., Any])

_CONFIG = "elasticcb.config"  # keys under which a context keeps the config file
_ALL_FLAGS = "elasticcb.all_flags"  # and whether --help-all was given

# Flags accept both `-` and `_`; the help shows `_`, as ElasticDL does.
CONTEXT: dict[str, Any] = {"token_normalize_func": normalize, "help_option_names": ["--help", "-h"]}

in_namespace = click.option(
    "--namespace", metavar="NAME", help="Kubernetes namespace; JOB is then the name of a job in it."
)


@dataclass
class CommandRun:
    """One run of the command line; click passes it to all commands as `context.obj`."""

    debug: bool = False  # show the traceback of an error
    own_process: bool = False  # whether this is the command in its own process, which may fork


class JobCommand(click.RichCommand):
    """A command whose --help shows only the flags that most jobs need."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta.setdefault(_ALL_FLAGS, False)
        super().format_help(ctx, formatter)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """All parameters, except while --help is rendered."""
        params = super().get_params(ctx)
        if ctx.meta.get(_ALL_FLAGS, True):
            return params
        return [param for param in params if param.name in BASIC or param.name not in SETTINGS]


def job_options(commands: Iterable[Command], leave_out: frozenset[str] = frozenset()) -> Callable[[F], F]:
    """Adds to a `JobCommand` the flags that apply to `commands`, --config and --help-all."""

    def decorate(function: F) -> F:
        options = [option for option in options_of(commands) if option.name not in leave_out]
        function = _help_all_option(len(options))(function)
        function = _config_option(function)
        # click keeps decorators in their order above the function; the last one is applied first.
        for option in reversed(options):
            function = _click_option(option)(function)
        return function

    return decorate


def role_options(role: str) -> Callable[[F], F]:
    """Adds the settings that a manually started process takes to its click command."""

    def decorate(function: F) -> F:
        for option in reversed([each for each in SETTINGS.values() if role in each.roles]):
            default = option.default if option.default is not None else getattr(RoleProcess, option.name, None)
            described: dict[str, Any] = {"help": help_of(option), "default": default}
            if option.kind is Kind.TRUTH:
                described |= {"is_flag": True, "default": False}
            else:
                described |= {"metavar": option.metavar, "type": _role_type(option)}
            function = click.option(f"--{option.name}", **described)(function)
        return function

    return decorate


def _role_type(option: Setting) -> click.ParamType:
    limits: dict[str, Any] = {"min": option.minimum, "max": option.maximum}
    return click.IntRange(**limits) if option.kind is Kind.INTEGER else click.STRING


def given_values(context: click.Context, command: Command) -> Given:
    """The settings that the user gave to the command of `context`."""
    sources = {name: context.get_parameter_source(name) for name in context.params if name in SETTINGS}
    flags = {n: str(context.params[n]) for n, source in sources.items() if source is ParameterSource.COMMANDLINE}
    return Given.by_flags(command, flags, context.meta.get(_CONFIG))


def _click_option(option: Setting) -> Callable[[F], F]:
    # `--flag` without a value, where that is meaningful.
    alone: dict[str, Any] = {"flag_value": "true"} if option.kind is Kind.TRUTH else {}
    return click.option(
        *(f"--{name}" for name in (option.name, *option.aliases)),
        option.name,
        type=click.STRING,  # `Given` reads it, and reports all problems together
        metavar=metavar_of(option),
        default=option.default,
        show_default=written(option.default_text, False) or option.default is not None,
        is_flag=False,
        **alone,
        help=help_of(option),
        panel=option.panel,
        callback=_note_log_level if option.name == "log_level" else None,
    )


def _note_log_level(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if value.upper() == "DEBUG" and isinstance(context.obj, CommandRun):
        context.obj.debug = True
    return value


def _help_all_option(count: int) -> Callable[[F], F]:
    def show(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value and not context.resilient_parsing:
            context.meta[_ALL_FLAGS] = True
            click.echo(context.get_help(), color=context.color)
            context.exit()

    text = f"Show all {count} flags; --help shows those that most jobs need. docs/cli.md lists them in tables."
    return click.option("--help-all", is_flag=True, is_eager=True, expose_value=False, callback=show, help=text)


def _config_option(function: F) -> F:
    def use_config(context: click.Context, parameter: click.Parameter, path: str | None) -> None:
        if path is not None:
            context.meta[_CONFIG] = read_config(Path(path).expanduser())

    return click.option(
        "--config",
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=use_config,
        panel=JOB,
        help="YAML file with flags under the same names. Command-line flags override the file; an empty value, such as "
        "--output=, removes the file's. Paths in it are relative to the file.",
    )(function)
