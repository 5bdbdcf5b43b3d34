"""The counters of a daemon that its users read by name: all of them are there from the start."""

from __future__ import annotations

COUNTERS = (
    "control_requests",
    "clients_rejected",
    "fills",
    "fill_bytes",
    "fill_failures",
    "flash_bad_chunks",
    "flash_created",
    "flash_disk_faults",
    "flash_evicted",
    "flash_evicted_bytes",
    "flash_healed",
    "flash_published",
    "flash_verified_chunks",
    "flash_written_bytes",
    "open_bypasses",
    "open_hits",
    "open_misses",
    "origin_get_bytes",
    "origin_gets",
    "origin_heads",
    "origin_lists",
    "origin_requests",
    "origin_retries",
    "origin_throttled",
    "pass_through_bytes",
    "prefetch_bypassed",
    "prefetch_dropped",
    "prefetch_failures",
)
