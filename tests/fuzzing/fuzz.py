"""Broken messages on the wire, to every servicer: a master with its service of batches, and two parameter servers, in
processes of their own, which listen as those of a job do.

    python tests/fuzzing/fuzz.py --minutes=10 [--seed=0] [--listen=unix|tls|tcp]

Calls as they should be are changed at random: bytes, lengths, values of the header, names, dtypes and shapes of arrays;
they go by gRPC and by links, with shared memory where servers listen at Unix sockets, else as between machines. A
server must refuse each with a status and a reason, or answer it, must go on, and must not grow. Each half minute it
tells of the calls, and of the memory of the servers.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("fuzzing", "ps", ""))

import psutil

import master_calls
import server_calls
from elasticcb.data.batch_sources.service import DataService
from elasticcb.rpc import shared_frames
from elasticcb.security.credentials import Access
from elasticcb.security.tls import TLS, TLSFiles, make_ca

_REPORT_SECONDS = 30.0
_JOB_SECONDS = 0.5


def serve(kind: str, folder: Path, host: str, found: Any) -> None:
    """The process that is to hold out; it tells its addresses, and ends with the one that sends."""
    logging.disable()
    access = access_in(folder)
    if kind == "master":
        data = DataService()
        with master_calls.serving(host, access, data) as master:
            master_calls.begin_job(master)
            found.put([master.address, master_calls.endless_batches(data)])
            while True:
                time.sleep(_JOB_SECONDS)
                master_calls.begin_job(master)
    with server_calls.serving(folder / "job", host, access) as addresses:
        found.put(addresses)
        while True:
            signal.pause()


def access_in(folder: Path) -> Access:
    """A token; and TLS where the folder has a CA."""
    ca = folder / "tls" / "ca.pem"
    return Access("fuzz", TLS.load(TLSFiles(str(ca))) if ca.exists() else None)


def start(kind: str, folder: Path, host: str) -> tuple[psutil.Process, list[Any]]:
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    process = context.Process(target=serve, args=(kind, folder, host, found), daemon=True)
    process.start()
    return psutil.Process(process.pid), found.get(timeout=300)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--listen", choices=["unix", "tls", "tcp"], default="unix")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        host = f"unix:{folder}" if arguments.listen == "unix" else "127.0.0.1"  # the folder is 0700
        if arguments.listen != "unix":  # as on another machine
            shared_frames.is_supported = lambda: False
        if arguments.listen == "tls":
            make_ca(name)
        access = access_in(folder)
        master, (address, source) = start("master", folder, host)
        servers, addresses = start("servers", folder, host)
        fuzzers: dict[str, Any] = {
            "master": master_calls.MasterFuzzer(arguments.seed, address, access),
            "batches at its port": master_calls.BatchesFuzzer(arguments.seed, address, source, access),
            "parameter servers": server_calls.ServerFuzzer(arguments.seed, addresses, folder / "checkpoint", access),
        }
        begun = time.monotonic()
        told = begun
        while time.monotonic() < begun + 60 * arguments.minutes:
            for fuzzer in fuzzers.values():
                fuzzer.run(100)
            if time.monotonic() - told > _REPORT_SECONDS:
                told = time.monotonic()
                tell(told - begun, fuzzers, [master, master, servers])
        tell(time.monotonic() - begun, fuzzers, [master, master, servers])
        serves = all(fuzzer.still_serves() for fuzzer in fuzzers.values())
    surprises = sorted(surprise for fuzzer in fuzzers.values() for surprise in fuzzer.surprises)
    print("still serve" if serves else "do not serve any more")
    for fuzzer in fuzzers.values():
        print(dict(fuzzer.codes.most_common()))
    for method, code, words in surprises:
        print(f"WRONG: {method}: {code}: {words}")
    return 0 if serves and not surprises else 1


def tell(seconds: float, fuzzers: dict[str, Any], processes: list[psutil.Process]) -> None:
    for (name, fuzzer), process in zip(fuzzers.items(), processes, strict=True):
        accepted = fuzzer.codes["OK"]
        print(
            f"{seconds:4.0f} s, {name}: {accepted:,} calls taken, {fuzzer.codes.total() - accepted:,} refused, "
            f"{process.memory_info().rss / 2**20:,.0f} MiB, {process.num_threads()} threads, {process.num_fds()} files",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
