"""Calls to the Kubernetes API server with the official client; errors are explained to the user."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import queue
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from elasticcb.errors import ElasticCBError, UsageError

logger = logging.getLogger(__name__)

_SECONDS = 15.0  # seconds, for one call
_QUIET_SECONDS = 15.0  # seconds without a line, after which to check whether a log's container still runs
Manifest = Mapping[str, Any]


class Right(NamedTuple):
    """A permission that an RBAC role grants."""

    verb: str
    resource: str
    group: str = ""


# Permissions that a master needs for its processes.
PROCESS_RIGHTS = (
    *(Right(verb, "pods") for verb in ("get", "list", "watch", "create", "delete", "deletecollection")),
    Right("get", "pods/log"),
    Right("list", "events"),
)
# Permissions of a master in a pod; deploy/kubernetes/role.yaml grants them.
MASTER_RIGHTS = (
    *PROCESS_RIGHTS,
    Right("get", "services"),
    *(Right(verb, "leases", "coordination.k8s.io") for verb in ("get", "patch")),
)


class KubernetesError(ElasticCBError):
    """The API server refused a call or could not be reached.

    Attributes:
        status: HTTP status; 0 if there was no answer.
        hopeless: repeating the call would fail again.
    """

    def __init__(self, message: str, status: int = 0, hopeless: bool = False) -> None:
        super().__init__(message)
        self.status, self.hopeless = status, hopeless


def check_installed() -> None:
    """Raises `UsageError` if the client is not installed."""
    if importlib.util.find_spec("kubernetes") is None:
        raise UsageError(
            "--cluster=kubernetes needs the package kubernetes, which is not installed. Run `pip install "
            "'elasticcb[kubernetes]'`."
        )


class KubernetesAPI:
    """The API in one namespace, with the credentials of this process's pod or of the user's kubeconfig.

    Every method raises `KubernetesError`.
    """

    def __init__(self, namespace: str) -> None:
        check_installed()
        import urllib3
        from kubernetes import client, config

        configuration = client.Configuration()
        try:
            try:
                config.load_incluster_config(client_configuration=configuration)
                self.who = "the service account of this pod"
            except config.ConfigException:
                config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=configuration)
                self.who = "the user of the kubeconfig"
        except (config.ConfigException, OSError) as error:
            raise UsageError(
                f"No Kubernetes cluster is configured: {error}. Expected a kubeconfig (~/.kube/config, or the file in "
                "KUBECONFIG), or a pod with a service account."
            ) from None
        if not configuration.verify_ssl:  # the kubeconfig asks for it; urllib3 would warn at each call
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        configuration.retries = 2  # only for connections that were idle; callers retry other calls
        self.namespace, self.server = namespace, configuration.host
        self._client = client.ApiClient(configuration)
        self._core = client.CoreV1Api(self._client)
        self._batch = client.BatchV1Api(self._client)
        self._coordination = client.CoordinationV1Api(self._client)

    def version(self) -> tuple[int, int]:
        """Version of the API server, such as (1, 31); (0, 0) if unknown."""
        from kubernetes import client

        with self._told("ask for its version"):
            found = self._json(client.VersionApi(self._client).get_code(**self._options()))
        numbers = [re.match(r"\d+", found.get(part, "")) for part in ("major", "minor")]
        major, minor = (0 if number is None else int(number[0]) for number in numbers)
        return major, minor

    # ------------------------------------------------------------ objects

    def create(self, manifest: Manifest, dry_run: bool = False) -> dict[str, Any]:
        """Creates an object; returns it as the API server stores it. `dry_run`: only validates it."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        more = {"dry_run": "All"} if dry_run else {}
        with self._told(f"create the {kind} {name}"):
            return self._json(self._method("create", kind)(self.namespace, manifest, **self._options(), **more))

    def read(self, kind: str, name: str) -> dict[str, Any]:
        with self._told(f"read the {kind} {name}"):
            return self._json(self._method("read", kind)(name, self.namespace, **self._options()))

    def list(self, kind: str, selector: str = "", fields: str = "") -> dict[str, Any]:
        with self._told(f"list {kind}s"):
            wanted = {"label_selector": selector, "field_selector": fields}
            return self._json(self._method("list", kind)(self.namespace, **wanted, **self._options()))

    def patch(self, kind: str, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        with self._told(f"change the {kind} {name}"):
            return self._json(self._method("patch", kind)(name, self.namespace, patch, **self._options()))

    def delete(self, kind: str, name: str, grace_seconds: int | None = None) -> bool:
        """Deletes an object and what it owns; returns whether it existed."""
        more: dict[str, Any] = {} if grace_seconds is None else {"grace_period_seconds": grace_seconds}
        try:
            with self._told(f"delete the {kind} {name}"):
                remove = self._method("delete", kind)
                remove(name, self.namespace, propagation_policy="Background", **self._options(), **more)
        except KubernetesError as error:
            if error.status != 404:
                raise
            return False
        return True

    def delete_pods(self, selector: str, fields: str = "") -> None:
        with self._told("delete pods"):
            self._core.delete_collection_namespaced_pod(
                self.namespace,
                label_selector=selector,
                field_selector=fields,
                grace_period_seconds=1,
                **self._options(),
            )

    def events_of(self, name: str, seen: Manifest, kind: str = "Pod") -> Sequence[Manifest]:
        """The events of this very object, by uid if it was seen; none if they may not be read."""
        uid = seen.get("metadata", {}).get("uid")
        one = f",involvedObject.uid={uid}" if uid else ""
        try:
            return self.list("Event", fields=f"involvedObject.kind={kind},involvedObject.name={name}{one}")["items"]
        except KubernetesError as error:
            logger.info("%s", error)
            return ()

    def watch_pods(self, selector: str, version: str, seconds: int) -> Iterator[tuple[Manifest, bool]]:
        """Yields changes of pods after a version of their list, and whether the pod is gone, for this many seconds."""
        from kubernetes import watch

        watcher = watch.Watch()
        with self._told("watch pods"):
            stream = watcher.stream(
                self._core.list_namespaced_pod,
                self.namespace,
                label_selector=selector,
                resource_version=version,
                timeout_seconds=seconds,
                _request_timeout=(_SECONDS, seconds + _SECONDS),
            )
            for event in stream:
                yield event["raw_object"], event["type"] == "DELETED"

    # ------------------------------------------------------------ logs

    def log(self, pod: str, lines: int) -> str:
        with self._told(f"read the log of the pod {pod}"):
            answer = self._core.read_namespaced_pod_log(pod, self.namespace, tail_lines=lines, **self._options())
            return bytes(answer.data).decode(errors="replace")

    def follow_log(self, pod: str, lines: int | None = None) -> Iterator[str]:
        """Yields the output of a pod's container until it ends, starting with the last `lines` lines; None: all.

        The stream does not show the end reliably: after a lost connection it stays open and silent.
        """
        more = {} if lines is None else {"tail_lines": lines}
        with self._told(f"read the log of the pod {pod}"):
            containers = self._running_containers(pod)
            answer = self._core.read_namespaced_pod_log(
                pod, self.namespace, follow=True, _preload_content=False, _request_timeout=(_SECONDS, None), **more
            )
            rest, over = b"", False
            for chunk in _each_or_pause(answer.stream(amt=None, decode_content=False), _QUIET_SECONDS):
                if chunk is None:
                    if over:
                        break
                    try:
                        over = not containers or self._running_containers(pod) != containers
                    except KubernetesError as error:
                        if error.hopeless:
                            raise
                    continue
                over = False
                *whole, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
            if rest:
                yield rest.decode(errors="replace")

    def _running_containers(self, pod: str) -> Collection[str]:
        """The ids of a pod's running containers; none if the pod does not exist."""
        try:
            statuses = self.read("Pod", pod)["status"].get("containerStatuses") or ()
        except KubernetesError as error:
            if error.status != 404:
                raise
            return ()
        return {each["containerID"] for each in statuses if "running" in each.get("state", {})}

    def execute(self, pod: str, container: str, command: Sequence[str]) -> tuple[int, str]:
        """Runs a command in a container; returns its exit code and output."""
        from kubernetes import stream

        with self._told(f"run a command in the pod {pod}"):
            call = stream.stream(
                self._core.connect_get_namespaced_pod_exec,
                pod,
                self.namespace,
                container=container,
                command=list(command),
                stdout=True,
                stderr=True,
                _preload_content=False,
            )
            call.run_forever()
            return call.returncode, call.read_all()

    # ------------------------------------------------------------ rights

    def missing_rights(self, rights: Sequence[Right]) -> Sequence[Right]:
        """The permissions that this process lacks."""
        from kubernetes import client

        reviews = client.AuthorizationV1Api(self._client)
        missing = []
        for right in rights:
            resource, _, subresource = right.resource.partition("/")
            attributes = {
                "namespace": self.namespace,
                "verb": right.verb,
                "group": right.group,
                "resource": resource,
                "subresource": subresource,
            }
            body = {"spec": {"resourceAttributes": attributes}}
            with self._told("query its permissions"):
                answer = self._json(reviews.create_self_subject_access_review(body, **self._options()))
            if not answer["status"].get("allowed"):
                missing.append(right)
        return missing

    # ------------------------------------------------------------

    @contextlib.contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ApiException as error:
            raise self._explained(error, doing) from None
        except (HTTPError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise KubernetesError(
                f"The API server {self.server} can't be reached to {doing}: {reason}. Check that the cluster is up, "
                "and that the kubeconfig points to it."
            ) from None

    def _explained(self, error: Any, doing: str) -> KubernetesError:
        status, message = int(error.status or 0), _message(error)
        where = f"namespace {self.namespace} of {self.server}"
        if status == 401:
            what, hopeless = (
                (f"The API server {self.server} does not recognize {self.who}: {message}. Log in again."),
                True,
            )
        elif status == 403 and "exceeded quota" in message:
            what, hopeless = f"The quota of the namespace {self.namespace} is used up: {message}.", False
        elif status == 403:
            what = (
                f"{self.who.capitalize()} may not {doing} in the {where}: {message}. Bind a role to it that grants "
                "this, such as the one in deploy/kubernetes."
            )
            hopeless = True
        elif status == 404 and f'namespaces "{self.namespace}" not found' in message:
            what = f"There is no namespace {self.namespace} in the cluster {self.server}. Create it, or choose another "
            what, hopeless = what + "(--namespace).", True
        else:
            hopeless = 400 <= status < 500 and status not in (408, 409, 410, 429)
            what = f"Kubernetes did not {doing} in the {where}: {message or error.reason or f'HTTP status {status}'}."
        return KubernetesError(what, status, hopeless)

    def _method(self, verb: str, kind: str) -> Any:
        group = {"Job": self._batch, "Lease": self._coordination}.get(kind, self._core)
        return getattr(group, f"{verb}_namespaced_{kind.lower()}")

    def _options(self) -> dict[str, Any]:
        return {"_request_timeout": _SECONDS, "_preload_content": False}

    def _json(self, answer: Any) -> dict[str, Any]:
        try:
            found = json.loads(answer.data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise KubernetesError(
                f"The server at {self.server} is not a Kubernetes API server: its answer is not a JSON object. Check "
                "whether a proxy is in between."
            )
        return found


def _message(error: Any) -> str:
    try:
        text = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        text = str(error.body or error.reason or "")
    return " ".join(str(text).split()).rstrip(".")


def _each_or_pause(items: Iterator[bytes], seconds: float) -> Iterator[bytes | None]:
    """The items of a blocking iterator, read in a thread; None whenever no item arrives for this many seconds."""
    arrived: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for item in items:
                arrived.put(item)
            arrived.put(None)
        except Exception as error:
            arrived.put(error)

    threading.Thread(target=read, name="log", daemon=True).start()
    while True:
        try:
            item = arrived.get(timeout=seconds)
        except queue.Empty:
            yield None
            continue
        if item is None:
            return
        if isinstance(item, Exception):
            raise item
        yield item
