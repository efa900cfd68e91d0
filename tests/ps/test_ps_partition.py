from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticcb.errors import WireError
from elasticcb.rpc.tensors import dtype_of
from elasticcb.sharding.partition import VariableSpec, pack, partition, unpack

shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 300), min_size=1, max_size=1).map(tuple),
    st.tuples(st.integers(0, 400), st.integers(0, 40)),
    st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 50)),
)
variables = st.builds(
    VariableSpec,
    path=st.just("layer/kernel"),
    shape=shapes,
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "int32"]),
    trainable=st.booleans(),
    constraint=st.sampled_from(["", "", "", "{}"]),
)


@settings(max_examples=100)
@given(st.lists(variables, max_size=8), st.integers(1, 5), st.booleans())
def test_every_element_is_held_exactly_once(specs, num_ps, split):
    counts = [np.zeros(spec.elements, int) for spec in specs]
    times = [0] * len(specs)
    for slices in partition(specs, num_ps, split):
        assert slices == sorted(slices)
        for part in slices:
            counts[part.variable][part.start : part.stop] += 1
            times[part.variable] += 1
            first, last = part.row_range(specs[part.variable])
            assert np.prod(part.shape(specs[part.variable])) == part.elements
            assert 0 <= first <= last <= specs[part.variable].rows
    assert all((count == 1).all() for count in counts)
    assert all(number >= 1 for number in times)
    whole = [number for number, spec in zip(times, specs, strict=True) if not split or spec.constraint]
    assert all(number == 1 for number in whole)


@settings(max_examples=100)
@given(st.lists(variables, max_size=8), st.integers(1, 4), st.booleans(), st.booleans())
def test_unpacking_what_was_packed_gives_the_same_arrays(specs, num_ps, split, trainable):
    arrays = [np.arange(spec.elements).reshape(spec.shape).astype(dtype_of(spec.dtype)) for spec in specs]
    back = [np.zeros_like(array) for array in arrays]
    for slices in partition(specs, num_ps, split):
        unpack(pack(arrays, specs, slices, trainable), specs, slices, trainable, back)
    for spec, array, other in zip(specs, arrays, back, strict=True):
        assert np.array_equal(other, array if spec.trainable is trainable else np.zeros_like(array))


@settings(max_examples=100)
@given(
    st.lists(
        st.builds(
            VariableSpec,
            path=st.just("v"),
            shape=st.tuples(st.integers(1, 5000), st.integers(1, 64)),
            dtype=st.just("float32"),
            trainable=st.just(True),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 6),
)
def test_servers_are_level_by_bytes_when_variables_may_be_cut(specs, num_ps):
    loads = [sum(part.elements * 4 for part in slices) for slices in partition(specs, num_ps, True)]
    assert max(loads) - min(loads) <= 4 * (16 * 1024 + 64 * 4)


def test_whole_variables_are_levelled_too():
    specs = [VariableSpec(f"v{i}", (size,), "float32", True) for i, size in enumerate([8, 7, 6, 5, 4])]
    loads = [sum(part.elements for part in slices) for slices in partition(specs, 2, False)]
    assert sorted(loads) == [13, 17]


def test_small_variables_are_not_cut():
    specs = [VariableSpec("bias", (100,), "float32", True)]
    assert sorted(map(len, partition(specs, 2, True))) == [0, 1]


def test_blocks_of_another_layout_are_refused_in_words():
    specs = [VariableSpec("bias", (4,), "float32", True)]
    slices = partition(specs, 1, True)[0]
    with pytest.raises(WireError, match=r"expected float32\[4\], got float32\[3\]"):
        unpack({"float32": np.zeros(3, np.float32)}, specs, slices, True, [np.zeros(4, np.float32)])
