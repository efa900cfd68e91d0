"""Refuses callbacks whose hooks share what their processes do not: an error is better than another model.

What a hook of batches changes, and a hook on the master uses, is refused. So is a hook of batches on several workers
that sets something of the model and reads what it has changed itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from elasticcb.callbacks.attribute_use import Slot, Use, in_words, use_of
from elasticcb.callbacks.placement import TABLE, Place, hooks_at, overridden_hooks, place_of
from elasticcb.callbacks.warning import CallbackWarning
from elasticcb.errors import UsageError
from elasticcb.settings import Command, JobSettings

_HOOKS = {Command.TRAIN: ("train", "epoch", "test"), Command.EVALUATE: ("test",), Command.PREDICT: ("predict",)}
_BEGIN = frozenset({"on_train_begin", "on_predict_begin"})  # in each process, before everything else
_OWN = "let hooks of batches and other hooks use attributes of their own"


def shares_state(settings: JobSettings) -> bool:
    """Whether callbacks on the worker have the state of those on the master (shared_state.py)."""
    return not settings.model.definition and not _has_several(settings)


def _has_several(settings: JobSettings) -> bool:
    return settings.cluster.num_workers > 1 or settings.cluster.autoscale.most > 1


class Placed:
    """A callback with hooks of batches on workers.

    Args:
        batches: its hooks of batches.
        others: its hooks on the master, except those that begin the job.

    Attributes:
        on_workers, on_master: what these do.
        follows: what only hooks on the master change, and hooks of batches read.
    """

    def __init__(self, callback: Any, batches: list[str], others: list[str]) -> None:
        self.callback, self.name = callback, type(callback).__name__
        self.batches, self.others = batches, others
        self.on_workers, self.on_master = use_of(callback, batches), use_of(callback, others)
        self.follows = self.on_workers.reads & self.on_master.changes - self.on_workers.changes

    def those(self, hooks: Iterable[str], slots: set[Slot]) -> str:
        """Which of `hooks` use any of `slots`, for messages."""
        uses = {name: use_of(self.callback, [name]) for name in hooks}
        return f"{self.name}.{' and '.join(name for name, use in uses.items() if slots & _used(use))}"


def _used(use: Use) -> set[Slot]:
    return use.reads | use.changes


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
        batches = [name for name in worker if TABLE[name].of_batch]
        # On the command line, each worker ends its own predictions.
        others = _BEGIN if in_program else _BEGIN | {"on_predict_end"}
        if batches:
            found.append(Placed(callback, batches, [name for name in master if name not in others]))
    return found


def sharing(callbacks: Iterable[Any], settings: JobSettings) -> list[Placed]:
    """The callbacks whose state is sent to workers."""
    found = [] if settings.model.definition else placed(callbacks, settings)
    return found if shares_state(settings) or any(each.follows for each in found) else []


def check_hooks(callbacks: Iterable[Any], settings: JobSettings) -> None:
    """Raises `UsageError`, before training, for callbacks whose hooks would not do the same as in `fit`."""
    problems = [text for each in placed(callbacks, settings) for text in _problems(each, settings)]
    if problems:
        raise UsageError("\n".join(problems))


def _problems(each: Placed, settings: JobSettings) -> Iterator[str]:
    worker, master, in_program = each.on_workers, each.on_master, not settings.model.definition
    if shares_state(settings):
        return
    shared = worker.changes & _used(master)
    if not in_program:
        shared |= each.follows
    if shared:
        ways = ["use num_workers=1, where all hooks share one state"] if in_program else []
        if not worker.sets:
            uses_model = worker.reads & {"model", "_model"}
            model = ", after the batch and on weights that may be newer," if uses_model else ""
            ways.append(
                f'put @elasticcb.callbacks.runs_on("master") above the class: all of its hooks then run{model} on one '
                "object, for the batches of all workers"
            )
        yield (
            f"{each.those(each.batches, shared)} (on workers) and {each.those(each.others, shared)} (on the master) "
            f"share {in_words(shared)}, but each process has its own copy of the callback, so they would not do the "
            f"same as in fit. {_choice([*ways, _OWN])}"
        )
    kept = worker.changes & worker.reads
    if kept and worker.sets and _has_several(settings):
        ways = [
            f"use {'num_workers=1' if in_program else '--num_workers=1'}",
            'compute it from logs["version"], the number of batches of all workers',
            "use a keras.optimizers.schedules.LearningRateSchedule, or hooks of epochs",
        ]
        yield (
            f"{each.those(each.batches, kept)} sets {' and '.join(sorted(worker.sets))} on workers, and keeps "
            f"{in_words(kept)} from batch to batch. Each worker has its own copy of the callback, which sees only its "
            f"own batches, so this would not do the same as in fit. {_choice(ways)}"
        )


def _choice(ways: list[str]) -> str:
    text = f"{'; or '.join(ways)}."
    return text[0].upper() + text[1:]


def left_on_workers(callbacks: Iterable[Any], settings: JobSettings) -> Iterator[CallbackWarning]:
    """What hooks of batches collect on several workers, where the caller of `fit` may look for it in vain."""
    for each in [] if settings.model.definition or shares_state(settings) else placed(callbacks, settings):
        collected = each.on_workers.fills
        if "the model" in each.on_workers.sets:
            text = (
                f"{each.those(each.batches, {'model', '_model'})} sets something of the model on "
                f"{settings.cluster.num_workers} workers, in a copy on each: neither hooks elsewhere nor your model "
                "get it. Use num_workers=1, where it comes back."
            )
            yield CallbackWarning(f"{each.name} sets something of the model", text)
        if collected:
            text = (
                f"{each.those(each.batches, collected)} changes {in_words(collected)} on "
                f"{settings.cluster.num_workers} workers, in a copy of the callback on each: the object that you "
                "passed does not get it. To collect it there, use num_workers=1, or put "
                '@elasticcb.callbacks.runs_on("master") above the class.'
            )
            yield CallbackWarning(f"{each.name} collects on workers", text)
