"""Every spelling that opens a session gives a Session."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import flyte

from union import sandbox as sb


async def spellings() -> None:
    assert_type(await sb.on_device.session(), sb.Session)
    assert_type(await sb.on_device.session().open(), sb.Session)
    assert_type(await sb.remote.session(endpoint="http://127.0.0.1:1"), sb.Session)
    async with sb.on_device.session() as one:
        assert_type(one, sb.Session)
    async with await sb.on_device.session() as two:
        assert_type(two, sb.Session)
    async with sb.remote.session(endpoint="http://127.0.0.1:1", backend="default") as three:
        assert_type(three, sb.Session)


async def arguments(backend: sb.BackendName, mode: sb.NetworkMode) -> None:
    async with sb.on_device.session(
        backend=backend,
        host_work_dir=Path("/srv/work"),
        network_mode=mode,
        network_allowlist=sb.PYPI_HOSTS,
        network_denylist=sb.CLOUD_METADATA_DENY,
        timeout_s=60,
        env={"A": "b"},
        read_only_paths=[Path("/srv/data"), "/srv/more"],
        read_write_paths=("/srv/out",),
        resources=sb.Resources(cpu=1, memory="1Gi", tmp=1024),
        strict=True,
        warm=2,
        preload=["json"],
        persist="machine",
    ) as sbx:
        assert_type(sbx.backend, sb.BackendName)
        assert_type(sbx.work_dir, str)
        assert_type(sbx.isolation, sb.Isolation)
    async with sb.on_device.session(resources=flyte.Resources(cpu=1, memory="1Gi")):
        pass


def errors() -> None:
    try:
        sb.on_device.available_backends()
    except sb.SandboxFileNotFoundError as exc:
        assert_type(exc.code, str)
    except (sb.SandboxConnectionError, sb.errors.SandboxPathError, sb.UnknownArgumentError) as exc:
        assert_type(exc.hint, str)
    status: tuple[sb.BackendStatus, ...] = sb.on_device.available_backends()
    assert status
