"""Imports libraries that only some formats need, when a file of such a format is read."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elasticcb.errors import DataError


def import_extra(module: str, extra: str, format_name: str) -> Any:
    """Imports a module; raises a `DataError` that names the extra of this package that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{format_name} needs the Python module {module}, which can't be imported ({error}). "
            f"Install it with: pip install 'elasticcb[{extra}]'"
        ) from error


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Converts errors of a format's library to a `DataError` about `what`."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{what} can't be read: {type(error).__name__}: {error}. The file is damaged or incomplete, or its "
            "extension does not match its format."
        ) from error
