"""A short search by every target, the same on every run: what is known, then mutations of it.

Searches that find new ways are for ``make fuzz``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.fuzz import archives, native, page, seeds
from tests.fuzz.drive import SLOW, blind, known_inputs
from tests.fuzz.targets import PYTHON

from union.sandbox._plan import plan as p

if TYPE_CHECKING:
    from pathlib import Path

SEED = 7
NATIVE_RUNS = 40_000
PYTHON_RUNS = 1200
MOST_BYTES = 300 * 1024
# Three processes for all of them: to start one takes longer than most targets.
GROUPS = {
    module: [name for name, target in PYTHON.items() if target.__module__ == module]
    for module in sorted({target.__module__ for target in PYTHON.values()})
}


def test_every_target_is_described_and_has_seeds() -> None:
    assert set(page.WHAT) == {*native.NAMES, *PYTHON} == set(seeds.seeds())
    broke = {folder.name for folder in seeds.REGRESSIONS.iterdir()}
    assert broke | set(archives.names()) <= set(page.WHAT)
    assert all(archives.load(name) for name in archives.names())


def test_the_corpus_is_small_and_holds_archives_alone() -> None:
    sizes = [len(data) for name in archives.names() for data in archives.load(name)]
    assert 0 < sum(sizes) < MOST_BYTES
    kept = {f"{name}{archives.SUFFIX}" for name in archives.names()}
    assert kept == {path.name for path in archives.CORPUS.iterdir()}


def test_an_archive_depends_on_its_inputs_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    archives.save("x", [b"b", b"", b"a" * 4096], first)
    archives.save("x", [b"a" * 4096, b"b", b"", b"b"], second)
    assert sorted(archives.load("x", first)) == [b"", b"a" * 4096, b"b"]
    assert (first / "x.zip").read_bytes() == (second / "x.zip").read_bytes()
    assert archives.load("other", first) == []
    archives.unpack(archives.load("x", first), tmp_path / "files")
    assert {path.read_bytes() for path in (tmp_path / "files").iterdir()} == {
        *archives.load("x", first)
    }


@pytest.mark.parametrize("group", GROUPS)
def test_no_input_breaks_a_parser(group: str, tmp_path: Path) -> None:
    names = GROUPS[group]
    how = ("blind", str(SEED), str(PYTHON_RUNS), str(tmp_path))
    # A process of its own: some targets count descriptors, and most keep a loop.
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.drive", ",".join(names), *how],
        check=False,
        capture_output=True,
        text=True,
        cwd=native.ROOT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert list(counts) == names
    assert all(int(count) > PYTHON_RUNS // SLOW.get(name, 1) for name, count in counts.items())


def run_native(program: Path, files: list[Path], scratch: Path, *, runs: int) -> int:
    """The number of inputs that were run, or a failure with what the sanitizer says."""
    given = [str(file) for file in files]
    if program.name.endswith("-standalone"):
        commands = [[str(program), str(SEED), str(runs), *given]]
    else:
        options = [f"-seed={SEED}", f"-artifact_prefix={scratch}/", "-print_final_stats=1"]
        new = scratch / "new"
        new.mkdir()
        for file in files:
            (new / f"{file.parent.name}-{file.name}").write_bytes(file.read_bytes())
        # Files are run as they are; a folder is where the search begins.
        commands = [[str(program), *options, *given]]
        commands += [[str(program), *options, f"-runs={runs}", "-max_len=4096", str(new)]]
    for command in commands:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, errors="replace", cwd=scratch
        )
        assert done.returncode == 0, done.stderr[-4000:]
    if program.name.endswith("-standalone"):
        return int(done.stdout)
    return int(done.stderr.partition("number_of_executed_units:")[2].split()[0])


def build(name: str) -> Path:
    program = native.build(name, libfuzzer=True) or native.build(name, libfuzzer=False)
    if program is None:
        pytest.skip(f"no C compiler: {native.REMEDY}")
    return program


def files_of(name: str, scratch: Path) -> list[Path]:
    files = []
    for number, data in enumerate(known_inputs(name)):
        files.append(scratch / f"{number}")
        files[-1].write_bytes(data)
    return files


@pytest.mark.parametrize("name", native.NAMES)
def test_no_input_breaks_a_native_decoder(name: str, tmp_path: Path) -> None:
    files = files_of(name, tmp_path)
    if name == "native_plan":
        # Cut to 16 bits, as the kernel stores it, 65537 instructions are one: next to no filter.
        for count in (4096, 4097, 65537):
            files.append(tmp_path / f"filter{count}")
            files[-1].write_bytes(p.encode((p.Seccomp(bytes(8) * count),)))
    assert run_native(build(name), files, tmp_path, runs=NATIVE_RUNS) >= NATIVE_RUNS


def test_the_native_targets_can_be_driven_without_libfuzzer(tmp_path: Path) -> None:
    program = native.build("native_netlink", libfuzzer=False)
    if program is None:
        pytest.skip("no C compiler: apt-get install gcc libc6-dev")
    files = files_of("native_netlink", tmp_path)
    assert run_native(program, files, tmp_path, runs=5000) == 5000 + len(files)


def test_a_broken_promise_is_found_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The search itself: an input that breaks a target ends it, and is there to be looked at."""

    def target(data: bytes) -> None:
        assert b"\xff" not in data

    keep = tmp_path / "kept" / "input"
    assert blind(target, [b"abc"], seed=1, runs=100_000, keep=keep) == 0
    assert b"\xff" in keep.read_bytes()
    assert "AssertionError" in capsys.readouterr().err


def test_the_page_tells_the_results_in_the_tree() -> None:
    results = json.loads(page.RESULTS.read_text("utf-8"))
    assert page.PAGE.read_text("utf-8") == page.render(results)
    assert set(results["targets"]) == set(page.WHAT)
    assert sum(result["executions"] for result in results["targets"].values()) >= 10_000_000
    assert sum(result["crashes"] for result in results["targets"].values()) == 0
