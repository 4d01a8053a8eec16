"""The synchronous face, as its users write it."""

from __future__ import annotations

from datetime import timedelta

from union import sandbox as sb
from union.sandbox import sync


def commands() -> str:
    with sync.on_device.session(backend="userns", network_mode="blocked", timeout_s=60) as sbx:
        result: sb.ExecResult = sbx.exec(["ls", "-la"], timeout_s=5.0, env={"A": "b"})
        text: str = result.stdout + sbx.run_code("print(1)")
        process: sync.SandboxProcess = sbx.run("make", stdout=True, stderr=sync.PIPE, stdin=True)
        if process.stdin is not None:
            process.stdin.write(b"data")
            process.stdin.drain()
            process.stdin.close()
        for line in process.iter_stdout_lines():
            text += line.upper()
        chunks: list[bytes] = list(process.iter_stderr())
        code: int = process.wait()
        ended: int | None = process.returncode
        reason: sb.TerminationReason = process.termination_reason
        out, _ = process.communicate()
        process.kill()
        return f"{text}{chunks}{code}{ended}{reason}{out.hex()}"


def files(sbx: sync.Session) -> int:
    written: int = sbx.put_bytes("f", b"data")
    data: bytes = sbx.get_bytes("f")
    names = [entry.path for entry in sbx.list_dir()]
    copied = sbx.upload("/etc/hostname", "h")
    return written + len(data) + len(names) + copied.files


def elsewhere() -> None:
    session = sync.remote.session(endpoint="http://127.0.0.1:1", token="t").open()
    try:
        session.exec("true", check=True)
    except sync.SandboxCommandError as exc:
        print(exc.result.stderr)
    finally:
        session.close()
    with sync.session(timeout=timedelta(minutes=5), local=True) as owner:
        name: str = owner.name
        print(name, owner.is_owner, owner.exec("true").ok)


def wrapped(session: sb.Session, cluster: sb.SandboxSession) -> tuple[str, bool]:
    face: sync.Session = sync.wrap(session)
    other: sync.SandboxSession = sync.wrap(cluster)
    return face.exec("true").stdout, other.is_owner
