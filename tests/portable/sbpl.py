"""Read and judge sandbox profiles of macOS, strictly: what is unknown here is an error.

For tests on machines without macOS. It knows the part of the language that our profiles use, and
these published observations about its evaluation:

- The last rule that matches wins; a rule for a family (``file-read*``) covers its members.
- Under ``(deny default)``, a profile of version 1 still allows the operations that have a default
  of their own (``ALLOWED_BY_DEFAULT``).
- Paths are compared as real paths: a rule through /tmp, /var or /etc never matches.
- ``(remote ip ...)`` accepts the hosts ``*`` and ``localhost`` only; else the profile is refused.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Policy", "ProfileError", "read"]


class ProfileError(Exception):
    """A profile that sandbox-exec would refuse, or that cannot be meant."""


class Symbol(str):
    """A word of the language."""

    __slots__ = ()


Form = Any

_FILE = [
    "file-chroot",
    "file-clone",
    "file-ioctl",
    "file-issue-extension",
    "file-link",
    "file-map-executable",
    "file-mknod",
    "file-mount",
    "file-read-data",
    "file-read-metadata",
    "file-read-xattr",
    "file-revoke",
    "file-search",
    "file-test-existence",
    "file-unmount",
    "file-write-acl",
    "file-write-create",
    "file-write-data",
    "file-write-flags",
    "file-write-mode",
    "file-write-owner",
    "file-write-setugid",
    "file-write-times",
    "file-write-unlink",
    "file-write-xattr",
]
_OTHER = [
    "appleevent-send",
    "darwin-notification-post",
    "distributed-notification-post",
    "dynamic-code-generation",
    "iokit-get-properties",
    "iokit-open",
    "iokit-set-properties",
    "ipc-posix-sem-create",
    "ipc-posix-sem-open",
    "ipc-posix-sem-post",
    "ipc-posix-sem-unlink",
    "ipc-posix-sem-wait",
    "ipc-posix-shm-read-data",
    "ipc-posix-shm-write-create",
    "ipc-posix-shm-write-data",
    "ipc-posix-shm-write-unlink",
    "ipc-sysv-msg",
    "ipc-sysv-sem",
    "ipc-sysv-shm",
    "job-creation",
    "lsopen",
    "mach-cross-domain-lookup",
    "mach-lookup",
    "mach-priv-host-port",
    "mach-priv-task-port",
    "mach-register",
    "mach-task-name",
    "network-bind",
    "network-inbound",
    "network-outbound",
    "nvram-delete",
    "nvram-get",
    "nvram-set",
    "process-exec-interpreter",
    "process-fork",
    "process-info-codesignature",
    "process-info-dirtycontrol",
    "process-info-listpids",
    "process-info-pidfdinfo",
    "process-info-pidinfo",
    "process-info-rusage",
    "process-info-setcontrol",
    "pseudo-tty",
    "signal",
    "socket-ioctl",
    "sysctl-read",
    "sysctl-write",
    "system-fsctl",
    "system-info",
    "system-privilege",
    "system-socket",
    "syscall-unix",
    "user-preference-read",
    "user-preference-write",
]
OPERATIONS = frozenset({*_FILE, *_OTHER, "process-exec*", "default"})
ALIASES = {
    "process-exec": "process-exec*",
    "ipc-posix-sem": "ipc-posix-sem*",
    "ipc-posix-shm": "ipc-posix-shm*",
}
ALLOWED_BY_DEFAULT = frozenset({
    "darwin-notification-post", "dynamic-code-generation", "file-clone", "file-link",
    "file-map-executable", "file-test-existence", "iokit-get-properties",
    "mach-cross-domain-lookup", "nvram-delete", "nvram-get", "nvram-set",
    "process-info-codesignature", "process-info-dirtycontrol", "process-info-listpids",
    "process-info-pidfdinfo", "process-info-pidinfo", "process-info-rusage",
    "process-info-setcontrol", "socket-ioctl", "system-privilege", "syscall-unix",
})  # fmt: skip
_PATHS = {
    "literal",
    "path",
    "subpath",
    "prefix",
    "regex",
    "path-ancestors",
    "vnode-type",
    "extension",
}
_TARGETS = {"self", "same-sandbox", "others", "children", "pgrp"}
FILTERS = {
    "file": _PATHS,
    "process-exec": {"literal", "path", "subpath", "prefix", "regex"},
    "network": _PATHS | {"remote", "local", "socket-domain", "socket-type", "socket-protocol"},
    "system-socket": {"socket-domain", "socket-type", "socket-protocol"},
    "mach": {"global-name", "global-name-prefix", "global-name-regex", "local-name"},
    "sysctl": {"sysctl-name", "sysctl-name-prefix", "sysctl-name-regex"},
    "ipc-posix": {"ipc-posix-name", "ipc-posix-name-prefix", "ipc-posix-name-regex"},
    "signal": {"target"},
    "process-info": {"target"},
    "iokit": {"iokit-registry-entry-class", "iokit-user-client-class"},
}
_LINKS = ("/tmp", "/var", "/etc")
_DOMAINS = {"AF_UNIX", "AF_INET", "AF_INET6", "AF_SYSTEM", "AF_ROUTE"}


def _tokens(text: str) -> list[tuple[int, Any]]:
    found, at = [], 0
    spec = re.compile(
        r'\s+|;[^\n]*|(?P<open>\()|(?P<close>\))|(?P<quote>\')|#"(?P<raw>[^"]*)"'
        r'|"(?P<text>(?:[^"\\]|\\.)*)"|(?P<number>-?\d+)(?=[\s()])|(?P<word>[^\s()"\';]+)',
        re.DOTALL,
    )
    while at < len(text):
        match = spec.match(text, at)
        if match is None:
            raise ProfileError(f"unreadable at {at}: {text[at : at + 20]!r}")
        at = match.end()
        if (kind := match.lastgroup) is None:
            continue
        value: Any = match[kind]
        if kind == "text":
            value = re.sub(r"\\(.)", r"\1", value)
        elif kind == "number":
            value = int(value)
        elif kind == "word":
            value = Symbol(value)
        found.append((kind, value))
    return found


def read(text: str) -> list[Form]:
    """The forms of a profile: lists, words, strings and numbers."""
    stack: list[list[Form]] = [[]]
    quoted = 0
    for kind, value in _tokens(text):
        if kind == "open":
            stack.append([])
        elif kind == "close":
            if len(stack) == 1:
                raise ProfileError("a parenthesis too many")
            done = stack.pop()
            stack[-1].append(done)
        elif kind == "quote":
            quoted += 1
        else:
            stack[-1].append([Symbol("quote"), value] if quoted else value)
            quoted = 0
    if len(stack) > 1:
        raise ProfileError("a parenthesis is not closed")
    return stack[0]


@dataclass(frozen=True)
class Rule:
    """One action for some operations, where a filter matches; none: everywhere."""

    allow: bool
    operations: tuple[str, ...]
    filters: tuple[Form, ...]


@dataclass
class Policy:
    """A profile, with its parameters, judged."""

    text: str
    parameters: dict[str, str]
    without: frozenset[str] = frozenset()
    """Operations that this release does not know."""
    rules: list[Rule] = field(default_factory=list)
    message: str = ""
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        forms = read(self.text)
        if not forms or forms[0] != ["version", 1]:
            raise ProfileError("a profile begins with (version 1)")
        for form in forms[1:]:
            self._top(form)
        if not self.rules or self.rules[0].operations != ("default",) or self.rules[0].allow:
            raise ProfileError("the first rule must deny what no other allows")
        unused = set(self.parameters) - self.used
        if unused:
            raise ProfileError(f"parameters that no rule uses: {', '.join(sorted(unused))}")

    def _top(self, form: Form) -> None:
        head = form[0] if isinstance(form, list) and form else None
        if head in {"allow", "deny"}:
            self.rules.append(self._rule(form))
        elif head == "when" and len(form) >= 3:
            test = form[1]
            if not (isinstance(test, list) and test[0] == "defined?" and test[1][0] == "quote"):
                raise ProfileError(f"a condition that is not understood: {test}")
            if test[1][1] not in self.without:
                for one in form[2:]:
                    self._top(one)
        elif head == "import":
            raise ProfileError("nothing of the system's can be imported here")
        else:
            raise ProfileError(f"not a directive: {form}")

    def _rule(self, form: list[Form]) -> Rule:
        operations, filters = [], []
        for part in form[1:]:
            if isinstance(part, Symbol):
                if filters:
                    raise ProfileError(f"an operation after a filter: {part}")
                operations.append(self._operation(part))
            elif isinstance(part, list) and part and part[0] == "with":
                self._modifier(part)
            else:
                filters.append(part)
        if not operations:
            raise ProfileError(f"a rule without an operation: {form}")
        for operation in operations:
            for one in filters:
                self._check(one, operation)
        return Rule(form[0] == "allow", tuple(operations), tuple(filters))

    def _operation(self, name: str) -> str:
        name = ALIASES.get(name, name)
        if name in self.without:
            raise ProfileError(f"unbound variable: {name}")
        known = name in OPERATIONS or (name.endswith("*") and _members(name))
        if not known:
            raise ProfileError(f"unbound variable: {name}")
        return name

    def _modifier(self, part: list[Form]) -> None:
        if len(part) == 3 and part[1] == "message":
            self.message = self.value(part[2])
        elif part[1:] not in ([Symbol("no-log")], [Symbol("no-report")]):
            raise ProfileError(f"an unknown modifier: {part}")

    def value(self, form: Form) -> str:
        """A string, or what a parameter stands for."""
        if isinstance(form, list) and len(form) == 2 and form[0] == "param":
            self.used.add(form[1])
            if form[1] not in self.parameters:
                raise ProfileError(f"no parameter {form[1]!r} was given")
            return self.parameters[form[1]]
        if isinstance(form, str) and not isinstance(form, Symbol):
            return form
        raise ProfileError(f"not a string: {form}")

    def _check(self, form: Form, operation: str) -> None:  # noqa: C901 - one case per filter
        if not isinstance(form, list) or not form or not isinstance(form[0], Symbol):
            raise ProfileError(f"not a filter: {form}")
        kind, *arguments = form
        if kind in {"require-all", "require-any", "require-not"}:
            for one in arguments:
                self._check(one, operation)
            return
        accepted = next((v for k, v in FILTERS.items() if operation.startswith(k)), set())
        if kind not in accepted:
            raise ProfileError(f"{operation} takes no filter {kind}")
        if kind in {"literal", "path", "subpath", "prefix", "path-ancestors"}:
            self._check_path(kind, self.value(arguments[0]), given=isinstance(arguments[0], list))
        elif kind == "regex" or kind.endswith("-regex"):
            re.compile(self.value(arguments[0]))
        elif kind in {"remote", "local"}:
            _check_address(kind, arguments)
        elif kind == "target":
            if len(arguments) != 1 or arguments[0] not in _TARGETS:
                raise ProfileError(f"an unknown target: {arguments}")
        elif kind == "socket-domain":
            if arguments[0] not in _DOMAINS:
                raise ProfileError(f"an unknown domain: {arguments}")
        elif kind not in {"socket-protocol", "socket-type", "vnode-type"}:
            self.value(arguments[0])

    def _check_path(self, kind: str, path: str, *, given: bool) -> None:
        """Check a path: literal ones are of macOS, those of parameters of this machine."""
        if not path.startswith("/") or "//" in path or (path != "/" and path.endswith("/")):
            raise ProfileError(f"{path!r} is not an absolute, plain path")
        if {"..", "."} & set(path.split("/")):
            raise ProfileError(f"{path!r} is not a real path")
        dead = any(path == link or path.startswith(link + "/") for link in _LINKS)
        dead = os.path.realpath(path) != path if given else dead
        if dead and not (kind == "literal" and path in _LINKS):
            raise ProfileError(f"{path!r} leads through a link: the rule would never match")
        if kind == "subpath" and path == "/":
            raise ProfileError("everything is allowed")

    # Judging.

    def allows(self, operation: str, **facts: Any) -> bool:
        """What the kernel would answer, as far as the facts given tell."""
        verdict = operation in ALLOWED_BY_DEFAULT
        for rule in self.rules:
            if rule.operations == ("default",):
                continue  # the operations that have no default of their own begin with this
            if not any(covers(one, operation) for one in rule.operations):
                continue
            if not rule.filters or any(self._matches(one, facts) for one in rule.filters):
                verdict = rule.allow
        return verdict

    def _matches(self, form: Form, facts: dict[str, Any]) -> bool:
        kind, *arguments = form
        if kind == "require-all":
            return all(self._matches(one, facts) for one in arguments)
        if kind == "require-any":
            return any(self._matches(one, facts) for one in arguments)
        if kind == "require-not":
            return not self._matches(arguments[0], facts)
        if kind in {"remote", "local"}:
            return _address_matches(arguments, facts.get(kind))
        if kind == "target":
            return facts.get("target") == arguments[0]
        if kind.startswith("socket-"):
            return facts.get(kind) == arguments[0]
        wanted = self.value(arguments[0])
        if kind == "extension":
            return wanted in facts.get("extensions", ())
        name = {"literal": "path", "subpath": "path", "regex": "path", "prefix": "path"}.get(kind)
        name = name or re.sub("-(prefix|regex)$", "", kind)
        given = facts.get(name)
        if given is None:
            return False
        if kind == "subpath":
            return given == wanted or given.startswith(wanted + "/")
        if kind == "prefix" or kind.endswith("-prefix"):
            return given.startswith(wanted)
        if kind == "regex" or kind.endswith("-regex"):
            return re.search(wanted, given) is not None
        return given == wanted

    def granted(self, operation: str) -> list[tuple[str, str]]:
        """Return (kind, path) of each path filter that allows an operation."""
        found: dict[tuple[str, str], bool] = {}
        for rule in self.rules:
            if not any(covers(one, operation) for one in rule.operations):
                continue
            for kind, *arguments in rule.filters:
                if kind in {"literal", "subpath"}:
                    found[kind, self.value(arguments[0])] = rule.allow
        return [key for key, allow in found.items() if allow]

    def ports(self) -> list[int] | None:
        """The loopback ports that can be connected to; None: everything can be."""
        found: list[int] = []
        for rule in self.rules:
            if not rule.allow or not any(covers(o, "network-outbound") for o in rule.operations):
                continue
            if not rule.filters:
                return None
            for kind, *arguments in rule.filters:
                if kind == "remote":
                    if len(arguments) == 1:
                        return None
                    found.append(int(arguments[1].rpartition(":")[2]))
        return found


def covers(name: str, operation: str) -> bool:
    """Whether a rule for ``name`` is one for ``operation``."""
    if name == operation:
        return True
    if name == "default":
        return False
    if name == "network-inbound" and operation == "network-bind":
        return True  # the one that falls back to a neighbour
    return name.endswith("*") and operation.startswith(name[:-1])


def _members(name: str) -> bool:
    return any(one.startswith(name[:-1]) for one in OPERATIONS)


def _check_address(kind: str, arguments: list[Form]) -> None:
    if not arguments or arguments[0] not in {"ip", "tcp", "udp"} or len(arguments) > 2:
        raise ProfileError(f"not an address: ({kind} {arguments})")
    if len(arguments) == 2:
        host, _, port = str(arguments[1]).rpartition(":")
        if host not in {"*", "localhost"}:
            raise ProfileError(f"host must be * or localhost in network address: {arguments[1]!r}")
        if port != "*" and not (port.isdecimal() and 0 < int(port) < 65536):
            raise ProfileError(f"not a port: {arguments[1]!r}")


def _address_matches(arguments: list[Form], given: tuple[str, int] | None) -> bool:
    if given is None:
        return False
    if len(arguments) == 1:
        return True
    host, _, port = arguments[1].rpartition(":")
    return (host == "*" or given[0] in {"127.0.0.1", "::1"}) and port in {"*", str(given[1])}
