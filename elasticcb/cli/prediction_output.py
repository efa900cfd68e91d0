"""Checks `--output` of `elasticcb predict`: the file, its format, and whether it can be written."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import PurePath

from elasticcb.cli.given_flags import GivenFlags
from elasticcb.settings import Command
from elasticcb.settings.choices import PREDICTION_FORMATS
from elasticcb.storage.local_folders import problem_of_folder
from elasticcb.storage.remote_files import is_url

_ENDINGS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".npz": "npz"}


def names_predictions(given: GivenFlags) -> bool:
    """Whether `--output` is a file of predictions.

    In a config file shared with `train`, it is the folder of the SavedModel, which `predict` ignores.
    """
    if not given["output"]:
        return False
    return "output" not in given.from_config or bool(prediction_format(given))


def prediction_format(given: GivenFlags) -> str:
    """The format of the file; "" if unknown."""
    return given["output_format"] or _ENDINGS.get(PurePath(given["output"] or "").suffix.lower(), "")


def check_prediction_output(command: Command, given: GivenFlags) -> Iterator[str]:
    """Messages about problems with the flags."""
    if command is not Command.PREDICT:
        return
    if not names_predictions(given):
        if "output_format" in given:
            flag = given.flag("output_format", with_value=True)
            yield (
                f"{flag} sets the format of --output, but --output is missing. Add --output=FILE, or remove "
                "--output_format."
            )
        return
    flag = given.flag("output", with_value=True)
    format = prediction_format(given)
    if not format:
        yield (
            f"{flag} has no known file extension. Expected {', '.join(_ENDINGS)}; or add --output_format, one of "
            f"{', '.join(PREDICTION_FORMATS)}."
        )
    elif format == "parquet" and importlib.util.find_spec("pyarrow") is None:
        yield f"{flag} needs the Python module pyarrow. Install it with: pip install 'elasticcb[parquet]'"
    if is_url(given["output"]):
        yield f"{flag} is a URL. Expected a local file. Copy it when the job is done."


def check_prediction_file(command: Command, given: GivenFlags) -> Iterator[str]:
    """Messages about why the file can't be written."""
    if command is not Command.PREDICT or not names_predictions(given) or is_url(given["output"]):
        return
    path, flag = given.path("output"), given.flag("output")
    assert path is not None
    if path.is_dir():
        yield f"{flag} names {path}, which is a folder. Expected a file for the predictions, such as {path}.csv."
        return
    if os.path.lexists(path):
        yield (
            f"{flag} names {path}, which exists; `predict` does not overwrite files. Remove the file, or choose "
            "another file."
        )
        return
    problem = problem_of_folder(path.parent)
    if problem:
        yield f"{flag} names {path}, but {path.parent} {problem}. Choose a file in another folder."
