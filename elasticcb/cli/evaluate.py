"""`elasticcb evaluate`."""

from __future__ import annotations

from typing import Any

import rich_click as click

from elasticcb.cli.command import CONTEXT, given_values, job_options
from elasticcb.cli.follow import FollowSettings, follow
from elasticcb.cli.from_flags import values_of
from elasticcb.cli.job import build_settings, run_job, show_folder
from elasticcb.dashboard.beside import page_beside
from elasticcb.settings import Command


@click.command(context_settings=CONTEXT)
@job_options([Command.EVALUATE])
@click.pass_context
def evaluate(context: click.Context, /, **values: Any) -> None:
    """Evaluate a trained model, from a checkpoint; or one that is being trained, checkpoint by checkpoint.

    \b
    Examples:
      elasticcb evaluate --config job.yaml --checkpoint_dir_for_init=checkpoints
      elasticcb evaluate --model_zoo=model_zoo --model_def=mnist.custom_model \\
          --validation_data=data/test --checkpoint_dir_for_init=checkpoints
      elasticcb evaluate --config job.yaml --checkpoint_dir_for_init=checkpoints \\
          --follow --follow_timeout=600
    """
    given = given_values(context)
    if not given["follow"]:
        run_job(Command.EVALUATE, given, context.obj)
        return
    limits = FollowSettings(**values_of(Command.EVALUATE, given, "follow"))
    settings = build_settings(Command.EVALUATE, given)
    show_folder(settings)
    with page_beside(settings.directory, settings.cluster.dashboard):
        follow(settings, limits)
