"""The settings of a job and of its command, typed and frozen, in seconds and bytes. Each is defined once, here.

Flags, keys of config files, arguments of `Cluster`, checks and tables of the docs are derived from these fields. The
master sends `JobSettings.to_json` to workers and parameter servers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticcb.errors import UsageError
from elasticcb.settings.choices import PREDICTION_FORMATS, TIME, Command, LostOffsets, LostUpdates
from elasticcb.settings.cluster import ClusterSettings
from elasticcb.settings.definition import (
    ALL,
    CHECKPOINTS,
    DATA,
    EVALUATE,
    JOB,
    KUBERNETES,
    MODEL,
    PREDICT,
    TRAIN,
    TRAIN_AND_EVALUATE,
    Kind,
    Section,
    build,
    setting,
)
from elasticcb.settings.training import EmbeddingOptions, TrainingSettings


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Section):
    """The model file, and the names of its functions."""

    PANEL = MODEL

    zoo: str = setting(
        "",
        "Folder with the model files. Required.",
        name="model_zoo",
        kind=Kind.FOLDER,
        needed=ALL,
        what="the folder with the model file",
    )
    definition: str = setting(
        "",  # "": the job is serialized instead (model/program.py)
        "The model in the zoo: dotted path of the file, then the function that returns the Keras model, or the "
        "keras.Model subclass; e.g. mnist.custom_model. Required.",
        name="model_def",
        unit="FOLDER.FILE.NAME",
        needed=ALL,
        what="the model in the zoo, e.g. mnist.custom_model",
    )
    params: dict[str, Any] = setting(
        dict,
        'Arguments for the function of {model_def}, e.g. "units=64;rate=1e-3". Values that look like numbers, true, '
        "false or null are parsed as such; all others are text.",
        name="model_params",
    )
    loss: str = setting(
        "loss", "Name of the loss function in the model file.", kind=Kind.NAME, commands=TRAIN_AND_EVALUATE
    )
    optimizer: str = setting("optimizer", "Name of the function that returns the Keras optimizer.", kind=Kind.NAME)
    feed_batch: str = setting(
        "feed_batch",
        "Name of the function that converts the raw records of a batch to features and labels.",
        kind=Kind.NAME,
    )
    feed: str = setting(
        "feed", "Name of the function that maps or filters a dataset of single raw records.", kind=Kind.NAME
    )
    eval_metrics_fn: str = setting(
        "eval_metrics_fn",
        "Name of the function that returns the evaluation metrics.",
        kind=Kind.NAME,
        commands=TRAIN_AND_EVALUATE,
    )
    callbacks: str = setting(
        "callbacks", "Name of the function that returns the list of Keras callbacks.", kind=Kind.NAME
    )
    custom_data_reader: str = setting(
        "custom_data_reader", "Name of the function that returns a custom data reader.", kind=Kind.NAME
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings(Section):
    """Origins of records: a path, glob, folder, URL, or several joined by commas; "": none."""

    PANEL = DATA

    training: str = setting(
        "",
        "Records to train on: a file, folder, glob, URL, or several of these separated by commas; with a custom data "
        "reader, any text that it understands. Required.",
        name="training_data",
        kind=Kind.DATA,
        commands=TRAIN,
        needed=TRAIN,
        what="the records to train on",
    )
    validation: str = setting(
        "",
        "Records to evaluate on. Required by `evaluate`; without it, `train` does not evaluate.",
        name="validation_data",
        kind=Kind.DATA,
        commands=TRAIN_AND_EVALUATE,
        needed=EVALUATE,
        what="the records to evaluate on",
    )
    prediction: str = setting(
        "",
        "Records to predict. Required.",
        name="prediction_data",
        kind=Kind.DATA,
        commands=PREDICT,
        needed=PREDICT,
        what="the records to predict",
    )
    follow: bool = setting(
        False,
        "`train`: train also on files that are added to {training_data} later. `evaluate`: evaluate each checkpoint in "
        "{checkpoint_dir_for_init}, then each new one when it appears. `{follow}` without a value means true.",
        commands=TRAIN_AND_EVALUATE,
    )
    label: str = setting("", "Column of the labels, for a model file without a feed.", unit="COLUMN")
    bad_records: str = setting(
        "fail",
        "What to do with a record to train on that can't be converted to an example. fail: the job fails. skip: it is "
        "counted and skipped. A folder or URL: it is also kept there, as it came.",
        unit="fail|skip|FOLDER",
        commands=TRAIN,
    )
    bad_records_limit: int = setting(
        1000,
        "With {bad_records}: the job fails after this number of bad records; 0: no limit.",
        unit="RECORDS",
        minimum=0,
        commands=TRAIN,
    )
    reader_params: dict[str, Any] = setting(
        dict, 'Arguments for the data reader, e.g. "header=true;encoding=latin-1".', name="data_reader_params"
    )


_A_TIME: dict[str, Any] = {
    "unit": "TIME",
    "commands": TRAIN,
    "pattern": TIME,
    "expected": "a time in whole seconds, minutes, hours, days or weeks, such as 30s, 10m, 6h or 2d",
}


@dataclass(frozen=True, kw_only=True)
class StreamSettings(Section):
    """Training on data that grows."""

    PANEL = DATA
    COMMANDS = TRAIN

    records_per_epoch: int = setting(
        0,
        "Of a stream: records in an epoch, after which the model is evaluated, and callbacks run. Without it and "
        "{epoch_every}, an epoch ends with the stream.",
        unit="RECORDS",
        minimum=0,
    )
    epoch_every: str = setting("", "Of a stream: time after which an epoch ends.", **_A_TIME)
    epoch_event_time: str = setting(
        "",
        "Of a stream: an epoch has the records whose timestamps are in one such period, for example in one hour.",
        **_A_TIME,
    )
    progressive: bool = setting(
        False,
        "Evaluate each batch before it is trained, and log the metrics of each epoch as progressive_NAME; as with "
        "elasticcb.callbacks.ProgressiveMetrics. `{progressive}` without a value means true.",
    )
    lost_offsets: LostOffsets = setting(
        LostOffsets.FAIL,
        "Of a stream: what to do when records were removed, by retention, before they were trained: fail, or count and "
        "skip them.",
    )

    @property
    def ends_of_epochs(self) -> list[str]:
        """The settings by which epochs end."""
        return [name for name in ("records_per_epoch", "epoch_every", "epoch_event_time") if getattr(self, name)]


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Section):
    """When parameter servers write their state."""

    PANEL = CHECKPOINTS
    COMMANDS = TRAIN
    GROUP = "checkpoint"

    steps: int = setting(
        0,
        "Write a checkpoint every N model versions; 0: only at the end.",
        name="checkpoint_steps",
        unit="VERSIONS",
        minimum=0,
    )
    interval_seconds: float = setting(
        10.0,
        "Interval at which parameter servers write their changes to recovery files in the job's folder; a server "
        "that is killed restarts from them. 0: never; then losing a server ends the job.",
        name="checkpoint_interval",
        unit="SECONDS",
        minimum=0,
    )
    keep_max: int = setting(
        3,
        "Number of newest checkpoints to keep; 0 keeps all.",
        name="keep_checkpoint_max",
        unit="CHECKPOINTS",
        minimum=0,
    )
    init_from: str = setting(
        "",
        "Start a new job with the weights and embedding rows of another model's checkpoint, matched by name. A "
        "folder or URL of checkpoints (the newest is used), or of one checkpoint. Steps, epochs and versions count "
        "from 0.",
        kind=Kind.FOLDER,
    )
    init_map: str = setting(
        "",
        "Names of variables or layers in the model and in the checkpoint of {init_from}, separated by commas; NEW= "
        "initializes one from scratch.",
        unit="NEW=OLD,…",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(CheckpointOptions):
    """When and where checkpoints are written, and which one to start from."""

    directory: str = setting(
        "",
        "Folder or URL (s3://, gs://, sftp://, …) to write checkpoints to; the last one is the trained model. A "
        "program without it writes none.",
        name="checkpoint_dir",
        kind=Kind.FOLDER,
        default_text="`model` in the job's folder",
        argument="checkpoint_dir",
    )
    directory_for_init: str = setting(
        "",
        "Start from this checkpoint, or from the newest one in this folder or URL. Required by `evaluate` and "
        "`predict`.",
        name="checkpoint_dir_for_init",
        kind=Kind.FOLDER,
        commands=ALL,
        needed=EVALUATE | PREDICT,
        what="the checkpoint with the trained weights",
    )


@dataclass(frozen=True, kw_only=True)
class PeriodicExportSettings(Section):
    """Exports for serving while training continues."""

    PANEL = CHECKPOINTS

    directory: str = setting(
        "",
        "Folder or URL (s3://, gs://, sftp://, …) for exports of the model while training continues, from which it is "
        "served; as with elasticcb.callbacks.PeriodicExport.",
        name="export_dir",
        kind=Kind.FOLDER,
        commands=TRAIN,
    )
    every: str = setting("60s", "Time between two exports to {export_dir}.", name="export_every", **_A_TIME)
    full_every: str = setting(
        "6h",
        "Time between two full exports to {export_dir}; those between have only what has changed.",
        name="export_full_every",
        **_A_TIME,
    )
    keep: str = setting(
        "2d",
        "How long exports in {export_dir} are kept, unless the newest version needs them.",
        name="export_keep",
        **_A_TIME,
    )


# In the job's folder.
RECOVERY_FOLDER = "recovery"  # from which a killed parameter server restarts
INDEX_FILE = "index-{mode}.zip"  # below the recovery folder: offsets of records, so that data is scanned only once
HIDDEN = "***"
# Keys of user-defined parameters of readers, models and callbacks.
_SECRET_NAMES = re.compile(
    r"(?i)secret|token|passw|passphrase|credential|authorization|api_?key|access_?key|private|cookie|signature"
    r"|storage_options|headers|^(key|auth|sas|pwd)$"
)

JOB_FILE = "job.json"  # the settings of training
MODEL_FOLDER = "model"  # checkpoints of a command's training job that was given no other folder for them
INITIAL_FOLDER = "initial-checkpoint"  # downloaded from a remote folder
STATUS_FILE = "status.json"  # of a finished job
HISTORY_FILE = "history.json"  # of a finished job: its history, for the dashboard
JOURNAL_FILE = "journal.log"  # from which another master continues the job
JOURNALS = "journal"  # below a URL: the folder with the journal in segments
FIT_FILE = "fit.json"  # in the folder of each `fit` of a `Cluster`: its inputs
FORK_LOG = "zygote.log"  # in `logs`: of the process that forks the others


@dataclass(frozen=True, kw_only=True)
class JobSettings(Section):
    """All settings of a job, as each of its processes receives them."""

    PANEL = JOB

    command: Command
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    stream: StreamSettings = StreamSettings()
    training: TrainingSettings = TrainingSettings()
    embedding: EmbeddingOptions = EmbeddingOptions()
    checkpoint: CheckpointSettings = CheckpointSettings()
    output: str = setting(
        "",
        "`train`: folder for the exported SavedModel; an earlier SavedModel there is replaced; without it, nothing "
        "is exported. `predict`: file to write the predictions to; must not exist.",
        panel=CHECKPOINTS,
        kind=Kind.FOLDER,
        unit="PATH",
        commands=TRAIN | PREDICT,
    )
    output_format: str = setting(
        "",
        "Format of the predictions: CSV, JSON lines, Parquet (needs pyarrow) or NumPy.",
        panel=CHECKPOINTS,
        kind=Kind.CHOICE,
        choices=PREDICTION_FORMATS,
        default_text="from the file extension of {output}",
        commands=PREDICT,
    )
    exports: PeriodicExportSettings = PeriodicExportSettings()
    cluster: ClusterSettings = ClusterSettings()
    name: str = setting(
        "",
        "Name of the job, in logs and in the job's folder.",
        name="job_name",
        unit="NAME",
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*",
        expected="letters, digits, dots, dashes and underscores, starting with a letter or a digit, because it names a "
        "folder",
        default_text="from {model_def}",
    )
    directory: str = setting(
        "",  # absolute; of a URL, the folder on this machine
        "Folder for the job's logs and results. `elasticcb train` also accepts a URL (s3://, gs://, sftp://, …), from "
        "which another machine can resume the job.",
        name="job_dir",
        kind=Kind.FOLDER,
        default_text="jobs/COMMAND-NAME-TIME",
    )
    log_level: str = setting(
        "INFO",
        "Lowest level that is logged. DEBUG also shows tracebacks of errors, as does ELASTICCB_DEBUG=1.",
        kind=Kind.CHOICE,
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        argument="log_level",
    )
    log_file_bytes: int = setting(
        50 << 20, "Rotate a log file when it reaches this size; 0: never.", unit="BYTES", minimum=0
    )
    log_files_kept: int = setting(
        3, "Number of rotated log files to keep per process: NAME.log.1 and so on.", unit="FILES", minimum=1
    )
    callback_params: dict[str, Any] = field(default_factory=dict)  # additional `callback.params`
    keras_backend: str = ""  # the Keras backend of master and workers; set by the master
    store: str = ""  # the URL of --job_dir; "": it is a folder
    dry_run: bool = False  # read only the first records of each data origin

    @property
    def in_program(self) -> bool:
        """Whether it is a job of a `Cluster`, whose user knows arguments, or of a command, with flags."""
        return not self.model.definition

    @property
    def keeps_model_in_folder(self) -> bool:
        """Whether its checkpoints are in the job's folder, because no other was given."""
        return self.checkpoint.directory == f"{self.store or self.directory}/{MODEL_FOLDER}"

    @property
    def keeps_recovery_files(self) -> bool:
        """Whether the parameter servers change their part of the model, and write it."""
        return self.command in (Command.TRAIN, Command.CALL) and self.checkpoint.interval_seconds > 0

    @property
    def repeats_lost(self) -> bool:
        """Whether batches are trained again whose updates were lost with a server."""
        is_training = self.command is Command.TRAIN and self.keeps_recovery_files
        return is_training and self.cluster.lost_updates is LostUpdates.REPEAT

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=_plain)

    def to_show(self) -> str:
        """As JSON for logs, with possible secrets masked."""
        values = json.loads(self.to_json())
        pods = values["cluster"]["kubernetes"]
        pods["envs"] = ",".join(f"{each.partition('=')[0]}={HIDDEN}" for each in pods["envs"].split(",") if each)
        return json.dumps(_without_secrets(values))

    @classmethod
    def from_json(cls, given: str | Mapping[str, Any]) -> JobSettings:
        """From the text of `to_json`, or the object in it. Raises `UsageError` if another release wrote it."""
        try:
            settings: JobSettings = build(cls, json.loads(given) if isinstance(given, str) else given)
            return settings
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise UsageError(
                f"The job settings can't be read ({error}). All processes of a job must run the same release of "
                "elasticcb."
            ) from error


@dataclass(frozen=True, kw_only=True)
class FollowSettings(Section):
    """Not part of a job: whether and how long `evaluate` follows a folder of checkpoints."""

    PANEL = CHECKPOINTS
    COMMANDS = EVALUATE

    timeout: float = setting(
        0.0,
        "With {follow}: exit if no new checkpoint appears for this long; 0: no limit.",
        name="follow_timeout",
        unit="SECONDS",
        minimum=0,
    )
    max_evaluations: int = setting(
        0, "With {follow}: exit after N checkpoints; 0: no limit.", unit="CHECKPOINTS", minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class SubmissionSettings(Section):
    """Not part of a job: what to do with its manifests."""

    PANEL = KUBERNETES

    yaml: str = setting(
        "", "Write the manifests of the job to a file for kubectl, instead of submitting it.", kind=Kind.FILE
    )
    dry_run: bool = setting(
        False,
        "`train`: train one batch with one worker, without hooks of callbacks, show what the job would do, and keep "
        "nothing. With {cluster:kubernetes}: validate the job against the API server without starting anything. "
        "`{dry_run}` without a value means true.",
        panel=JOB,
    )


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Section):
    """Not part of a job: how its model is exported."""

    PANEL = CHECKPOINTS
    COMMANDS = TRAIN

    numbered: bool = setting(
        False,
        "Export to the next number below {output}, such as 3, as TensorFlow Serving expects. `{numbered}` without a "
        "value means true.",
    )


def _without_secrets(value: Any, name: str = "") -> Any:
    """A JSON value with the values of `_SECRET_NAMES` and of pods' environment variables masked."""
    if name and _SECRET_NAMES.search(name) and value:
        return HIDDEN
    if isinstance(value, dict):
        variable = value.keys() == {"name", "value"}
        return {key: HIDDEN if variable and key == "value" else _without_secrets(v, key) for key, v in value.items()}
    return [_without_secrets(each) for each in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Converts a NumPy number to a Python number."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{value!r} (of type {type(value).__name__}) can't be converted to JSON for the settings")
