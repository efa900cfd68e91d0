"""`elasticcb train`, `evaluate`, `predict` and `master`: the commands that run a job; `elasticcb worker` and `elasticcb
ps`: one process, joining a master.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from elasticcb.cli.command import CONTEXT, JobCommand, given_values, job_options, role_options
from elasticcb.cli.job import build_settings, run_job, show_header
from elasticcb.clients.running_master import command_runs
from elasticcb.cluster.external import ExternalCluster
from elasticcb.cluster.role import RoleProcess
from elasticcb.dashboard.beside import page_beside
from elasticcb.errors import ElasticCBError, JobInterrupted, UsageError
from elasticcb.process.log_files import print_line
from elasticcb.process.signals import sigterm_interrupts
from elasticcb.process.wording import how_many
from elasticcb.security.credentials import TOKEN_VARIABLE, Access, token_of_environment
from elasticcb.security.socket_folder import is_folder
from elasticcb.security.tls import FILES, TLS, tls_files
from elasticcb.settings import Command, FollowSettings, JobSettings
from elasticcb.settings.definition import ALL, JOB
from elasticcb.storage import durable

if TYPE_CHECKING:
    from elasticcb.cli.progress import Display
    from elasticcb.master.snapshot import JobSnapshot
    from elasticcb.sidecar.follower import Checkpoint

RESULTS = "evaluations.jsonl"  # in the job's folder


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
    run_job(given_values(context, Command.TRAIN), context.obj)


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
    given = given_values(context, Command.EVALUATE)
    if not given["follow"]:
        run_job(given, context.obj)
        return
    settings, limits = build_settings(given), FollowSettings(**given.of("follow"))
    show_header(settings)
    directory = settings.directory
    # same exit codes as other jobs
    with page_beside(directory, settings.cluster.dashboard, True), command_runs(Path(directory)), sigterm_interrupts():
        follow(settings, limits)


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
    run_job(given_values(context, Command.PREDICT), context.obj)


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
    given = given_values(context, Command(job_command))
    run_job(given.replaced("cluster", ExternalCluster.name), context.obj)


_MASTER_HELP = "Address of the master; `elasticcb master` prints it. Required."
_INDEX_HELP = "Index of this process, counted from 0; -1: the master chooses."
_HELP = {
    "worker": """Run one worker, which processes tasks from a master until none are left.

    The job's settings come from the master.

    \b
    Example:
      elasticcb worker --master 10.0.0.1:50001 --tls_ca=ca.pem
    """,
    "ps": """Run one parameter server, which holds its shard of the model until the job ends.

    The job's settings come from the master.

    \b
    Example:
      elasticcb ps --master 10.0.0.1:50001 --tls_ca=ca.pem --host 10.0.0.2
    """,
}


class Address(click.ParamType):
    """Checks the form of `HOST:PORT`, with an IPv6 host in brackets; `unix:FOLDER/NUMBER` passes unchecked."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if is_folder(str(value)):
            return str(value)
        host, colon, port = str(value).strip().rpartition(":")
        if not colon or not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
            self.fail(f"{value!r} is not an address. Expected HOST:PORT, such as 10.0.0.1:50001.", param, ctx)
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            self.fail(f"{value!r} is ambiguous. Put an IPv6 host in brackets: [::1]:50001.", param, ctx)
        return f"{host}:{port}"


def _command(role: str) -> click.Command:
    @click.command(role, context_settings=CONTEXT, help=_HELP[role])
    @click.option("--master", type=Address(), metavar="HOST:PORT", required=True, help=_MASTER_HELP)
    @click.option("--index", type=click.IntRange(-1), metavar="N", default=-1, show_default=True, help=_INDEX_HELP)
    @role_options(role)
    @click.option("--parent_pid", type=click.INT, default=None, hidden=True)  # exit when this process ends
    def run(**values: Any) -> None:
        tls = {name: values.pop(name) for name in (*FILES, "tls_name")}
        granted = access(values["master"], tls, values.pop("insecure"))
        given = {name: value for name, value in values.items() if value is not None}
        process = RoleProcess(role=role, access=granted, **given)
        from elasticcb.roles.run import run_role

        run_role(process)

    return run


worker, ps = _command("worker"), _command("ps")


def access(master: str, flags: dict[str, str | None], insecure: bool) -> Access:
    """Credentials from the TLS flags.

    Raises `UsageError` if files can't be used, the token is missing, or the token could reach a stranger.
    """
    files = tls_files({name: value or "" for name, value in flags.items()})
    if files is not None and insecure:
        raise UsageError(f"--insecure turns TLS off, but {files.flags[0]} asks for it. Remove one of the two.")
    if files is None and not insecure and not is_folder(master):
        raise UsageError(
            f"The master at {master} can't be authenticated without a CA, and the job's token is not sent to a "
            "stranger. Add --tls_ca, as in the command that the master prints after `Waiting for:`; or --insecure, "
            "if the master runs with it."
        )
    tls = None if files is None else TLS.load(files)
    token = token_of_environment()
    if not token:
        raise UsageError(
            f"The environment variable {TOKEN_VARIABLE} is not set. Set it to the job's token, as in the command that "
            "the master prints after `Waiting for:`."
        )
    return Access(token, tls)
