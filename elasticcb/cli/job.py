"""From checked flags to a running job."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from elasticcb.cli.command import Session
from elasticcb.cli.given import Given
from elasticcb.cli.launcher import GO_ON, become_master
from elasticcb.cli.option import Kind
from elasticcb.cli.options import options_of
from elasticcb.cli.validation import validate
from elasticcb.errors import LostServerError, UsageError
from elasticcb.settings import (
    JOURNAL_FILE,
    CallbackErrors,
    CheckpointSettings,
    ClusterKind,
    ClusterSettings,
    Command,
    DataSettings,
    EmbeddingSettings,
    JobSettings,
    ModelSettings,
    NonFinite,
    TrainingSettings,
    WhenFull,
    WireDtype,
)

_ENUMS = {
    "cluster": ClusterKind,
    "non_finite": NonFinite,
    "callback_errors": CallbackErrors,
    "wire_dtype": WireDtype,
    "embedding_when_full": WhenFull,
}


def run_job(command: Command, given: Given, session: Session) -> None:
    """Checks the flags, then runs the job to its end.

    Raises:
        UsageError: before anything has started.
        ElasticCBError: the job failed or was interrupted.
    """
    run_settings(build_settings(command, given), session)


def run_settings(settings: JobSettings, session: Session, resumed: bool = False) -> None:
    """Runs a job to its end.

    Args:
        resumed: go on with what an earlier master has begun.

    Raises `ElasticCBError` when the job failed or was interrupted.
    """
    local = settings.cluster.kind is ClusterKind.LOCAL
    trains = settings.command is Command.TRAIN
    supervised = session.own_process and local and trains and bool(settings.checkpoint.interval_seconds)
    if supervised:
        if not resumed:  # of a job before in this folder
            Path(settings.directory, JOURNAL_FILE).unlink(missing_ok=True)
        resumed = become_master(settings.directory, _say) or resumed
    # Only now: what these import takes seconds, and a mistake in the flags should be told at once.
    from elasticcb.cli.progress import make_display
    from elasticcb.roles import run_master

    display = make_display(settings)
    try:
        run_master(settings, display, resumed)
    except LostServerError as error:
        if not supervised:
            raise
        display.message(str(error).splitlines()[0])
        sys.exit(GO_ON)
    finally:
        display.close()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build_settings(command: Command, given: Given) -> JobSettings:
    """Checks the flags and makes the job's folder; all paths in the settings are absolute.

    Raises:
        UsageError: with all that is wrong.
    """
    origins = validate(command, given)
    sections: dict[str, dict[str, Any]] = defaultdict(dict)
    for option in options_of([command]):
        value = given[option.name]
        if option.name not in given or value is None:
            continue  # the settings' own default
        if option.kind is Kind.FOLDER:
            value = str(given.path(option.name))
        elif option.kind is Kind.DATA:
            value = origins[option.name]
        elif option.name in _ENUMS:
            value = _ENUMS[option.name](value)
        section, _, field = option.field.rpartition(".")
        sections[section][field] = value
    # `elasticcb master` sets the kind of cluster by itself.
    if given["cluster"] is not None:
        sections["cluster"]["kind"] = ClusterKind(given["cluster"])
    job = sections.pop("", {})
    job.setdefault("name", _default_name(given["model_def"]))
    if "directory" not in job:
        job["directory"] = str(_new_folder(given.working_directory / "jobs", job["name"]))
    Path(job["directory"]).mkdir(parents=True, exist_ok=True)
    return JobSettings(
        command=command,
        model=ModelSettings(**sections["model"]),
        data=DataSettings(**sections["data"]),
        training=TrainingSettings(**sections["training"]),
        checkpoint=CheckpointSettings(**sections["checkpoint"]),
        cluster=ClusterSettings(**sections["cluster"]),
        embedding=EmbeddingSettings(**sections["embedding"]),
        **job,
    )


def _default_name(definition: str) -> str:
    """ "mnist.mnist_functional.custom_model" -> "mnist-mnist_functional"; a repeated part stands once."""
    return "-".join(dict.fromkeys(definition.split(".")[:-1]))


def _new_folder(parent: Path, name: str) -> Path:
    """Makes a folder that no other job has, even one started in the same second."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        path = parent / (f"{name}-{stamp}" if number == 1 else f"{name}-{stamp}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"The job's folder {path} can't be made: {error}. Name another: --job_dir.") from error
        return path
    raise UsageError(f"No free folder like {parent / name}-{stamp}. Name one: --job_dir.")
