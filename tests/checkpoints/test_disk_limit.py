"""The disk limit: a hard one, for one large file and for many small ones."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, session_of, shown_to_host

from union import sandbox as sb

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = sb.Resources(disk="16Mi")
MIB = 2**20


@pytest.mark.spec("L5")
@pytest.mark.threat(189)
@pytest.mark.parametrize("way", ISOLATED)
async def test_one_large_file_and_many_small_ones(way: str) -> None:
    async with session_of(way, resources=LIMIT) as session:
        assert dict(session.isolation.limits)["disk"] == "tmpfs"
        large = await session.exec("head -c 64M /dev/zero > large; stat -c %s large; rm large")
        assert "No space left on device" in large.stderr
        assert int(large.stdout) <= 17 * MIB
        many = await session.run_code(
            """
            import errno, os
            made = 0
            try:
                while made < 20_000:
                    with open(f"f{made}", "w") as f: f.write("x")
                    made += 1
            except OSError as exc: print(errno.errorcode[exc.errno])
            used = sum(os.stat(n).st_blocks * 512 for n in os.listdir(".") if n[0] == "f")
            print(used)
            for n in range(made): os.unlink(f"f{n}")
            """
        )
        reason, used = many.split()
        assert reason == "ENOSPC"
        assert int(used) <= 17 * MIB
        # The session goes on, for the host as well.
        await session.put_bytes("after", b"works")
        assert (await session.exec("cat after; echo more >> after", check=True)).stdout == "works"
        with pytest.raises(OSError, match="No space"):
            await session.put_bytes("large", bytes(32 * MIB))


@pytest.mark.spec("L5")
@pytest.mark.threat(189)
@pytest.mark.parametrize("way", ISOLATED)
async def test_64_mib_are_at_most_80_on_the_host(way: str) -> None:
    """In one file, or in 10,000: the file system itself is asked, by its own count of blocks."""
    async with session_of(way, resources=sb.Resources(disk="64Mi")) as session:
        with shown_to_host(session) as top:

            def used() -> int:
                found = os.statvfs(top)
                return (found.f_blocks - found.f_bfree) * found.f_frsize

            await session.exec("head -c 200M /dev/zero > large")
            assert 60 * MIB < used() <= 80 * MIB
            await session.remove("large")
            made = await session.run_code(
                """
                import errno
                n = 0
                try:
                    while n < 10_000:
                        with open(f"f{n}", "wb") as f: f.write(b"x" * 9000)
                        n += 1
                except OSError as exc: assert exc.errno == errno.ENOSPC
                print(n)
                """
            )
            assert 1000 < int(made) < 10_000
            assert 60 * MIB < used() <= 80 * MIB


@pytest.mark.spec("L5")
async def test_the_limit_holds_for_calls_checkpoints_and_forks() -> None:
    async with session_of("userns", resources=LIMIT) as session:
        await session.put_bytes("a", b"1")
        call = await session.exec("cat a; echo 2 > b", resources=sb.Resources(processes=64))
        assert (call.stdout, await session.get_bytes("b")) == ("1", b"2\n")
        checkpoint = await session.checkpoint()
        assert checkpoint.kind == "copy"
        await session.exec("rm a; head -c 64M /dev/zero > large")
        await session.rollback(checkpoint)
        assert await session.diff(checkpoint) == ()
        async with checkpoint.fork() as other:
            assert (await other.exec("cat a b", check=True)).stdout == "12\n"
            full = await other.exec("head -c 64M /dev/zero > large")
            assert "No space left on device" in full.stderr


@pytest.mark.spec("L1", "L5")
async def test_a_rollback_needs_no_room_for_both_contents() -> None:
    """A file is restored that was changed, and takes more than half of the limit."""
    async with session_of("userns", resources=LIMIT) as session:
        await session.put_bytes("large", b"1" * (10 * MIB))
        checkpoint = await session.checkpoint()
        await session.exec("printf 2 | dd of=large conv=notrunc", check=True)
        assert (await session.get_bytes("large"))[:2] == b"21"
        await session.rollback(checkpoint)
        assert await session.get_bytes("large") == b"1" * (10 * MIB)
        assert [info.path for info in await session.list_dir(".")] == ["large"]


@pytest.mark.spec("L5")
async def test_a_limit_that_cannot_be_enforced_is_refused(outside_tmp: Path) -> None:
    for way, options in (("none", {}), ("userns", {"host_work_dir": outside_tmp})):
        with pytest.raises(sb.BackendUnavailableError) as error:
            await session_of(way, resources=LIMIT, **options).open()
        assert error.value.missing == ("disk limit",)
    with pytest.raises(sb.SandboxUsageError, match="at least"):
        session_of("userns", resources=sb.Resources(disk="4k"))
    async with session_of("userns", resources=LIMIT) as session:
        with pytest.raises(sb.PolicyError, match="limit of the session"):
            await session.exec("true", resources=sb.Resources(disk="8Mi"))
