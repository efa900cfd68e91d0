"""`elasticcb predict`."""

from __future__ import annotations

from typing import Any

import rich_click as click

from elasticcb.cli.command import CONTEXT, JobCommand, given_values, job_options
from elasticcb.cli.job import run_job
from elasticcb.settings import Command


@click.command(cls=JobCommand, context_settings=CONTEXT)
@job_options([Command.PREDICT])
@click.pass_context
def predict(context: click.Context, /, **values: Any) -> None:
    """Predict with a trained model from a checkpoint.

    Predictions are written to the file --output, one row per record with the record's number, and passed to the
    callbacks of the model file, such as elasticcb.callbacks.PredictionOutputsProcessor.

    \b
    Examples, after the first example of `elasticcb train --help`:
      elasticcb predict --config model_zoo/digits/job.yaml \\
          --prediction_data=test --checkpoint_dir_for_init=checkpoints \\
          --output=predictions.csv
      elasticcb predict --model_zoo=model_zoo \\
          --model_def=digits.digits.custom_model --prediction_data=test \\
          --checkpoint_dir_for_init=checkpoints \\
          --output=predictions.parquet
    """
    run_job(Command.PREDICT, given_values(context), context.obj)
