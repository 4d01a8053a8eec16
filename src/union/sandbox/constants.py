"""Public names and limits."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "CLOUD_METADATA_DENY",
    "DEVNULL",
    "INHERIT",
    "KUBERNETES_DENY",
    "PIPE",
    "PYPI_HOSTS",
    "STDOUT",
    "HostList",
    "Stream",
]


class Stream(enum.Enum):
    """Handling of one standard stream of a command."""

    PIPE = "pipe"
    INHERIT = "inherit"
    DEVNULL = "devnull"
    STDOUT = "stdout"

    def __repr__(self) -> str:
        return self.name


PIPE: Final = Stream.PIPE
"""A live stream that the caller reads or writes while the command runs."""
INHERIT: Final = Stream.INHERIT
"""Copied to the caller's own stream as it arrives."""
DEVNULL: Final = Stream.DEVNULL
"""Discarded; for stdin, end-of-file."""
STDOUT: Final = Stream.STDOUT
"""For stderr: written to the same pipe as stdout, so that the order is kept."""


class HostList(tuple[str, ...]):
    """An immutable list of hosts that can be added to any list or tuple of strings.

    >>> PYPI_HOSTS + ["mirror.example"] == ["mirror.example"] + PYPI_HOSTS
    False
    >>> ("mirror.example" in PYPI_HOSTS + ["mirror.example"], len(PYPI_HOSTS))
    (True, 3)
    """

    __slots__ = ()

    def __add__(self, other: Iterable[str]) -> HostList:  # type: ignore[override]  # wider
        """Return a new list with ``other`` appended."""
        return NotImplemented if isinstance(other, str) else HostList((*self, *other))

    def __radd__(self, other: Iterable[str]) -> HostList:
        """Return a new list with ``other`` prepended."""
        return NotImplemented if isinstance(other, str) else HostList((*other, *self))


PYPI_HOSTS: Final = HostList(
    (
        "pypi.org",
        "files.pythonhosted.org",
        "*.pythonhosted.org",
    )
)
"""The hosts that ``uv pip install`` needs for the public Python index."""

CLOUD_METADATA_DENY: Final = HostList(
    (
        "169.254.0.0/16",  # link-local: AWS, Azure, Google, Oracle, OpenStack, ECS tasks
        "fd00:ec2::/32",  # AWS over IPv6
        "fd20:ce::/32",  # Google over IPv6
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure's host channel
        "192.0.0.192",  # Oracle, classic
        "metadata.google.internal",
        "*.metadata.google.internal",
        "metadata.goog",
        "metadata",
        "instance-data",
        "instance-data.ec2.internal",
        "metadata.azure.internal",
        "metadata.tencentyun.com",
        "metadata.platformequinix.com",
    )
)
"""Deny-list entries for the metadata services of the large clouds."""

KUBERNETES_DENY: Final = HostList(
    (
        *CLOUD_METADATA_DENY,
        "10.0.0.0/8",  # private: where clusters have their services, pods and nodes
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",  # shared: pods of some managed clusters
        "fc00::/7",  # private, over IPv6
        "fe80::/10",
        "kubernetes",
        "kubernetes.default",
        "*.svc",
        "*.cluster.local",
    )
)
"""Deny-list entries for a pod: ``CLOUD_METADATA_DENY``, and the private addresses and names that
services, pods, nodes and the API server of a cluster have."""

DEFAULT_PROCESSES: Final = 512
DEFAULT_SESSION_PROCESSES: Final = 4096
DEFAULT_OPEN_FILES: Final = 1024
DEFAULT_TMP_MIB: Final = 512
DEFAULT_SHM_MIB: Final = 256
DEFAULT_FILE_SIZE_MIB: Final = 8192
KILL_GRACE_S: Final = 0.2
"""Seconds from SIGTERM to SIGKILL after a timeout."""

MAX_OUTPUT_BYTES: Final = 64 * 1024 * 1024
"""Default for ``max_output_bytes``: what is collected of one stream."""
UNREAD_STREAM_BYTES: Final = 64 * 1024 * 1024
"""The buffer of a piped stream while the caller reads the other one."""
MAX_LINE_BYTES: Final = 1024 * 1024
"""Longer lines are yielded in pieces of this size."""
MAX_FILE_BYTES: Final = 1024 * 1024 * 1024
"""Default limit of ``get_bytes()``."""
MAX_DIR_ENTRIES: Final = 100_000
"""``list_dir()`` rejects a directory with more entries."""
MAX_TREE_BYTES: Final = 1024 * 1024 * 1024
"""Default limit of ``upload()`` and ``download()``."""
MAX_TREE_FILES: Final = 100_000
"""Default limit of entries for ``upload()`` and ``download()``, directories included."""
MAX_TREE_DEPTH: Final = 128
"""The limit of nested directories for ``upload()`` and ``download()``."""

CA_VARIABLES: Final = (
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "PIP_CERT",
)
"""Variables that name certificate bundles; they are passed into sandboxes."""
