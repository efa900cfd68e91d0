"""Values of settings: enumerated ones, the range of workers, the age of rows, and the map of --init_map."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from enum import Enum

from elasticcb.errors import UsageError


class Command(str, Enum):
    """What a job does."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    CALL = "call"  # functions passed to `Cluster.schedule`


class Mode(str, Enum):
    """The `mode` argument of a model file's `feed`: what the data is for."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def of(cls, command: Command) -> Mode:
        """The mode in which a job builds its model. A job of functions has none."""
        return {Command.TRAIN: cls.TRAINING, Command.EVALUATE: cls.EVALUATION, Command.PREDICT: cls.PREDICTION}[command]


class Updates(str, Enum):
    """After how many batches a worker's movement is merged, and whether workers wait for each other."""

    LOCAL = "local"  # after some batches, with those of the others
    SYNC = "sync"  # after each batch, with those of all others
    ASYNC = "async"  # when it arrives


class NonFinite(str, Enum):
    """What happens when a loss or a gradient contains NaN or infinity."""

    STOP = "stop"  # the job fails
    SKIP = "skip"  # the batch is skipped and counted


class LostUpdates(str, Enum):
    """What happens to updates that a killed parameter server had not written to its recovery files."""

    REPEAT = "repeat"  # their batches are trained again
    ACCEPT = "accept"  # they stay lost


class LostOffsets(str, Enum):
    """What happens when records of a stream were removed before they were trained."""

    FAIL = "fail"  # the job fails
    SKIP = "skip"  # they are counted


class CallbackErrors(str, Enum):
    """What happens when a callback hook raises."""

    STOP = "stop"  # the job fails
    WARN = "warn"  # it is shown and counted, and the job continues


class WireDtype(str, Enum):
    """How float32 movements, rows and gradients of rows are encoded on the wire in training."""

    SAME = "same"  # unchanged
    BFLOAT16 = "bfloat16"


class RowsDtype(str, Enum):
    """How parameter servers store the rows of float32 embedding tables."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"  # rounded stochastically


class WhenFull(str, Enum):
    """What happens when embedding tables reach their memory limit."""

    ERROR = "error"  # the job fails
    EVICT = "evict"  # the least recently used rows are removed
    DISK = "disk"  # the least recently used rows move to disk until they are needed
    INITIAL = "initial"  # new ids keep their initial value


PREDICTION_FORMATS = ("csv", "jsonl", "parquet", "npz")
MOST_WORKERS = 256  # that a job can be scaled to, unless it starts with more


@dataclass(frozen=True)
class WorkerRange:
    """Allowed number of workers; `most` 0: the number is fixed."""

    least: int = 0
    most: int = 0

    @classmethod
    def of(cls, text: str) -> WorkerRange:
        """Parses "1..8". Raises `UsageError` if the text is not a range."""
        parts = [part.strip() for part in text.split("..")]
        numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 10]
        if not len(parts) == len(numbers) == 2 or not 1 <= numbers[0] <= numbers[1] <= MOST_WORKERS:
            raise UsageError(
                f"{text!r} is not a range of workers. Expected MIN..MAX with numbers from 1 to {MOST_WORKERS}, such "
                "as 1..8."
            )
        return cls(*numbers)

    def __str__(self) -> str:
        return f"{self.least}..{self.most}" if self.most else ""


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
TIME = rf"([1-9]\d*)([{''.join(_SECONDS)}])"
EXPECTED = "Expected a number of versions, such as 10000, or a time, such as 30m, 12h or 7d; 0 means never."


def read_age(value: object) -> int | str | None:
    """Parses an age: an integer number of versions, or a text such as "7d"; None if `value` is neither."""
    if isinstance(value, str):
        text = value.strip()
        return text if re.fullmatch(TIME, text) else int(text) if text.isdecimal() else None
    try:
        versions = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
    return versions if versions >= 0 and not isinstance(value, bool) else None


def seconds_of(age: int | str) -> int:
    """A time in seconds; 0: `age` is a number of versions."""
    found = re.fullmatch(TIME, age) if isinstance(age, str) else None
    return int(found[1]) * _SECONDS[found[2]] if found else 0


def read_init_map(text: str) -> dict[str, str]:
    """Maps names in the model to names in the checkpoint; "": it starts fresh.

    Raises `UsageError` if a part is malformed or a name is given twice.
    """
    found: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        new, equals, old = (each.strip().strip("/") for each in part.partition("="))
        if not equals or not new or "=" in old:
            raise UsageError(
                f"{part!r} is not of the form NEW=OLD. Expected names of layers or variables, such as "
                '"user=customer,top/kernel=": the one in the model, then the one in the checkpoint, or nothing to '
                "start fresh."
            )
        if new in found:
            raise UsageError(f"{new!r} is given twice. Remove one of the two.")
        found[new] = old
    return found
