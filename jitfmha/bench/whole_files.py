"""Writes result files that are complete or not there."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(file: str, data: bytes) -> None:
    """Write or replace ``file``; one that is there stays as it is until the new one is complete.
    Raises ``OSError`` where it cannot be written.
    """
    target = Path(file)
    part = target.with_name(f".{target.name}-{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(data)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
