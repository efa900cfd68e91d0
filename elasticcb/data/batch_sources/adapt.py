"""Converts the data arguments of `fit`, `evaluate` and `predict` to a source of batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from elasticcb.data.batch_sources import keras_data
from elasticcb.data.batch_sources.arrays import ArraySource
from elasticcb.data.batch_sources.dataset_fn import DatasetFactory, DatasetFnSource
from elasticcb.data.batch_sources.iterables import ServedSource, StoredSource, begin_one_more, chooses_anew
from elasticcb.data.batch_sources.py_dataset import PyDatasetSource
from elasticcb.data.batch_sources.records import Records, RecordSource, StreamSource
from elasticcb.data.batch_sources.service import DataService
from elasticcb.data.batches import BatchSource, PassSource, Purpose
from elasticcb.data.reader import Reader
from elasticcb.data.unbounded import UnboundedSource
from elasticcb.settings import Mode

# Keras's name of the number of batches in an epoch, by purpose.
_STEPS: dict[str, str] = {
    "fit": "steps_per_epoch", "validation": "validation_steps", "evaluate": "steps", "predict": "steps",
}  # fmt: skip
_MODES = {
    "fit": Mode.TRAINING, "validation": Mode.EVALUATION, "evaluate": Mode.EVALUATION, "predict": Mode.PREDICTION,
}  # fmt: skip
_DEFAULT_BATCH_SIZE = 32


def adapt(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool | str = True,
    class_weight: Mapping[int, float] | None = None,
    steps: int | None = None,
    epochs: int = 1,
    purpose: Purpose,
    folder: Path,
    seed: int,
    service: DataService | None = None,
) -> BatchSource:
    """The batches that Keras would use for the same arguments.

    Args:
      steps: batches in an epoch: `steps_per_epoch`, `validation_steps` or `steps`. In "fit", epochs are cut from the
        endlessly repeated data; for other purposes it is a limit, because no record may count twice. 0 is None.
      epochs: number of epochs of "fit".
      shuffle: only for "fit".
      folder: folder for the data that workers read; on a disk that they share.
      service: serves the batches of a `tf.data.Dataset` or generator in "fit"; needed only for these.

    Raises `ValueError` and `TypeError` like Keras, for contradictory arguments or data of an unknown type.
    """
    if isinstance(x, BatchSource):
        return x
    steps = keras_data.capped_steps(steps) or None
    fit = purpose == "fit"
    shuffle = shuffle if fit else False
    amount: dict[str, Any] = {"steps": steps} if fit else {"limit": steps}
    source: BatchSource
    if isinstance(x, Reader | Records):
        _refuse("elasticcb.data Reader", y, sample_weight)
        records = x if isinstance(x, Records) else Records(x)
        if isinstance(records.reader, UnboundedSource):
            if not fit:
                raise ValueError(f"{records.reader} never ends, so only `fit` takes it. Received it in `{purpose}`.")
            return StreamSource(records, batch_size or _DEFAULT_BATCH_SIZE, class_weight, steps)
        amount |= {"mode": _MODES[purpose], "class_weight": class_weight, "shuffle": bool(shuffle), "seed": seed}
        source = RecordSource(records, batch_size or _DEFAULT_BATCH_SIZE, **amount)
    elif isinstance(x, DatasetFactory) or (callable(x) and not isinstance(x, keras.utils.PyDataset)):
        _refuse("`dataset_fn`", y, sample_weight)
        factory = x if isinstance(x, DatasetFactory) else DatasetFactory(x)
        source = _of_factory(factory, steps, class_weight, purpose, folder)
    else:
        weights = {"sample_weight": sample_weight, "class_weight": class_weight}
        adapter = keras_data.get_data_adapter(
            x, y, batch_size=batch_size, steps_per_epoch=steps, shuffle=shuffle, **weights
        )
        stored: dict[str, Any] = {"folder": folder, "seed": seed, **amount}
        if isinstance(adapter, keras_data.ArrayDataAdapter):
            arrays = keras_data.arrays_of(adapter)
            source = ArraySource(arrays, keras_data.num_rows(arrays), adapter.batch_size, shuffle=shuffle, **stored)
        elif isinstance(adapter, keras_data.PyDatasetAdapter):
            if x.num_batches is None and not steps:
                raise _needs_steps("an infinitely repeating PyDataset", purpose)
            of_index: dict[str, Any] = {"shuffle": bool(shuffle), "purpose": purpose, "seed": seed, **amount}
            source = PyDatasetSource(x, class_weight=class_weight, **of_index)
        else:
            source = _iterated(adapter, steps, purpose, folder, service)
    if steps and isinstance(source, PassSource):
        # In `fit`, an epoch in which the data ends has fewer batches, unless it ends with the epoch.
        is_short = source.size % steps and source.size < steps * epochs if fit else source.size < steps
        if is_short:
            keras_data.warn_of_missing_data()
    return source


def _of_factory(
    factory: DatasetFactory, steps: int | None, class_weight: Mapping[int, float] | None, purpose: Purpose, folder: Path
) -> BatchSource:
    if purpose != "fit":
        dataset = keras_data.weighted(factory(tf.distribute.InputContext()), class_weight)
        return StoredSource(_finite(dataset, steps, purpose), folder=folder, limit=steps)
    if not steps:
        raise ValueError(
            "When using a `DatasetFactory`, or another function that creates a dataset, `steps_per_epoch` must be "
            "provided in `fit`: each worker calls the function, and a step is one batch on one worker."
        )
    return DatasetFnSource(factory, steps, class_weight)


def split_validation(x: Any, y: Any, sample_weight: Any, validation_split: float) -> tuple[tuple[Any, ...], ...]:
    """Splits `(x, y, sample_weight)` like Keras: returns the training part, and the last part for validation.

    Raises `ValueError` if the data is not made of arrays, or is too small.
    """
    return keras_data.train_validation_split((x, y, sample_weight), validation_split)


def _iterated(
    adapter: Any, steps: int | None, purpose: Purpose, folder: Path, service: DataService | None
) -> BatchSource:
    """The source of data that can only be iterated over."""
    batches: Iterable[Any]
    if isinstance(adapter, keras_data.TFDatasetAdapter):
        batches = _finite(adapter.get_tf_dataset(), steps, purpose)
    elif isinstance(adapter, keras_data.GeneratorDataAdapter):
        batches = Passes(adapter.generator)
    else:
        batches = Passes(adapter.get_numpy_iterator)
    is_dataset = isinstance(batches, tf.data.Dataset)
    # A generator yields its batches once, but without `steps` each epoch needs all of them.
    if purpose == "fit" and (steps or not isinstance(adapter, keras_data.GeneratorDataAdapter)):
        if service is None:
            raise ValueError("`fit` with a tf.data.Dataset or a generator needs a DataService. Received: service=None")
        return ServedSource(batches, size=adapter.num_batches, steps=steps, service=service)
    stored = StoredSource(batches, folder=folder, limit=steps)
    if is_dataset:
        if adapter.num_batches and stored.num_batches == adapter.num_batches:
            begin_one_more(batches)
        if purpose == "validation" and chooses_anew(batches, steps):
            warnings.warn(
                "validation_data shuffles, and then takes only some of its records: others in each epoch of Keras, the "
                "same in each of a cluster. To keep training data apart from validation data, use shuffle(..., "
                "reshuffle_each_iteration=False).",
                stacklevel=3,
            )
    return stored


@dataclass(frozen=True)
class Passes:
    """Batches of a loader; or of a generator: each pass has its first batches, which Keras has taken from it, and what
    it yields after them.
    """

    begin: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


def _finite(dataset: tf.data.Dataset, steps: int | None, purpose: Purpose) -> tf.data.Dataset:
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY and not steps:
        raise _needs_steps("an infinitely repeating dataset", purpose)
    return dataset


def _refuse(kind: str, y: Any, sample_weight: Any) -> None:
    if y is not None:
        keras_data.raise_unsupported_argument("y", "the targets", kind)
    if sample_weight is not None:
        keras_data.raise_unsupported_argument("sample_weights", "the sample weights", kind)


def _needs_steps(what: str, purpose: Purpose) -> ValueError:
    name = _STEPS[purpose]
    return ValueError(
        f"When passing {what}, please specify a `{name}` value so that epoch level callbacks continue to work. The "
        f"value can be arbitrary, or a number that you think correctly defines the size of an epoch. Received: "
        f"{name}=None"
    )
