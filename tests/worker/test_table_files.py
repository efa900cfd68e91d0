"""A whole embedding table in a file."""

import errno
import os

import numpy as np
import pytest

from elasticcb.worker.session import collect


@pytest.mark.parametrize("input_dim", [0, 6])
def test_a_table_has_its_rows_in_order(tmp_path, input_dim):
    pieces = [(np.array(ids), np.array(ids, np.float32)[:, None]) for ids in ([0, 2, 4], [1, 3, 5])]
    ids, rows = collect(pieces, str(tmp_path), input_dim)
    assert ids.tolist() == rows[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        collect([(np.arange(3), np.zeros((3, 2), np.float32))], str(tmp_path), 0)
    assert error.value.filename == str(tmp_path)
