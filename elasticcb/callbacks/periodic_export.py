"""Exports the model for serving, again and again, while it is trained."""

# mypy: allow-subclassing-any

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras

from elasticcb.callbacks.placement import check_in_job, runs_on
from elasticcb.errors import ModelFileError
from elasticcb.settings.choices import seconds_of
from elasticcb.storage.local_folders import problem_of_folder
from elasticcb.storage.remote_files import as_path, is_url, problem_of


@runs_on("master")
class PeriodicExport(keras.callbacks.Callback):
    """Exports the model for serving while training continues: a full SavedModel now and then, and what has changed
    between them.

    Parameter servers write what has changed, directly to the folder. Another process of the master's machine writes the
    full exports. Training does not wait. docs/serving.md describes the files.

    Args:
        folder: local folder that all processes share, or any fsspec URL: `s3://bucket/clicks`, `gs://…`,
            `sftp://…`. One training at a time writes there.
        every: time between two exports, such as "30s", "10m", or a number of seconds. Without changes, nothing is
            written.
        full_every: time between two full exports. The first one is written when training begins.
        keep: exports older than this are removed, unless the newest version needs them.

    Raises:
        ModelFileError: an argument is invalid; or, before training, it is in Keras's own `fit`.

    Example:

        class Canary(PeriodicExport):
            def on_export_end(self, version, path):
                print(path, "is complete")

        def callbacks():
            return [Canary("s3://models/clicks", every="10s")]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: str | float = "60s",
        full_every: str | float = "6h",
        keep: str | float = "2d",
    ) -> None:
        super().__init__()
        text = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else ""
        if not text:
            raise ModelFileError(f"PeriodicExport expects a folder or a URL. Received: {folder!r}.")
        local = as_path(text)
        self.folder = text if is_url(local) else os.path.abspath(os.path.expanduser(local))
        self.every = _seconds("every", every)
        self.full_every = _seconds("full_every", full_every)
        self.keep = _seconds("keep", keep)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        check_in_job(self)

    def on_export_end(self, version: int, path: str) -> None:
        """An export is complete, and `current.json` is up to date: for steps of your own. Called on the master.

        Args:
            version: of the export.
            path: its folder or URL, `…/full-V` or `…/delta-V-W`.
        """

    def problem(self) -> str:
        """Why the folder can't be used, as far as this machine can tell without connecting; "": it can."""
        if is_url(self.folder):
            return problem_of(self.folder)
        problem = problem_of_folder(Path(self.folder))
        return problem and f"{problem}."


def _seconds(name: str, given: str | float) -> float:
    if isinstance(given, str):
        seconds: float = seconds_of(given.strip())
    else:
        seconds = given if isinstance(given, (int, float)) and not isinstance(given, bool) else 0
    if not seconds > 0:
        raise ModelFileError(
            f"PeriodicExport expects {name} as a time in whole seconds, minutes, hours, days or weeks, such as "
            f'"30s", "10m", "6h" or "2d", or as a number of seconds, such as 0.5. Received: {given!r}.'
        )
    return float(seconds)
