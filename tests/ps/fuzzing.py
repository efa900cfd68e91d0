"""Broken messages on the wire: calls of real servers, mutated, sent again by gRPC.

    python tests/ps/fuzzing.py --minutes=10 [--seed=0]

A server must refuse them with a status and a reason, or answer them, must go on, and must not grow. UNKNOWN and
INTERNAL stand for an exception that nobody thought of.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
sys.path.insert(0, str(Path(__file__).parent))

import grpc
import numpy as np
import psutil

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.partition import VariableSpec
from elasticcb.table_spec import TableSpec
from elasticcb.tensors import Frame, dtype_of, encode_frame, frame_decoder
from helpers_ps import SPECS, Cluster, gradients, initial_values, push_frame

TABLE = len(SPECS)
WITH_TABLE = (
    *SPECS,
    VariableSpec(
        "table/embeddings",
        (0, 4),
        "float32",
        True,
        table=TableSpec(None, '{"class_name": "Zeros", "config": {}, "module": "keras.initializers"}', 1).to_json(),
    ),
)
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_NUMBERS = (0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 2**62, 2**40)
_TEXTS = ("", "float32", "bfloat16", "int64", "object", "weights/float32", "rows/5/ids", "lookup/99", "\0", "ä" * 50)


class Fuzzer:
    """Sends mutated calls to one parameter server.

    Attributes:
        codes: how often each status was the answer.
        surprises: calls that were answered by a status that is not `ALLOWED`: (method, status, words, message).
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._cluster = Cluster(1, WITH_TABLE)
        self._cluster.initialize([*initial_values(), np.zeros((0, 4), np.float32)])
        self._corpus = dict(self._valid())
        channel = self._cluster.connections[0].channel
        self._send = {name: channel.unary_unary(f"/elasticcb.ParameterServer/{name}") for name in self._corpus}
        self.codes: Counter[str] = Counter()
        self.surprises: list[tuple[str, str, str, bytes]] = []

    def _valid(self) -> Iterator[tuple[str, tuple[Callable[[], Any], list[Frame[Any]]]]]:
        (slices,) = self._cluster.slices
        rows = {TABLE: (np.array([3, 1, 8]), np.ones((3, 4), np.float32)), 0: (np.array([2]), np.ones((1, 4), "f4"))}
        dense = {index: value for index, value in gradients(0).items() if index}
        pushes = [
            push_frame(dense, slices, WITH_TABLE, rows, pull=True, sequence=1, state={"float32": np.ones(6, "f4")})
        ]
        lookup = Frame(pb.ExchangeRequest(create_rows=True, pull=True), {f"lookup/{TABLE}": np.arange(9)})
        yield "Exchange", (pb.ExchangeRequest, [*pushes, lookup])
        exported = self._cluster.call(0, "Export", Frame(pb.ExportRequest(), {}))
        state = pb.LoadStateRequest(id=7, optimizers=exported.header.optimizers)
        yield "LoadState", (pb.LoadStateRequest, [Frame(state, exported.tensors)])
        variables = [spec.to_message() for spec in WITH_TABLE]
        first = pb.InitializeRequest(variables=variables, num_ps=1, split=True)
        yield "Initialize", (pb.InitializeRequest, [Frame(first, exported.tensors)])
        for method, header in {
            "Apply": pb.ApplyRequest(pushes=[pb.PushName(worker_id=1, sequence=1)], version=1),
            "Snapshot": pb.SnapshotRequest(evaluation_round=1),
            "FinishTraining": pb.FinishTrainingRequest(),
            "SetLearningRate": pb.SetLearningRateRequest(learning_rate=0.1),
            "Export": pb.ExportRequest(),
            "ReadTable": pb.ReadTableRequest(variable=TABLE, count=4),
        }.items():
            yield method, (type(header), [Frame(header, {})])

    def run(self, messages: int) -> None:
        """Sends so many."""
        for _ in range(messages):
            method = self._random.choice([*self._corpus, "Exchange", "Exchange"])
            message = self._mutated(*self._corpus[method])
            try:
                self._send[method](message, timeout=30.0, metadata=self._cluster.connections[0].metadata)
                code, words = grpc.StatusCode.OK, ""
            except grpc.RpcError as error:
                code, words = error.code(), error.details()
            self.codes[code.name] += 1
            if code not in ALLOWED or (code is not grpc.StatusCode.OK and not words):
                self.surprises.append((method, code.name, words, message))

    def still_serves(self) -> bool:
        """Whether it takes a model, a push and a pull, as if nothing had been."""
        self._cluster.initialize([*initial_values(), np.zeros((0, 4), np.float32)])
        answer = self._cluster.push(gradients(0), sequence=1, pull=True)
        return answer.header.version == 1 and "weights/float32" in answer.tensors

    def close(self) -> None:
        self._cluster.close()

    # ------------------------------------------------------------ mutations

    def _mutated(self, header_type: Callable[[], Any], frames: list[Frame[Any]]) -> bytes:
        whole = encode_frame(self._random.choice(frames))
        kind = self._random.randrange(5)
        if kind == 0:
            return self._with_other_bytes(whole)
        if kind == 1:
            return whole[: self._random.randrange(len(whole))] + self._random.randbytes(self._random.choice((0, 0, 9)))
        frame = frame_decoder(header_type)(whole)
        tensors = {name: array.copy() for name, array in frame.tensors.items()}
        if kind == 2 or not tensors:
            return self._with_another_header(frame)
        name = self._random.choice(sorted(tensors))
        if kind == 3:
            tensors[name] = self._other_array(tensors[name])
        else:
            array = tensors.pop(name)
            tensors[self._random.choice((name + "x", *_TEXTS))] = array
        return encode_frame(Frame(frame.header, tensors))

    def _with_other_bytes(self, whole: bytes) -> bytes:
        data = bytearray(whole)
        for _ in range(self._random.choice((1, 1, 3, 20))):
            data[self._random.randrange(len(data))] = self._random.randrange(256)
        return bytes(data)

    def _other_array(self, array: np.ndarray) -> np.ndarray:
        kind = self._random.randrange(5)
        flat = array.reshape(-1)
        if kind == 0 and flat.size:
            flat[self._random.randrange(flat.size)] = (
                self._random.choice((np.nan, np.inf, 1e38)) if array.dtype.kind == "f" else self._random.choice((-1, 0))
            )
            return array
        if kind == 1:
            return array.astype(dtype_of(self._random.choice(("int8", "float64", "bfloat16", "bool", "complex64"))))
        if kind == 2:
            return flat[: self._random.randrange(flat.size + 1)]
        if kind == 3:
            return np.concatenate([flat, flat])
        return array.reshape(*array.shape, 1)

    def _with_another_header(self, frame: Frame[Any]) -> bytes:
        """One value anywhere in the header is another one; the arrays stay as they are."""
        whole = encode_frame(frame)
        end = 8 + int.from_bytes(whole[4:8], "little")
        header = type(frame.header).FromString(whole[8:end])
        change_one_value(header, self._random)
        encoded = header.SerializeToString()
        return whole[:4] + len(encoded).to_bytes(4, "little") + encoded + whole[end:]


def change_one_value(message: Any, generator: random.Random) -> None:
    """Gives a value anywhere in a protobuf message, or in the messages in it, another value of its type."""
    field = generator.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    if field.is_repeated:
        if not len(value) or (field.message_type and field.message_type.GetOptions().map_entry):
            return
        place = generator.randrange(len(value))
        if generator.random() < 0.2:
            del value[place]
        elif field.message_type:
            change_one_value(value[place], generator)
        else:
            value[place] = other_value(field, value[place], generator)
    elif field.message_type:
        change_one_value(value, generator)
    else:
        setattr(message, field.name, other_value(field, value, generator))


def other_value(field: Any, value: Any, generator: random.Random) -> Any:
    """Another value of a field's type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        # A folder to write to, or to read from, is no matter of this test.
        return value if "director" in field.name or field.name == "checkpoint" else generator.choice(_TEXTS)
    if isinstance(value, bytes):
        return generator.randbytes(5)
    if isinstance(value, float):
        return generator.choice((float("nan"), float("inf"), -1.0, 0.0, 1e300))
    number = generator.choice(_NUMBERS)
    return number % 2**31 if field.type in (field.TYPE_INT32, field.TYPE_ENUM) else number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    fuzzer, process = Fuzzer(arguments.seed), psutil.Process()
    fuzzer.run(2_000)
    begun, before = time.monotonic(), process.memory_info().rss
    while time.monotonic() < begun + 60 * arguments.minutes:
        fuzzer.run(1_000)
    print(f"{fuzzer.codes.total():,} messages: {dict(fuzzer.codes.most_common())}")
    print(f"memory: {before / 2**20:,.0f} MiB after 2,000, {process.memory_info().rss / 2**20:,.0f} MiB at the end")
    print(f"threads: {process.num_threads()}, open files: {process.num_fds()}")
    serves = fuzzer.still_serves()
    print("still serves" if serves else "does not serve any more")
    different = {(method, code, words.split("\n")[0][:200]) for method, code, words, _ in fuzzer.surprises}
    for method, code, words in sorted(different):
        print(f"{method}: {code}: {words}")
    fuzzer.close()
    return 0 if serves and not different else 1


if __name__ == "__main__":
    sys.exit(main())
