"""Functions that are compiled by kind of batch."""

import numpy as np
import pytest

from elasticcb.errors import user_traceback
from elasticcb.tf.batch_signatures import Signatures, flat_tensors


def test_an_error_of_a_step_that_is_compiled_is_shown_without_another() -> None:
    def make(specs):
        raise ValueError("no gradients")

    batch = np.zeros((8, 4), "float32")
    with pytest.raises(ValueError, match="no gradients") as caught:
        Signatures(make).function(batch, flat_tensors(batch)[1])
    assert "KeyError" not in user_traceback(caught.value)
