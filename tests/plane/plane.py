"""Start and stop the stand-in; the handle that a test uses while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from flyteidl2.actions.actions_service_connect import ActionsServiceASGIApplication
from flyteidl2.cluster.service_connect import ClusterServiceASGIApplication
from flyteidl2.dataproxy.dataproxy_service_connect import DataProxyServiceASGIApplication
from flyteidl2.task.task_service_connect import TaskServiceASGIApplication
from flyteidl2.workflow.run_service_connect import RunServiceASGIApplication
from tests.plane.actions import Actions
from tests.plane.cluster import Cluster
from tests.plane.dataproxy import DataProxy
from tests.plane.executor import GRACE_S, Executor
from tests.plane.faults import Faults
from tests.plane.podspec import ORG, Surroundings, store_env
from tests.plane.processes import ProcessPod, ProcessPods
from tests.plane.runs import Runs
from tests.plane.state import ROOT_ACTION, Action, Run, State
from tests.plane.store import MOUNT, Store
from tests.plane.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.plane.executor import Pods
    from tests.plane.store import Receive, Scope, Send

PROJECT = "testing"
DOMAIN = "development"
_STOP_S = 20
_T = TypeVar("_T")


class Plane:
    """The stand-in, on a port of loopback, in a thread of its own.

    ``secrets`` are what tasks may ask for, by key or by ``group/key``. ``pods`` makes the pods;
    processes of this machine unless another maker is given, and then ``host`` is the address
    at which the pods can reach this machine. ``grace_s`` is for pods that ask for none.
    """

    def __init__(
        self,
        *,
        secrets: dict[str, str] | None = None,
        host: str = "127.0.0.1",
        pods: Pods | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self._grace_s = grace_s
        self.faults = Faults()
        self.store = Store()
        self.place = Path(tempfile.mkdtemp(prefix="plane-", dir="/var/tmp"))
        self.pods = ProcessPods(self.place) if pods is None else pods
        self._host, self._secrets = host, secrets or {}
        self._thread = threading.Thread(target=self._serve, name="plane", daemon=True)
        self._ready = threading.Event()
        self._socket = socket.create_server((host, 0))

    # --- connection data for clients

    @property
    def endpoint(self) -> str:
        return f"http://{self._host}:{self._socket.getsockname()[1]}"

    @property
    def store_url(self) -> str:
        return self.endpoint + MOUNT

    def client_env(self) -> dict[str, str]:
        """Return the variables of a process that uses the SDK: the store, and no telemetry."""
        return {**store_env(self.store_url), "DO_NOT_TRACK": "1"}

    def init_options(self) -> dict[str, Any]:
        """Return the arguments of `flyte.init`."""
        return {
            "endpoint": self.endpoint,
            "insecure": True,
            "org": ORG,
            "project": PROJECT,
            "domain": DOMAIN,
        }

    def config_file(self) -> Path:
        """Write a configuration file for the `flyte` command line."""
        path = self.place / "config.yaml"
        path.write_text(
            f"admin:\n  endpoint: {self.endpoint}\n  insecure: true\n"
            f"task:\n  org: {ORG}\n  project: {PROJECT}\n  domain: {DOMAIN}\n"
        )
        return path

    # --- inspection and faults for tests

    def run(self, name: str) -> Run:
        return self.state.runs[(PROJECT, DOMAIN, name)]

    def action(self, run: str, name: str = ROOT_ACTION) -> Action:
        return self.run(run).actions[name]

    def pod(self, run: str, name: str = ROOT_ACTION) -> ProcessPod:
        """Return the current pod of an action, if pods are processes."""
        pod = self.action(run, name).pod
        assert isinstance(pod, ProcessPod), pod
        return pod

    def recreate_pod(self, run: str, name: str = ROOT_ACTION) -> None:
        """Kill the pod and restart it for the same attempt; return when it has started."""
        self._do(self._executor.recreate(self.action(run, name)))

    def cut_connections(self) -> None:
        """Reset every connection without a close handshake."""

        async def cut() -> None:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()  # type: ignore[union-attr]  # HTTP/1.1 is all we speak

        self._do(cut())

    def processes(self) -> set[int]:
        """Return every process of every pod."""
        made = self.pods.made if isinstance(self.pods, ProcessPods) else []
        return {pid for pod in made for pid in pod.processes()}

    # --- start and stop

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(_STOP_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every pod at once, then the service; nothing is left."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(TimeoutError):
            self._do(self._executor.stop())
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._socket.close()
        shutil.rmtree(self.place, ignore_errors=True)

    def _do(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_STOP_S)

    def _serve(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.state = State()
        around = Surroundings(endpoint=self.endpoint, store=self.store_url, secrets=self._secrets)
        self._executor = Executor(
            self.state, self.store, self.pods, self.faults, around, grace_s=self._grace_s
        )
        tasks = Tasks(self.state)
        self._services: dict[str, Any] = {
            app.path: app
            for app in (
                TaskServiceASGIApplication(tasks),
                ClusterServiceASGIApplication(Cluster()),
                DataProxyServiceASGIApplication(
                    DataProxy(self.state, self.store, self.faults, self.store_url)
                ),
                RunServiceASGIApplication(Runs(self.state, tasks, self._executor, self.faults)),
                ActionsServiceASGIApplication(Actions(self.state, self._executor)),
            )
        }
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            http="h11",
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
        )
        self._server = uvicorn.Server(config)
        self._ready.set()
        await self._server.serve(sockets=[self._socket])

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(MOUNT + "/"):
            await self.store(scope, receive, send)
            return
        service = self._services.get("/" + scope["path"].split("/")[1])
        if service is None:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 501, "headers": headers})
            body = b'{"code": "unimplemented", "message": "not in the stand-in"}'
            await send({"type": "http.response.body", "body": body})
            return
        try:
            await service(scope, receive, send)
        except ConnectError as problem:
            # A stream may be open when the plane stops.
            if problem.code is not Code.CANCELED:
                raise
