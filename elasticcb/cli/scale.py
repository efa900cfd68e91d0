"""`elasticcb scale`: more or fewer workers for a job that runs."""

from __future__ import annotations

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.errors import ConnectionLostError, UsageError
from elasticcb.running_job import running_master

_PATIENCE_SECONDS = 5.0


@click.command(context_settings=CONTEXT)
@click.argument("job", metavar="JOB")
@click.option("--workers", type=click.IntRange(1), metavar="N", required=True, help="How many there are to be.")
def scale(job: str, workers: int) -> None:
    """Give a job that runs more or fewer workers.

    JOB is the job's folder. New workers take tasks as soon as they are up. Those that are too many finish their batch,
    hand the rest of their task back, and leave: nothing is lost or trained twice.

    \b
    Examples:
      elasticcb scale jobs/mnist-20260101-120000 --workers 4
    """
    from elasticcb.master_client import MasterClient

    master = running_master(job)
    client = MasterClient(master.address, _PATIENCE_SECONDS, master.token)
    try:
        before = client.scale(workers)
    except ConnectionLostError as error:
        raise UsageError(
            f"The master of {job} does not answer: {error} If it was killed, `elasticcb resume` goes on with the job."
        ) from None
    finally:
        client.close()
    print(
        f"{job} has {workers} workers from now on; there were {before}."
        if workers != before
        else f"{job} has {workers} workers already."
    )
