"""The settings of a job, typed and frozen, in seconds and bytes: each is defined here, once.

Flags, the keys of config files, the arguments of `Cluster`, checks and the tables of the docs follow from these fields.
`JobSettings.to_json` travels from the master to the workers and the parameter servers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any

from elasticcb.errors import UsageError
from elasticcb.settings.choices import PREDICTION_FORMATS, Command
from elasticcb.settings.cluster import ClusterSettings
from elasticcb.settings.definition import (
    ALL,
    CHECKPOINTS,
    DATA,
    EVALUATE,
    JOB,
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
    """Where the model file is, and what its names are."""

    PANEL = MODEL

    zoo: str = setting(
        "",
        "Folder that holds model files. Needed.",
        name="model_zoo",
        kind=Kind.FOLDER,
        needed=ALL,
        what="the folder that holds the model file",
    )
    definition: str = setting(
        "",  # the job has a program instead
        "The model in the zoo: path of the file with dots, then the function that returns the Keras model, or the "
        "keras.Model subclass; e.g. mnist.custom_model. Needed.",
        name="model_def",
        unit="FOLDER.FILE.NAME",
        needed=ALL,
        what="the model in the zoo, e.g. mnist.custom_model",
    )
    params: dict[str, Any] = setting(
        dict,
        'Arguments for the function of --model_def, e.g. "units=64;rate=1e-3". Values are read as numbers, true, false '
        "or null where they look so, else as text.",
        name="model_params",
    )
    loss: str = setting(
        "loss", "Name of the loss function in the model file.", kind=Kind.NAME, commands=TRAIN_AND_EVALUATE
    )
    optimizer: str = setting("optimizer", "Name of the function that returns the Keras optimizer.", kind=Kind.NAME)
    feed: str = setting("feed", "Name of the function that turns raw records into features and labels.", kind=Kind.NAME)
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
        "custom_data_reader", "Name of the function that returns a data reader of your own.", kind=Kind.NAME
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings(Section):
    """Origins of records: a path, glob, folder, list of those joined by commas, or URL; "" is none."""

    PANEL = DATA

    training: str = setting(
        "",
        "Records to train on: a file, folder, glob, URL, or several of these with commas between; with a data reader "
        "of your own, whatever it understands. Needed.",
        name="training_data",
        kind=Kind.DATA,
        commands=TRAIN,
        needed=TRAIN,
        what="the records to train on",
    )
    validation: str = setting(
        "",
        "Records to evaluate on. `evaluate` needs it; without it `train` runs no evaluation.",
        name="validation_data",
        kind=Kind.DATA,
        commands=TRAIN_AND_EVALUATE,
        needed=EVALUATE,
        what="the records to evaluate on",
    )
    prediction: str = setting(
        "",
        "Records to predict. Needed.",
        name="prediction_data",
        kind=Kind.DATA,
        commands=PREDICT,
        needed=PREDICT,
        what="the records to predict",
    )
    reader_params: dict[str, Any] = setting(
        dict, 'Arguments for the data reader, e.g. "header=true;encoding=latin-1".', name="data_reader_params"
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Section):
    """When what parameter servers hold is written."""

    PANEL = CHECKPOINTS
    COMMANDS = TRAIN

    steps: int = setting(
        0,
        "Write a checkpoint every so many model versions; 0: only at the end.",
        name="checkpoint_steps",
        unit="VERSIONS",
        minimum=0,
    )
    interval_seconds: float = setting(
        10.0,
        "Parameter servers write down what changed every so many seconds, in the job's folder; one that is killed "
        "comes back with that. 0: never, and a lost server ends the job.",
        name="checkpoint_interval",
        unit="SECONDS",
        minimum=0,
    )
    keep_max: int = setting(
        3,
        "Keep the newest so many checkpoints; 0: all.",
        name="keep_checkpoint_max",
        unit="CHECKPOINTS",
        minimum=0,
    )
    init_from: str = setting(
        "",
        "Begin a new job with the weights and embedding rows of another model's checkpoint, matched by name: the "
        "newest in this folder or URL, or this very checkpoint. Steps, epochs and versions count from 0.",
        kind=Kind.FOLDER,
    )
    init_map: str = setting(
        "",
        "Names of variables or layers in the model, and in the checkpoint of --init_from, with commas between; NEW= "
        "starts one fresh.",
        unit="NEW=OLD,…",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(CheckpointOptions):
    """When and where checkpoints are written, and which one to start from."""

    directory: str = setting(
        "",
        "Folder to write checkpoints to; `elasticcb train` takes its URL, too (s3://, gs://, sftp://, …). Without it "
        "none are written.",
        name="checkpoint_dir",
        kind=Kind.FOLDER,
        argument="checkpoint_dir",
    )
    directory_for_init: str = setting(
        "",
        "Start from the newest checkpoint in this folder or URL, or from this very checkpoint. `evaluate` and "
        "`predict` need it.",
        name="checkpoint_dir_for_init",
        kind=Kind.FOLDER,
        commands=ALL,
        needed=EVALUATE | PREDICT,
        what="the checkpoint with the trained weights",
    )


# In the job's folder.
RECOVERY_FOLDER = "recovery"  # by which a parameter server that was killed comes back
INDEX_FILE = "index-{mode}.zip"  # below the recovery folder: where records begin, by which data need no second scan
_HIDDEN = "***"
# Keys of what users give: parameters of readers, models and callbacks.
_SECRET_NAMES = re.compile(
    r"(?i)secret|token|passw|passphrase|credential|authorization|api_?key|access_?key|private|cookie|signature"
    r"|storage_options|headers|^(key|auth|sas|pwd)$"
)

JOB_FILE = "job.json"  # the settings of training
CHECKPOINTS_FOLDER = "checkpoints"  # those on their way to a remote folder
INITIAL_FOLDER = "initial-checkpoint"  # that came from a remote folder
STATUS_FILE = "status.json"  # of a job that is over
HISTORY_FILE = "history.json"  # likewise: its past, for its page
JOURNAL_FILE = "journal.log"  # by which a master goes on with the job of another


@dataclass(frozen=True, kw_only=True)
class JobSettings(Section):
    """Everything that a process of the job needs to know."""

    PANEL = JOB

    command: Command
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    training: TrainingSettings = TrainingSettings()
    embedding: EmbeddingOptions = EmbeddingOptions()
    checkpoint: CheckpointSettings = CheckpointSettings()
    output: str = setting(
        "",
        "`train`: folder of the exported SavedModel; without it nothing is exported. An earlier SavedModel there is "
        "replaced. `predict`: file of the predictions, a new one.",
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
        default_text="by the ending of --output",
        commands=PREDICT,
    )
    cluster: ClusterSettings = ClusterSettings()
    name: str = setting(
        "",
        "Name of the job, in logs and in the job's folder.",
        name="job_name",
        unit="NAME",
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*",
        expected="letters, digits, dots, dashes and underscores, beginning with a letter or a digit: it names a folder",
        default_text="from --model_def",
    )
    directory: str = setting(
        "",  # absolute
        "Folder for the job's logs and results.",
        name="job_dir",
        kind=Kind.FOLDER,
        default_text="jobs/COMMAND-NAME-TIME",
    )
    log_level: str = setting(
        "INFO",
        "What is logged. DEBUG also shows the traceback of an error, as ELASTICCB_DEBUG=1 does.",
        kind=Kind.CHOICE,
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        argument="log_level",
    )
    log_file_bytes: int = setting(
        50 << 20,
        "A log file of this size is renamed, and the process begins a new one; 0: never.",
        unit="BYTES",
        minimum=0,
    )
    log_files_kept: int = setting(
        3, "Older log files to keep of each process, as NAME.log.1 and so on.", unit="FILES", minimum=1
    )
    callback_params: dict[str, Any] = field(default_factory=dict)  # more of `callback.params`

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=_plain)

    def to_show(self) -> str:
        """As JSON, for logs: values that may be secrets are left out."""
        values = json.loads(self.to_json())
        pods = values["cluster"]["kubernetes"]
        pods["envs"] = ",".join(f"{each.partition('=')[0]}={_HIDDEN}" for each in pods["envs"].split(",") if each)
        return json.dumps(_without_secrets(values))

    @classmethod
    def from_json(cls, text: str) -> JobSettings:
        """Raises `UsageError` when `text` comes from another release's settings."""
        try:
            values = json.loads(text)
            lease = values.get("training", {}).pop("lease_seconds", None)  # where releases before this one had it
            if lease is not None:
                values.setdefault("cluster", {}).setdefault("lease_seconds", lease)
            settings: JobSettings = build(cls, values)
            return settings
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise UsageError(
                f"These job settings can't be read ({error}). All processes of a job must run the same "
                "release of elasticcb."
            ) from error


def _without_secrets(value: Any, name: str = "") -> Any:
    """A JSON value without what stands under a name of `_SECRET_NAMES`, or in an environment variable of pods."""
    if name and _SECRET_NAMES.search(name) and value:
        return _HIDDEN
    if isinstance(value, dict):
        variable = value.keys() == {"name", "value"}
        return {key: _HIDDEN if variable and key == "value" else _without_secrets(v, key) for key, v in value.items()}
    return [_without_secrets(each) for each in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """A number of NumPy, as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{value!r} (of type {type(value).__name__}) can't be a setting")
