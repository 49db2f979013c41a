"""What runs take on disk."""

from __future__ import annotations

import os
from pathlib import Path


def disk_bytes(folder: Path) -> int:
    """Bytes that the files below `folder` occupy. Links are not followed; what vanishes or is closed counts nothing."""
    total = 0
    for root, _, files in os.walk(folder, onerror=None, followlinks=False):
        for name in files:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except OSError:
                continue
    return total
