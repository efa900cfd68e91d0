"""Refuses callbacks whose hooks share what their processes do not: an error is better than another model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from elasticcb.callbacks.attribute_use import Slot, Use, in_words, use_of
from elasticcb.callbacks.placement import TABLE, Place, hooks_at, overridden_hooks, place_of
from elasticcb.callbacks.warning import CallbackWarning
from elasticcb.errors import UsageError
from elasticcb.settings import Command, JobSettings, Updates

_HOOKS = {Command.TRAIN: ("train", "epoch", "test"), Command.EVALUATE: ("test",), Command.PREDICT: ("predict",)}
_BEGIN = frozenset({"on_train_begin", "on_predict_begin"})  # in each process, before everything else


def shares_state(settings: JobSettings) -> bool:
    """Whether callbacks on the worker have the state of those on the master (shared_state.py)."""
    return not settings.model.definition and not _has_several(settings)


def _has_several(settings: JobSettings) -> bool:
    return settings.cluster.num_workers > 1 or settings.cluster.autoscale.most > 1


@dataclass(frozen=True)
class Placed:
    """A callback whose hooks run in several kinds of processes, in one job."""

    callback: Any
    batches: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def name(self) -> str:
        return type(self.callback).__name__

    @property
    def on_workers(self) -> Use:
        return use_of(self.callback, self.batches)

    @property
    def on_master(self) -> Use:
        return use_of(self.callback, self.others)

    @property
    def follows(self) -> set[Slot]:
        """What only hooks on the master change, and hooks of batches read."""
        return {slot for slot in self.on_master.changes - self.on_workers.changes if slot in self.on_workers.reads}


def placed(callbacks: Iterable[Any], settings: JobSettings) -> list[Placed]:
    """The callbacks with hooks of batches on workers, as far as the table decides for each hook."""
    in_program, one_worker = not settings.model.definition, shares_state(settings)
    found = []
    for callback in callbacks:
        if place_of(callback) is not None or type(callback).__module__.startswith("elasticcb."):
            continue
        overridden = overridden_hooks(callback)
        of_command = {name for name in overridden if name.split("_")[1] in _HOOKS.get(settings.command, ())}
        worker, master = (
            sorted(of_command & hooks_at(callback, place, overridden, in_program, one_worker))
            for place in (Place.WORKER, Place.MASTER)
        )
        batches = tuple(name for name in worker if TABLE[name].of_batch)
        if batches:
            found.append(Placed(callback, batches, tuple(name for name in master if name not in _BEGIN)))
    return found


def check_hooks(callbacks: Iterable[Any], settings: JobSettings) -> None:
    """Raises `UsageError`, before training, for callbacks whose hooks would not do the same as in `fit`."""
    problems = [text for each in placed(callbacks, settings) for text in _problems(each, settings)]
    if problems:
        raise UsageError("\n".join(problems))


def _problems(each: Placed, settings: JobSettings) -> Iterator[str]:
    updates = settings.training.updates
    if "weights" in each.on_workers.sets and settings.command is Command.TRAIN and updates is not Updates.LOCAL:
        yield (
            f"{each.name}.{_those(each, each.batches, lambda use: 'weights' in use.sets)} sets weights on a worker. "
            f"With updates={updates.value!r}, the weights of the servers replace them at the next batch. Use "
            "updates='local', or set them at the end of an epoch."
        )
    if not shares_state(settings):
        yield from _apart(each, settings)
        if _has_several(settings):
            yield from _counting(each, settings)


def _apart(each: Placed, settings: JobSettings) -> Iterator[str]:
    """Hooks on workers and hooks on the master share something."""
    worker, master, in_program = each.on_workers, each.on_master, not settings.model.definition
    back = worker.changes & (master.reads | master.changes)
    slots = worker.changes & master.reads | (set() if in_program else each.follows)
    if in_program:
        slots |= {slot for slot in back & worker.reads if slot in master.changes}
    if not slots:
        return
    batches = _those(each, each.batches, lambda use: slots & (use.changes | use.reads))
    others = _those(each, each.others, lambda use: slots & (use.changes | use.reads))
    text = (
        f"{each.name}.{batches} (on workers) and {each.name}.{others} (on the master) share {in_words(slots)}, but "
        "each process has its own copy of the callback, so they would not do the same as in fit."
    )
    ways = ["use num_workers=1, where all hooks share one state"] if in_program else []
    if not worker.sets:
        model = ", after the batch and on weights that may be newer," if worker.has_model else ""
        ways.append(
            f'put @elasticcb.callbacks.runs_on("master") above the class: all of its hooks then run{model} on one '
            "object, for the batches of all workers"
        )
    ways.append("let hooks of batches and other hooks use attributes of their own")
    yield f"{text} {_choice(ways)}"


def _counting(each: Placed, settings: JobSettings) -> Iterator[str]:
    """Hooks of batches set something of the model from what they keep from batch to batch."""
    worker = each.on_workers
    kept = worker.changes & worker.decides
    if kept and worker.sets:
        one = "--num_workers=1" if settings.model.definition else "num_workers=1"
        yield (
            f"{each.name}.{_those(each, each.batches, lambda use: kept & use.changes)} sets "
            f"{' and '.join(sorted(worker.sets))} on workers from {in_words(kept)}, which it changes with each batch. "
            "Each worker has its own copy of the callback, which sees only its own batches, so this would not do the "
            "same as in fit. "
            + _choice(
                [
                    f"use {one}",
                    'compute it from logs["version"], the number of batches of all workers',
                    "use a keras.optimizers.schedules.LearningRateSchedule, or hooks of epochs",
                ]
            )
        )


def _those(each: Placed, hooks: Iterable[str], condition: Any) -> str:
    """The hooks whose use fulfils `condition`, as text."""
    return " and ".join(name for name in hooks if condition(use_of(each.callback, [name])))


def _choice(ways: list[str]) -> str:
    text = f"{'; or '.join(ways)}."
    return text[0].upper() + text[1:]


def left_on_workers(callbacks: Iterable[Any], settings: JobSettings) -> Iterator[CallbackWarning]:
    """What hooks of batches collect on several workers, where the caller of `fit` may look for it in vain."""
    if settings.model.definition or shares_state(settings):
        return
    for each in placed(callbacks, settings):
        collected = each.on_workers.collects
        if collected:
            hooks = _those(each, each.batches, lambda use: use.collects)
            workers = settings.cluster.num_workers
            text = (
                f"{each.name}.{hooks} collects {in_words(collected)} on {workers} workers, in a copy of the "
                "callback on each: the object that you passed does not get it. To collect it there, use "
                'num_workers=1, or put @elasticcb.callbacks.runs_on("master") above the class.'
            )
            yield CallbackWarning(f"{each.name} collects on workers", text)
