"""A folder of pictures with a folder for each class."""

from pathlib import Path

from foundry.config.sources import download_hint
from foundry.core.errors import ConfigError, Violation, shown


def class_folders(path: str) -> list[Path]:
    """The folders of the classes, by name; the folder itself where there are none, and all pictures are of one class.

    Hidden ones are no classes.

    Raises:
        ConfigError: there is no such folder, or it cannot be read.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        wrong = ", which is a file" if folder.is_file() else " but there is no such folder"
        hint = download_hint(path, of_data=True)
        message = f"is {shown(path)}{wrong}; give a folder with a folder for each class{hint}"
        raise ConfigError(Violation("data.path", message))
    try:
        inside = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise ConfigError(Violation("data.path", f"is {shown(path)}, which cannot be read: {error.strerror}")) from None
    return inside or [folder]
