"""Uploads the exported model to a remote store, file by file, with a completion marker last."""

# mypy: allow-subclassing-any

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import keras

from elasticcb.errors import CallbackError, ModelFileError
from elasticcb.storage.remote_files import MARKER, RemoteFolder, local_files, without_password

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_SECONDS = 60.0
# Errors for which retries are useless: credentials, a missing bucket, a bug.
_PERMANENT = (PermissionError, FileNotFoundError, NotADirectoryError, TypeError, ImportError)
_PERMANENT_NAMES = ("AuthenticationException", "BadHostKeyException", "NoCredentialsError")


class ModelUploader(keras.callbacks.Callback):
    """Uploads the exported SavedModel when training ends, on the worker with the TRAIN_END task.

    Runs after `SavedModelExporter`, wherever it is in the list. The remote model is complete if the file `_SUCCESS`
    exists: this file is removed first, then the files are uploaded and verified one by one, by size (and by checksum if
    the store provides one or the file is small), and it is written last, as JSON that lists the files with size and
    MD5. A model that exists already is not sent again. Files of the previous model that are not part of the new one are
    removed; other files are kept.

    If the upload fails, the TRAIN_END task fails and is retried; the exported model is not changed.

    Args:
        remote_url: folder, as any fsspec URL: `s3://bucket/models/digits`, `sftp://user@host/models/digits`, `gs://…`,
            `file:///…`. The package for the protocol must be installed (`elasticcb[s3]`, `elasticcb[sftp]`).
        saved_model_path: local folder to upload; default: `--output`.
        storage_options: arguments for the fsspec file system: `endpoint_url`, `key`, `secret` for S3, `port`,
            `key_filename`, `host_key_policy="reject"` for SFTP.
        retries: how often a failed upload is retried. Uploaded files are not sent again.
        backoff_seconds: pause before the first retry; doubles with each retry, up to a minute.
        timeout_seconds: how long an SFTP operation may go without an answer. For other protocols, use
            `storage_options`.

    Raises:
        ModelFileError: an argument is invalid, or the package for the protocol is missing.

    Example:

        def callbacks():
            return [SavedModelExporter(), ModelUploader("s3://models/digits", retries=5)]
    """

    after_export = True  # read by the dispatcher
    essential = True  # likewise: a failed upload fails the job

    def __init__(
        self,
        remote_url: str,
        *,
        saved_model_path: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        retries: int = 5,
        backoff_seconds: float = 1.0,
        timeout_seconds: float = 60.0,
    ) -> None:
        super().__init__()
        if not isinstance(remote_url, str) or not remote_url:
            raise ModelFileError(
                "ModelUploader expects remote_url as the URL of a folder, such as s3://bucket/models/digits. "
                f"Received: {remote_url!r}."
            )
        if retries < 0 or backoff_seconds < 0 or timeout_seconds <= 0:
            raise ModelFileError(
                "ModelUploader expects retries >= 0, backoff_seconds >= 0 and timeout_seconds > 0. Received: "
                f"retries={retries!r}, backoff_seconds={backoff_seconds!r}, timeout_seconds={timeout_seconds!r}."
            )
        try:
            fsspec.get_filesystem_class(fsspec.utils.get_protocol(remote_url))
        except (ImportError, ValueError) as error:
            raise ModelFileError(
                f"ModelUploader can't use {without_password(remote_url)}: {error}. Install the fsspec package of that "
                "protocol (elasticcb[s3] for s3, elasticcb[sftp] for sftp), or correct the URL."
            ) from error
        self._remote_url = remote_url
        self._saved_model_path = saved_model_path
        self._storage_options = dict(storage_options or {})
        self._retries = retries
        self._backoff_seconds = backoff_seconds
        self._timeout_seconds = timeout_seconds

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._local_folder()  # reports a missing --output before training, not after

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        folder = self._local_folder()
        if not (folder / "saved_model.pb").is_file():
            raise CallbackError(
                f"ModelUploader found no SavedModel in {folder}. Add SavedModelExporter() to callbacks(), or pass the "
                "folder that it exports to: ModelUploader(..., saved_model_path=...)."
            )
        files = local_files(folder)
        remote = RemoteFolder(self._remote_url, self._storage_options, self._timeout_seconds)
        shown = without_password(self._remote_url)
        began = time.monotonic()
        for attempt in range(self._retries + 1):
            try:
                sent = remote.upload(folder, files)
            except Exception as error:
                permanent = isinstance(error, _PERMANENT) or type(error).__name__ in _PERMANENT_NAMES
                if permanent or attempt == self._retries:
                    raise CallbackError(
                        f"The model in {folder} could not be uploaded to {shown}: {type(error).__name__}: "
                        f"{without_password(str(error))}. Tried {attempt + 1} time(s) in "
                        f"{time.monotonic() - began:.0f} s. {MARKER} was not written, so the upload is marked as "
                        "incomplete. The local model is complete. Check that the remote is up and the credentials "
                        "are right, or copy the folder manually."
                    ) from error
                pause = min(self._backoff_seconds * 2**attempt, _LONGEST_PAUSE_SECONDS)
                pause *= random.uniform(0.5, 1.0)  # jitter, so that several jobs do not retry in step
                logger.warning(
                    "Upload to %s failed (%s: %s); retrying in %.1f s",
                    shown,
                    type(error).__name__,
                    without_password(str(error)),
                    pause,
                )
                time.sleep(pause)
            else:
                logger.info("Uploaded %d of %d files to %s", sent, len(files), shown)
                return

    def _local_folder(self) -> Path:
        path = self._saved_model_path or (self.params or {}).get("saved_model_path")
        if not path:
            raise CallbackError(
                "ModelUploader has no folder to upload. Pass ModelUploader(..., saved_model_path=...), or "
                "`elasticcb train --output=/path/to/model`."
            )
        return Path(path).expanduser()
