"""`elasticcb scale`, `stop`, `logs` and `dashboard`: change a running job, and show what it does."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import rich_click as click

from elasticcb.cli.command import CONTEXT, in_namespace
from elasticcb.cli.job import end_with
from elasticcb.cli.job_folders import find_job
from elasticcb.cli.kubernetes.job import KubernetesJob, follow_job
from elasticcb.clients.local_job import StoredJob, log_lines, scale_job, stop_job
from elasticcb.clients.running_master import MASTER_FILE
from elasticcb.cluster.kubernetes.api import KubernetesAPI
from elasticcb.cluster.kubernetes.pods import JOB_LABEL
from elasticcb.errors import UsageError
from elasticcb.process.log_files import print_line, quiet_environment, say
from elasticcb.process.system import follow_parent
from elasticcb.storage.remote_files import is_url


@click.command(context_settings=CONTEXT)
@click.argument("job", metavar="JOB")
@click.option("--workers", type=click.IntRange(1), metavar="N", help="New number of workers.")
@click.option("--ps", type=click.IntRange(1), metavar="M", help="New number of parameter servers.")
@in_namespace
def scale(job: str, workers: int | None, ps: int | None, namespace: str | None) -> None:
    """Change the number of workers or parameter servers of a running job.

    JOB is the job's folder or its name below `jobs`; a --job_name or `latest` (the newest job); or, with
    --namespace, the name of a job on Kubernetes. New workers take tasks as soon as they run. Surplus workers finish
    their batch, return the rest of their task, and exit: no record is lost or trained twice. Parameter servers move
    their shards while training continues; the command returns when they have moved.

    \b
    Examples:
      elasticcb scale train-mnist-20260101-120000 --workers 4
      elasticcb scale train-mnist-20260101-120000 --ps 2
      elasticcb scale mnist --namespace=training --workers 4
    """
    if not workers and not ps:
        raise UsageError("Nothing to scale. Expected --workers=N, --ps=M, or both.")
    if namespace:
        counts = [f"--{name}={count}" for name, count in (("workers", workers), ("ps", ps)) if count]
        end_with(KubernetesJob(KubernetesAPI(namespace), job).pass_on("scale", counts))
        return
    for line in scale_job(find_job(job), workers, ps, on_wait=lambda waits_for: say(f"Waiting for {waits_for}.")):
        print(line)


@click.command(context_settings=CONTEXT)
@click.argument("job", metavar="JOB")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    default=120.0,
    show_default=True,
    help="How long to wait for a job on this machine to end.",
)
@in_namespace
@click.option("--delete", is_flag=True, help="On Kubernetes: delete the job with all its objects; its folder is kept.")
def stop(job: str, timeout: float, namespace: str | None, delete: bool) -> None:
    """Stop a job. `elasticcb resume` can continue a training job later.

    JOB is the job's folder or its name below `jobs`; a --job_name or `latest` (the newest job); or, with
    --namespace, the name of a job on Kubernetes. As after Ctrl-C, running tasks finish, parameter servers save their
    state, and all processes exit. The command returns when they have exited; on Kubernetes, at once.

    \b
    Examples:
      elasticcb stop latest
      elasticcb stop jobs/train-mnist-20260101-120000
      elasticcb stop census --namespace=training --delete
    """
    if namespace:
        _stop_on_kubernetes(KubernetesJob(KubernetesAPI(namespace), job), delete)
        return
    if delete:
        raise UsageError(
            "--delete applies only to jobs on Kubernetes. Add --namespace; or, for a job on this machine, remove its "
            "folder."
        )
    print(stop_job(find_job(job), timeout))


def _stop_on_kubernetes(job: KubernetesJob, delete: bool) -> None:
    name, namespace = job.name, job.api.namespace
    if delete:
        job.api.delete("Job", name)
        # During its grace period, a master would recreate pods that are deleted before it.
        job.api.delete_pods(f"{JOB_LABEL}={name}")
        print(f"The job {name} was deleted.")
        return
    if job.state != "running":
        raise UsageError(f"The job {name} is {job.state}; there is nothing to stop. Use --delete to delete it.")
    job.api.patch("Job", name, {"spec": {"parallelism": 0}})
    print(f"The job {name} is stopping. To continue it: elasticcb resume {name} --namespace={namespace}")


@click.command(context_settings=CONTEXT)
@click.argument("job", metavar="JOB")
@in_namespace
@click.option("--follow", "-f", is_flag=True, help="Follow the log until the job ends. Ctrl-C stops only this command.")
@click.option("--master", is_flag=True, help="Show the log of the master (the default).")
@click.option("--worker", type=click.IntRange(0), metavar="N", help="Show the log of worker N.")
@click.option("--ps", type=click.IntRange(0), metavar="N", help="Show the log of parameter server N.")
@click.option(
    "--lines", type=click.IntRange(1), metavar="N", default=1000, show_default=True, help="Show only the last N lines."
)
def logs(
    job: str, namespace: str | None, follow: bool, master: bool, worker: int | None, ps: int | None, lines: int
) -> None:
    """Show the log of a job's master or of one of its other processes.

    JOB is the job's folder or its name below `jobs`; a --job_name or `latest` (the newest job); or, with
    --namespace, the name of a job on Kubernetes.

    \b
    Examples:
      elasticcb logs latest --follow
      elasticcb logs jobs/train-mnist-20260101-120000 --worker=3
      elasticcb logs census --namespace=training --follow
    """
    if master + (worker is not None) + (ps is not None) > 1:
        raise UsageError("--master, --worker and --ps exclude each other. Give one of them, or none for the master.")
    role, index = ("worker", worker) if worker is not None else ("ps", ps) if ps is not None else ("master", 0)
    if namespace:
        _show_pod(KubernetesJob(KubernetesAPI(namespace), job), role, index or 0, follow, lines)
        return
    process = "master" if role == "master" else f"{role}-{index}"
    stored = StoredJob(job) if is_url(job) else None
    if stored is not None and stored.local_folder is None:
        _show(stored.log(process)[-lines:])
    else:
        _show(log_lines(find_job(job), process, lines, follow))


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, end="", flush=True)


def _show_pod(job: KubernetesJob, role: str, index: int, follow: bool, lines: int) -> None:
    if role == "master" and follow and job.state == "running":
        end_with(follow_job(job.api, job.name, lines, from_now=True))
        return
    pod = job.newest(role, index)
    if not pod:
        raise UsageError(f"The job {job.name} has no pod of {role} {index}.")
    if not follow:
        print(job.api.log(pod, lines), end="")
        return
    _show(f"{line}\n" for line in job.api.follow_log(pod, lines))


_LOOK_SECONDS = 0.2


@click.command(context_settings=CONTEXT)
@click.argument("job", metavar="JOB")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    default=0,
    help="Port to listen on at 127.0.0.1.",
    show_default="any free port",
)
@click.option("--parent", type=int, hidden=True, help="Exit together with this process, and wait for the job to start.")
@click.option(
    "--publish", is_flag=True, hidden=True, help="Write the address to the job's folder instead of printing it."
)
def dashboard(job: str, port: int, parent: int | None, publish: bool) -> None:
    """Serve the live dashboard of a job to browsers on this machine, and print its address.

    JOB is the job's folder or its name below `jobs`; a --job_name or `latest` (the newest job). The page shows loss,
    metrics and throughput, workers and their tasks, parameter servers, events and logs, and has buttons to scale and
    stop the job. For a job that has ended, it shows the final state. Ctrl-C stops the dashboard, not the job. Needs
    elasticcb[dashboard].

    \b
    Examples:
      elasticcb dashboard latest
      elasticcb dashboard jobs/train-mnist-20260101-120000 --port 8787
    """
    os.environ.update(quiet_environment("INFO"))
    from elasticcb.dashboard.beside import PAGE_FILE, line_about
    from elasticcb.dashboard.server import serve
    from elasticcb.storage import durable

    folder = find_job(job)
    if parent is not None:
        follow_parent(parent)
        while not (folder / MASTER_FILE).exists():
            time.sleep(_LOOK_SECONDS)

    def say(address: str) -> None:
        if publish:
            durable.write_document(folder / PAGE_FILE, {"address": address})
        else:
            print_line(line_about(address))

    serve(folder, port, say)
