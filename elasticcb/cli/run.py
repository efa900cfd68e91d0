"""`elasticcb train`, `evaluate`, `predict` and `master`: the commands that run a job."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import rich_click as click

from elasticcb.cli.command import CONTEXT, JobCommand, given_values, job_options
from elasticcb.cli.follow import FollowSettings, follow
from elasticcb.cli.from_flags import values_of
from elasticcb.cli.job import build_settings, run_job, show_header
from elasticcb.clients.running_master import command_runs
from elasticcb.cluster.external import ExternalCluster
from elasticcb.dashboard.beside import page_beside
from elasticcb.process.signals import sigterm_interrupts
from elasticcb.settings import Command
from elasticcb.settings.definition import ALL, JOB


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


@click.command(cls=JobCommand, context_settings=CONTEXT)
@job_options(ALL, leave_out=frozenset({"cluster"}))
@click.option(
    "--command",
    "job_command",
    type=click.Choice([command.value for command in Command if command in ALL]),
    default=Command.TRAIN.value,
    show_default=True,
    panel=JOB,
    help="The command that the job runs; it takes the flags of that command.",
)
@click.pass_context
def master(context: click.Context, /, job_command: str, **values: Any) -> None:
    """Run only the master, and wait for manually started workers and parameter servers.

    The same as `train`, `evaluate` or `predict` with --cluster=external. It prints the files to copy to the other
    machines, and the commands to run there. The model file and the data must have the same paths there.

    \b
    Examples:
      elasticcb master --config job.yaml --host=10.0.0.1 --port=50001
      elasticcb ps     --master 10.0.0.1:50001 --tls_ca=ca.pem --host=10.0.0.2
      elasticcb worker --master 10.0.0.1:50001 --tls_ca=ca.pem
    """
    given = given_values(context)
    values = {**given.values, "cluster": ExternalCluster.name}
    external = dataclasses.replace(given, values=values, explicit=given.explicit | {"cluster"})
    run_job(Command(job_command), external, context.obj)
