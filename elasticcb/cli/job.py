"""From checked flags to a running job."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticcb.cli.command import Session
from elasticcb.cli.exits import exit_code
from elasticcb.cli.given_flags import Given
from elasticcb.cli.job_folders import JOBS, new_folder
from elasticcb.cli.kubernetes.checks import read_cluster_spec
from elasticcb.cli.kubernetes.pod_master import keep_in_pod
from elasticcb.cli.option import Kind
from elasticcb.cli.options import options_of
from elasticcb.cli.prediction_output import names_predictions, prediction_format
from elasticcb.cli.submit import is_to_be_submitted, submit
from elasticcb.cli.validation import validate
from elasticcb.cluster.fork_server import can_fork
from elasticcb.cluster.kubernetes import runs_in_pod
from elasticcb.cluster.supervisor import keep_master
from elasticcb.errors import GO_ON, JobDoneError, LostServerError
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
    KubernetesSettings,
    ModelSettings,
    NonFinite,
    TrainingSettings,
    WhenFull,
    WireDtype,
    WorkerRange,
)

if TYPE_CHECKING:
    from elasticcb.cluster.fork_server import ForkServer

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
    if is_to_be_submitted(given):
        end_with(submit(command, given))
    else:
        run_settings(build_settings(command, given), session)


def end_with(code: int) -> None:
    """Ends this process with a code other than 0."""
    if code:
        sys.exit(code)


def run_settings(settings: JobSettings, session: Session, resumed: bool = False) -> None:
    """Runs a job to its end.

    Args:
        resumed: go on with what an earlier master has begun.

    Raises `ElasticCBError` when the job failed or was interrupted.
    """
    show_folder(settings)
    local = settings.cluster.kind is ClusterKind.LOCAL
    trains = settings.command is Command.TRAIN
    if session.own_process and local and trains and settings.checkpoint.interval_seconds and can_fork():
        if not resumed:  # of a job before in this folder
            Path(settings.directory, JOURNAL_FILE).unlink(missing_ok=True)
        sys.exit(keep_master(settings, session.debug, resumed, _say))
    if settings.cluster.kind is ClusterKind.KUBERNETES and runs_in_pod():
        keep_in_pod(settings, lambda goes_on, since: _run_master(settings, resumed or goes_on, since=since))
    else:
        _run_master(settings, resumed)


def show_folder(settings: JobSettings) -> None:
    """The first line of what a job prints: where its folder is."""
    print(f"[{settings.name}] The job's folder is {settings.directory}", flush=True)


def run_as_master(request: dict[str, Any], fork_server: ForkServer) -> int:
    """What a process does that the launcher has started; its exit code.

    Args:
        request: of `launcher.keep_master`.
        fork_server: has forked this process.
    """
    from elasticcb.cluster.local import follow_parent

    follow_parent(os.getppid())
    settings = JobSettings.from_json(request["settings"])

    def run() -> None:
        try:
            _run_master(settings, request["resumed"], fork_server, request["since"])
        except LostServerError as error:
            _say(str(error).splitlines()[0])
            sys.exit(GO_ON)
        except JobDoneError:
            if not request["since"]:
                raise
            _say("It was done when its master was killed.")

    return exit_code(run, Session(own_process=True, debug=request["debug"]))


def _run_master(
    settings: JobSettings, resumed: bool, fork_server: ForkServer | None = None, since: float = 0.0
) -> None:
    # Only now: what these import takes seconds, and a mistake in the flags should be told at once.
    from elasticcb.cli.progress import make_display
    from elasticcb.roles.processes import run_master

    display = make_display(settings)
    try:
        run_master(settings, display, resumed, fork_server, since)
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
        if option.name == "output" and command is Command.PREDICT and not names_predictions(given):
            continue
        if option.kind in (Kind.FOLDER, Kind.FILE):
            value = given.folder(option.name)
        elif option.kind is Kind.DATA:
            value = origins[option.name]
        elif option.name in _ENUMS:
            value = _ENUMS[option.name](value)
        elif option.name == "autoscale":
            value = WorkerRange.of(value)
        if option.name == "cluster_spec":
            value = read_cluster_spec(value)
        section, _, field = option.field.rpartition(".")
        sections[section][field] = value
    kubernetes = sections.pop("cluster.kubernetes", {})
    # `elasticcb master` sets the kind of cluster by itself.
    if given["cluster"] is not None:
        sections["cluster"]["kind"] = ClusterKind(given["cluster"])
    if given["cluster"] == ClusterKind.KUBERNETES.value:  # others may hear what pods say to each other
        sections["cluster"].setdefault("tls", not given["tls_cert"])
    if given["lease_seconds"] and given["lease_seconds"] < ClusterSettings.silence_seconds:
        sections["cluster"].setdefault("silence_seconds", given["lease_seconds"])
    if "autoscale" in given:
        sections["cluster"].setdefault("num_workers", sections["cluster"]["autoscale"].least)
    job = sections.pop("", {})
    if "output" in job and command is Command.PREDICT:
        job["output_format"] = prediction_format(given)
    job.setdefault("name", _default_name(given["model_def"]))
    if "directory" not in job:
        job["directory"] = str(new_folder(given.working_directory / JOBS, command, job["name"]))
    Path(job["directory"]).mkdir(mode=0o700, parents=True, exist_ok=True)
    return JobSettings(
        command=command,
        model=ModelSettings(**sections["model"]),
        data=DataSettings(**sections["data"]),
        training=TrainingSettings(**sections["training"]),
        checkpoint=CheckpointSettings(**sections["checkpoint"]),
        cluster=ClusterSettings(**sections["cluster"], kubernetes=KubernetesSettings(**kubernetes)),
        embedding=EmbeddingSettings(**sections["embedding"]),
        **job,
    )


def _default_name(definition: str) -> str:
    """ "mnist.mnist_functional.custom_model" -> "mnist-mnist_functional"; a repeated part stands once."""
    return "-".join(dict.fromkeys(definition.split(".")[:-1]))
