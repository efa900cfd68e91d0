"""`--output` of `elasticcb predict`: which file it is, and whether it can be written."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from elasticcb.cli.given_flags import GivenFlags
from elasticcb.predictions.formats import ENDINGS, format_of
from elasticcb.settings import Command
from elasticcb.settings.choices import PREDICTION_FORMATS
from elasticcb.storage.remote_files import is_url
from elasticcb.storage.writable import problem_of_folder


def names_predictions(given: GivenFlags) -> bool:
    """Whether `--output` is a file of predictions.

    A config file that `train` shares has the folder of the SavedModel there, which `predict` leaves alone.
    """
    if not given["output"]:
        return False
    return "output" not in given.from_config or bool(given["output_format"] or format_of(given["output"]))


def prediction_format(given: GivenFlags) -> str:
    """The format of the file; "" when nothing names one."""
    return given["output_format"] or format_of(given["output"] or "")


def check_prediction_output(command: Command, given: GivenFlags) -> Iterator[str]:
    """What is wrong with the flags, in words."""
    if command is not Command.PREDICT:
        return
    if not names_predictions(given):
        if "output_format" in given:
            flag = given.flag("output_format", with_value=True)
            yield f"{flag} is the format of --output, which is missing. Add --output=FILE, or leave it out."
        return
    flag = given.flag("output", with_value=True)
    format = prediction_format(given)
    if not format:
        yield (
            f"{flag} does not say in which format to write. Expected a file that ends with {', '.join(ENDINGS)}; or "
            f"add --output_format, one of {', '.join(PREDICTION_FORMATS)}."
        )
    elif format == "parquet" and importlib.util.find_spec("pyarrow") is None:
        yield f"{flag} needs the Python module pyarrow. Install it with: pip install 'elasticcb[parquet]'"
    if is_url(given["output"]):
        yield f"{flag} is a URL. Expected a file of this machine; copy it when the job is done."


def check_prediction_file(command: Command, given: GivenFlags) -> Iterator[str]:
    """What stands in the way of writing the file, in words."""
    if command is not Command.PREDICT or not names_predictions(given) or is_url(given["output"]):
        return
    path, flag = given.path("output"), given.flag("output")
    assert path is not None
    if path.is_dir():
        yield f"{flag} names {path}, which is a folder. Expected a file for the predictions, such as {path}.csv."
        return
    if os.path.lexists(path):
        yield (
            f"{flag} names {path}, which exists; `predict` writes over no file. Remove the file, or name another one."
        )
        return
    problem = problem_of_folder(path.parent)
    if problem:
        yield f"{flag} names {path}, but {path.parent} {problem}. Name a file in another folder."
