"""Paths and limits of one call: the rules of the session's, for this call alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import ISOLATED, REMOTE, host_dir, session_of

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import OpenSession

ARGUMENTS = ("read_only_paths", "read_write_paths")


@pytest.fixture(params=[*ISOLATED, *(REMOTE + way for way in ISOLATED)])
def jailed(request: pytest.FixtureRequest) -> OpenSession:
    return lambda **options: session_of(request.param, **options)


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    tree = tmp_path / "data"
    (tree / "inner").mkdir(parents=True)
    (tree / "file").write_text("content\n")
    for path in (tree, tree / "inner"):
        path.chmod(0o777)
    return tree


@pytest.mark.spec("C11")
async def test_a_path_is_visible_to_its_call_alone(jail: sb.Session, data: Path) -> None:
    look = f"cat {data}/file; echo x > {data}/new; ls {data}"
    hidden = await jail.exec(look)
    assert "content" not in hidden.stdout
    shown = await jail.exec(look, read_only_paths=[str(data)])
    assert shown.stdout == "content\nfile\ninner\n"
    assert "Read-only" in shown.stderr
    writable = await jail.exec(look, read_write_paths=[data])
    assert writable.stdout == "content\nfile\ninner\nnew\n"
    assert (data / "new").read_text() == "x\n"
    for _ in range(6):  # more than wait ready
        assert "content" not in (await jail.exec(look)).stdout


@pytest.mark.spec("C11")
async def test_every_call_takes_them(jail: sb.Session, data: Path) -> None:
    code = f"print(open('{data}/file').read(), end='')"
    assert await jail.run_code(code, read_only_paths=[str(data)]) == "content\n"
    with pytest.raises(sb.SandboxCommandError, match="FileNotFoundError"):
        await jail.run_code(code)
    process = await jail.run(f"cat {data}/file", stdout=True, read_only_paths=(str(data),))
    assert await process.communicate() == (b"content\n", b"")
    terminal = await jail.run(f"cat {data}/file", pty=True, read_only_paths=(str(data),))
    assert await terminal.communicate() == (b"content\r\n", b"")
    inside = await jail.exec("cat file", cwd=str(data), read_only_paths=[str(data)])
    assert inside.stdout == "content\n"


@pytest.mark.spec("C11")
async def test_calls_at_once_see_their_own_paths_only(jail: sb.Session, tmp_path: Path) -> None:
    places = [tmp_path / f"place-{number}" for number in range(8)]
    for number, place in enumerate(places):
        place.mkdir()
        (place / "file").write_text(f"{number}")
    look = "cat " + " ".join(f"{place}/file" for place in places)
    results = await asyncio.gather(
        *(jail.exec(look, read_only_paths=[str(place)]) for place in (*places, *places)),
        *(jail.exec(look) for _ in places),
    )
    assert [result.stdout for result in results] == [*"01234567" * 2, *[""] * 8]


@pytest.mark.spec("C11")
async def test_network_and_paths_are_independent(jailed: OpenSession, data: Path) -> None:
    async with jailed(network_mode="allowlist", network_allowlist=["192.0.2.1"]) as jail:
        for mode in (None, "blocked"):
            found = await jail.exec(
                f"cat {data}/file", read_only_paths=[str(data)], network_mode=mode
            )
            assert found.stdout == "content\n"
            assert (await jail.exec(f"cat {data}/file", network_mode=mode)).stdout == ""


@pytest.mark.spec("C11")
async def test_a_writable_path_can_be_made_read_only(jailed: OpenSession, data: Path) -> None:
    write = f"echo x > {data}/inner/x; echo x > {data}/y; ls {data}/inner"
    async with jailed(read_write_paths=[str(data)]) as jail:
        narrow = await jail.exec(write, read_only_paths=[str(data)])
        assert narrow.stdout == ""
        assert narrow.stderr.count("Read-only") == 2
        below = await jail.exec(write, read_only_paths=[str(data / "inner")])
        assert below.stdout == ""
        assert below.stderr.count("Read-only") == 1
        assert (await jail.exec(write)).stdout == "x\n"
    async with jailed(read_write_paths=[str(data / "inner")]) as jail:
        above = await jail.exec(write, read_only_paths=[str(data)])
        assert above.stderr.count("Read-only") == 2
        both = await jail.exec(
            write, read_only_paths=[str(data)], read_write_paths=[str(data / "inner")]
        )
        assert both.stderr.count("Read-only") == 1


@pytest.mark.spec("C11")
async def test_part_of_the_work_dir_can_be_made_read_only(
    jailed: OpenSession, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    (work / "src").mkdir(parents=True)
    for path in (work, work / "src"):
        path.chmod(0o777)
    async with jailed(host_work_dir=str(work)) as jail:
        write = "echo x > src/x; echo x > y; ls"
        narrow = await jail.exec(write, read_only_paths=[str(work / "src")])
        assert "src/x" in narrow.stderr
        assert "Read-only" in narrow.stderr
        assert not (work / "src" / "x").exists()
        assert (work / "y").exists()
        assert (await jail.exec(write)).stderr == ""


@pytest.mark.spec("C11")
@pytest.mark.parametrize("argument", ARGUMENTS)
async def test_a_missing_path_is_an_error_before_anything_starts(
    sbx: sb.Session, tmp_path: Path, argument: str
) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(sb.SandboxUsageError, match=missing) as caught:
        await sbx.run("touch ran", **{argument: [missing]})
    assert caught.value.argument == argument
    assert not Path(host_dir(sbx), "ran").exists()
    # It is looked for again in each call, also after one that has found it.
    Path(missing).mkdir()
    assert (await sbx.exec("true", **{argument: [missing]})).ok
    Path(missing).rmdir()
    with pytest.raises(sb.SandboxUsageError, match=missing):
        await sbx.exec("touch ran", **{argument: [missing]})
    assert (await sbx.exec("ls")).stdout == ""


@pytest.mark.spec("C11")
async def test_a_replaced_file_is_seen_by_the_next_call(jail: sb.Session, data: Path) -> None:
    file = data / "file"
    for text in ("one", "two", "three"):
        (data / "next").write_text(text)
        (data / "next").replace(file)
        assert (await jail.exec(f"cat {file}", read_only_paths=[str(file)])).stdout == text


@pytest.mark.spec("C10", "C11")
@pytest.mark.parametrize(
    "argument, value",
    [
        ("read_only_paths", "/usr"),
        ("read_only_paths", ""),
        ("read_write_paths", b"/usr"),
        ("read_write_paths", ["relative"]),
        ("read_only_paths", [3]),
        ("read_only_paths", None),
        ("read_write_paths", ["/a\0b"]),
        ("resources", {"memory": "64Mi"}),
        ("resources", "64Mi"),
        ("resources", sb.Resources(memory="512MB")),
    ],
)
async def test_wrong_values(sbx: sb.Session, argument: str, value: object) -> None:
    options: dict[str, Any] = {argument: value}
    with pytest.raises(sb.SandboxUsageError) as caught:
        await sbx.exec("true", **options)
    assert caught.value.argument == argument


@pytest.mark.spec("C11")
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("path", ["/", "/proc", "/etc", "/run"])
async def test_places_that_no_sandbox_is_shown(jail: sb.Session, argument: str, path: str) -> None:
    with pytest.raises(sb.PolicyError) as caught:
        await jail.exec("true", **{argument: [path]})
    assert caught.value.argument == argument


@pytest.mark.spec("C11")
async def test_the_work_dir_itself_is_refused(jailed: OpenSession, tmp_path: Path) -> None:
    async with jailed(host_work_dir=str(tmp_path)) as jail:
        with pytest.raises(sb.PolicyError, match="work dir"):
            await jail.exec("true", read_only_paths=[str(tmp_path)])


@pytest.mark.spec("C11")
async def test_one_path_cannot_be_both(jail: sb.Session, data: Path) -> None:
    with pytest.raises(sb.PolicyError, match="read_only_paths of the same call"):
        await jail.exec("true", read_only_paths=[f"{data}/"], read_write_paths=[str(data)])


@pytest.mark.spec("C11", "G3")
async def test_limits_of_one_call(sbx: sb.Session) -> None:
    look = "import resource as r; print(r.getrlimit(r.RLIMIT_NOFILE)[0])"
    usual = int(await sbx.run_code(look))
    assert await sbx.run_code(look, resources=sb.Resources(open_files=77)) == "77\n"
    assert int(await sbx.run_code(look)) == usual


@pytest.mark.spec("C11", "G3")
async def test_memory_of_one_call(sbx: sb.Session) -> None:
    fill = "data = b'x' * (256 << 20); print(len(data))"
    limited = await sbx.exec(fill, script_type="python", resources=sb.Resources(memory="64Mi"))
    assert limited.termination_reason == "oom"
    assert limited.stdout == ""
    assert await sbx.run_code(fill) == f"{256 << 20}\n"


@pytest.mark.spec("C11", "G3")
async def test_scratch_space_of_one_call(jail: sb.Session) -> None:
    size = "import os; s = os.statvfs('/tmp'); print(s.f_blocks * s.f_frsize)"
    usual = int(await jail.run_code(size))
    assert int(await jail.run_code(size, resources=sb.Resources(tmp="8Mi"))) == 8 << 20
    assert int(await jail.run_code(size)) == usual > 8 << 20


@pytest.mark.spec("C11")
@pytest.mark.parametrize(
    "field", ["cpu", "memory", "processes", "open_files", "file_size", "tmp", "shm"]
)
async def test_a_higher_limit_is_refused_by_name(open_session: OpenSession, field: str) -> None:
    given = {"cpu": 1, "memory": "64Mi", "tmp": "8Mi", "shm": "8Mi", "processes": 50}
    limits: dict[str, Any] = {**given, "open_files": 100, "file_size": "8Mi"}
    async with open_session(resources=sb.Resources(**limits)) as session:
        more: dict[str, Any] = {field: 1 << 30}
        with pytest.raises(sb.PolicyError, match=field) as caught:
            await session.run("touch ran", resources=sb.Resources(**more))
        assert caught.value.argument == "resources"
        same: dict[str, Any] = {field: limits[field]}
        assert (await session.exec("ls", resources=sb.Resources(**same))).stdout == ""


@pytest.mark.spec("C11")
async def test_limits_that_are_not_named_stay_the_sessions(open_session: OpenSession) -> None:
    async with open_session(resources=sb.Resources(open_files=99)) as session:
        found = await session.exec("ulimit -n", resources=sb.Resources(memory="64Mi"))
        assert found.stdout == "99\n"


@pytest.mark.spec("C11")
@pytest.mark.bare
@pytest.mark.parametrize("way", ["none", "remote-none"])
async def test_without_isolation_nothing_is_made_read_only(
    open_session: OpenSession, data: Path, tmp_path: Path
) -> None:
    async with open_session(read_write_paths=[str(data)]) as session:
        for path in (data, data / "inner", tmp_path):
            with pytest.raises(sb.PolicyError, match="cannot make"):
                await session.exec("true", read_only_paths=[str(path)])
