"""`elasticcb resume`: continues a training job."""

from __future__ import annotations

import json
from pathlib import Path

import rich_click as click

from elasticcb.cli.command import CONTEXT, CommandRun
from elasticcb.cli.job import end_with, run_settings
from elasticcb.cli.job_folders import find_job
from elasticcb.cli.kubernetes.follow import follow_job
from elasticcb.cli.kubernetes.job import KubernetesJob
from elasticcb.cli.kubernetes.recreate import make_again, make_missing_lease, wait_for_old_master
from elasticcb.clients.running_master import refuse_cluster
from elasticcb.cluster.kubernetes.api import KubernetesAPI
from elasticcb.cluster.registry import missing_for
from elasticcb.compute.registry import keep_backend
from elasticcb.errors import UsageError
from elasticcb.settings import JOB_FILE, JOURNAL_FILE, JobSettings
from elasticcb.storage import durable


@click.command(context_settings=CONTEXT)
@click.argument("job", metavar="JOB")
@click.option("--namespace", metavar="NAME", help="Kubernetes namespace; JOB is then the name of a job in it.")
@click.pass_obj
def resume(session: CommandRun, job: str, namespace: str | None) -> None:
    """Continue a training job that was interrupted, failed, or was lost with its machine.

    JOB is the job's folder or its name below `jobs`; a --job_name or `latest` (the newest training job); or, with
    --namespace, the name of a stopped or failed job on Kubernetes. Tasks that were reported as done are not repeated;
    parameter servers restart from their last recovery files. The job keeps its original settings.

    \b
    Examples:
      elasticcb resume train-mnist-20260101-120000
      elasticcb resume mnist --namespace=training
    """
    if namespace:
        end_with(_resume_on_kubernetes(KubernetesJob(KubernetesAPI(namespace), job)))
    else:
        settings = resumed_settings(find_job(job, only_training=True))
        keep_backend(settings.keras_backend)
        missing = list(missing_for(settings.cluster))  # of this machine, on which the job may not have started
        if missing:
            raise UsageError("\n".join(missing))
        run_settings(settings, session, resumed=True)


def _resume_on_kubernetes(job: KubernetesJob) -> int:
    if job.state == "stopped":
        wait_for_old_master(job)
        make_missing_lease(job)
        job.api.patch("Job", job.name, {"spec": {"parallelism": 1}})
    elif job.state == "failed":
        make_again(job)
    else:
        raise UsageError(
            f"The job {job.name} is {job.state}, not stopped. See its log: elasticcb logs {job.name} "
            f"--namespace={job.api.namespace}"
        )
    return follow_job(job.api, job.name, from_now=True)


def resumed_settings(folder: Path) -> JobSettings:
    """The settings of the job in a folder. Raises `UsageError` if it can't be resumed."""
    try:
        document = durable.read_document(folder / JOB_FILE)
    except ValueError as error:
        raise UsageError(
            f"{error}. Nothing was changed. Restore a copy of the file, or start a new job from the newest checkpoint "
            "with --checkpoint_dir_for_init."
        ) from None
    except OSError as error:
        refuse_cluster(folder)
        raise UsageError(
            f"{folder} contains no job that can be resumed ({error.strerror}). Expected the folder of an `elasticcb "
            "train` job. Start `evaluate` and `predict` jobs again instead."
        ) from None
    settings = JobSettings.from_json(json.dumps(document))
    if not (folder / JOURNAL_FILE).is_file():
        interval = settings.checkpoint.interval_seconds
        why = "it ended before training started" if interval else "the job ran with --checkpoint_interval=0"
        raise UsageError(f"{folder} contains no {JOURNAL_FILE}: {why}, so there is nothing to resume. Start a new job.")
    if settings.directory != str(folder):
        raise UsageError(f"{folder} was at {settings.directory} when the job started. Move it back there.")
    return settings
