"""Atomic and durable file writes."""

import json
import os
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces the content of a file atomically: a kill or a power failure leaves either the old content or the new.

    Raises:
      OSError: the file cannot be written. It then keeps its old content.
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
    """Writes UTF-8 text, with the guarantee and the errors of `write_bytes`."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON, with the guarantee and the errors of `write_bytes`."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def sync_folder(path: Path) -> None:
    """Flushes the folder to disk, so that renames inside it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
