"""Origins of records: paths, globs, lists of them, URLs, or any text that a custom reader understands."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from elasticcb.cli.given_flags import absolute
from elasticcb.data.files import expanded_glob
from elasticcb.errors import UsageError

_GLOB = frozenset("*?[")


def resolve_origin(origin: str, base: Path, flag: str, custom_reader: bool) -> tuple[str, list[str]]:
    """Returns `origin` with local paths made absolute, relative to `base`; and messages about problems.

    With a custom reader, a part that is not a file is passed on unchanged: it may be the name of a table, for example.
    A bare word counts as a folder only without a custom reader. A part is invalid if it is empty or, without a custom
    reader, if it matches no file or folder.
    """
    parts = [part.strip() for part in origin.split(",")]
    if not all(parts):
        problem = f"{flag}={origin!r} is empty or has an empty part."
        return origin, [f"{problem} Expected a path, folder, glob or URL, or several of these separated by commas."]
    # A file name may contain a comma.
    if os.path.isfile(absolute(base, origin)):  # not Path.exists, which fails for a long list of files
        return str(absolute(base, origin)), []
    resolved, problems = [], []
    for part in parts:
        try:
            resolved.append(_resolve_part(part, base, flag, custom_reader))
        except UsageError as error:
            problems.append(str(error))
    return ",".join(resolved), problems


def _resolve_part(part: str, base: Path, flag: str, custom_reader: bool) -> str:
    if "://" in part:
        return part
    path = absolute(base, part)
    try:
        if path.is_file():
            return str(path)
        if path.is_dir():
            if custom_reader and os.sep not in part:
                return part
            if not custom_reader and not any(path.iterdir()):
                raise UsageError(f"{flag} names the folder {path}, which is empty. Expected files with records.")
            return str(path)
        if _GLOB & set(part):
            if any(expanded_glob(str(path))):
                return str(path)
            problem = f"{flag} names {path}, which matches no file."
        else:
            problem = f"{flag} names {path}, which does not exist."
        if not custom_reader:
            problem += _nearest(path)
    except OSError as error:
        problem = f"{flag} names {path}, which can't be read: {error}."
    if custom_reader:
        return part
    raise UsageError(
        f"{problem} Expected a file, folder, glob or URL, or several of these separated by commas. (Other names need "
        "a `custom_data_reader` in the model file.)"
    )


def _nearest(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        while not parent.is_dir():
            parent = parent.parent
        return f" The path exists up to {parent}."
    close = difflib.get_close_matches(path.name, [entry.name for entry in parent.iterdir()], n=1)
    return f" Did you mean {parent / close[0]}?" if close else ""
