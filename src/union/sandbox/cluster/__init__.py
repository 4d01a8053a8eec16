"""Sessions in a pod of their own, launched by Flyte; or, with no cluster, as a local process.

This is the only package that uses Flyte and Kubernetes. It imports either of them on first use.
"""

from __future__ import annotations
