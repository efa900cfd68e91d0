"""A push as it travels: what a worker cuts for a server is what the server reads, whatever the frame is."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from elasticcb.errors import WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.sharding import array_names
from elasticcb.sharding.partition import ShardMap, VariableSpec, pack, partition
from elasticcb.sharding.push import Movement, Push

PAGE = Path(__file__).parents[2] / "docs" / "wire_protocol.md"
SPECS = (
    VariableSpec("rows/embeddings", (6, 2), "float32", True),
    VariableSpec("dense/kernel", (3, 2), "float32", True),
    VariableSpec("norm/mean", (2,), "float32", False),
    VariableSpec("table", (0, 2), "float32", True, table='{"input_dim": null}'),
)


def part_of(index, servers=2):
    parts = partition(SPECS, servers, False)
    slots = {"slots/1/momentum": np.ones((3, 2), np.float32), "shared/iterations": np.int64(3)}
    step = Movement(
        batches=4,
        partition=parts,
        moved=[
            pack({0: np.ones((6, 2), np.float32), 1: np.ones((3, 2), np.float32)}, SPECS, each, True) for each in parts
        ],
        state=[pack({2: np.full(2, 5.0, np.float32)}, SPECS, each, False) for each in parts],
        shares=[pack({2: np.ones(2, np.float32)}, SPECS, each, False) for each in parts],
        rows={3: (np.arange(9), np.ones((9, 2), np.float32))},
        optimizers=slots,
    )
    return step.part(index, SPECS, parts[index], ShardMap(servers), base=7)


@pytest.mark.parametrize("index", [0, 1])
def test_a_push_comes_out_of_its_frame_as_it_went_in(index):
    push, header = part_of(index), pb.ExchangeRequest()
    arrays = push.encode(header)
    read = Push.decode(pb.ExchangeRequest.FromString(header.SerializeToString()), arrays)
    assert (read.batches, read.base) == (4, 7)
    for mine, other in ((push.moved, read.moved), (push.state, read.state), (push.shares, read.shares)):
        assert mine.keys() == other.keys()
        assert all(mine[dtype] is other[dtype] for dtype in mine)
    assert push.optimizers.keys() == read.optimizers.keys() >= {"shared/iterations"}
    assert push.rows.keys() == read.rows.keys()
    assert all(push.rows[index] == read.rows[index] for index in push.rows)


def test_the_servers_parts_of_a_step_are_the_whole_step():
    pushes = [part_of(index) for index in (0, 1)]
    assert sorted(np.concatenate([push.rows[3].ids for push in pushes])) == list(range(9))
    assert sum(push.moved["float32"].size for push in pushes if push.moved) == 18
    assert sum("slots/1/momentum" in push.optimizers for push in pushes) == 1


def test_the_names_on_the_wire_are_those_of_the_protocol():
    names = set().union(*(part_of(index).encode(pb.ExchangeRequest()) for index in (0, 1)))
    assert names == {
        "moved/float32", "state/float32", "shares/float32", "rows/3/ids", "rows/3/values",
        "slots/1/momentum", "shared/iterations",
    }  # fmt: skip


def test_the_page_of_the_protocol_names_all_kinds_of_arrays():
    kinds = {kind for name, kind in vars(array_names).items() if name.isupper()}
    table = PAGE.read_text(encoding="utf-8").split("### Names of arrays")[1].split("\n## ")[0]
    rows = [row.partition(" | ")[0] for row in table.splitlines() if row.startswith("|")]
    documented = {kind for row in rows for kind in re.findall(r"`(\w+)/[A-Z]", row)}
    of_files = {getattr(array_names, name) for name in ("WEIGHT", "GONE")}
    assert kinds - of_files == documented


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("gradient/float32", "has an unknown tensor 'gradient/float32'"),
        ("rows/0/id", "has an unknown tensor 'rows/0/id'"),
        ("rows/x/ids", "named 'rows/x/ids'; expected rows/INDEX/NAME"),
        ("rows/0/ids", "needs ids and values"),
    ],
)
def test_an_array_that_no_push_holds_is_refused_by_name(name, what):
    with pytest.raises(WireError, match=what):
        Push.decode(pb.ExchangeRequest(), {name: np.zeros(1, np.int64)})
