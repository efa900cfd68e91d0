"""Two jobs on a Kubernetes cluster that has room for one and a half: one after the other, and at once.

    python benchmarks/sharing.py --folder=DIR [--records=N] [--into=docs/kubernetes.md] -- FLAGS

Each job wants three workers, a parameter server and a master. A scheduler that starts a job when all of its pods fit
(gang scheduling) runs these two one after the other, and part of the cluster does nothing. Started at once, both train
with the workers that find room, and the one that ends later takes what the other leaves.

FLAGS are those of `elasticcb train` that pods need here: --image, --volume, --namespace, --service_account and so on.
DIR is a folder that pods see under the same path. --host_python instead: pods run this machine's Python and this
checkout, which one-node clusters of this machine can do. Workers may not take more processor time than they ask for, as
on a cluster that is full.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import yaml
from report import machine, publish, table_parser

ROOT = Path(__file__).resolve().parents[1]
WORKERS, FEATURES, BATCH, BATCHES_PER_TASK = 3, 256, 512, 10
# Of the node's processor time: three workers, a server and a master are 70 %, so that two jobs do not fit.
WORKER_SHARE, OTHER_SHARE = 0.2, 0.05

MODEL = f"""
    import keras

    def custom_model():
        layers = [keras.layers.Dense(1024, activation="relu") for _ in range(4)]
        return keras.Sequential([keras.Input(({FEATURES},)), *layers, keras.layers.Dense(1)])

    def loss(labels, predictions):
        return keras.losses.mean_squared_error(labels, predictions)

    def optimizer():
        return keras.optimizers.SGD(0.01)
"""


def main() -> int:
    parser = table_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="that pods see under the same path")
    parser.add_argument("--records", type=int, default=120_000, help="that each job trains")
    parser.add_argument("--cores", type=float, default=os.cpu_count(), help="of the cluster")
    parser.add_argument("--host_python", action="store_true", help="pods run this machine's Python")
    parser.add_argument("flags", nargs="*", help="of `elasticcb train`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        folder.chmod(0o777)
        flags = prepare(folder, arguments.records, arguments.cores)
        flags += arguments.flags + (host_python(folder) if arguments.host_python else [])
        after = [run(folder, flags, "after-", [each]) for each in ("a", "b")]
        at_once = run(folder, flags, "at-once-", ["a", "b"])
    text = table([seconds for (seconds,) in after], at_once)
    publish("sharing", f"{machine()}; {arguments.records:,} records a job, seconds:\n\n{text}", arguments.into)
    return 0


def prepare(folder: Path, records: int, cores: float) -> list[str]:
    """Writes model and data; the flags of a job."""
    (folder / "wide.py").write_text(textwrap.dedent(MODEL))
    random = np.random.default_rng(0)
    x = random.normal(size=(records, FEATURES)).astype("float32")
    np.savez(folder / "train.npz", x=x, y=x.mean(axis=1, keepdims=True))
    for path in folder.iterdir():
        path.chmod(0o644)
    worker, other = (f"cpu={int(1000 * cores * share)}m" for share in (WORKER_SHARE, OTHER_SHARE))
    values = {
        "cluster": "kubernetes",
        "model_zoo": folder,
        "model_def": "wide.custom_model",
        "training_data": folder / "train.npz",
        "minibatch_size": BATCH,
        "num_minibatches_per_task": BATCHES_PER_TASK,
        "num_workers": WORKERS,
        "worker_resource_request": f"{worker},memory=300Mi",
        "worker_resource_limit": worker,
        "ps_resource_request": f"{other},memory=300Mi",
        "master_resource_request": f"{other},memory=300Mi",
    }
    return [f"--{name}={value}" for name, value in values.items()]


def host_python(folder: Path) -> list[str]:
    """Flags of pods that run what this process runs."""
    command = {"containers": [{"name": "elasticcb", "command": [sys.executable, "-m", "elasticcb"]}]}
    (folder / "spec.yaml").write_text(yaml.safe_dump({"all": {"spec": command}}))
    paths = dict.fromkeys(["/usr", "/lib", "/lib64", sys.base_prefix, sys.prefix, str(ROOT)])
    mounts = [f"host_path={path},mount_path={path},read_only=true" for path in paths]
    return [
        f"--cluster_spec={folder / 'spec.yaml'}",
        f"--volume={';'.join([*mounts, f'host_path={folder},mount_path={folder}'])}",
        f"--envs=PYTHONPATH={ROOT},PYTHONDONTWRITEBYTECODE=1",
        "--image_pull_policy=Never",
    ]


def run(folder: Path, flags: list[str], prefix: str, names: list[str]) -> list[float]:
    """Starts jobs at once; seconds from then to the end of each. Raises `SystemExit` when one fails."""
    started, jobs, ended = time.monotonic(), {}, dict[str, float]()
    for name in names:
        job = f"sharing-{prefix}{name}-{secrets.token_hex(2)}"  # jobs that are done keep their names
        output = (folder / f"{job}.log").open("w")
        command = [sys.executable, "-m", "elasticcb", "train", *flags]
        own = [f"--job_name={job}", f"--job_dir={folder / job}"]
        jobs[job] = subprocess.Popen([*command, *own], stdout=output, stderr=subprocess.STDOUT)
    while len(ended) < len(jobs):
        time.sleep(0.2)
        for job, process in jobs.items():
            if job not in ended and process.poll() is not None:
                ended[job] = time.monotonic() - started
                print(f"{job}: {ended[job]:.0f} s", flush=True)
                if process.returncode:
                    raise SystemExit((folder / f"{job}.log").read_text()[-5000:])
    return [ended[job] for job in jobs]


def table(after: list[float], at_once: list[float]) -> str:
    """Markdown."""
    rows = [
        ("one after the other", f"{after[0]:.0f}", f"{sum(after):.0f}", f"{sum(after):.0f}"),
        ("at once", f"{at_once[0]:.0f}", f"{at_once[1]:.0f}", f"{max(at_once):.0f}"),
    ]
    lines = ["| | first job ends | second job ends | both |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", f"Ratio: {max(at_once) / sum(after):.2f}"])


if __name__ == "__main__":
    sys.exit(main())
