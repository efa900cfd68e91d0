"""What an event of `JobMachine` is, and its effects: what follows for the journal, for threads and for the user."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar, cast

from elasticcb.master.accounting import IllegalTransitionError

if TYPE_CHECKING:
    from elasticcb.model.metric_messages import States

Method = TypeVar("Method", bound=Callable[..., Any])


class Wake(IntEnum):
    """Which threads a change concerns; each value includes those before it."""

    NOBODY = 0
    DRIVER = 1  # the driving thread; most reports concern only it
    ALL = 2  # also workers that wait for a task, of which there may be hundreds


@dataclass
class Effects:
    """What follows from events.

    Attributes:
        changed: whether the journal gets the state of the machine.
        facts, states, restarted: what it gets besides, as in `Journal.add`.
    """

    changed: bool = False
    wake: Wake = Wake.NOBODY
    facts: dict[str, Any] = field(default_factory=dict)
    states: list[tuple[int, States]] = field(default_factory=list)
    restarted: list[int] = field(default_factory=list)
    compacts: bool = False
    lines: list[str] = field(default_factory=list)


def event(wakes: Wake | Callable[[Any, Any], Wake | None] = Wake.ALL) -> Callable[[Method], Method]:
    """Marks a method of `JobMachine` as an event.

    Args:
        wakes: which threads it concerns; or what tells this from the answer, None if nothing has changed.
    """

    def mark(method: Method) -> Method:
        @functools.wraps(method)
        def handle(machine: Any, *args: Any, **kwargs: Any) -> Any:
            machine.story.append((method.__name__, *(arg for arg in args if isinstance(arg, (int, float)))))
            concerned: Wake | None = Wake.ALL
            try:
                answer = method(machine, *args, **kwargs)
                concerned = wakes if isinstance(wakes, Wake) else wakes(machine, answer)
                return answer
            except IllegalTransitionError as error:
                told = "\n".join(f"  {name}{tuple(args)}" for name, *args in machine.story)
                raise IllegalTransitionError(f"{error}\nThe last events of the job:\n{told}") from error
            finally:
                if concerned is not None:
                    machine.changed(concerned)

        return cast(Method, handle)

    return mark
