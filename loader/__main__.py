"""``python -m loader``: look at data sets, check them, convert them."""

from __future__ import annotations

import sys

from .tool.cli import main

if __name__ == "__main__":
    sys.exit(main())
