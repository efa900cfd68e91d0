"""What a job makes of processes that are killed all the time.

    python benchmarks/chaos.py [--data_dir=DIR] [--every 60 5] [--seed=0] [--epochs=60]

Trains a recommender (embedding tables, Adagrad) with `elasticcb train`: undisturbed, and for each number of seconds in
`--every` with a worker, a parameter server or the master killed (SIGKILL) so often, drawn from a seeded generator. The
data are ml-100k/u.data of the directory, or ratings made from hidden factors. The job's own reader keeps a ledger of
all that was read; every record must have been read as often as there are epochs, the summary must tell of every record
in every epoch, and every evaluation pass must count every record once. Prints a Markdown table; ends with 1 when
something was lost.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from report import machine, publish, table_parser

HERE = Path(__file__).resolve().parent
SHARES = {"worker": 0.45, "ps": 0.45, "master": 0.1}
NAMES = {"worker": "worker", "ps": "parameter server", "master": "master"}
WORKERS, SERVERS = 2, 2


@dataclass
class Job:
    """What came of a job."""

    seconds: float
    output: str
    ledger: list[tuple[float, int, str, int, int]]  # time, process, file, first and last record
    logs: dict[str, str]
    every: float | None = None  # seconds between two kills
    kills: list[tuple[float, str]] = field(default_factory=list)  # time and role


def main() -> int:
    parser = table_parser(__doc__)
    parser.add_argument(
        "--data_dir", type=Path, help="directory that holds ml-100k/u.data; without it ratings are made"
    )
    parser.add_argument("--every", type=float, nargs="+", default=[5.0], help="seconds between two kills, for each job")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--lost_updates", default="repeat", help="as of `elasticcb train`")
    parser.add_argument("--roles", default=",".join(SHARES), help="what may be killed: %(default)s")
    parser.add_argument("--jobs_url", help="URL below which the jobs have their folders; without it these are local")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = write_data(Path(folder), arguments.data_dir)
        jobs = [run(Path(folder), arguments, every) for every in (None, *arguments.every)]
        wrong = [line for job in jobs for line in check(job, arguments.epochs, counts)]
        publish("chaos", table(jobs, arguments, counts), arguments.into)
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


def write_data(folder: Path, data_dir: Path | None) -> dict[str, int]:
    """Writes train.npy and test.npy; how many records each has."""
    if data_dir is not None:
        rows = np.loadtxt(data_dir / "ml-100k/u.data", dtype=np.int64)[:, :3]
    else:
        generator = np.random.default_rng(0)
        users, items = generator.integers(0, 1000, 100_000), generator.zipf(1.3, 100_000) % 2000
        factors = generator.normal(size=(3000, 4))
        scores = 3 + (factors[users] * factors[1000 + items]).sum(1) / 2 + generator.normal(size=100_000) / 2
        rows = np.stack([users, items, np.clip(np.rint(scores), 1, 5).astype(np.int64)], 1)
    rows = np.random.default_rng(0).permutation(rows)
    cut = len(rows) // 10
    np.save(folder / "test.npy", rows[:cut])
    np.save(folder / "train.npy", rows[cut:])
    return {"test.npy": cut, "train.npy": len(rows) - cut}


def run(data: Path, arguments: argparse.Namespace, every: float | None) -> Job:
    folder = Path(tempfile.mkdtemp(dir=data))
    ledger, output = folder / "ledger", folder / "output"
    started = time.time()
    more = [f"--job_dir={arguments.jobs_url}/{folder.name}"] if arguments.jobs_url else []
    process = start(data, folder, arguments.epochs, f"--lost_updates={arguments.lost_updates}", *more)
    kills = disturb(process, arguments, every, output) if every else []
    code = process.wait()
    job = Job(
        time.time() - started,
        output.read_text(),
        [_entry(line) for line in ledger.read_text().splitlines()],
        {path.stem: path.read_text(errors="replace") for path in folder.glob("**/logs/*.log")},
        every,
        kills,
    )
    if code:
        print(job.output[-5000:])
        raise SystemExit(f"The job ended with {code}, after {len(kills)} kills.")
    return job


def start(data: Path, folder: Path, epochs: int, *more: str) -> subprocess.Popen[bytes]:
    """Starts a job, which writes `output`, `ledger` and `job` in the folder."""
    command = [
        *(sys.executable, "-m", "elasticcb", "train", f"--model_zoo={HERE / 'chaos_model'}"),
        *("--model_def=ratings.custom_model", f"--training_data={data / 'train.npy'}"),
        *(f"--validation_data={data / 'test.npy'}", f"--num_workers={WORKERS}", f"--num_ps={SERVERS}"),
        *("--minibatch_size=64", "--num_minibatches_per_task=32", f"--num_epochs={epochs}", "--checkpoint_interval=2"),
        *("--max_worker_restarts=100000", "--max_ps_restarts=100000", *more),
    ]
    if not any(flag.startswith("--job_dir=") for flag in more):
        command.append(f"--job_dir={folder / 'job'}")
    environment = os.environ | {"LEDGER": str(folder / "ledger")}
    with (folder / "output").open("w") as file:
        return subprocess.Popen(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, env=environment)


def _entry(line: str) -> tuple[float, int, str, int, int]:
    at, process, name, first, last = line.split()
    return float(at), int(process), name, int(first), int(last)


def disturb(
    process: subprocess.Popen[bytes], chaos: argparse.Namespace, every: float, output: Path
) -> list[tuple[float, str]]:
    """Kills processes of the job until it ends; what and when."""
    drawn = random.Random(chaos.seed)
    roles = chaos.roles.split(",")
    kills: list[tuple[float, str]] = []
    while "epoch 1" not in output.read_text() and process.poll() is None:
        time.sleep(0.1)
    while process.poll() is None:
        try:
            process.wait(every)
        except subprocess.TimeoutExpired:
            role = drawn.choices(roles, [SHARES[role] for role in roles])[0]
            victims = members(process.pid, role)
            if victims:
                victim = drawn.choice(victims)
                with_name = (time.time(), role)
                try:
                    victim.kill()
                except psutil.NoSuchProcess:
                    continue
                kills.append(with_name)
    return kills


def members(launcher: int, role: str) -> list[psutil.Process]:
    try:
        children = psutil.Process(launcher).children(recursive=True)
        return [child for child in children if child.name().partition("-")[0] == role]
    except psutil.NoSuchProcess:
        return []


# ------------------------------------------------------------ what came of it


def check(job: Job, epochs: int, counts: dict[str, int]) -> list[str]:
    """What was lost, in words."""
    reads = np.zeros(counts["train.npy"], np.int64)
    for _, _, name, first, last in job.ledger:
        if name == "train.npy":
            reads[first:last] += 1
    wrong = []
    if (reads < epochs).any():
        wrong.append(f"{np.count_nonzero(reads < epochs)} records were read less than {epochs} times")
    told = re.findall(r"records trained +[\d,]+ \((.+)\)", job.output)
    is_untold = "The job was done when its master was killed" in job.output
    if not is_untold and told != [f"{epochs} epochs of {counts['train.npy']:,}"]:
        wrong.append(f"the summary tells of {told} records")
    rounds = {int(float(rows)) for rows in re.findall(r"Evaluation at version .*rows ([\d.]+)", job.output)}
    if rounds != {counts["test.npy"]}:
        wrong.append(f"evaluation passes counted {rounds} records")
    return wrong


def recoveries(job: Job) -> dict[str, list[float]]:
    """Seconds from each kill to the moment when the place was filled again, by role."""
    found: dict[str, list[float]] = {role: [] for role in SHARES}
    found["ps"] = [float(s) for s in re.findall(r"Parameter server \d+ recovered in ([\d.]+) s", job.output)]
    there = times(job.logs["master"], r"worker \d+ \(.*joined")
    answers = times(job.logs["master"], r"(?:Workers and servers can continue|The servers hold the model)")
    for at, role in job.kills:
        after = {"worker": there, "master": answers}.get(role, [])
        later = [moment - at for moment in after if moment > at]
        if later:
            found[role].append(min(later))
    return found


def times(log: str, pattern: str) -> list[float]:
    stamps = re.findall(rf"^(\S+)\.(\d+)Z master I \S+: .*{pattern}", log, re.MULTILINE)
    return [
        datetime.datetime.strptime(second, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=datetime.timezone.utc).timestamp()
        + int(milli) / 1000
        for second, milli in stamps
    ]


def table(jobs: list[Job], arguments: argparse.Namespace, counts: dict[str, int]) -> str:
    wanted = counts["train.npy"] * arguments.epochs
    rows = {
        "": ["undisturbed" if job.every is None else f"a kill every {job.every:g} s" for job in jobs],
        "seconds": [f"{job.seconds:.0f}" for job in jobs],
        "goodput": [f"{100 * jobs[0].seconds / job.seconds:.0f} %" for job in jobs],
        **{f"kills of a {name}": [_kills(job, role) for job in jobs] for role, name in NAMES.items()},
        "records lost": [str(_lost(job, arguments, counts)) for job in jobs],
        f"records of {wanted:,} read again": [_again(job, wanted) for job in jobs],
        "updates lost, of a part of the model": [_updates_lost(job) for job in jobs],
        "evaluation passes that did not count each record once": [str(_bad_rounds(job, counts)) for job in jobs],
        "RMSE at the end": [re.findall(r"rmse ([\d.]+)", job.output)[-1] for job in jobs],
    }
    lines = [f"| {' | '.join([label, *cells])} |" for label, cells in rows.items()]
    lines.insert(1, "|---" * (1 + len(jobs)) + "|")
    about = f"{machine()}; seed {arguments.seed}, {arguments.epochs} epochs of {counts['train.npy']:,} records:"
    return "\n".join([about, "", *lines])


def _kills(job: Job, role: str) -> str:
    text, seconds = str(sum(killed == role for _, killed in job.kills)), recoveries(job)[role]
    if seconds:
        text += f"; back after {_spread(seconds)}"
    built = [float(s) for s in re.findall(r"The master recovered in ([\d.]+) s", job.output)]
    if role == "master" and built:  # calls are answered before
        text += f", with its model after {_spread(built)}"
    return text


def _again(job: Job, wanted: int) -> str:
    again = max(0, sum(last - first for _, _, name, first, last in job.ledger if name == "train.npy") - wanted)
    return f"{again:,} ({100 * again / wanted:.2f} %)"


def _updates_lost(job: Job) -> str:
    lost = sum(int(n.replace(",", "")) for n in re.findall(r"; ([\d,]+) updates? to its shard", job.output))
    version = re.search(r"model version +([\d,]+)", job.output)
    return f"{lost:,} of {SERVERS} x {version[1] if version else '?'}"


def _spread(seconds: list[float]) -> str:
    return f"{median(seconds):.1f} s (median), {max(seconds):.1f} s (longest)"


def _lost(job: Job, arguments: argparse.Namespace, counts: dict[str, int]) -> int:
    reads = np.zeros(counts["train.npy"], np.int64)
    for _, _, name, first, last in job.ledger:
        if name == "train.npy":
            reads[first:last] += 1
    return int(np.count_nonzero(reads < arguments.epochs))


def _bad_rounds(job: Job, counts: dict[str, int]) -> int:
    rows = re.findall(r"Evaluation at version .*rows ([\d.]+)", job.output)
    return sum(int(float(count)) != counts["test.npy"] for count in rows)


if __name__ == "__main__":
    sys.exit(main())
