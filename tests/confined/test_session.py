"""Sessions of the ``landlock`` backend: when they open, what they refuse, how they connect."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.net import harness

from union import sandbox as sb
from union.sandbox._linux import kernel
from union.sandbox._net.egress import Egress
from union.sandbox.on_device import _mediated_network
from union.sandbox.on_device._mediated_network import MediatedNetwork, loopback_pair

if TYPE_CHECKING:
    from pathlib import Path

    from union.sandbox._policy.decision import Decision

WARNS = """
import asyncio, warnings
from union import sandbox as sb
async def main():
    for _ in range(2):
        async with sb.on_device.session(backend="landlock"):
            pass
    sb.doctor()
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    if {doctor}:
        sb.doctor()
    asyncio.run(main())
print(len([w for w in seen if "isolates less" in str(w.message)]))
"""


@pytest.mark.parametrize("doctor", [False, True])
def test_it_warns_once_per_process_and_doctor_does_not(*, doctor: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WARNS.format(doctor=doctor)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize(
    "abi, options, opens",
    [
        (0, {}, False),
        (2, {}, False),
        (3, {}, True),
        (3, {"network_mode": "allowlist", "network_allowlist": ["example.com"]}, False),
        (4, {"network_mode": "allowlist", "network_allowlist": ["example.com"]}, True),
        (3, {"network_mode": "open", "network_denylist": ["example.com"]}, False),
    ],
)
async def test_the_kernel_must_be_new_enough(
    monkeypatch: pytest.MonkeyPatch, abi: int, options: dict[str, object], *, opens: bool
) -> None:
    if opens and kernel.landlock_abi() < abi:
        pytest.skip(f"the kernel of this machine has Landlock ABI {kernel.landlock_abi()}")
    monkeypatch.setattr(kernel, "landlock_abi", lambda: abi)
    session = sb.on_device.session(backend="landlock", **options)  # type: ignore[arg-type]
    if opens:
        async with session as sbx:
            assert (await sbx.exec("echo inside")).stdout == "inside\n"
            assert sbx.isolation.signals == "notified"
        return
    with pytest.raises(sb.BackendUnavailableError, match="needs Landlock ABI") as caught:
        await session.open()
    assert "Linux 6." in caught.value.hint


async def test_a_read_only_path_in_a_writable_one_is_refused(tmp_path: Path) -> None:
    below = tmp_path / "kept"
    below.mkdir()
    session = sb.on_device.session(
        backend="landlock", host_work_dir=tmp_path, read_only_paths=[below]
    )
    with pytest.raises(sb.PolicyError, match="must stay read-only"):
        await session.open()
    async with sb.on_device.session(backend="landlock", host_work_dir=tmp_path) as sbx:
        assert (await sbx.exec("touch kept/x && echo made")).stdout == "made\n"


async def test_strict_needs_an_id_of_its_own(tmp_path: Path) -> None:
    session = sb.on_device.session(backend="landlock", host_work_dir=tmp_path, strict=True)
    with pytest.raises(sb.BackendUnavailableError) as caught:
        await session.open()
    assert caught.value.missing == ("unprivileged ids",)


async def test_a_path_that_was_replaced_is_not_shown(tmp_path: Path) -> None:
    """A rule for a replaced directory would open whatever the new name leads to."""
    work = tmp_path / "work"
    shown = work / "shown"
    shown.mkdir(parents=True)
    async with sb.on_device.session(
        backend="landlock", host_work_dir=work, read_write_paths=[shown], warm=0
    ) as sbx:
        assert (await sbx.exec("ls -d shown")).stdout == "shown\n"
        await sbx.exec("mv shown old && ln -s / shown")
        secret = tmp_path / "secret"
        secret.write_text("host secret")
        try:
            done = await sbx.exec(f"cat {secret}")
            assert "host secret" not in done.stdout
        except sb.SandboxError as exc:
            assert "host secret" not in str(exc)  # noqa: PT017 - either outcome is safe


async def test_names_are_resolved_over_tcp_and_refused_ones_are_recorded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with sb.on_device.session(
            backend="landlock",
            network_mode="allowlist",
            network_allowlist=[f"127.0.0.1:{port}"],
        ) as sbx:
            program = f"""
                import socket
                for host, port in (("127.0.0.1", {port}), ("127.0.0.1", 1), ("192.0.2.1", 80)):
                    try:
                        socket.create_connection((host, port), 5).close()
                        print("connected")
                    except OSError as exc:
                        print(type(exc).__name__)
                try:
                    socket.getaddrinfo("denied.test", 80)
                except socket.gaierror:
                    print("no such name")
                """
            process = await sbx.run(program, script_type="python")
            await process.wait()
            result = process.result()
            assert result.stdout.split("\n") == [
                "connected", "PermissionError", "PermissionError", "no such name", "",
            ]  # fmt: skip
            found = {(d.door, d.host, d.port): d.allowed for d in process.network}
            assert found["tcp", "127.0.0.1", port]
            assert not found["tcp", "192.0.2.1", 80]
            assert not found["dns", "denied.test", 0]


def test_a_loopback_pair_is_one_connection() -> None:
    near, far = loopback_pair()
    with near, far:
        near.send(b"x")
        assert far.recv(1) == b"x"
        assert near.getpeername() == far.getsockname()


def test_a_foreign_connection_to_the_listener_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process of the machine may connect first; its connection is not handed out."""
    foreign = []
    create = socket.create_server

    def taken(address: tuple[str, int], **options: int) -> socket.socket:
        listener = create(address, **options)
        foreign.append(socket.create_connection(listener.getsockname()))
        return listener

    monkeypatch.setattr(_mediated_network.socket, "create_server", taken)
    near, far = loopback_pair()
    with near, far, foreign[0]:
        near.send(b"ours")
        assert far.recv(8) == b"ours"
        assert foreign[0].recv(8) == b""


async def test_the_policy_decides_before_a_socket_is_handed_over() -> None:
    decisions: list[Decision] = []
    network = MediatedNetwork(
        lambda destination: Egress(
            harness.policy(["192.0.2.7"]),
            http=None,
            socks=None,
            on_decision=decisions.append,
            destination=destination,
        )
    )
    try:
        with pytest.raises(PermissionError) as caught:
            network.connect(socket.AF_INET, socket.inet_aton("192.0.2.8"), 80)
        assert caught.value.errno == errno.EACCES
        with pytest.raises(OSError, match="address family"):
            network.connect(99, bytes(16), 80)
        network.connect(socket.AF_INET, socket.inet_aton("127.0.0.1"), 3128).close()
    finally:
        await network.aclose()
    assert [d.allowed for d in decisions if d.host == "192.0.2.8"] == [False]


async def test_the_work_dir_and_scratch_are_removed() -> None:
    async with sb.on_device.session(backend="landlock") as sbx:
        await sbx.exec('mkdir -p "$TMPDIR/a/b" && chmod 0 "$TMPDIR/a"')
        transport = sbx._transport
        places = [transport.host_dir, transport._scratch.path]  # type: ignore[attr-defined]
        assert all(map(os.path.exists, places))
    assert not any(map(os.path.exists, places))
