"""Files that are there whole or not at all."""

import os
import pathlib


def write(path: pathlib.Path, content: bytes) -> None:
    """Puts `content` in the place of what was there; a kill leaves one or the other."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    scratch.write_bytes(content)
    scratch.replace(path)
