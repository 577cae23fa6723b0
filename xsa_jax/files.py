"""Files that are there whole or not at all, whenever the machine stops."""

import json
import os
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces the file; a kill or a power failure leaves either the old content or the new.

    Raises:
      OSError: the file cannot be written; the old content is then still there.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON as `write_bytes` does."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def sync_folder(path: Path) -> None:
    """Makes renames inside the folder survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
