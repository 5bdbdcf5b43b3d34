"""``python -m cachefs``: the same as the ``cachefs`` command."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
