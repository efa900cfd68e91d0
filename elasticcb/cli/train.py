"""`elasticcb train`."""

from __future__ import annotations

from typing import Any

import rich_click as click

from elasticcb.cli.command import CONTEXT, JobCommand, given_values, job_options
from elasticcb.cli.job import run_job
from elasticcb.settings import Command


@click.command(cls=JobCommand, context_settings=CONTEXT)
@job_options([Command.TRAIN])
@click.pass_context
def train(context: click.Context, /, **values: Any) -> None:
    """Train a model, evaluate it during training, and export it.

    \b
    Examples, in a checkout of the repository:
      elasticcb train --config model_zoo/digits/job.yaml \\
          --checkpoint_dir=checkpoints
      elasticcb train --model_zoo=model_zoo --model_def=iris.iris.custom_model \\
          --training_data=model_zoo/iris/train.csv \\
          --validation_data=model_zoo/iris/test.csv \\
          --data_reader_params="header=true" --minibatch_size=8 \\
          --num_epochs=15 --num_workers=2 --output=exported/iris
      elasticcb train --config model_zoo/iris/job.yaml --cluster=inprocess
      elasticcb train --config model_zoo/iris/job.yaml \\
          --updates=sync
    """
    run_job(Command.TRAIN, given_values(context), context.obj)
