"""Typed, frozen settings of a job: in seconds and bytes, validated once, sent to every process.

Nothing below the command line sees flags. `JobSettings.to_json` travels from the master to the
workers and the parameter servers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from elasticcb.errors import UsageError


class Command(str, Enum):
    """What a job does."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    CALL = "call"  # functions that `Cluster.schedule` is given


class ClusterKind(str, Enum):
    """Who starts the processes of a job."""

    LOCAL = "local"  # processes on this machine
    INPROCESS = "inprocess"  # threads of this process, for debugging
    EXTERNAL = "external"  # the user, by hand, anywhere
    KUBERNETES = "kubernetes"  # Kubernetes, as pods
    RAY = "ray"  # on the nodes of a Ray cluster


class NonFinite(str, Enum):
    """What a NaN or an infinity in a loss or a gradient leads to."""

    STOP = "stop"  # the job fails
    SKIP = "skip"  # the batch is passed over, and counted


class CallbackErrors(str, Enum):
    """What an error in a hook of a callback leads to."""

    STOP = "stop"  # the job fails
    WARN = "warn"  # it is shown and counted, and the job goes on


class WireDtype(str, Enum):
    """How gradients travel between processes."""

    SAME = "same"  # as they are
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Where the model file is, and what its names are."""

    zoo: str = ""  # folder that is put on the import path
    definition: str = ""  # "package.module.custom_model", relative to `zoo`; "": the job has a program instead
    params: dict[str, Any] = field(default_factory=dict)  # keyword arguments of `custom_model`
    loss: str = "loss"
    optimizer: str = "optimizer"
    feed: str = "feed"
    eval_metrics_fn: str = "eval_metrics_fn"
    callbacks: str = "callbacks"
    custom_data_reader: str = "custom_data_reader"


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Origins of records: a path, glob, folder, list of those joined by commas, or URL; "" is none."""

    training: str = ""
    validation: str = ""
    prediction: str = ""
    reader_params: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the reader


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The loop over tasks and batches."""

    minibatch_size: int = 64  # records
    num_minibatches_per_task: int = 8
    num_epochs: int = 1
    max_step: int = 0  # model versions; 0: no limit
    evaluation_steps: int = 0  # model versions between evaluation rounds; 0: at the end of each epoch
    get_model_steps: int = 1  # batches between pulls
    max_staleness: int = 0  # batches that a worker computes ahead of the answers to its pushes, asynchronous mode
    wire_dtype: WireDtype = WireDtype.SAME
    log_loss_steps: int = 100  # model versions between log lines; 0: never
    initial_epoch: int = 0  # epochs before it are taken as done
    validation_freq: int | tuple[int, ...] = 1  # evaluate every so many epochs, or after these (from 1)
    shuffle_seed: int | None = 0  # of the order of shards in each epoch; None: in order
    use_async: bool = True
    grads_to_wait: int = 1  # gradients per update, synchronous mode
    sync_version_tolerance: int = 0  # how many versions old a gradient may be, synchronous mode
    non_finite: NonFinite = NonFinite.STOP
    callback_errors: CallbackErrors = CallbackErrors.STOP
    max_task_retries: int = 3
    lease_seconds: float = 300.0  # a task without progress for so long is taken away

    @property
    def records_per_task(self) -> int:
        return self.minibatch_size * self.num_minibatches_per_task

    @property
    def max_batches(self) -> int:
        """Training batches that `max_step` versions take; 0: no limit."""
        return self.max_step * (1 if self.use_async else self.grads_to_wait)


class WhenFull(str, Enum):
    """What happens when embedding tables reach their memory."""

    ERROR = "error"  # the job fails
    EVICT = "evict"  # rows that were not used for longest go
    INITIAL = "initial"  # new ids keep their initial value


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """Embedding tables: variables whose rows parameter servers hold by id."""

    threshold_bytes: int = 2 << 20  # a keras.layers.Embedding of at least so many becomes a table
    memory_bytes: int = 0  # of all tables of a server, with slots; 0: no limit
    when_full: WhenFull = WhenFull.ERROR
    min_count: int = 1  # from which time on that training meets an id it has a row of its own
    max_age: int = 0  # rows that training did not meet for so many versions go; 0: never


# In the job's folder.
RECOVERY_FOLDER = "recovery"  # by which a parameter server that was killed comes back
INDEX_FILE = "index-{mode}.zip"  # below the recovery folder: where records begin, by which data need no second scan
JOB_FILE = "job.json"  # the settings of training
CHECKPOINTS_FOLDER = "checkpoints"  # those on their way to a remote folder
INITIAL_FOLDER = "initial-checkpoint"  # that came from a remote folder
STATUS_FILE = "status.json"  # of a job that is over
JOURNAL_FILE = "journal.log"  # by which a master goes on with the job of another


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When and where checkpoints are written, and which one to start from."""

    directory: str = ""  # a folder, or the fsspec URL of one; "": none are written
    steps: int = 0  # model versions between checkpoints; 0: only at the end
    keep_max: int = 3  # newest that are kept; 0: all
    # Between the files by which a parameter server that was killed comes back; 0: none are written.
    interval_seconds: float = 10.0
    # A checkpoint folder, or the folder of one version, or the fsspec URL of one of them; "": fresh weights.
    directory_for_init: str = ""


MOST_WORKERS = 256  # that a job can be scaled to, unless it begins with more


@dataclass(frozen=True)
class WorkerRange:
    """How many workers there may be; `most` 0: the number is fixed."""

    least: int = 0
    most: int = 0

    @classmethod
    def of(cls, text: str) -> WorkerRange:
        """ "1..8" as a range. Raises `UsageError` when it is none."""
        parts = [part.strip() for part in text.split("..")]
        numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 10]
        if not len(parts) == len(numbers) == 2 or not 1 <= numbers[0] <= numbers[1] <= MOST_WORKERS:
            raise UsageError(
                f"{text!r} is no range of workers. Expected two numbers from 1 to {MOST_WORKERS}, the smaller one "
                "first, with two dots between them, such as 1..8."
            )
        return cls(*numbers)

    def __str__(self) -> str:
        return f"{self.least}..{self.most}" if self.most else ""


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """What pods are like; texts as the flags of the same names have them (cluster/pod_flags.py)."""

    namespace: str = "default"
    image: str = ""
    image_pull_policy: str = ""  # "": what Kubernetes takes
    service_account: str = ""  # "": that of the namespace
    master_resource_request: str = ""
    master_resource_limit: str = ""
    worker_resource_request: str = ""
    worker_resource_limit: str = ""
    ps_resource_request: str = ""
    ps_resource_limit: str = ""
    master_pod_priority: str = ""
    worker_pod_priority: str = ""
    ps_pod_priority: str = ""
    volume: str = ""
    envs: str = ""
    node_selector: str = ""
    tolerations: str = ""
    restart_policy: str = "Never"  # of the master's pod
    master_pod: bool = True  # the master is a pod, too; else a process of this machine
    cluster_spec: dict[str, Any] = field(default_factory=dict)  # patches of pods by role, and of "all"


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """How many processes, and who starts them."""

    kind: ClusterKind = ClusterKind.LOCAL
    ray_address: str = ""  # of the Ray cluster, "HOST:PORT"; "": that of RAY_ADDRESS, or the one of this machine
    num_workers: int = 1
    autoscale: WorkerRange = WorkerRange()
    num_ps: int = 1
    ps_replicas: int = 0  # of each server's last updates, in the memory of the next server
    host: str = ""  # address that the master listens on; "": the one of this machine that its processes reach
    port: int = 0  # of the master; 0: any free one
    metrics_port: int | None = None  # where the master serves metrics to Prometheus; 0: any free one, None: it does not
    health_port: int | None = None  # where the master answers health checks; likewise
    max_worker_restarts: int = 10  # over the whole job
    max_ps_restarts: int = 10  # likewise
    silence_seconds: float = 30.0  # a server, or a process that nobody watches, is lost after so much silence
    tls: bool = False  # with certificates that are made for the job
    tls_cert: str = ""  # PEM files of the user's own; "": none
    tls_key: str = ""
    tls_ca: str = ""
    tls_name: str = ""  # that all certificates are for; "": each is for its process's address
    kubernetes: KubernetesSettings = KubernetesSettings()

    @property
    def patience_seconds(self) -> float:
        """Of calls to a server: longer than it takes to notice that it does not answer, or is not heard of, and to put
        another in its place."""
        return 60.0 + 2 * self.silence_seconds


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Everything that a process of the job needs to know."""

    command: Command
    name: str
    directory: str  # logs and results of the job, absolute
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    training: TrainingSettings = TrainingSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    cluster: ClusterSettings = ClusterSettings()
    embedding: EmbeddingSettings = EmbeddingSettings()
    callback_params: dict[str, Any] = field(default_factory=dict)  # more of `callback.params`
    output: str = ""  # folder of the exported SavedModel, or file of the predictions; "": none
    output_format: str = ""  # of the predictions, one of prediction_formats.FORMATS
    log_level: str = "INFO"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=_plain)

    @classmethod
    def from_json(cls, text: str) -> JobSettings:
        """Raises `UsageError` when `text` comes from another release's settings."""
        try:
            settings: JobSettings = _build(cls, json.loads(text))
            return settings
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise UsageError(
                f"These job settings can't be read ({error}). All processes of a job must run the same "
                "release of elasticcb."
            ) from error


def _plain(value: Any) -> Any:
    """A number of NumPy, as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{value!r} (of type {type(value).__name__}) can't be a setting")


# Fields that are not JSON values themselves.
_NESTED: dict[tuple[type, str], type] = {
    (JobSettings, "command"): Command,
    (JobSettings, "model"): ModelSettings,
    (JobSettings, "data"): DataSettings,
    (JobSettings, "training"): TrainingSettings,
    (JobSettings, "checkpoint"): CheckpointSettings,
    (JobSettings, "cluster"): ClusterSettings,
    (JobSettings, "embedding"): EmbeddingSettings,
    (EmbeddingSettings, "when_full"): WhenFull,
    (ClusterSettings, "kind"): ClusterKind,
    (ClusterSettings, "autoscale"): WorkerRange,
    (ClusterSettings, "kubernetes"): KubernetesSettings,
    (TrainingSettings, "wire_dtype"): WireDtype,
    (TrainingSettings, "non_finite"): NonFinite,
    (TrainingSettings, "callback_errors"): CallbackErrors,
}


def _build(kind: type, values: dict[str, Any]) -> Any:
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        nested = _NESTED.get((kind, name))
        if nested is None:
            arguments[name] = value
        elif issubclass(nested, Enum):
            arguments[name] = nested(value)
        else:
            arguments[name] = _build(nested, value)
    return kind(**arguments)


def conflicts_with_replicas(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Arguments that `ps_replicas=1` can't be with: (name, why and what to do instead).

    Args:
        values: of the arguments of the same names of `elasticcb.Cluster` and of the command line.
    """
    if values["num_ps"] < 2:
        yield "num_ps", "the next server keeps the replica of a server. Start at least 2."
    if not values["use_async"]:
        yield "use_async", "in synchronous mode all servers start anew when one is lost. Leave one of them out."
    if not values["checkpoint_interval"]:
        yield "checkpoint_interval", "a replica holds what the files lack that are written then. Give it some seconds."
    forgets = "a replica does not know which rows a server has let go since it wrote its files. Leave one of them out."
    if values["embedding_min_count"] > 1:
        yield "embedding_min_count", forgets
    if values["embedding_max_age"]:
        yield "embedding_max_age", forgets
    if values["embedding_memory_bytes"] and WhenFull(values["embedding_when_full"]) is not WhenFull.ERROR:
        yield "embedding_when_full", forgets
