"""`elasticcb train`."""

from __future__ import annotations

from typing import Any

import rich_click as click

from elasticcb.cli.command import CONTEXT, given_values, job_options
from elasticcb.cli.job import run_job
from elasticcb.settings import Command


@click.command(context_settings=CONTEXT)
@job_options([Command.TRAIN])
@click.pass_context
def train(context: click.Context, /, **values: Any) -> None:
    """Train a model, evaluate it on the way, and export it.

    \b
    Examples:
      elasticcb train --config model_zoo/digits/job.yaml
      elasticcb train --model_zoo=model_zoo --model_def=mnist.custom_model \\
          --training_data=data/train --validation_data=data/test \\
          --num_workers=2 --num_ps=1 --num_epochs=3 --output=export/mnist
      elasticcb train --config job.yaml --updates=sync --grads_to_wait=2
      elasticcb train --config job.yaml --cluster=inprocess   # breakpoints work
    """
    run_job(Command.TRAIN, given_values(context), context.obj)
