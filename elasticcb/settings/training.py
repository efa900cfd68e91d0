"""The settings of training: the loop, the exchange of weights and gradients, and embedding tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticcb.settings.choices import CallbackErrors, NonFinite, RowsDtype, Updates, WhenFull, WireDtype
from elasticcb.settings.definition import (
    ALL,
    AUTO,
    EMBEDDING,
    JOB,
    TASKS,
    TRAIN,
    TRAINING,
    Kind,
    Section,
    setting,
    settings_of,
)
from elasticcb.settings.table import TableOptions

_MOST_BATCHES_PER_TASK = 64
_BATCHES_PER_TASK_OF_UNKNOWN = 16  # the epoch may be short
_TASKS_PER_WORKER = 4  # at least, in each epoch, so that workers end at about the same time


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions(Section):
    """How workers and parameter servers exchange weights and gradients."""

    PANEL = TRAINING
    COMMANDS = TRAIN

    sync_version_tolerance: int = setting(
        0,
        "Synchronous mode: maximum age of a gradient; older ones are rejected and computed again.",
        unit="VERSIONS",
        minimum=0,
    )
    get_model_steps: int = setting(1, "A worker pulls the weights every N batches.", unit="BATCHES", minimum=1)
    max_staleness: int = setting(
        0,
        "How many batches a worker may compute before it waits for the servers' answers; 0: strictly pull, compute, "
        "push. With local updates, it applies to the rows of embedding tables. Not available in synchronous mode.",
        unit="BATCHES",
        minimum=0,
    )
    wire_dtype: WireDtype = setting(
        WireDtype.SAME,
        "Encoding of float32 weights, gradients and embedding rows on the wire in training: unchanged, or rounded to "
        "bfloat16.",
    )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ExchangeOptions):
    """The loop over tasks and batches."""

    num_epochs: int = setting(1, "Number of passes over the training data.", unit="EPOCHS", minimum=1)
    max_step: int = setting(
        0,
        "Stop after N model versions (accepted gradient pushes); 0: no limit.",
        unit="VERSIONS",
        minimum=0,
    )
    evaluation_steps: int = setting(
        0,
        "Evaluate every N model versions; 0: at the end of each epoch. The final model is always evaluated.",
        unit="VERSIONS",
        minimum=0,
    )
    updates: Updates = setting(
        Updates.LOCAL,
        "How the updates of several workers are combined. local: each worker trains alone for --local_steps batches, "
        "then its movement (weight change) is merged. sync: the mean of --grads_to_wait gradients is applied. async: "
        "each gradient is applied when it arrives.",
        argument="updates",
    )
    local_steps: int | None = setting(
        None,
        "Local mode: number of batches that a worker trains on before its movement is merged; it is also merged "
        "at the end of a task. auto: 4 to 64, so that merging takes about 5 % of the time.",
        unit="BATCHES",
        minimum=1,
        default_text=AUTO,
        argument="local_steps",
    )
    # None: `updates` decides
    use_async: bool | None = setting(
        None,
        "Earlier name of --updates: true is --updates=async, false is --updates=sync.",
        argument="use_async",
    )
    grads_to_wait: int = setting(
        1,
        "Synchronous mode: number of gradients per update; may exceed the number of workers.",
        unit="GRADIENTS",
        minimum=1,
        argument="grads_to_wait",
    )
    non_finite: NonFinite = setting(
        NonFinite.STOP,
        "What to do when a loss or a gradient contains NaN or infinity: stop the job, or skip and count the batch.",
        argument="non_finite",
    )
    callback_errors: CallbackErrors = setting(
        CallbackErrors.STOP,
        "What to do when a callback hook raises: stop the job, or show the error once, count it and continue.",
        panel=JOB,
        commands=ALL,
        argument="callback_errors",
    )
    # None: in order
    shuffle_seed: int | None = setting(0, "Seed for the order of tasks in each epoch.", unit="SEED")
    log_loss_steps: int = setting(100, "Log the loss every N model versions; 0: never.", unit="VERSIONS", minimum=0)
    minibatch_size: int = setting(64, "Records per batch.", unit="RECORDS", minimum=1, panel=TASKS, commands=ALL)
    num_minibatches_per_task: int | None = setting(
        None,
        "Batches per task. A task is the unit of work that a worker takes, and that is repeated after a failure. "
        "auto: at most 64, and few enough that each worker gets at least four tasks per epoch; 16 if the length of an "
        "epoch is unknown.",
        default_text=AUTO,
        unit="BATCHES",
        minimum=1,
        panel=TASKS,
        commands=ALL,
    )
    max_task_retries: int = setting(
        3,
        "How often a failed task is retried before the job fails.",
        unit="TIMES",
        minimum=0,
        panel=TASKS,
        commands=ALL,
    )
    initial_epoch: int = 0  # earlier epochs count as done
    validation_freq: int | tuple[int, ...] = 1  # evaluate every N epochs, or after these (counted from 1)

    def __post_init__(self) -> None:
        updates = self.updates if self.use_async is None else (Updates.ASYNC if self.use_async else Updates.SYNC)
        object.__setattr__(self, "updates", Updates(updates))
        object.__setattr__(self, "use_async", None)

    @property
    def is_synchronous(self) -> bool:
        """Whether all servers together apply the mean of several gradients."""
        return self.updates is Updates.SYNC

    @property
    def is_local(self) -> bool:
        """Whether workers run their own optimizers."""
        return self.updates is Updates.LOCAL

    def batches_per_task(self, batches: int | None, workers: int) -> int:
        """Number of batches in a task."""
        if self.num_minibatches_per_task is not None:
            return self.num_minibatches_per_task
        if batches is None:
            return _BATCHES_PER_TASK_OF_UNKNOWN
        per_task = max(batches // (workers * _TASKS_PER_WORKER), 1)
        window = self.local_steps if self.is_local and self.local_steps else 1
        if per_task <= window:
            return per_task
        return -(-min(per_task, _MOST_BATCHES_PER_TASK) // window) * window  # whole windows

    @property
    def max_batches(self) -> int:
        """Training batches that `max_step` versions take; 0: no limit."""
        return self.max_step * (self.grads_to_wait if self.is_synchronous else 1)


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions(Section):
    """Embedding tables: variables whose rows parameter servers store by id."""

    PANEL = EMBEDDING
    COMMANDS = TRAIN

    threshold_bytes: int = setting(
        2 << 20,
        "Shard a keras.layers.Embedding of at least this size by id across the servers; workers then exchange only "
        "the rows in the batch.",
        name="embedding_threshold_bytes",
        unit="BYTES",
        minimum=0,
        commands=ALL,
    )
    memory_bytes: int = setting(
        0,
        "Memory limit for the embedding tables of one parameter server, including optimizer slots; 0: no limit.",
        name="embedding_memory_bytes",
        unit="BYTES",
        minimum=0,
    )
    when_full: WhenFull = setting(
        WhenFull.ERROR,
        "What to do when --embedding_memory_bytes, or max_rows of a table, is reached: fail the job, remove the "
        "least recently used rows, move them to disk, or let new ids keep their initial value.",
        name="embedding_when_full",
    )
    min_count: int = setting(
        1,
        "elasticcb.layers.Embedding: create a row for an id once training has looked it up N times. Until then, the "
        "id keeps its initial value.",
        name="embedding_min_count",
        unit="TIMES",
        minimum=1,
    )
    max_age: int | str = setting(
        0,
        "elasticcb.layers.Embedding: remove rows that training has not used for this many versions, or for this time "
        "(30m, 12h, 7d); 0: never.",
        name="embedding_max_age",
        kind=Kind.AGE,
    )
    rows_dtype: RowsDtype = setting(
        RowsDtype.FLOAT32,
        "Dtype in which parameter servers store float32 rows: float32, or bfloat16 with stochastic rounding, which "
        "halves the memory.",
        name="embedding_rows_dtype",
    )
    tables: dict[str, dict[str, Any]] = setting(
        dict,
        "Settings of individual tables, by layer name; they override those of the layer: "
        f"{', '.join(option.field for option in settings_of(TableOptions))}.",
        name="embedding_tables",
        kind=Kind.MAPPING,
        unit="{TABLE: {SETTING: VALUE}}",
        default_text="none",
    )
