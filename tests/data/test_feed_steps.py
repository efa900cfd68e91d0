import pytest
import tensorflow as tf

from elasticcb.data.feeds import batch_error


@pytest.mark.parametrize(
    ("start", "has_header", "advised"), [(0, False, True), (0, True, False), (100, False, False), (100, True, False)]
)
def test_a_field_that_is_no_number_may_be_the_header_only_where_none_is_known(start, has_header, advised):
    error = tf.errors.InvalidArgumentError(None, None, "Field 2 in record 0 is not a valid int32: hour")
    assert ("header=true" in str(batch_error(error, "a.csv", start, 200, has_header))) == advised
