"""Sessions in a pod of their own, launched by Flyte; or, with no cluster, as a local process.

The only package that knows Flyte and Kubernetes, and loads either of them only when it is used.
"""

from __future__ import annotations
