"""Arrays in fewer bits for the way."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from elasticcb.errors import WireError
from elasticcb.settings import WireDtype
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.wire_codec import narrowed, widened, wire_dtype_of

SPECS = (
    VariableSpec("table/embeddings", (0, 16), "float32", True),
    VariableSpec("dense/kernel", (4, 2), "bfloat16", True),
    VariableSpec("cube", (9, 4, 5), "float32", True),
)
ROWS = "rows/0/values"


def rows_of(count=3000, dim=16, seed=0):
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(count, dim)) * 10.0 ** generator.integers(-6, 6, (count, 1))
    return rows.astype(np.float32)


def there_and_back(frame, wire_dtype, noise=None):
    return widened(narrowed(frame, wire_dtype, noise), SPECS)


def test_what_is_sent_as_it_is_stays_the_same_memory():
    frame = {ROWS: rows_of()}
    assert there_and_back(frame, WireDtype.SAME)[ROWS] is frame[ROWS]


@pytest.mark.parametrize("name", [ROWS, "table/0", "gradients/float32", "weights/float32"])
def test_bfloat16_is_rounded_to_the_nearest(name):
    given = rows_of()
    sent = narrowed({name: given}, WireDtype.BFLOAT16)
    assert list(sent) == [name]
    assert sent[name].nbytes == given.nbytes // 2
    back = widened(sent, SPECS)[name]
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, given.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("dim", [3, 16, 65, 200])
def test_rows_as_integers_are_within_half_a_step_of_their_scale(dim):
    given = rows_of(dim=dim)
    sent = narrowed({"table/0": given}, WireDtype.INT8)
    assert {name: array.dtype.name for name, array in sent.items()} == {"table/0": "int8", "scales/table/0": "bfloat16"}
    back = widened(sent, SPECS)["table/0"]
    largest = np.abs(given).max(axis=1, keepdims=True)
    assert (np.abs(back - given) <= 0.505 * 1.008 * largest / 127).all()
    assert back.ctypes.data % 64 == 0


def test_gradients_as_integers_have_the_mean_that_they_had():
    given = np.tile(np.array([[1.0, 0.3, -0.004, 0.0011]], np.float32), (20_000, 1))
    back = there_and_back({ROWS: given}, WireDtype.INT8, np.random.SFC64(3))[ROWS]
    np.testing.assert_allclose(back.mean(axis=0, dtype=np.float64), given[0], atol=1e-4)
    assert (np.abs(back - given) <= 1.01 / 126).all()


def test_noise_is_reproducible():
    given = {ROWS: rows_of()}
    first, second = (narrowed(given, WireDtype.INT8, np.random.SFC64(5)) for _ in range(2))
    np.testing.assert_array_equal(first[ROWS], second[ROWS])
    other = narrowed(given, WireDtype.INT8, np.random.SFC64(6))
    assert (first[ROWS] != other[ROWS]).any()


@pytest.mark.parametrize("dtype", [WireDtype.BFLOAT16, WireDtype.INT8])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_not_finite_at_the_other_end(dtype, wrong):
    given = rows_of(5)
    given[3, 7] = wrong
    back = there_and_back({ROWS: given}, dtype, np.random.SFC64(0))[ROWS]
    assert np.isfinite(back).all(axis=1).tolist() == [True, True, True, False, True]


@given(arrays(np.float32, (5, 4), elements=st.floats(width=32)))
def test_any_rows_travel_as_integers(rows):
    back = there_and_back({ROWS: rows}, WireDtype.INT8)[ROWS]
    for row, got in zip(rows, back, strict=True):
        if np.isfinite(row).all():
            largest = np.abs(row).max()
            assert (np.abs(got.astype(np.float64) - row) <= 0.51 * 1.008 * largest / 127 + 1e-33).all()
        else:
            assert np.isnan(got).all()


def test_what_is_short_empty_or_of_another_dtype_or_kind_is_left_alone():
    frame = {
        "rows/2/values": rows_of(6, 20).reshape(6, 4, 5),
        "rows/0/values": np.empty((0, 16), np.float32),
        "rows/0/ids": np.arange(3),
        "rows/1/values": np.ones((3, 2), ml_dtypes.bfloat16),
        "state/float32": np.ones(3, np.float32),
        "slots/0/momentum": np.ones((3, 4), np.float32),
        "table/0": np.ones((3, 2), np.float32),
        "gradients/float64": np.ones(3),
        "weights/bfloat16": np.ones(3, ml_dtypes.bfloat16),
    }
    sent = narrowed(frame, WireDtype.INT8)
    narrow = {name for name in frame if sent[name].dtype != frame[name].dtype}
    assert narrow == {"rows/2/values", "rows/0/values", "table/0"}
    assert sent["rows/2/values"].dtype == np.int8
    assert sent["table/0"].dtype.name == "bfloat16"  # scales would take as much as they save
    back = widened(sent, SPECS)
    assert {name: (array.dtype, array.shape) for name, array in back.items()} == {
        name: (array.dtype, array.shape) for name, array in frame.items()
    }


SCALES = np.ones(3, ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        ({"scales/rows/0/values": SCALES}, "scales of 'rows/0/values', but no such array"),
        (
            {ROWS: np.ones((3, 16), np.float32), f"scales/{ROWS}": SCALES},
            r"which is float32\[3, 16\]; only rows of int8",
        ),
        ({"rows/0/ids": np.ones(3, np.int8), "scales/rows/0/ids": SCALES}, "only rows of int8"),
        ({ROWS: np.ones((), np.int8), f"scales/{ROWS}": SCALES}, "only rows of int8"),
        ({ROWS: np.ones((3, 16), np.int8), f"scales/{ROWS}": SCALES[:2]}, r"are bfloat16\[2\]; expected bfloat16\[3\]"),
        (
            {ROWS: np.ones((3, 16), np.int8), f"scales/{ROWS}": np.ones(3, np.float32)},
            r"are float32\[3\]; expected bfloat16\[3\]",
        ),
        (
            {ROWS: np.ones((3, 16), np.int8), f"scales/{ROWS}": -SCALES},
            "A scale of 'rows/0/values' is -1; it must be 0",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(frame, words):
    with pytest.raises(WireError, match=words):
        widened(frame, SPECS)


def test_integers_without_scales_stay_for_the_reader_to_refuse():
    assert widened({ROWS: np.ones((3, 16), np.int8)}, SPECS)[ROWS].dtype == np.int8


@pytest.mark.parametrize("name", ["table/9", "rows/x/values", "rows", "table/x", "rows/", "gradients", ""])
def test_names_of_nothing_stay_for_the_reader_to_refuse(name):
    array = np.ones((3, 4), ml_dtypes.bfloat16)
    assert widened({name: array}, SPECS)[name] is array


def test_a_dtype_that_is_not_known_is_named():
    assert wire_dtype_of("", "rows") is WireDtype.SAME
    with pytest.raises(WireError, match="invalid dtype 'int4' for rows; expected one of 'same', 'bfloat16', 'int8'"):
        wire_dtype_of("int4", "rows")
