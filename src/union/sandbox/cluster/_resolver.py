"""The module that a pod names to load its task; deployments keep this path."""

from __future__ import annotations

from union.sandbox.cluster._environment import SandboxResolver

__all__ = ["SandboxResolver"]
