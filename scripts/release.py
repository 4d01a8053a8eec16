"""`make release-check`: prove that this tree can be released.

Builds every file twice, from copies of the source in different directories, and compares the bytes.
Checks the contents of each file, the entry of the changelog and the workflow, and writes a bill of
materials (CycloneDX) and the checksums that are signed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts import dist
from scripts.dist_checks import DistError, check_sdist, check_wheel

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github/workflows/release.yml"
SBOM_NAME = "sbom.cdx.json"
_URL = re.compile(r"[A-Za-z0-9._-]+")


class ReleaseError(Exception):
    """The tree cannot be released; the message has the reason."""


def version() -> str:
    """Return the version of this tree."""
    text = (ROOT / "src/union/sandbox/_version.py").read_text(encoding="utf-8")
    return re.search(r'^__version__.*"([^"]+)"', text, re.MULTILINE)[1]  # type: ignore[index]


def check_changelog(text: str, released: str, *, draft: bool) -> None:
    """Raise unless the changelog has a dated entry for the version, or may still lack it."""
    heads = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?$", text, re.MULTILINE)
    entries = dict(heads)
    if entries.get(released):
        return
    if draft and "Unreleased" in entries:
        body = text.partition("## [Unreleased]")[2].partition("\n## [")[0]
        if re.search(r"^- \S", body, re.MULTILINE):
            return
    raise ReleaseError(f"CHANGELOG.md has no entry `## [{released}] - YYYY-MM-DD`")


def sbom(released: str, files: list[Path], *, epoch: int) -> dict[str, Any]:
    """Return the bill of materials: the package, what it requires, and the published files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = f"pkg:pypi/{project['name']}@{released}"
    components = []
    optional = project["optional-dependencies"]
    required = [(one, "required") for one in project["dependencies"]]
    required += [(one, "optional") for extra in optional.values() for one in extra]
    seen: set[str] = set()
    for requirement, scope in required:
        name = _URL.match(requirement)[0].lower()  # type: ignore[index]
        if name == project["name"] or name in seen:
            continue
        seen.add(name)
        components.append(
            {
                "type": "library",
                "bom-ref": f"pkg:pypi/{name}",
                "name": name,
                "purl": f"pkg:pypi/{name}",
                "scope": scope,
                "properties": [{"name": "requirement", "value": requirement}],
            }
        )
    for file in files:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        components.append(
            {
                "type": "file",
                "bom-ref": file.name,
                "name": file.name,
                "hashes": [{"alg": "SHA-256", "content": digest}],
            }
        )
    time = subprocess.run(
        ["date", "-u", "-d", f"@{epoch}", "+%Y-%m-%dT%H:%M:%SZ"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    names = "".join(f"{c['name']}{c.get('hashes', '')}" for c in components)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, own + names)}",
        "version": 1,
        "metadata": {
            "timestamp": time,
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": project["name"],
                "version": released,
                "purl": own,
                "licenses": [{"license": {"id": project["license"]}}],
            },
        },
        "components": components,
        "dependencies": [
            {"ref": own, "dependsOn": [c["bom-ref"] for c in components if "purl" in c]}
        ],
    }


def check_workflow(path: Path = WORKFLOW) -> str:
    """Check the workflow against the schema of GitHub Actions, and with a linter; return how."""
    for tool in ("check-jsonschema", "zizmor"):
        try:
            metadata.version(tool)
        except metadata.PackageNotFoundError:
            raise ReleaseError(f"{tool} is missing: pip install --group dist") from None
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows",
         str(path)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise ReleaseError(f"{path.name}: {done.stdout}{done.stderr}")
    used = re.findall(r"uses: (?!\./)(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    pinned = re.compile(r"[^@\s]+@[0-9a-f]{40} # v\d+(\.\d+)*")
    if unpinned := [one for one in used if not pinned.fullmatch(one)]:
        raise ReleaseError(f"{path.name}: not pinned as NAME@COMMIT # vN.N.N: {unpinned}")
    linter = Path(sys.executable).with_name("zizmor")
    done = subprocess.run(
        [str(linter), "--offline", "--no-progress", "--quiet", str(path)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise ReleaseError(f"{path.name}: {done.stdout}{done.stderr}")
    return "GitHub Actions schema, zizmor, actions pinned by commit"


def build_all(source: Path, target: Path) -> list[Path]:
    """Build the source distribution and every wheel from one copy of the tree."""
    sdist = dist.build(source, target, "--sdist")
    check_sdist(sdist)
    made = [sdist]
    for architecture in (*dist.ARCHITECTURES, *dist.MACS, dist.PURE):
        wheel = dist.build_wheel(sdist, target, architecture)
        check_wheel(wheel, architecture=architecture, source=source / "src")
        made.append(wheel)
    return made


def copy_of_tree(target: Path) -> Path:
    """Copy the files that git tracks, so that nothing of this machine is built in."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place)
    return target


def differences(first: list[Path], second: list[Path]) -> list[str]:
    """Return the names of files that two builds did not make alike."""
    ours, theirs = ({p.name: hashlib.sha256(p.read_bytes()).digest() for p in made}
                    for made in (first, second))  # fmt: skip
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))


def main(arguments: list[str] | None = None) -> int:
    """Check everything; print each result as it arrives."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist/release", metavar="DIR")
    parser.add_argument("--draft", action="store_true", help="accept an entry under Unreleased")
    options = parser.parse_args(arguments)
    output: Path = options.output
    try:
        released = version()
        changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        check_changelog(changelog, released, draft=options.draft)
        print(f"changelog   {released}", flush=True)
        print(f"workflow    {check_workflow()}", flush=True)
        epoch = int(
            subprocess.run(
                ["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True
            ).stdout
        )
        os.environ["SOURCE_DATE_EPOCH"] = str(epoch)
        shutil.rmtree(output, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="sbx-release-") as scratch:
            # Both copies first: a file that is edited meanwhile would be a difference.
            places = [copy_of_tree(Path(scratch, name)) for name in ("one", "elsewhere/two")]
            made = build_all(places[0], output)
            for file in made:
                print(f"built       {file.stat().st_size / 1024:6.0f} KiB  {file.name}", flush=True)
            again = build_all(places[1], Path(scratch, "out"))
            if different := differences(made, again):
                raise ReleaseError(f"not reproducible: {', '.join(different)}")
        print(f"same bytes  {len(made)} files, built twice in different directories", flush=True)
        bill = json.dumps(sbom(released, made, epoch=epoch), indent=1) + "\n"
        (output / SBOM_NAME).write_text(bill, encoding="utf-8")
        sums = [
            f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
            for file in (*made, output / SBOM_NAME)
        ]
        (output / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
        print(f"written     {SBOM_NAME}, SHA256SUMS: the workflow attests and signs them")
    except (ReleaseError, DistError) as exc:
        print(f"release: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
