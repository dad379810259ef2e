"""Image folders with one subfolder per class."""

from pathlib import Path

from foundry.config.sources import download_hint
from foundry.core.errors import ConfigError, Violation, as_text


def class_folders(path: str) -> list[Path]:
    """Return the subfolders of an image folder, one per class, sorted by name, without hidden folders.

    If there are no subfolders, the result is the folder itself, and all images belong to one class.

    Raises:
        ConfigError: if the folder does not exist or cannot be read.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        problem = "is a file" if folder.is_file() else "does not exist"
        hint = download_hint(path, of_data=True)
        message = f"is {as_text(path)}, which {problem}; give a folder with a subfolder for each class{hint}"
        raise ConfigError(Violation("data.path", message))
    try:
        subfolders = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise ConfigError(
            Violation("data.path", f"is {as_text(path)}, which cannot be read: {error.strerror}")
        ) from None
    return subfolders or [folder]
