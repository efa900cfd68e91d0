"""The settings of training: its loop, how weights and gradients travel, and embedding tables."""

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
_BATCHES_PER_TASK_OF_UNKNOWN = 16  # an epoch may be a short one
_TASKS_PER_WORKER = 4  # at least, in an epoch, so that the last ones end at the same time


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions(Section):
    """How weights and gradients travel between workers and parameter servers."""

    PANEL = TRAINING
    COMMANDS = TRAIN

    sync_version_tolerance: int = setting(
        0,
        "Synchronous mode: how many versions old a gradient may be; older ones are computed again.",
        unit="VERSIONS",
        minimum=0,
    )
    get_model_steps: int = setting(1, "A worker fetches the weights every so many batches.", unit="BATCHES", minimum=1)
    max_staleness: int = setting(
        0,
        "How many batches a worker may compute ahead of the servers' answers, so that it does not wait for them; 0: "
        "strictly pull, compute, push. Local updates: of the rows of embedding tables; not in synchronous mode.",
        unit="BATCHES",
        minimum=0,
    )
    wire_dtype: WireDtype = setting(
        WireDtype.SAME,
        "How weights, gradients and embedding rows of float32 travel in training: as they are; rounded to bfloat16; or "
        "rows and their gradients as 8-bit integers with a scale per row, and the rest as bfloat16.",
    )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ExchangeOptions):
    """The loop over tasks and batches."""

    num_epochs: int = setting(1, "Passes over the training data.", unit="EPOCHS", minimum=1)
    max_step: int = setting(
        0,
        "Stop after so many model versions (gradient pushes taken); 0: no limit.",
        unit="VERSIONS",
        minimum=0,
    )
    evaluation_steps: int = setting(
        0,
        "Evaluate every so many model versions; 0: at the end of each epoch. The end of training is always evaluated.",
        unit="VERSIONS",
        minimum=0,
    )
    updates: Updates = setting(
        Updates.LOCAL,
        "How the work of several workers becomes one model. local: each trains by itself for --local_steps batches, "
        "then how far its weights moved is merged. sync: the mean of --grads_to_wait gradients is applied. async: each "
        "gradient is applied as it comes.",
        argument="updates",
    )
    local_steps: int | None = setting(
        None,
        "Local mode: batches that a worker trains on before its work is merged; a task ends them, too. auto: 4 to 64, "
        "so that merging takes a twentieth of the time.",
        unit="BATCHES",
        minimum=1,
        default_text=AUTO,
        argument="local_steps",
    )
    outer_optimizer: str = setting(
        "",
        "Local mode: a Keras optimizer by which servers apply the mean of the workers' movements, minus the mean being "
        "its gradient: a name such as sgd, or the JSON of keras.optimizers.serialize.",
        kind=Kind.OPTIMIZER,
        default_text="none: the mean is added",
        argument="outer_optimizer",
    )
    # None: `updates` says it
    use_async: bool | None = setting(
        None,
        "What --updates was before: true is --updates=async, false is --updates=sync.",
        argument="use_async",
    )
    grads_to_wait: int = setting(
        1,
        "Synchronous mode: gradients per update; may be more than there are workers.",
        unit="GRADIENTS",
        minimum=1,
        argument="grads_to_wait",
    )
    non_finite: NonFinite = setting(
        NonFinite.STOP,
        "When a loss or a gradient holds NaN or infinity: stop the job, or skip and count the batch.",
        argument="non_finite",
    )
    callback_errors: CallbackErrors = setting(
        CallbackErrors.STOP,
        "When a hook of a callback raises: stop the job, or show the error once, count it and go on.",
        panel=JOB,
        commands=ALL,
        argument="callback_errors",
    )
    # None: in order
    shuffle_seed: int | None = setting(0, "Seed of the order of tasks in each epoch.", unit="SEED")
    log_loss_steps: int = setting(
        100, "Log the loss once per this many model versions; 0: never.", unit="VERSIONS", minimum=0
    )
    minibatch_size: int = setting(64, "Records per batch.", unit="RECORDS", minimum=1, panel=TASKS, commands=ALL)
    num_minibatches_per_task: int | None = setting(
        None,
        "Batches per task, the unit that a worker takes and that is done again after a failure. auto: at most 64, and "
        "so that each worker gets four tasks of an epoch; 16 where nobody knows how long an epoch is.",
        default_text=AUTO,
        unit="BATCHES",
        minimum=1,
        panel=TASKS,
        commands=ALL,
    )
    max_task_retries: int = setting(
        3,
        "How often a failed task is tried again before the job fails.",
        unit="TIMES",
        minimum=0,
        panel=TASKS,
        commands=ALL,
    )
    initial_epoch: int = 0  # epochs before it are taken as done
    validation_freq: int | tuple[int, ...] = 1  # evaluate every so many epochs, or after these (from 1)

    def __post_init__(self) -> None:
        updates = self.updates if self.use_async is None else (Updates.ASYNC if self.use_async else Updates.SYNC)
        object.__setattr__(self, "updates", Updates(updates))
        object.__setattr__(self, "use_async", None)

    @property
    def is_synchronous(self) -> bool:
        """Whether an update is made of several gradients, by all servers at once."""
        return self.updates is Updates.SYNC

    @property
    def is_local(self) -> bool:
        """Whether workers run their own optimizers."""
        return self.updates is Updates.LOCAL

    def batches_per_task(self, batches: int | None, workers: int) -> int:
        """How long tasks are.

        Args:
            batches: of an epoch; None: nobody knows.
            workers: that take tasks.
        """
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
    """Embedding tables: variables whose rows parameter servers hold by id."""

    PANEL = EMBEDDING
    COMMANDS = TRAIN

    threshold_bytes: int = setting(
        2 << 20,
        "The rows of a keras.layers.Embedding of at least so many bytes live on the servers, and only those that a "
        "batch needs travel.",
        name="embedding_threshold_bytes",
        unit="BYTES",
        minimum=0,
        commands=ALL,
    )
    memory_bytes: int = setting(
        0,
        "What the embedding tables of one parameter server may hold, with the optimizer's slots; 0: no limit.",
        name="embedding_memory_bytes",
        unit="BYTES",
        minimum=0,
    )
    when_full: WhenFull = setting(
        WhenFull.ERROR,
        "When that, or max_rows of a table, is reached: the job fails, the rows that were not used for longest go for "
        "good or to disk, or new ids keep their initial value.",
        name="embedding_when_full",
    )
    min_count: int = setting(
        1,
        "An id of an elasticcb.layers.Embedding gets a row when training meets it for this time; until then it has its "
        "initial value.",
        name="embedding_min_count",
        unit="TIMES",
        minimum=1,
    )
    max_age: int | str = setting(
        0,
        "Rows of an elasticcb.layers.Embedding that training did not meet for so many versions, or so long (30m, 12h, "
        "7d), go; 0: never.",
        name="embedding_max_age",
        kind=Kind.AGE,
    )
    rows_dtype: RowsDtype = setting(
        RowsDtype.FLOAT32,
        "How parameter servers hold rows of float32: as they are, or rounded stochastically to bfloat16, in half the "
        "bytes.",
        name="embedding_rows_dtype",
    )
    tables: dict[str, dict[str, Any]] = setting(
        dict,
        "Settings of single tables by the names of their layers, before those of the layers: "
        f"{', '.join(option.field for option in settings_of(TableOptions))}.",
        name="embedding_tables",
        kind=Kind.MAPPING,
        unit="{TABLE: {SETTING: VALUE}}",
        default_text="none",
    )
