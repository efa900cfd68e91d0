"""Workers and parameter servers as pods of Kubernetes, and checks of the flags about them.

The master only makes requests; one thread executes them, another watches the pods. A pending pod does not stop the job:
its process joins when it runs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from elasticcb.cluster.base import BackendContext, ClusterBackend, Exit, Given, MasterRun
from elasticcb.cluster.kubernetes import api, backend
from elasticcb.cluster.kubernetes.api import PROCESS_RIGHTS, KubernetesAPI, KubernetesError
from elasticcb.cluster.kubernetes.fate import ENDED, HELD_UP, HOPELESS, TAKEN_AWAY, Fate, PodVerdict, verdict
from elasticcb.cluster.kubernetes.flags import PARSERS, amount, job_name, parse_resources, safe_name
from elasticcb.cluster.kubernetes.master_pod import check_rights, keep_in_pod, runs_in_pod, service_address
from elasticcb.cluster.kubernetes.pods import (
    FILES,
    HEALTH_PORT,
    INDEX_LABEL,
    JOB_LABEL,
    NUMBER_LABEL,
    POD_IP,
    POD_NAME,
    PORT,
    ROLE_LABEL,
    PodPlan,
    after_oom,
)
from elasticcb.cluster.role import Place, RoleProcess, common_environment
from elasticcb.errors import UsageError
from elasticcb.security.credentials import TOKEN_VARIABLE, is_loopback
from elasticcb.settings import Command
from elasticcb.settings.definition import KUBERNETES

PATCHED = ("all", "master", "worker", "ps")  # keys of a --cluster_spec


def mistakes(given: Given) -> Iterator[str]:
    """Messages about invalid flags."""
    if given["follow"] and given.command is Command.EVALUATE:
        yield "--follow evaluates on this machine, one checkpoint after another. Remove --cluster=kubernetes."
    try:
        api.check_installed()
    except UsageError as error:
        yield str(error)
    if given["dashboard"] and given["master_pod"] is not False:
        yield (
            "--dashboard needs the master on this machine, but with --cluster=kubernetes it runs in a pod. Remove "
            "one of the two, or set --master_pod=false."
        )
    if not given["image"]:
        yield "--image is missing: the container image of the pods. --cluster=kubernetes requires it."
    for name, parse in PARSERS.items():
        if given[name]:
            try:
                parse(given[name])
            except UsageError as error:
                yield f"{given.name(name)}: {error}"
    yield from _check_resources(given)
    if given["cluster_spec"]:
        try:
            read_cluster_spec(given["cluster_spec"])
        except UsageError as error:
            yield f"{given.name('cluster_spec')}: {error}"
    if given["job_name"]:
        try:
            job_name(given["job_name"])
        except UsageError as error:
            yield f"{given.name('job_name')}: {error}"
    if given["master_pod"] is False and is_loopback(given["host"] or "127.0.0.1"):
        yield "--master_pod=false needs --host: an address of this machine that the pods can reach."


def _check_resources(given: Given) -> Iterator[str]:
    for role in ("master", "worker", "ps"):
        names = [f"{role}_resource_{kind}" for kind in ("request", "limit")]
        try:
            request, limit = (parse_resources(given[name] or "") for name in names)
        except UsageError:
            continue  # already reported
        for resource in request.keys() & limit.keys():
            if amount(request[resource]) > amount(limit[resource]):
                yield (
                    f"{given.name(names[0])} requests {resource}={request[resource]}, more than the limit "
                    f"{limit[resource]} in {given.name(names[1])}. Lower the request, or raise the limit."
                )


def read_cluster_spec(path: str) -> dict[str, Any]:
    """The pod patches in a file. Raises `UsageError` if it contains something else."""
    expected = f"Expected YAML with pod patches under {', '.join(PATCHED)}, such as `worker: {{spec: …}}`."
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}. {expected}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}. {expected}") from None
    if not isinstance(found, dict) or not all(isinstance(part, dict) for part in found.values()):
        raise UsageError(f"{path} contains no pod patches. {expected}")
    unknown = sorted(str(part) for part in found if part not in PATCHED)
    if unknown:
        raise UsageError(f"{path} has the unknown key {unknown[0]!r}. {expected}")
    strange = sorted({str(key) for part in found.values() for key in part} - {"metadata", "spec"})
    if strange:
        raise UsageError(f"{path} has {strange[0]!r} where a pod has only metadata and spec. {expected}")
    return found


logger = logging.getLogger(__name__)

_HELD_UP_SECONDS = 15.0  # after which a pod that does not run yet is explained
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds before a call is retried
_GRPC_PROBES = (1, 24)  # first Kubernetes release that enables them by default
_GONE_SECONDS = 60.0  # seconds for the pods of another master to be gone
_LIST_SECONDS = 20  # until the pods are listed again
_EXPIRED = 410  # the API server no longer has the changes since a list
# seconds before they are listed again, after that and after other errors
_PAUSE_SECONDS, _LONG_PAUSE_SECONDS = 0.5, 2.0


@dataclass
class _Pod:
    place: Place
    made: float  # seconds of time.monotonic
    version: int = 0  # of the API's data (resourceVersion), at its creation
    seen: Mapping[str, Any] = field(default_factory=dict)  # the last observed state
    held_up: str = ""  # why it does not run yet


class KubernetesCluster(ClusterBackend):
    """Pods.

    Args:
        directory: the job's folder; pods are named after it, unless this process is in a pod of a submitted job.

    Raises `UsageError` if no cluster is configured.
    """

    name = "kubernetes"
    summary = "as pods"
    panel = KUBERNETES
    in_programs = False

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._settings, self._say = context.settings.kubernetes, context.say
        self._api = KubernetesAPI(self._settings.namespace)
        self._environment = common_environment(context.log_level)
        self._submitted = runs_in_pod()
        # Unlike folders, objects of the same name could belong to several users.
        self._job = f"{safe_name(Path(context.directory).name, 33)}-{secrets.token_hex(3)}"
        self._plan: PodPlan | None = None  # until `prepare`
        self._address = ""  # address of the master for pods; "": the one that it listens on
        self._lock = threading.Lock()
        self._pods: dict[str, _Pod] = {}  # by name; pods that have not ended
        self._places: dict[Place, str] = {}  # the pod's name
        self._last: dict[Place, str] = {}  # likewise, also for ended pods
        self._numbers: dict[Place, int] = {}  # number of the next pod
        self._ooms: dict[Place, int] = {}
        self._ran: set[str] = set()  # roles
        self._exits: list[Exit] = []
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    @classmethod
    def mistakes(cls, given: Given) -> Iterator[str]:
        return backend.mistakes(given)

    @classmethod
    def submits(cls, given: Given) -> bool:
        return given["master_pod"] is not False and not runs_in_pod()

    @classmethod
    def run_master(cls, run: MasterRun) -> None:
        if runs_in_pod():
            keep_in_pod(run)
        else:
            super().run_master(run)

    def resume_command(self, name: str) -> str:
        return f"elasticcb resume {name} --namespace={self._settings.namespace}" if self._submitted else ""

    @property
    def _selector(self) -> str:
        return f"{JOB_LABEL}={self._job},{ROLE_LABEL} in (worker,ps)"

    def prepare(self) -> None:
        if self._plan is not None:
            return
        owner = None
        if self._submitted:
            pod = self._api.read("Pod", os.environ[POD_NAME])
            self._job = pod["metadata"]["labels"][JOB_LABEL]
            owner = _owner_of(pod)
            try:
                self._address = service_address(self._api, self._job)
            except KubernetesError as error:
                self._say(f"{error} Workers and servers use this pod's address, which changes if it is replaced.")
        probes = self._api.version() >= _GRPC_PROBES
        self._plan = PodPlan(self._job, self._settings, self._environment, TOKEN_VARIABLE, owner, probes)
        if self._submitted:
            self._find_earlier()
        else:
            check_rights(self._api, PROCESS_RIGHTS)
            certificates = {} if self.access.tls is None else self.access.tls.contents
            self._api.create(self._plan.secret(self.access.token, certificates))
        for name, run in (("pods", self._watch), ("kubernetes", self._carry_out)):
            thread = threading.Thread(target=run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def start(self, role: str, index: int, master_address: str) -> None:
        self.prepare()
        assert self._plan is not None
        place = role, index
        with self._lock:
            before = self._places.get(place)
            number = self._numbers.get(place, 0)
            self._numbers[place] = number + 1
            ports: dict[str, Any] = {} if self._plan.shares_network else {"port": PORT, "health_port": HEALTH_PORT}
            process = RoleProcess(
                role=role,
                master=self._address or master_address,
                index=index,
                host=f"$({POD_IP})",
                access=replace(self.access, tls=None if self.access.tls is None else self.access.tls.at(FILES)),
                **ports,
            )
            manifest = self._plan.pod(role, index, number, process.arguments, self._ooms.get(place, 0))
            name = manifest["metadata"]["name"]
            self._places[place] = self._last[place] = name
            self._pods[name] = _Pod(place, time.monotonic())
            # An earlier pod's end (for example, while waiting in vain for this master) must not count as the new pod's.
            self._exits = [exit for exit in self._exits if (exit.role, exit.index) != place]
        if before is not None:  # it has deregistered, and may still exist
            self._asked.put(lambda: self._delete(before))
        self._asked.put(lambda: self._create(name, manifest))

    def poll(self) -> list[Exit]:
        with self._lock:
            exits, self._exits = self._exits, []
        return exits

    def pending(self) -> dict[Place, str]:
        with self._lock:
            return {pod.place: pod.held_up for pod in self._pods.values() if pod.held_up}

    def kill(self, role: str, index: int) -> None:
        with self._lock:
            name = self._places.pop((role, index), None)
            if name is not None:
                self._pods.pop(name, None)
        if name is not None:
            self._asked.put(lambda: self._delete(name, 0))

    def stop(self, grace_seconds: float) -> None:
        self._stopped.set()
        self._asked.put(None)
        with self._lock:
            self._pods.clear()
            self._places.clear()
        if self._plan is None:
            return
        try:
            if self._submitted:  # ended pods keep their logs until the Job is deleted
                for phase in ("Pending", "Running"):
                    self._api.delete_pods(self._selector, f"status.phase={phase}")
            else:
                self._api.delete_pods(self._selector)
                self._api.delete("Secret", self._job)
        except KubernetesError as error:
            self._say(f"The job's pods could not be deleted. {error}")

    def log_tail(self, role: str, index: int, lines: int = 30) -> str:
        name = self._last.get((role, index), "")
        try:
            return self._api.log(name, lines).rstrip("\n") if name else ""
        except KubernetesError:
            return ""

    def note(self, text: str) -> None:
        """Creates an event of the Job: `kubectl describe job` shows it."""
        if self._plan is not None and self._plan.owner is not None:
            now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            event = self._plan.event(text, secrets.token_hex(8), now)
            self._asked.put(functools.partial(self._post, event))

    def _post(self, event: Mapping[str, Any]) -> None:
        try:
            self._api.create(event)
        except KubernetesError as error:
            logger.info("%s", error)

    # ------------------------------------------------------------ requests

    def _carry_out(self) -> None:
        while (call := self._asked.get()) is not None and not self._stopped.is_set():
            call()

    def _delete(self, name: str, grace_seconds: int | None = None) -> None:
        try:
            self._api.delete("Pod", name, grace_seconds)
        except KubernetesError as error:
            logger.warning("%s", error)

    def _create(self, name: str, manifest: Mapping[str, Any], pause: float = _FIRST_PAUSE) -> None:
        with self._lock:
            pod = self._pods.get(name)
        if pod is None:  # it was killed before it was created
            return
        try:
            made = self._api.create(manifest)
            pod.version = _version(made)
            with self._lock:
                unwanted = name not in self._pods
            if unwanted:
                self._delete(name, 0)
        except KubernetesError as error:
            if error.status == 409:  # an answer was lost
                return
            if error.hopeless:
                self._end(name, pod, PodVerdict(Fate.CANNOT_START, str(error)))
                return
            pod.held_up = f"{str(error).rstrip('.')}; retrying"
            later = threading.Timer(
                pause, lambda: self._asked.put(lambda: self._create(name, manifest, min(2 * pause, _LONGEST_PAUSE)))
            )
            later.daemon = True
            later.start()

    # ------------------------------------------------------------ observations

    def _watch(self) -> None:
        follow_pods(self._api, self._selector, self._stopped, self._note_all, self._note, self._say)

    def _note_all(self, listing: Mapping[str, Any]) -> None:
        listed = {pod["metadata"]["name"]: pod for pod in listing["items"]}
        for pod in listed.values():
            self._note(pod, False)
        version = _version(listing)
        with self._lock:
            absent = [
                (name, pod)
                for name, pod in self._pods.items()
                if name not in listed and (pod.seen or 0 < pod.version <= version)
            ]
        for name, pod in absent:
            self._judge(name, pod, pod.seen, True)

    def _note(self, seen: Mapping[str, Any], gone: bool) -> None:
        name = seen["metadata"]["name"]
        with self._lock:
            pod = self._pods.get(name)
        if pod is not None:
            pod.seen = seen
            self._judge(name, pod, seen, gone)

    def _judge(self, name: str, pod: _Pod, seen: Mapping[str, Any], gone: bool) -> None:
        found = verdict(seen, (), gone)
        late = found.fate is Fate.WAITING and time.monotonic() - pod.made > _HELD_UP_SECONDS
        if found.fate is Fate.DELETED or late:
            found = verdict(seen, self._api.events_of(name, seen), gone)
        if found.fate in ENDED:
            self._end(name, pod, found)
        elif found.fate is Fate.RUNNING:
            self._ran.add(pod.place[0])
            pod.held_up = ""
        elif found.fate in HOPELESS and pod.place[0] not in self._ran:
            self._end(name, pod, found)
        elif found.fate in HELD_UP:
            pod.held_up = found.words

    def _end(self, name: str, pod: _Pod, found: PodVerdict) -> None:
        place, words = pod.place, found.words
        with self._lock:
            if self._pods.pop(name, None) is None:
                return
            if found.fate is Fate.OOM_KILLED:
                self._ooms[place], more = after_oom(self._settings, place[0], self._ooms.get(place, 0))
                words += more
            present = self._places.get(place) == name
            if present:
                del self._places[place]
                log = f"kubectl logs -n {self._api.namespace} {name}"
                failed = found.fate is Fate.FAILED or found.fate in HOPELESS
                self._exits.append(Exit(*place, 0, words, failed, log, found.fate in TAKEN_AWAY))
        if found.fate in HOPELESS:
            self._delete(name, 0)
        elif not present and found.fate is not Fate.COMPLETED:  # another pod has its slot; the reason is unknown
            self._say(f"{_words(place)}, which had deregistered: {words}.")

    # ------------------------------------------------------------ a submitted job

    def _find_earlier(self) -> None:
        """Looks for pods that another master left."""
        for pod in self._api.list("Pod", self._selector)["items"]:
            labels, name = pod["metadata"]["labels"], pod["metadata"]["name"]
            place, number = (labels[ROLE_LABEL], int(labels[INDEX_LABEL])), int(labels[NUMBER_LABEL])
            self._numbers[place] = max(self._numbers.get(place, 0), number + 1)
            if verdict(pod).fate not in ENDED and "deletionTimestamp" not in pod["metadata"]:
                self._places[place] = self._last[place] = name
                self._pods[name] = _Pod(place, time.monotonic(), _version(pod), pod)

    @property
    def taken_over(self) -> dict[Place, str]:
        """Processes by the names of their pods."""
        return dict(self._places) if self._submitted else {}

    def end_taken_over(self) -> None:
        """Ends them and waits, because two servers must not write the same files."""
        with self._lock:
            running = list(self._pods)
            self._pods.clear()
            self._places.clear()
        for name in running:
            self._delete(name, 1)
        give_up = time.monotonic() + _GONE_SECONDS
        while running and time.monotonic() < give_up:
            here = {pod["metadata"]["name"] for pod in self._api.list("Pod", self._selector)["items"]}
            running = [name for name in running if name in here]
            time.sleep(_FIRST_PAUSE if running else 0.0)


def _owner_of(pod: Mapping[str, Any]) -> dict[str, Any]:
    """The owner of a master's processes: its Job, or its pod."""
    metadata = pod["metadata"]
    for owner in metadata.get("ownerReferences", ()):
        if owner.get("controller"):
            return {key: owner[key] for key in ("apiVersion", "kind", "name", "uid")}
    return {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}


def _version(found: Mapping[str, Any]) -> int:
    with contextlib.suppress(KeyError, ValueError):
        return int(found["metadata"]["resourceVersion"])
    return 0


def _words(place: Place) -> str:
    role, index = place
    return f"{'Worker' if role == 'worker' else 'Parameter server'} {index}"


def follow_pods(
    api: KubernetesAPI,
    selector: str,
    stopped: threading.Event,
    see_all: Callable[[Mapping[str, Any]], None],
    see: Callable[[Mapping[str, Any], bool], None],
    say: Callable[[str], None],
) -> None:
    """Lists the pods, then watches changes, until `stopped` is set."""
    silent = False
    while not stopped.is_set():
        try:
            listing = api.list("Pod", selector)
            see_all(listing)
            if silent:
                say("The Kubernetes API server answers again.")
            silent = False
            for pod, gone in api.watch_pods(selector, listing["metadata"]["resourceVersion"], _LIST_SECONDS):
                if stopped.is_set():
                    return
                see(pod, gone)
        except KubernetesError as error:
            expired = error.status == _EXPIRED
            if not expired and not silent and not stopped.is_set():
                silent = True
                say(f"{error} The job continues; pods that end meanwhile are noticed later.")
            stopped.wait(_PAUSE_SECONDS if expired else _LONG_PAUSE_SECONDS)
