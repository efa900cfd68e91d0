from __future__ import annotations

from pathlib import Path

import pytest

from elasticcb.master.task import HANDING_OUT_ORDER, TRANSITIONS, DecisionKind, MilestoneKind, TaskEvent, TaskState

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the first table below `heading`, without its head; backticks are taken off."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_documented_transitions_are_those_of_the_code():
    documented = [(before, event, after) for before, event, after, _ in rows_of("Transitions")]
    ours = [(before.value, event.value, after.value) for (before, event), after in TRANSITIONS.items()]
    assert documented == ours


def test_every_event_and_state_is_in_the_table():
    assert {event for _, event in TRANSITIONS} == set(TaskEvent)
    assert {state for state, _ in TRANSITIONS} | set(TRANSITIONS.values()) == set(TaskState)


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Order", [kind.value for kind in HANDING_OUT_ORDER]),
        ("Answers to get_task", [kind.value for kind in DecisionKind]),
        ("Milestones", [kind.value for kind in MilestoneKind]),
    ],
)
def test_documented_names_are_those_of_the_code(heading, names):
    assert [row[0] for row in rows_of(heading)] == names
