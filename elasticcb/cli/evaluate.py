"""`elasticcb evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click

from elasticcb.cli.command import CONTEXT, JobCommand, given_values, job_options
from elasticcb.cli.follow import FollowSettings, follow
from elasticcb.cli.from_flags import values_of
from elasticcb.cli.job import build_settings, run_job, show_header
from elasticcb.clients.running_master import command_runs
from elasticcb.dashboard.beside import page_beside
from elasticcb.process.signals import sigterm_interrupts
from elasticcb.settings import Command


@click.command(cls=JobCommand, context_settings=CONTEXT)
@job_options([Command.EVALUATE])
@click.pass_context
def evaluate(context: click.Context, /, **values: Any) -> None:
    """Evaluate a model from a checkpoint, or evaluate each new checkpoint of a running training job.

    \b
    Examples, after the first example of `elasticcb train --help`:
      elasticcb evaluate --config model_zoo/digits/job.yaml \\
          --checkpoint_dir_for_init=checkpoints
      elasticcb evaluate --model_zoo=model_zoo \\
          --model_def=digits.digits.custom_model --validation_data=test \\
          --checkpoint_dir_for_init=checkpoints
      elasticcb evaluate --config model_zoo/digits/job.yaml \\
          --checkpoint_dir_for_init=checkpoints --follow --max_evaluations=1
    """
    given = given_values(context)
    if not given["follow"]:
        run_job(Command.EVALUATE, given, context.obj)
        return
    limits = FollowSettings(**values_of(Command.EVALUATE, given, "follow"))
    settings = build_settings(Command.EVALUATE, given)
    show_header(settings)
    directory = settings.directory
    # same exit codes as other jobs
    with page_beside(directory, settings.cluster.dashboard, True), command_runs(Path(directory)), sigterm_interrupts():
        follow(settings, limits)
