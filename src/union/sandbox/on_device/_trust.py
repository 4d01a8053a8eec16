"""The certificates that programs inside trust, for calls with ``Http`` entries.

Programs find them by environment variables: a file with the caller's authorities and the session's
own. The file is public, is in the session venv, and is written again if sandboxed code changed it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import ssl
import struct
from typing import TYPE_CHECKING, Final

from union.sandbox._core.files import VENV_DIR
from union.sandbox._policy.credentials import ServerSecret
from union.sandbox._policy.entries import has_http
from union.sandbox._session import threads
from union.sandbox.constants import CA_VARIABLES
from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from union.sandbox._core.spec import NetworkSpec
    from union.sandbox._net.interception import Interception
    from union.sandbox.on_device._workdir import WorkDir

__all__ = ["Trust", "http_variables"]

_BUNDLE: Final = f"{VENV_DIR}/ca-bundle.pem"
_JAVA_STORE: Final = f"{VENV_DIR}/ca-bundle.jks"
_JKS_MAGIC: Final = 0xFEEDFEED
_JAVA_PASSWORD: Final = "changeit"  # noqa: S105 - Java's usual one; the store is public
_SYSTEM_BUNDLES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
)
_CERTIFICATE: Final = re.compile(
    rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL
)
_MAX_BUNDLE_BYTES: Final = 16 * 1024 * 1024
_VARIABLES: Final = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "AWS_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
    "DENO_CERT",
    "PIP_CERT",
    "CARGO_HTTP_CAINFO",
    "NIX_SSL_CERT_FILE",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
)
"""Variables by which programs find the file: each reads another one."""


def http_variables(network: NetworkSpec, *, work_dir: str) -> dict[str, str]:
    """Return the variables of a call with ``Http`` entries: trust, and placeholders."""
    if not has_http(network):
        return {}
    found = dict.fromkeys(_VARIABLES, f"{work_dir}/{_BUNDLE}")
    if _has_java():
        found["JAVA_TOOL_OPTIONS"] = (
            f"-Djavax.net.ssl.trustStore={work_dir}/{_JAVA_STORE} "
            f"-Djavax.net.ssl.trustStorePassword={_JAVA_PASSWORD}"
        )
    for entry in network.allow:
        if entry.http is not None:
            if isinstance(entry.http.auth, ServerSecret):
                raise PolicyError(
                    f"network_allowlist: {entry.text} names {entry.http.auth.name!r}, a secret of "
                    "a server, and this session has no server",
                    argument="network_allowlist",
                    code="server-secret",
                    hint="pass the value with sb.Secret(...), or use a session of a server that "
                    "has it",
                )
            found.update(entry.http.variables)
    return found


class Trust:
    """The files of one session.

    Args:
        work: the work dir.
        interception: the session's authority.

    """

    def __init__(self, work: WorkDir, interception: Interception) -> None:
        self._work = work
        self._interception = interception
        self._mark: object = None

    def variables(self, network: NetworkSpec) -> dict[str, str]:
        """Return the variables of a cell with ``Http`` entries."""
        return http_variables(network, work_dir=self._work.path)

    async def ready(self) -> None:
        """Write the files if needed, without blocking the event loop.

        Raises:
            OSError: they could not be written.
            MissingExtraError: the package ``cryptography`` is not installed.

        """
        if not self.is_current():
            await threads.files.run(self._work.tree, self.ensure)

    def is_current(self) -> bool:
        """Return whether the files are as they were written; a few stat calls."""
        return self._mark is not None and self._mark == self._work.tree.fingerprint(self._names())

    def ensure(self) -> None:
        """Write the files if they are missing or were changed. The first call takes a while."""
        if self.is_current():
            return
        own = self._interception.prepare().pem
        bundle = _caller_bundle().rstrip() + b"\n" + own
        self._work.tree.put(_BUNDLE, bundle)
        if _has_java():
            self._work.tree.put(_JAVA_STORE, _java_store(bundle))
        self._mark = self._work.tree.fingerprint(self._names())

    def _names(self) -> tuple[str, ...]:
        return (_BUNDLE, _JAVA_STORE) if _has_java() else (_BUNDLE,)


def _has_java() -> bool:
    return shutil.which("java") is not None


def _caller_bundle() -> bytes:
    """Return the caller's own authorities: those that its variables name, else the system's."""
    named = [os.environ[name] for name in CA_VARIABLES if os.environ.get(name)]
    files = [path for path in dict.fromkeys(named) if os.path.isfile(path)]
    if not files:
        usual = ssl.get_default_verify_paths().cafile
        known = (*([usual] if usual else []), *_SYSTEM_BUNDLES)
        files = [path for path in known if os.path.isfile(path)][:1]
    content = b""
    for path in files:
        with open(path, "rb") as file:
            content += file.read(_MAX_BUNDLE_BYTES).rstrip() + b"\n"
    return content


def _java_store(bundle: bytes) -> bytes:
    """Return the same certificates in a Java key store (JKS), which has a public password.

    The certificates are copied, not parsed: a system's bundle may contain old ones that a parser
    rejects.
    """
    found = re.findall(
        rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", bundle, re.DOTALL
    )
    kind = b"X.509"
    store = struct.pack(">III", _JKS_MAGIC, 2, len(found))
    for number, text in enumerate(found):
        name, content = str(number).encode(), base64.b64decode(text)
        store += struct.pack(">IH", 2, len(name)) + name + struct.pack(">Q", 0)
        store += struct.pack(">H", len(kind)) + kind + struct.pack(">I", len(content)) + content
    # The checksum that the format prescribes; it protects nothing.
    salted = _JAVA_PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + store
    return store + hashlib.sha1(salted, usedforsecurity=False).digest()
