"""Rows that training did not meet for a time go, whichever process holds them meanwhile; clocks are set."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from ps_clients import load_slices

from elasticcb.checkpoint.shard_file import write_part
from elasticcb.checkpoint.versions import begin_version, finish_version
from elasticcb.optimizers.state import ModelState
from elasticcb.ps import tables as tables_module
from elasticcb.ps.embedding_table import EmbeddingTable
from elasticcb.ps.parameters import Parameters
from elasticcb.ps.table_limits import RowAges
from elasticcb.settings.choices import read_age, seconds_of
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.partition import ShardMap, partition
from elasticcb.sharding.push import Push, Rows
from elasticcb.sharding.table_state import TableSpec, TableState
from helpers_ps import alone, exported, sgd, train_rows
from helpers_ps_lost import SPECS, VALUES, Servers

DAY = 86_400
AGED = replace(SPECS[3], table=TableSpec(None, '"zeros"', 7, TableOptions(max_age="7d")).to_json())


class Clock:
    def __init__(self, seconds: float = 1.7e9) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """That of tables which servers make."""
    clock = Clock()
    monkeypatch.setattr(tables_module, "time", SimpleNamespace(time=clock, monotonic=lambda: 0.0))
    return clock


@pytest.mark.parametrize(
    ("given", "read", "seconds"),
    [
        (0, 0, 0),
        (np.int64(30), 30, 0),
        ("30", 30, 0),
        ("45s", "45s", 45),
        ("30m", "30m", 1800),
        (" 7d ", "7d", 604_800),
    ],
)
def test_an_age_is_a_number_of_versions_or_a_time(given, read, seconds):
    assert read_age(given) == read
    assert seconds_of(read_age(given)) == seconds


@pytest.mark.parametrize("given", [-1, 1.5, True, None, "", "7", "0d", "-3h", "7 d", "7D", "1.5h", "1h30m", [3]])
def test_nothing_else_is_an_age(given):
    assert read_age(given) == (7 if given == "7" else None)


def table_of(max_age, clock, **options):
    zeros = lambda ids: np.zeros((len(ids), 2), np.float32)  # noqa: E731
    return EmbeddingTable(2, "float32", zeros, {}, options=TableOptions(max_age=max_age, **options), now=clock)


def train(table, ids, version):
    ids = np.array(ids)
    table.lookup(ids, True)
    train_rows(table, ids, np.zeros((len(ids), 2), np.float32), lambda rows, slots, gradients: (rows + 1, {}), version)


def ids_of(table):
    return sorted(table.export().ids.tolist())


def test_rows_go_when_they_were_not_trained_for_the_time_however_many_versions_that_are():
    clock = Clock()
    table = table_of("8h", clock)
    train(table, [1, 2, 3], 1)
    version = 1
    for hour in range(1, 24):
        clock.seconds += 3600
        for _ in range(1 + 20 * (hour % 2)):
            version += 1
            train(table, [1] if hour != 4 else [1, 2], version)
        kept = [1, *([2] if hour < 4 + 8 else []), *([3] if hour < 8 else [])]
        late = [1, *([2] if hour <= 4 + 9 else []), *([3] if hour <= 9 else [])]
        assert ids_of(table) in (kept, late)
    assert ids_of(table) == [1]
    assert table.flow.removed == 2


def test_ids_without_a_row_of_their_own_are_forgotten_by_the_same_time():
    clock = Clock()
    table = table_of("8h", clock, min_count=2)
    for version in range(1, 30):
        table.lookup(np.array([5 if version == 1 else 100 + version]), True)
        table.advance(version)
        clock.seconds += 3600
    assert table.candidates.lookups(5) == 0
    assert table.candidates.lookups(128) == 1


def test_a_table_keeps_a_bounded_number_of_marks():
    clock = Clock()
    ages = RowAges("1h", clock)
    for version in range(1, 20_000):
        clock.seconds += 1
        ages.due(version)
    assert len(ages.export(20_000)) < 100


def test_a_clock_that_is_set_back_removes_nothing_early_and_time_goes_on():
    clock = Clock()
    table = table_of("8h", clock)
    train(table, [1, 2], 1)
    clock.seconds -= DAY
    train(table, [1], 2)
    assert ids_of(table) == [1, 2]
    for version in range(3, 43):
        clock.seconds += 3600
        train(table, [1], version)
    assert ids_of(table) == [1]


def test_a_row_that_was_loaded_ages_from_then_on_where_nobody_knows_more():
    clock = Clock()
    table = table_of("8h", clock)
    table.load(TableState(np.arange(3), np.ones((3, 2), np.float32), used=np.array([1, 40, 50])), 50)
    for version in range(51, 58):
        clock.seconds += 3600
        train(table, [1], version)
    assert ids_of(table) == [0, 1, 2]
    clock.seconds += 4 * 3600
    train(table, [1], 58)
    train(table, [1], 59)
    assert 0 not in ids_of(table)


def test_versions_that_count_anew_are_not_taken_for_those_before():
    clock = Clock()
    before = RowAges("8h", clock)
    for version in range(100, 110):
        before.due(version)
        clock.seconds += 3600
    after = RowAges("8h", clock)
    after.restore(before.export(110), 0, False)
    clock.seconds += 7 * 3600
    assert after.due(1) is None


def parameters_of(index: int = 0, num_ps: int = 1) -> Parameters:
    slices = partition([AGED], num_ps, False)[index]
    values = {part.variable: np.zeros((0, 3), np.float32) for part in slices}
    return Parameters([AGED], slices, alone(sgd), values, place=(index, ShardMap(num_ps)))


def push(parameters: Parameters, ids) -> None:
    ids = np.array(ids, np.int64)
    parameters.tables.lookup({0: ids}, True)
    parameters.merge([Push(1, rows={0: Rows(ids, np.ones((len(ids), 3), np.float32))})])


@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_checkpoint_keeps_how_old_rows_are_and_time_passes_until_a_job_begins_with_it(tmp_path, clock, num_ps):
    first = parameters_of()
    push(first, [1, 2, 3, 4])
    clock.seconds += 3 * DAY
    push(first, [2, 4])
    folder, slices = begin_version(tmp_path, 2), partition([AGED], 1, False)
    files = [write_part(folder / "server", exported(first))]
    saved = finish_version(folder, version=2, specs=[AGED], parts=slices, files=files)
    clock.seconds += 3 * DAY
    left: list[int] = []
    young: list[int] = []
    for index in range(num_ps):
        part = load_slices(saved, [AGED], partition([AGED], num_ps, False)[index], index, ShardMap(num_ps))
        second = parameters_of(index, num_ps)
        second.tables.load(part.tables, part.version)
        second.version = part.version
        second.tables.restore_ages(part.ages, part.version)
        push(second, [])
        before = ids_of(second.tables[0])
        clock.seconds += 1.2 * DAY
        push(second, [])  # 1 and 3 were trained 7.2 days ago, 2 and 4 4.2
        left += before
        young += ids_of(second.tables[0])
        clock.seconds -= 1.2 * DAY
    assert sorted(left) == [1, 2, 3, 4]
    assert sorted(young) == [2, 4]


@pytest.fixture
def servers(tmp_path):
    running = Servers(tmp_path, specs=(*SPECS[:3], AGED))
    yield running
    running.close()


def held(servers) -> list[int]:
    return ids_of(servers.model(0).parameters.tables[3])


def test_a_server_that_takes_anothers_place_knows_how_old_rows_are_and_no_time_has_passed_meanwhile(clock, servers):
    servers.push(0, (1, 2, 3))
    clock.seconds += 3 * DAY
    servers.push(1, (2,))
    servers.write()
    clock.seconds += 30 * DAY  # the job stands still
    servers.replace(version=2)
    servers.push(2, (5,))
    assert held(servers) == [1, 2, 3, 5]
    clock.seconds += 5 * DAY
    servers.push(3, (5,))
    servers.push(4, (5,))
    assert held(servers) == [2, 5]
    servers.write()
    servers.replace(version=5)
    assert held(servers) == [2, 5]  # those that were removed since the first file do not come back


def test_rows_of_a_warm_start_are_as_old_as_in_the_job_before(clock, servers):
    ids, used = np.array([1, 2]), np.array([-5, -1])  # trained 6 days ago, and later
    marks = np.array([[-4, int(clock.seconds) - 6 * DAY]])
    servers.master.initialize(
        ModelState([*VALUES[:3], np.ones((2, 3), np.float32)], ids={3: ids}, used={3: used}, ages={3: marks})
    )
    servers.push(0, (5,))
    assert held(servers) == [1, 2, 5]
    clock.seconds += 2 * DAY
    servers.push(1, (5,))
    assert held(servers) == [2, 5]
