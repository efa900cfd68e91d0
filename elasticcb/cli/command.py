"""Turns the table of flags into click commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import rich_click as click
from click.core import ParameterSource

from elasticcb.cli.config import AgeText, ConfigFile, MappingText, OrAuto, Params, read_config
from elasticcb.cli.given_flags import GivenFlags
from elasticcb.cli.options import BASIC, BY_NAME, normalize, options_of, options_of_role
from elasticcb.cluster.role import RoleProcess
from elasticcb.settings import Command
from elasticcb.settings.definition import JOB, Kind, Setting

F = TypeVar("F", bound=Callable[..., Any])

_CONFIG = "elasticcb.config"  # keys under which a context keeps the config file
_UNREADABLE = "elasticcb.unreadable"  # messages about values that it could not parse, by flag
_UNSET = "elasticcb.unset"  # names of flags whose value in the config file the command line removes
_ALL_FLAGS = "elasticcb.all_flags"  # and whether --help-all was given

# Flags accept both `-` and `_`; the help shows `_`, as ElasticDL does.
CONTEXT: dict[str, Any] = {"token_normalize_func": normalize, "help_option_names": ["--help", "-h"]}


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
        return [param for param in params if param.name in BASIC or param.name not in BY_NAME]


def job_options(commands: Iterable[Command], leave_out: frozenset[str] = frozenset()) -> Callable[[F], F]:
    """Adds to a `JobCommand` the flags that apply to `commands`, --config and --help-all."""

    def decorate(function: F) -> F:
        options = [option for option in options_of(commands) if option.name not in leave_out]
        function = _help_all_option(len(options))(function)
        function = _config_option(frozenset(option.name for option in options))(function)
        # click keeps decorators in their order above the function; the last one is applied first.
        for option in reversed(options):
            function = _click_option(option)(function)
        return function

    return decorate


def role_options(role: str) -> Callable[[F], F]:
    """Adds the settings that a manually started process takes to its click command."""

    def decorate(function: F) -> F:
        for option in reversed(options_of_role(role)):
            default = option.default if option.default is not None else getattr(RoleProcess, option.name, None)
            described: dict[str, Any] = {"help": option.help, "default": default}
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


def given_values(context: click.Context) -> GivenFlags:
    """The flags that the user gave to the command of `context`."""
    names = [name for name in context.params if name in BY_NAME]
    unreadable = context.meta.get(_UNREADABLE, {})
    not_given = {*context.meta.get(_UNSET, ()), *unreadable}
    sources = {name: context.get_parameter_source(name) for name in names if name not in not_given}
    return GivenFlags(
        values={name: context.params[name] for name in names},
        explicit=frozenset(n for n, source in sources.items() if source is not ParameterSource.DEFAULT),
        from_config=frozenset(n for n, source in sources.items() if source is ParameterSource.DEFAULT_MAP),
        config=context.meta.get(_CONFIG),
        unreadable=tuple(unreadable.values()),
    )


def config_file(context: click.Context | None) -> ConfigFile | None:
    """The config file of a command, for messages."""
    return context.meta.get(_CONFIG) if context is not None else None


class _JobOption(click.RichOption):
    """An option whose invalid value is reported together with all other problems.

    An empty value on the command line removes the config file's value, if the option has none by default. Without a
    config file it would be a mistake, such as a variable of the shell that is not set.
    """

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        name = self.name or ""
        given_here = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given_here and config_file(ctx) is not None and BY_NAME[name].default is None and not str(value).strip():
            ctx.meta.setdefault(_UNSET, set()).add(name)
            value = None
        try:
            return super().process_value(ctx, value)
        except click.BadParameter as error:
            config, text = config_file(ctx), error.format_message()
            if config is not None and ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP:
                text += f" (in {config.path})"
            ctx.meta.setdefault(_UNREADABLE, {})[name] = text
            return super().process_value(ctx, self.default)


def _click_option(option: Setting) -> Callable[[F], F]:
    kinds: dict[Kind, Any] = {
        Kind.INTEGER: click.INT,
        Kind.NUMBER: click.FLOAT,
        Kind.TRUTH: click.BOOL,
        Kind.PARAMS: Params(),
        Kind.MAPPING: MappingText(),
        Kind.AGE: AgeText(),
        Kind.CHOICE: click.Choice(option.choices, case_sensitive=False),
    }
    # `--flag` without a value, where that is meaningful.
    alone: dict[str, Any] = {"flag_value": "true"} if option.kind is Kind.TRUTH else {}
    return click.option(
        *(f"--{name}" for name in (option.name, *option.aliases)),
        option.name,
        cls=_JobOption,
        type=OrAuto(kinds[option.kind]) if option.may_be_auto else kinds.get(option.kind, click.STRING),
        metavar=option.metavar,
        default=option.default,
        show_default=option.default_text or option.default is not None,
        is_flag=False,
        **alone,
        help=option.help,
        panel=option.panel,
        callback=_note_log_level if option.name == "log_level" else None,
    )


def _note_log_level(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if value == "DEBUG" and isinstance(context.obj, CommandRun):
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


def _config_option(names: frozenset[str]) -> Callable[[F], F]:
    def use_config(context: click.Context, parameter: click.Parameter, path: str | None) -> None:
        if path is None:
            return
        config = read_config(Path(path).expanduser())
        context.meta[_CONFIG] = config
        # One file may serve all commands: flags of other commands are ignored.
        context.default_map = {name: value for name, value in config.values.items() if name in names}

    return click.option(
        "--config",
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=use_config,
        panel=JOB,
        help="YAML file with flags under the same names. Command-line flags override the file; an empty value, such as "
        "--output=, removes the file's. Paths in it are relative to the file.",
    )
