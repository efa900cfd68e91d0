"""Values of settings that are one of a few, and the range of workers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elasticcb.errors import UsageError


class Command(str, Enum):
    """What a job does."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    CALL = "call"  # functions that `Cluster.schedule` is given


class Mode(str, Enum):
    """What is done with data: the `mode` argument of a model file's `feed`."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def of(cls, command: Command) -> Mode:
        """With which a job builds its model. A job of functions has none."""
        return {Command.TRAIN: cls.TRAINING, Command.EVALUATE: cls.EVALUATION, Command.PREDICT: cls.PREDICTION}[command]


class Updates(str, Enum):
    """How the work of several workers becomes one model."""

    LOCAL = "local"  # each trains by itself for some batches; then how far its weights moved is merged
    SYNC = "sync"  # the mean of several gradients is applied
    ASYNC = "async"  # each gradient is applied as it comes


class NonFinite(str, Enum):
    """What a NaN or an infinity in a loss or a gradient leads to."""

    STOP = "stop"  # the job fails
    SKIP = "skip"  # the batch is passed over, and counted


class CallbackErrors(str, Enum):
    """What an error in a hook of a callback leads to."""

    STOP = "stop"  # the job fails
    WARN = "warn"  # it is shown and counted, and the job goes on


class WireDtype(str, Enum):
    """How weights, rows and gradients that are float32 travel in training."""

    SAME = "same"  # as they are
    BFLOAT16 = "bfloat16"
    INT8 = "int8"  # rows; the rest as bfloat16


class RowsDtype(str, Enum):
    """How parameter servers hold the rows of embedding tables of float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"  # rounded stochastically


class WhenFull(str, Enum):
    """What happens when embedding tables reach their memory."""

    ERROR = "error"  # the job fails
    EVICT = "evict"  # rows that were not used for longest go
    DISK = "disk"  # they go to disk, and come back when they are needed
    INITIAL = "initial"  # new ids keep their initial value


PREDICTION_FORMATS = ("csv", "jsonl", "parquet", "npz")
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
