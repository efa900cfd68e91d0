"""Libraries that only some formats need, imported when a file of theirs is read."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elasticcb.errors import DataError


def import_extra(module: str, extra: str, format_name: str) -> Any:
    """The module, or a `DataError` that says which extra of this package brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{format_name} files need the Python module {module}, which can't be imported ({error}). "
            f"Install it with: pip install 'elasticcb[{extra}]'"
        ) from error


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns whatever a format's library raises into a `DataError` about `what`."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{what} can't be read: {type(error).__name__}: {error}. The file is damaged, was not copied to "
            "its end, or has another format than its name says."
        ) from error
