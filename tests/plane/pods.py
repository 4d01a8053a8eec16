"""Real pods: created through the Kubernetes API instead of as processes.

For people who have a cluster: ``make test-pods KUBECONFIG=...``. The image that a task names must
be there, with the package in it, and the cluster must reach this machine at the address that
the plane was given.

Only what is sent is tested without a cluster (`test_pods`, against an API that is written down).
This module has not been run against a real API server as part of this tree's own tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kubernetes.client import V1Pod

_LOOK_S = 0.5
_NOT_FOUND = 404
_CONFLICT = 409
_KILLED = 137


class CoreApi(Protocol):
    """The four calls of ``kubernetes.client.CoreV1Api`` that are used."""

    def create_namespaced_pod(self, namespace: str, body: dict[str, Any]) -> V1Pod: ...

    def read_namespaced_pod(self, name: str, namespace: str) -> V1Pod: ...

    def read_namespaced_pod_log(self, name: str, namespace: str, container: str) -> str: ...

    def delete_namespaced_pod(
        self, name: str, namespace: str, *, grace_period_seconds: int
    ) -> object: ...


def api_from(kubeconfig: str) -> CoreApi:
    """Return the API of the cluster that a configuration file names."""
    from kubernetes import client, config

    config.load_kube_config(config_file=kubeconfig)
    return client.CoreV1Api()


class KubePods:
    """Creates pods in one existing namespace of a cluster."""

    def __init__(self, api: CoreApi, *, namespace: str = "default") -> None:
        self._api, self._namespace = api, namespace
        self.made: list[KubePod] = []

    async def start(self, manifest: dict[str, Any]) -> KubePod:
        """Create a pod. It is recorded even if the caller is cancelled meanwhile."""
        payload = {
            **manifest,
            "metadata": {**manifest["metadata"], "namespace": self._namespace},
        }
        pod = KubePod(self._api, payload)
        self.made.append(pod)
        creating = asyncio.ensure_future(pod.create())
        try:
            await asyncio.shield(creating)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await creating
            await pod.end(0)
            raise
        return pod


class KubePod:
    """One pod of a cluster, polled for its state."""

    def __init__(self, api: CoreApi, manifest: dict[str, Any]) -> None:
        self._api, self.manifest = api, manifest
        self.name: str = manifest["metadata"]["name"]
        self.namespace: str = manifest["metadata"]["namespace"]
        self.born = time.monotonic()
        self._code: int | None = None
        self._log = b""
        self.notes: list[tuple[str, str]] = []
        """Reason and message of each event: why the pod waited, and how its container ended."""

    @property
    def is_over(self) -> bool:
        return self._code is not None

    async def create(self) -> None:
        """Create the pod; wait for one of the same name that is still terminating."""
        while True:
            try:
                await asyncio.to_thread(
                    self._api.create_namespaced_pod, self.namespace, self.manifest
                )
            except Exception as problem:
                if getattr(problem, "status", None) != _CONFLICT:
                    raise
                await asyncio.sleep(_LOOK_S)
            else:
                return

    async def running(self) -> None:
        while not self.is_over:
            pod = await self._look()
            if pod is not None and pod.status.phase == "Running":
                return
            await asyncio.sleep(_LOOK_S)

    async def ended(self) -> int:
        while self._code is None:
            await self._look()
            if self._code is None:
                await asyncio.sleep(_LOOK_S)
        return self._code

    async def end(self, grace_s: float) -> None:
        with contextlib.suppress(Exception):
            await self._read_log()
        try:
            await asyncio.to_thread(
                self._api.delete_namespaced_pod,
                self.name,
                self.namespace,
                grace_period_seconds=int(grace_s),
            )
        except Exception as problem:
            if getattr(problem, "status", None) != _NOT_FOUND:
                raise
        while await self._look() is not None:
            await asyncio.sleep(_LOOK_S)

    async def log_from(self, offset: int) -> bytes:
        if not self.is_over:
            with contextlib.suppress(Exception):
                await self._read_log()
        return self._log[offset:]

    async def _read_log(self) -> None:
        container = self.manifest["spec"]["containers"][0]["name"]
        text = await asyncio.to_thread(
            self._api.read_namespaced_pod_log, self.name, self.namespace, container
        )
        self._log = text.encode()

    async def _look(self) -> V1Pod | None:
        """Return the current state of the pod; None if it was deleted and has ended."""
        try:
            pod = await asyncio.to_thread(self._api.read_namespaced_pod, self.name, self.namespace)
        except Exception as problem:
            if getattr(problem, "status", None) != _NOT_FOUND:
                raise
            self._code = _KILLED if self._code is None else self._code
            return None
        self.notes += [note for note in _notes(pod) if note not in self.notes]
        if pod.status.phase in {"Succeeded", "Failed"} and self._code is None:
            with contextlib.suppress(Exception):
                await self._read_log()
            self._code = _exit_code(pod)
        return pod


def _notes(pod: V1Pod) -> list[tuple[str, str]]:
    """Return what the status of a pod shows about waiting and about its end."""
    found = [
        ("FailedScheduling", f"{condition.reason}: {condition.message}")
        for condition in getattr(pod.status, "conditions", None) or []
        if condition.type == "PodScheduled" and condition.status == "False"
    ]
    if getattr(pod.status, "reason", None):
        found.append((pod.status.reason, pod.status.message or ""))
    for status in pod.status.container_statuses or []:
        waiting = getattr(status.state, "waiting", None)
        if waiting is not None and waiting.reason not in {"ContainerCreating", "PodInitializing"}:
            found.append(("Failed", f"Error: {waiting.reason}: {waiting.message or ''}"))
        ended = getattr(status.state, "terminated", None)
        if ended is not None and ended.exit_code:
            reason = getattr(ended, "reason", None) or "Error"
            found.append((reason, f"container ended with {ended.exit_code}: {reason}"))
    return found


def _exit_code(pod: V1Pod) -> int:
    for status in pod.status.container_statuses or []:
        ended = status.state.terminated if status.state else None
        if ended is not None:
            return int(ended.exit_code)
    return 0 if pod.status.phase == "Succeeded" else 1
