"""Settings of glibc's allocator under which activations are not fetched anew in every step."""

from __future__ import annotations

import os

SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "134217728",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Variables with which memory that is freed stays with the process, and lies in huge pages where
Linux gives them to programs that ask (from glibc 2.35 on)."""


def settings_here() -> dict[str, str]:
    """Return those of the variables that this process was started with."""
    return {name: os.environ[name] for name in SETTINGS if name in os.environ}
