import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from elasticcb.errors import WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Frame, decode_frame, dtype_of, encode_frame, from_message, to_message

ARRAYS = hnp.arrays(
    st.sampled_from(["bool", "int32", "int64", "uint8", "float16", "float32", "float64"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)
decode = functools.partial(decode_frame, header_type=pb.ExchangeRequest)


@given(st.dictionaries(st.text(max_size=8), ARRAYS, max_size=4), st.integers(0, 2**40))
def test_a_frame_arrives_as_it_was_sent(tensors, version):
    data = encode_frame(Frame(pb.ExchangeRequest(known_version=version), tensors))
    arrived = decode(data)
    assert arrived.header.known_version == version
    assert list(arrived.tensors) == list(tensors)
    for name, array in tensors.items():
        assert arrived.tensors[name].dtype == array.dtype
        assert arrived.tensors[name].shape == array.shape
        np.testing.assert_array_equal(arrived.tensors[name], array)
        assert not arrived.tensors[name].flags.writeable


def test_a_frame_of_bfloat16_arrives_as_it_was_sent():
    array = np.arange(5, dtype=np.float32).astype(dtype_of("bfloat16"))
    arrived = decode(encode_frame(Frame(pb.ExchangeRequest(), {"a": array})))
    assert arrived.tensors["a"].dtype == array.dtype
    np.testing.assert_array_equal(arrived.tensors["a"].astype(np.float32), np.arange(5))


@given(st.data())
def test_a_frame_that_is_cut_short_is_refused(data):
    whole = encode_frame(Frame(pb.ExchangeRequest(known_version=3), {"a": np.arange(10, dtype=np.float32)}))
    size = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(WireError):
        decode(whole[:size])


@given(st.binary(max_size=60))
def test_bytes_that_are_no_frame_are_refused(data):
    with pytest.raises(WireError):
        decode(data)


def test_a_frame_whose_header_lies_about_sizes_is_refused():
    header = pb.ExchangeRequest()
    header.tensors.add(name="a", dtype="float32", shape=[1 << 40])
    encoded = header.SerializeToString()
    with pytest.raises(WireError, match="'a' is declared as"):
        decode(b"ECB1" + len(encoded).to_bytes(4, "little") + encoded)


def test_a_dtype_that_may_not_travel_is_refused():
    with pytest.raises(WireError, match="object"):
        dtype_of("object")


@given(ARRAYS)
def test_a_message_holds_an_array(array):
    np.testing.assert_array_equal(from_message(to_message(array)), array)


@given(st.lists(st.binary(max_size=5), max_size=5))
def test_a_message_holds_strings(values):
    array = np.empty(len(values), object)
    array[:] = values
    assert list(from_message(to_message(array))) == values


def test_a_message_whose_size_and_shape_disagree_is_refused():
    message = to_message(np.arange(3, dtype=np.float32), "state")
    message.shape[0] = 4
    with pytest.raises(WireError, match=r"'state' is declared as float32\[4\]"):
        from_message(message)
