"""`elasticcb evaluate --follow`: an evaluation job for each checkpoint that a training job writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from elasticcb.errors import ElasticCBError, JobInterrupted
from elasticcb.process.log_files import print_line
from elasticcb.process.wording import how_many
from elasticcb.settings import FollowSettings, JobSettings
from elasticcb.storage import durable

if TYPE_CHECKING:
    from elasticcb.cli.progress import Display
    from elasticcb.master.snapshot import JobSnapshot
    from elasticcb.sidecar.follower import Checkpoint

RESULTS = "evaluations.jsonl"  # in the job's folder


def follow(settings: JobSettings, limits: FollowSettings) -> None:
    """Evaluates each checkpoint of a folder, and new ones when they appear, until a limit is reached.

    Each result is appended as a line to `evaluations.jsonl` in the job's folder.

    Raises:
        JobInterrupted: SIGINT or SIGTERM came.
        ElasticCBError: an evaluation failed.
    """
    # Imported here because it takes seconds; mistakes in flags are reported before.
    from elasticcb.cli.progress import make_display
    from elasticcb.roles.master import running_cluster
    from elasticcb.sidecar.follower import CheckpointFollower

    folder = settings.checkpoint.directory_for_init
    results = Path(settings.directory, RESULTS)
    follower = CheckpointFollower(folder, files=False)
    display = make_display(settings)
    done, reason = 0, ""
    try:
        display.message(f"Following {folder}")
        checkpoint = follower.next(limits.timeout or None)
        while checkpoint is not None and not _enough(done, limits):
            with running_cluster(settings, display) as run:
                while checkpoint is not None and not _enough(done, limits):
                    summary = _evaluate(settings, checkpoint, display, run)
                    if summary is not None:
                        _note(results, checkpoint, summary)
                        done += 1
                    if not _enough(done, limits):
                        checkpoint = follower.next(limits.timeout or None)
                    if summary is None:
                        break  # the cluster is no longer usable
        if checkpoint is None:
            reason = f"No new checkpoint appeared for {limits.timeout:g} s. "
    except (KeyboardInterrupt, JobInterrupted) as error:
        raise JobInterrupted(f"Interrupted. {_ending(done, results)}") from error
    finally:
        follower.close()
        display.close()
    print_line(reason + _ending(done, results))


def _enough(done: int, limits: FollowSettings) -> bool:
    return 0 < limits.max_evaluations <= done


def _evaluate(
    settings: JobSettings, checkpoint: Checkpoint, display: Display, run: Callable[[JobSettings], JobSnapshot]
) -> JobSnapshot | None:
    """Runs the job of one checkpoint; None if the checkpoint was deleted before its weights were read."""
    initial = replace(settings.checkpoint, directory_for_init=str(checkpoint.path))
    try:
        return run(replace(settings, checkpoint=initial))
    except JobInterrupted:
        raise
    except ElasticCBError:
        if checkpoint.is_there:
            raise
        display.message(
            f"Version {checkpoint.version} was deleted before it was evaluated. Raise --keep_checkpoint_max of the "
            "training job."
        )
        return None


def _note(results: Path, checkpoint: Checkpoint, summary: JobSnapshot) -> None:
    entry = {
        "version": summary.version,
        "checkpoint": str(checkpoint.path),
        "records": summary.records_evaluated,
        "seconds": round(summary.seconds, 3),
        "metrics": dict(summary.metrics),
    }
    with results.open("ab", buffering=0) as file:
        durable.append(file.fileno(), json.dumps(entry).encode() + b"\n")
    durable.sync(results)


def _ending(done: int, results: Path) -> str:
    if not done:
        return "No checkpoint was evaluated."
    return f"Evaluated {how_many(done, 'checkpoint')}. Results: {results}"
