"""The flags of TLS, for processes that are started by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import rich_click as click

from elasticcb.cli.options import BY_NAME
from elasticcb.security.credentials import Access, token_of_environment
from elasticcb.security.tls import FILES, TLS, tls_files

F = TypeVar("F", bound=Callable[..., Any])
_NAMES = (*FILES, "tls_name")


def tls_options(function: F) -> F:
    """Gives a click command the flags `access` reads."""
    for name in reversed(_NAMES):
        option = BY_NAME[name]
        function = click.option(f"--{name}", metavar=option.metavar, help=option.help)(function)
    return function


def access(flags: dict[str, str | None]) -> Access:
    """What a process holds that was started with these flags. Raises `UsageError` for files that can't be used."""
    files = tls_files({name: value or "" for name, value in flags.items()})
    return Access(token_of_environment(), None if files is None else TLS.load(files))
