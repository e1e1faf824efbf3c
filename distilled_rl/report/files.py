"""Files that are either whole or not there."""

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> Path:
    """Write `content` (text as UTF-8) to `path` by a temporary file and a rename; make its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
