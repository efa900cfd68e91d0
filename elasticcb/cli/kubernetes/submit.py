"""Submits a job to Kubernetes: objects with its flags and secrets, and the Job of its master."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from elasticcb.cli.kubernetes.job import follow_job
from elasticcb.cli.validation import validate_flags
from elasticcb.cluster.kubernetes.api import KubernetesAPI, KubernetesError
from elasticcb.cluster.kubernetes.backend import read_cluster_spec
from elasticcb.cluster.kubernetes.flags import safe_name
from elasticcb.cluster.kubernetes.pods import (
    CONFIG,
    FILES,
    HEALTH_PORT,
    JOB_DIR_FLAG,
    METRICS_PORT,
    POD_IP,
    PORT,
    PRIVATE_FOLDER,
    SPEC,
    PodPlan,
)
from elasticcb.cluster.role import common_environment
from elasticcb.errors import UsageError
from elasticcb.process.log_files import say
from elasticcb.security import certificates
from elasticcb.security.credentials import TOKEN_VARIABLE, token_of_environment
from elasticcb.security.tls import FILES as TLS_FLAGS
from elasticcb.security.tls import TLS, TLSFiles, tls_files
from elasticcb.settings import Command, Given, KubernetesSettings
from elasticcb.settings.definition import Kind
from elasticcb.settings.names import SETTINGS
from elasticcb.storage import durable
from elasticcb.storage.remote_files import is_url

LOCAL_FILES = frozenset({"yaml", "cluster_spec", *TLS_FLAGS})  # paths on this machine, not in the pods
_NAME_SIGNS = 33  # and seven more that make it unique


def submit(given: Given) -> int:
    """Submits a job and follows it; returns the exit code.

    Raises:
        UsageError: the flags are wrong; the message lists all problems.
        KubernetesError: the API server refused it; the objects created so far were deleted.
    """
    validate_flags(given, check_paths)
    settings = kubernetes_settings(given)
    name = given["job_name"] or unlike_others(given["model_def"])
    directory = given["job_dir"] or f"{PRIVATE_FOLDER}/{name}"
    plan = PodPlan(name, settings, common_environment(given["log_level"]), TOKEN_VARIABLE)
    manifests = job_manifests(given, plan, directory)
    kept = kept_paths(manifests[-1])
    _check_kept(given, kept)
    if given["yaml"]:
        path = given["yaml"]
        _write(path, manifests)
        say(
            f"The job {name} was written to {path}, including its token and private key. To start it: kubectl apply "
            f"-f {path}"
        )
        return 0
    api = KubernetesAPI(settings.namespace)
    if given["dry_run"]:
        for manifest in manifests:
            api.create(manifest, dry_run=True)
        kinds = ", ".join(dict.fromkeys(each["kind"] for each in manifests))
        say(f"Kubernetes accepts the job {name}: {kinds}. Nothing was started.")
        return 0
    create_all(api, manifests)
    say(f"Job {name} was submitted to the namespace {settings.namespace} of {api.server}.")
    kept_job = is_url(directory) or any(_is_below(directory, path) for path in kept)
    if given.command is Command.TRAIN and not kept_job:
        say(
            "Its folder is lost with its pods: if the master's pod is lost, training restarts from the beginning, and "
            "a lost parameter server restarts from the newest checkpoint. To avoid that, set --job_dir to a URL, such "
            "as s3://BUCKET/JOB, or below a --volume that all pods share."
        )
    return follow_job(api, name)


def kubernetes_settings(given: Given) -> KubernetesSettings:
    """Settings from checked flags."""
    settings, path = given.settings().cluster.kubernetes, given["cluster_spec"]
    return replace(settings, cluster_spec=read_cluster_spec(path)) if path else settings


def unlike_others(definition: str) -> str:
    """A name for a job, from that of its model."""
    parts = dict.fromkeys(definition.split(".")[:-1])
    return f"{safe_name('-'.join(parts), _NAME_SIGNS)}-{secrets.token_hex(3)}"


def job_manifests(given: Given, plan: PodPlan, directory: str) -> list[dict[str, Any]]:
    """The objects of a job in the order in which they are created; the Job is last."""
    token = token_of_environment() or secrets.token_hex(16)
    names, certificates = _certificates(given)
    config = _config(given, plan.job)
    ports = config["metrics_port"], config["health_port"]
    files = {CONFIG: yaml.safe_dump(config, sort_keys=False).encode(), **certificates}
    if plan.settings.cluster_spec:
        files[SPEC] = yaml.safe_dump(dict(plan.settings.cluster_spec), sort_keys=False).encode()
    arguments = [given.command.value, f"--config={FILES}/{CONFIG}", f"{JOB_DIR_FLAG}{directory}", f"--host=$({POD_IP})"]
    return [
        plan.secret(token, files),
        plan.service(),
        plan.server_names(),
        plan.lease(),
        plan.master_job([*arguments, f"--port={PORT}", *names], *ports),
    ]


def create_all(api: KubernetesAPI, manifests: Sequence[Mapping[str, Any]]) -> None:
    """Creates all objects of a job, its Job last, or none of them.

    The Job is created first, suspended, so that it owns the others from the start and they are removed with it, even if
    this process is killed in between.
    """
    *others, job = manifests
    name = job["metadata"]["name"]
    made = _create(api, {**job, "spec": job["spec"] | {"parallelism": 0}})
    try:
        for each in others:
            _create(api, {**each, "metadata": each["metadata"] | {"ownerReferences": [_owner_reference(made)]}})
        api.patch("Job", name, {"spec": {"parallelism": job["spec"].get("parallelism", 1)}})
    except BaseException:  # interruptions included
        with contextlib.suppress(KubernetesError):
            api.delete("Job", name)
        raise


def _owner_reference(job: Mapping[str, Any]) -> dict[str, Any]:
    """The owner reference by which an object belongs to a Job and is removed with it."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
    }


def _create(api: KubernetesAPI, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Raises `UsageError` if an object of this name exists."""
    kind, name, namespace = manifest["kind"], manifest["metadata"]["name"], api.namespace
    try:
        return api.create(manifest)
    except KubernetesError as error:
        if error.status != 409:
            raise
    if kind == "Job":
        remove = f"elasticcb stop {name} --namespace={namespace} --delete"
    else:
        remove = f"kubectl delete {kind.lower()} {name} --namespace={namespace}"
    raise UsageError(
        f"The {kind} {name} already exists in the namespace {namespace}. Choose another --job_name, or remove it: "
        f"{remove}"
    )


def kept_paths(job: Mapping[str, Any]) -> list[str]:
    """Paths where files of the master's pod outlive it."""
    spec = job["spec"]["template"]["spec"]
    passing = {each["name"] for each in spec["volumes"] if "emptyDir" in each}
    (container,) = (each for each in spec["containers"] if each["name"] == "elasticcb")
    mounts = container["volumeMounts"]
    return [each["mountPath"] for each in mounts if each["name"] not in passing and not each.get("readOnly")]


def check_paths(given: Given) -> Iterator[str]:
    """Checks paths in pods that flags name: they must be absolute."""
    for name in given.values:
        kind, value = SETTINGS[name].kind, given.raw[name]
        if name in LOCAL_FILES or kind not in (Kind.FOLDER, Kind.FILE, Kind.DATA) or value.startswith("/"):
            continue
        if ":" not in value if kind is Kind.DATA else not is_url(value):
            yield (
                f"{given.shown(name)} is a relative path. On Kubernetes, paths are paths in the pods. Give an absolute "
                "path in the image or a --volume."
            )


def _check_kept(given: Given, kept: Sequence[str]) -> None:
    for name in ("output", "checkpoint_dir", "export_dir"):
        path = given[name]
        if path and not is_url(path) and not any(_is_below(path, each) for each in kept):
            raise UsageError(
                f"{given.shown(name)} is not on a writable volume and would be lost with its pod. "
                f"Expected a path below one of these: {', '.join(kept) or 'there are none, add --volume'}."
            )


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _config(given: Given, name: str) -> dict[str, Any]:
    """The flags of the job, in the form of the master's config file."""
    left_out = LOCAL_FILES | {"dry_run", "tls", "insecure", "tls_name", "host", "port", "job_name", "job_dir"}
    config = {each: value for each, value in given.values.items() if each not in left_out and value is not None}
    config["job_name"] = name
    for port, usual in (("metrics_port", METRICS_PORT), ("health_port", HEALTH_PORT)):
        config[port] = config.get(port) or usual  # 0 (any free port) is as good: all ports of a pod are free
    if given["cluster_spec"]:
        config["cluster_spec"] = f"{FILES}/{SPEC}"
    return config


def _certificates(given: Given) -> tuple[list[str], dict[str, bytes]]:
    """TLS flags in a pod, and its files by name."""
    if given["insecure"]:
        return ["--insecure"], {}
    files = tls_files({each: given[each] for each in (*TLS_FLAGS, "tls_name")})
    own = TLSFiles(TLS_FLAGS["tls_ca"])
    tls = TLS(own, {"tls_ca": certificates.make_ca()}) if files is None else TLS.load(files)
    return tls.at(FILES).files.flags, tls.contents


def _write(path: str, manifests: Sequence[Mapping[str, Any]]) -> None:
    try:
        durable.write(Path(path), yaml.safe_dump_all(manifests, sort_keys=False).encode())
    except OSError as error:
        raise UsageError(f"--yaml: {path} can't be written: {error.strerror}. Choose another file.") from None
