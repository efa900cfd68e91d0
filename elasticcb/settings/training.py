"""The settings of training: the loop, the exchange of weights and gradients, and embedding tables."""

from __future__ import annotations

from collections.abc import Sequence
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

ENDLESS = 2**31 - 1  # number of epochs of a stream

# ElasticDL's settings, which become others.
EARLIER = ("use_async", "grads_to_wait", "get_model_steps", "sync_version_tolerance")


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions(Section):
    """How workers and parameter servers exchange movements of weights, and rows of embedding tables."""

    PANEL = TRAINING
    COMMANDS = TRAIN
    GROUP = "exchange"

    max_staleness: int = setting(
        0,
        "Embedding tables: how many batches a worker may compute before it waits for the servers' answers to its "
        "gradients of rows; 0: strictly look up, compute, push.",
        unit="BATCHES",
        minimum=0,
    )
    wire_dtype: WireDtype = setting(
        WireDtype.SAME,
        "Encoding of float32 movements, embedding rows and their gradients on the wire in training: unchanged, or "
        "rounded to bfloat16.",
    )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ExchangeOptions):
    """The loop over tasks and batches."""

    num_epochs: int = setting(1, "Number of passes over the training data.", unit="EPOCHS", minimum=1)
    max_step: int = setting(
        0, "Stop after N model versions (batches of all workers); 0: no limit.", unit="VERSIONS", minimum=0
    )
    evaluation_steps: int = setting(
        0,
        "Evaluate every N model versions; 0: at the end of each epoch. The final model is always evaluated.",
        unit="VERSIONS",
        minimum=0,
    )
    updates: Updates = setting(
        Updates.LOCAL,
        "When the movement (weight change) of a worker that trains alone is merged into the model. local: after "
        "{local_steps} batches, with those of the other workers. sync: after each batch, with those of all others: the "
        "mean. async: after each batch, or {local_steps}, when it arrives; nobody waits.",
        argument="updates",
    )
    local_steps: int | None = setting(
        None,
        "Number of batches that a worker trains on before its movement is merged; it is also merged at the end of a "
        "task. auto: with {updates:local} 4 to 64, so that merging takes about 5 % of the time; else 1.",
        unit="BATCHES",
        minimum=1,
        default_text=AUTO,
        argument="local_steps",
    )
    # ElasticDL's flags, which become others (settings/checks.py).
    use_async: bool | None = setting(None, "ElasticDL's flag: true is {updates:async}, false is {updates:sync}.")
    grads_to_wait: int | None = setting(
        None,
        "ElasticDL's flag: {updates:sync}, whose rounds wait for one batch of each worker.",
        unit="GRADIENTS",
        minimum=1,
    )
    get_model_steps: int | None = setting(
        None, "ElasticDL's flag: {updates:async} {local_steps:N}.", unit="BATCHES", minimum=1
    )
    sync_version_tolerance: int | None = setting(
        None, "ElasticDL's flag; refused, because no update is rejected as too old.", unit="VERSIONS", minimum=0
    )
    non_finite: NonFinite = setting(
        NonFinite.STOP,
        "What to do when a loss, or a weight after a batch, is NaN or infinity: stop the job, or skip the batch.",
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
        "epoch is unknown, except in a stream.",
        default_text=AUTO,
        unit="BATCHES",
        minimum=1,
        panel=TASKS,
        commands=ALL,
    )
    max_task_retries: int = setting(
        3,
        "How often a failed task is retried before the job fails; at most once after an error in the data.",
        unit="TIMES",
        minimum=0,
        panel=TASKS,
        commands=ALL,
    )
    initial_epoch: int = 0  # earlier epochs count as done
    validation_freq: int | tuple[int, ...] = 1  # evaluate every N epochs, or after these (counted from 1)

    def __post_init__(self) -> None:
        updates, steps = self.updates, self.local_steps
        if self.use_async is not None:
            updates = Updates.ASYNC if self.use_async else Updates.SYNC
        elif self.grads_to_wait is not None:
            updates = Updates.SYNC
        if self.get_model_steps is not None:
            steps = self.get_model_steps
            updates = Updates.ASYNC if self.updates is Updates.LOCAL and self.use_async is None else updates
        object.__setattr__(self, "updates", Updates(updates))
        object.__setattr__(self, "local_steps", steps)
        for earlier in EARLIER:
            object.__setattr__(self, earlier, None)

    def validates_after(self, epoch: int) -> bool:
        """Whether validation data is evaluated after this epoch, counted from 0."""
        return is_due(self.validation_freq, epoch)

    @property
    def window(self) -> int | None:
        """Batches after which a worker's movement is merged; None: as measured."""
        return self.local_steps if self.updates is Updates.LOCAL else self.local_steps or 1

    def batches_per_task(self, batches: int | None, workers: int) -> int:
        """Number of batches in a task."""
        if self.num_minibatches_per_task is not None:
            return self.num_minibatches_per_task
        if batches is None:
            return _BATCHES_PER_TASK_OF_UNKNOWN
        per_task = max(batches // (workers * _TASKS_PER_WORKER), 1)
        window = self.window or 1
        if per_task <= window:
            return per_task
        return -(-min(per_task, _MOST_BATCHES_PER_TASK) // window) * window  # whole windows


def is_due(validation_freq: int | Sequence[int], epoch: int) -> bool:
    """Whether Keras's argument asks for a validation after this epoch, counted from 0."""
    epoch += 1
    return epoch % validation_freq == 0 if isinstance(validation_freq, int) else epoch in validation_freq


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions(Section):
    """Embedding tables: variables whose rows parameter servers store by id."""

    PANEL = EMBEDDING
    COMMANDS = TRAIN
    GROUP = "embedding"

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
        "What to do when {embedding_memory_bytes}, or max_rows of a table, is reached: fail the job, remove the "
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
