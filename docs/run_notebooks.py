"""Runs the notebooks of docs/notebooks: `python docs/run_notebooks.py [--write] [FILE ...]`.

Each is run from top to bottom in an empty folder, and ends at the first error. `--write` keeps what its cells answer,
as the repository's pages and the site show it.
"""

import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent / "notebooks"
LIMIT_SECONDS = 600
"""Of a cell: a machine may be busy."""


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with what its cells answer, without what differs from one machine to the next.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell has failed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models, and other work beside them
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="foundry-notebook-", ignore_cleanup_errors=True) as folder:
        NotebookClient(notebook, timeout=LIMIT_SECONDS, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            if "text" in output:
                output["text"] = re.sub(re.escape(folder) + "/?", "", output["text"])
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    return notebook


def main(words: list[str]) -> None:
    """Run all, or those that are named."""
    for path in [Path(word) for word in words if word != "--write"] or sorted(FOLDER.glob("*.ipynb")):
        began = time.monotonic()
        notebook = execute(path)
        sys.stdout.write(f"{path.name}: {time.monotonic() - began:.1f} s\n")
        if "--write" in words:
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
