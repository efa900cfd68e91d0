"""The state machine of test_task_queue_properties.py, walked at random: ten times as many events as hypothesis makes,
which remembers, shrinks and repeats.

    python tests/master/task_queue_walks.py --minutes=10 [--seed=0]

Prints how many sequences and events there were; a broken promise ends it with the seed of the sequence.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from hypothesis.strategies._internal.lazy import LazyStrategy
from test_task_queue_properties import TaskQueueMachine

EVENTS = 60  # of a sequence


def drawn(strategy: Any, chance: random.Random) -> Any:
    """A value of one of the strategies that the machine uses. Raises `TypeError` for others."""
    if isinstance(strategy, LazyStrategy):
        strategy = strategy.wrapped_strategy
    match type(strategy).__name__:
        case "IntegersStrategy":
            return chance.randint(strategy.start, strategy.end)
        case "SampledFromStrategy":
            return chance.choice(strategy.elements)
        case "BooleansStrategy":
            return chance.random() < 0.5
        case "JustStrategy":
            return strategy.value
        case "OneOfStrategy":
            return drawn(chance.choice(strategy.original_strategies), chance)
        case "MappedStrategy":
            return strategy.pack(drawn(strategy.mapped_strategy, chance))
        case "ListStrategy":
            count = chance.randint(strategy.min_size, strategy.max_size)
            return [drawn(strategy.element_strategy, chance) for _ in range(count)]
        case other:
            raise TypeError(f"{other} can't be drawn from.")


def walk(seed: int) -> None:
    """One sequence, and the end of the job."""
    chance = random.Random(seed)
    machine = TaskQueueMachine()

    def follow(rule: Any) -> None:
        rule.function(machine, **{name: drawn(strategy, chance) for name, strategy in rule.arguments.items()})

    for rule in machine._initialize_rules_to_run:
        follow(rule)
    for _ in range(EVENTS):
        rule = chance.choice(machine.rules)
        while not all(met(machine) for met in rule.preconditions):
            rule = chance.choice(machine.rules)
        follow(rule)
        for invariant in machine.invariants:
            invariant.function(machine)
    machine.teardown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the first sequence; the next ones count on")
    arguments = parser.parse_args()
    seed, end = arguments.seed, time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < end:
        try:
            walk(seed)
        except BaseException:
            print(f"The sequence of seed {seed}:")
            raise
        seed += 1
    count = seed - arguments.seed
    print(f"{count:,} sequences, {count * EVENTS:,} events: every promise was kept.")


if __name__ == "__main__":
    main()
