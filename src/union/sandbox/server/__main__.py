"""``python -m union.sandbox.server``."""

from __future__ import annotations

import sys

from union.sandbox.server import main

sys.exit(main())
