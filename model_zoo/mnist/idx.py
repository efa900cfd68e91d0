"""A data reader for MNIST's own files: IDX format, gzipped or not. Shared by the models in this folder.

`--training_data=mnist/train-images-idx3-ubyte.gz --validation_data=mnist/t10k-images-idx3-ubyte.gz` are the
usual two. A range in square brackets, as in Python, takes a part of a file:
`--training_data="mnist/t10k-images-idx3-ubyte.gz[:8000]"`. A folder stands for all images in it.
"""

import gzip
import re
import struct
from functools import cache
from pathlib import Path

import numpy as np
import tensorflow as tf

from elasticcb.data import Metadata, Reader, Source

_ORIGIN = re.compile(r"(?P<path>.*?)(\[(?P<start>\d*):(?P<stop>\d*)\])?")
_UNSIGNED_BYTES = 0x08  # the only IDX data type that MNIST, Fashion-MNIST and EMNIST use


def custom_data_reader(data_origin):
    return IdxReader(data_origin)


class IdxReader(Reader):
    """Records are dicts: "image" (uint8, (rows, columns)) and "label" (int64).

    Labels are read from the file next to the images whose name says `labels-idx1` for `images-idx3`.
    """

    def __init__(self, data_origin):
        match = _ORIGIN.fullmatch(data_origin)
        self._range = slice(*(int(match[end]) if match[end] else None for end in ("start", "stop")))
        path = Path(match["path"]).expanduser()
        self._files = sorted(path.glob("*images-idx3-ubyte*")) if path.is_dir() else [path]
        if not self._files:
            raise ValueError(f"The folder {path} has no *images-idx3-ubyte* file, gzipped or not.")

    def sources(self):
        return [Source(str(file), len(self._load(file)[1])) for file in self._files]

    def read(self, name, start, end):
        for chunk in self.read_chunks(name, start, end, size=1):
            yield {"image": chunk["image"][0], "label": chunk["label"][0]}

    # Optional: whole slices of arrays are much faster than record after record.
    def read_chunks(self, name, start, end, size=256):
        images, labels = self._load(name)
        for first in range(start, end, size):
            chunk = slice(first, min(first + size, end))
            yield {"image": images[chunk], "label": labels[chunk]}

    @property
    def element_spec(self):
        images, _ = self._load(self._files[0])
        return {"image": tf.TensorSpec(images.shape[1:], tf.uint8), "label": tf.TensorSpec((), tf.int64)}

    @property
    def metadata(self):
        return Metadata(column_names=("image", "label"))

    def _load(self, file):
        file = Path(file)
        images = read_idx(file)
        labels = read_idx(file.with_name(file.name.replace("images-idx3", "labels-idx1")))
        if len(images) != len(labels):
            raise ValueError(f"{file} holds {len(images)} images, but its labels file {len(labels)} labels.")
        return images[self._range], labels[self._range].astype(np.int64)


@cache
def read_idx(file):
    """The array in an IDX file. Raises ValueError when the file is not an IDX file of bytes, or is cut off."""
    data = file.read_bytes()
    if file.suffix == ".gz":
        data = gzip.decompress(data)
    # Two zero bytes, the data type, the number of dimensions; then each dimension's size, big-endian.
    if len(data) < 4 or data[:3] != bytes([0, 0, _UNSIGNED_BYTES]):
        raise ValueError(f"{file} does not begin like an IDX file of unsigned bytes: {data[:4]!r}.")
    dimensions = data[3]
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions)
    if values.size != np.prod(shape):
        raise ValueError(f"{file} promises the shape {shape}, but holds {values.size} values. Is it whole?")
    return values.reshape(shape)
