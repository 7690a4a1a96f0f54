"""The folder in which engines keep what they have learned: tried before any process starts."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile


def usable_folder(written: str) -> str:
    """Its absolute path; it is made if it is not there.

    Raises:
        ValueError: nothing can be written there.
    """
    folder = Path(written).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):  # rights alone do not say whether it works
            pass
    except (OSError, ValueError) as error:
        raise ValueError(
            f"estimates_folder is {written!r}, and nothing can be written there ({error}). Name a"
            " folder that the server's user may write to, or leave estimates_folder out: then"
            " every start measures anew."
        ) from None
    return str(folder)
