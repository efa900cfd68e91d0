"""`elasticcb dashboard`: the live dashboard of a job."""

from __future__ import annotations

import os
import time

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.cli.job_folders import find_job
from elasticcb.clients.running_master import MASTER_FILE
from elasticcb.process.log_files import print_line, quiet_environment
from elasticcb.process.system import follow_parent

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
