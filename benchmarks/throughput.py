"""Examples/s of ElasticCB next to Keras 3, `tf_keras`, PyTorch, TorchRec and `ParameterServerStrategy`, in one run.

    python benchmarks/throughput.py [--quick] [--into=docs/benchmarks.md]

All contestants of a workload are started, each a tree of processes, and train until they are warm. Then they take
turns: one runs for a window of 100 steps (a second at least) while all others are held; this is repeated.
Prints a Markdown table of medians over the windows, with processor time and memory of all processes of a tree.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from contestants import CONTESTANTS, KERAS, MORE, Contestant, update_options
from gate import FOLDER_VARIABLE, PARENT_VARIABLE, Gate
from process_tree import ProcessTree
from report import machine, publish, table_parser
from workloads import DATA_VARIABLE, WORKLOADS, write_data

_HERE = Path(__file__).resolve().parent
_POLL_SECONDS = 0.01
_START_SECONDS = 300.0  # by when a contestant must have made its first steps
_IDLE = 0.15  # processors that a tree which is held uses at most
_IDLE_SECONDS = 0.2
_DRAIN_SECONDS = 10.0  # by when a tree must be idle after its gate is closed
_SETTLING = 0.2  # of a window: how much is run before it, and not counted


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    windows: int
    steps: int  # in a window, at least, by each worker
    seconds: float  # of a window, at least
    longest_seconds: float  # of a window: a contestant that has not made its steps by then is cut short
    warm_up_steps: int
    warm_up_seconds: float  # at most, after the first steps


FULL = Plan(windows=5, steps=100, seconds=1.0, longest_seconds=20.0, warm_up_steps=200, warm_up_seconds=20.0)
QUICK = Plan(windows=3, steps=100, seconds=0.5, longest_seconds=20.0, warm_up_steps=60, warm_up_seconds=10.0)


@dataclass
class Runner:
    """A contestant that has been started, and what it reached, by window."""

    contestant: Contestant
    tree: ProcessTree
    gate: Gate
    batch_size: int
    rates: list[float] = field(default_factory=list)  # examples/s
    cpu: list[float] = field(default_factory=list)  # seconds per million examples
    memory: int = 0  # bytes, largest seen

    @property
    def steps(self) -> int:
        return sum(self.gate.steps_by_process())

    def check(self) -> None:
        if self.tree.ended:
            text = self.tree.log.read_text(errors="replace")[-4000:]
            raise SystemExit(f"{self.contestant.title} has ended:\n{text}")


def main() -> int:
    arguments = _arguments()
    plan = QUICK if arguments.quick else FULL
    changes = {name: getattr(arguments, name) for name in ("windows", "steps", "seconds") if getattr(arguments, name)}
    plan = Plan(**{**vars(plan), **changes})
    begun = time.monotonic()
    parts = [f"{machine()}; medians of {plan.windows} windows of {plan.steps} steps or more:"]
    for workload in arguments.workloads:
        for batch_size in arguments.batch_sizes:
            runners = measure(workload, batch_size, arguments.contestants, plan)
            parts.append(f"**{workload}, batch {batch_size}**\n\n{table(runners)}")
            print(f"\n{parts[-1]}", file=sys.stderr, flush=True)
    _say(f"{time.monotonic() - begun:.0f} s in all")
    publish("throughput", "\n\n".join(parts), arguments.into)
    return 0


def measure(workload: str, batch_size: int, contestants: Sequence[Contestant], plan: Plan) -> list[Runner]:
    """Starts the contestants, lets them take turns, and ends them."""
    with started(workload, batch_size, contestants, plan) as runners:
        for window in range(plan.windows):
            for runner in runners:
                _run_window(runner, plan)
                _say(f"window {window + 1}: {runner.contestant.key} {runner.rates[-1]:,.0f} examples/s")
        return runners


@contextmanager
def started(workload: str, batch_size: int, contestants: Sequence[Contestant], plan: Plan) -> Iterator[list[Runner]]:
    """The contestants, warm and held; at the end, also by SIGTERM, their processes are ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        runners = []
        for contestant in contestants:
            data = folder / (contestant.data or "data")
            if not data.exists():
                data.mkdir()
                write_data(workload, data, contestant.data)
            runner = _start(contestant, workload, batch_size, folder / contestant.key, data)
            stack.callback(runner.tree.end)
            runners.append(runner)
        _say(f"{workload}, batch {batch_size}: {len(runners)} contestants warm up")
        _warm_up(runners, plan)
        yield runners


def _start(contestant: Contestant, workload: str, batch_size: int, course: Path, data: Path) -> Runner:
    temporary = course / "tmp"
    temporary.mkdir(parents=True)
    gate = Gate(course)
    environment = {
        "KERAS_BACKEND": "tensorflow",
        **contestant.environment,
        FOLDER_VARIABLE: str(course),
        PARENT_VARIABLE: str(os.getpid()),
        DATA_VARIABLE: str(data),
        "TMPDIR": str(temporary),  # what killed processes leave is removed with the folder
        "PYTHONPATH": os.pathsep.join(filter(None, [*contestant.path, str(_HERE), os.environ.get("PYTHONPATH")])),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    tree = ProcessTree(contestant.command(workload, batch_size), environment, course / "log")
    return Runner(contestant, tree, gate, batch_size)


def _warm_up(runners: Sequence[Runner], plan: Plan) -> None:
    """Returns when all have made their first steps, and are held."""
    begun = time.monotonic()
    running: dict[int, tuple[Runner, float | None]] = {id(runner): (runner, None) for runner in runners}
    while running:
        time.sleep(0.05)
        now = time.monotonic()
        for key, (runner, first) in list(running.items()):
            runner.check()
            steps = runner.gate.steps_by_process()
            if len(steps) < runner.contestant.stepping:
                if now > begun + _START_SECONDS:
                    raise SystemExit(f"{runner.contestant.title} has made no step after {_START_SECONDS:.0f} s.")
                continue
            running[key] = (runner, first or now)
            if min(steps) >= plan.warm_up_steps or now > (first or now) + plan.warm_up_seconds:
                runner.gate.close()
                del running[key]
                _say(f"{runner.contestant.key} is warm after {now - begun:.0f} s")
    for runner in runners:
        _drain(runner)


def _drain(runner: Runner) -> None:
    """Returns when the steps that ran as the gate was closed have also ended."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    used, cpu = float("inf"), runner.tree.cpu_seconds()
    while used > _IDLE * _IDLE_SECONDS:
        if time.monotonic() > deadline:
            _say(f"{runner.contestant.key} uses {used / _IDLE_SECONDS:.2f} processors while it is held")
            return
        time.sleep(_IDLE_SECONDS)
        used, cpu = runner.tree.cpu_seconds() - cpu, runner.tree.cpu_seconds()


def _run_window(runner: Runner, plan: Plan) -> None:
    wanted = plan.steps * runner.contestant.workers
    runner.gate.open()
    try:
        _run(runner, _SETTLING * wanted, _SETTLING * plan.seconds, plan.longest_seconds)
        begin, steps, cpu = time.monotonic(), runner.steps, runner.tree.cpu_seconds()
        _run(runner, wanted, plan.seconds, plan.longest_seconds)
        end, steps, cpu = time.monotonic(), runner.steps - steps, runner.tree.cpu_seconds() - cpu
    finally:
        runner.gate.close()
    _drain(runner)
    made, seconds = runner.gate.steps_between(begin, end, runner.contestant.workers)
    if not made:
        raise SystemExit(f"{runner.contestant.title} noted too few steps in {end - begin:.0f} s. Give more --steps.")
    runner.rates.append(made * runner.batch_size / seconds)
    # Steps are stamped at the end of one or a few, so a count of them in a span is known to a few; a rate is not.
    runner.cpu.append(cpu / (end - begin) / runner.rates[-1] * 1e6)
    runner.memory = max(runner.memory, runner.tree.memory_bytes())


def _run(runner: Runner, steps: float, seconds: float, longest_seconds: float) -> None:
    """Waits until the runner has made `steps` steps, and `seconds` seconds are over."""
    begin, first = time.monotonic(), runner.steps
    while runner.steps < first + steps or time.monotonic() < begin + seconds:
        runner.check()
        if time.monotonic() > begin + longest_seconds and runner.steps > first:
            break
        time.sleep(_POLL_SECONDS)


def table(runners: Sequence[Runner]) -> str:
    """Markdown; ratios are those of medians."""
    rates = {runner.contestant.key: median(runner.rates) for runner in runners}
    keras = rates.get(KERAS.key)
    lines = [
        "| | examples/s (lowest - highest) | to Keras 3 | CPU-s per million | MiB |",
        "|---|---|---|---|---|",
    ]
    for runner in runners:
        rate = rates[runner.contestant.key]
        lines.append(
            f"| {runner.contestant.title} | {rate:,.0f} ({min(runner.rates):,.0f} - {max(runner.rates):,.0f}) "
            f"| {_ratio(rate, keras)} | {median(runner.cpu):,.0f} "
            f"| {runner.memory / 2**20:,.0f} |"
        )
    return "\n".join(lines)


def _ratio(rate: float, to: float | None) -> str:
    return "" if to is None else f"{rate / to:.2f}x"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    known = {contestant.key: contestant for contestant in (*CONTESTANTS, *MORE)}
    parser = table_parser(__doc__)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="some of: %(default)s")
    parser.add_argument("--batch_sizes", default="128,1024")
    default = ",".join(contestant.key for contestant in CONTESTANTS)
    parser.add_argument("--contestants", default=default, help=f"some of: {', '.join(known)}; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter windows")
    parser.add_argument("--windows", type=int, help="of each contestant")
    parser.add_argument("--steps", type=int, help="in a window, by each worker")
    parser.add_argument("--seconds", type=float, help="of a window, at least")
    arguments = parser.parse_args()
    arguments.workloads = listed(parser, "workloads", arguments.workloads, WORKLOADS)
    arguments.batch_sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    keys = listed(parser, "contestants", arguments.contestants, known)
    taken = update_options() if any(known[key].needs for key in keys) else set()
    arguments.contestants = []
    for contestant in (known[key] for key in keys):
        if not taken.issuperset(contestant.needs):
            _say(f"{contestant.key} is left out: this release of ElasticCB lacks its arguments.")
        elif contestant.package and importlib.util.find_spec(contestant.package) is None:
            _say(f"{contestant.key} is left out: the package {contestant.package} is not installed.")
        else:
            arguments.contestants.append(contestant)
    return arguments


def listed(
    parser: argparse.ArgumentParser, name: str, text: str, known: Sequence[str] | Mapping[str, object], by: str = ","
) -> list[str]:
    """The items of an argument; ends the program when it names one that is not known."""
    items = text.split(by)
    if unknown := [item for item in items if item not in known]:
        parser.error(f"--{name} names {by.join(unknown)}; expected some of: {by.join(known)}.")
    return items


if __name__ == "__main__":
    sys.exit(main())
