"""Run the notebooks of docs/notebooks: `python docs/run_notebooks.py [--write] [FILE ...]`.

Each notebook runs from top to bottom in an empty folder and ends at the first error. `--write` saves the outputs of the
cells in the notebook, which the site shows.
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
"""Time limit of a cell; long, because the machine may be busy."""


def execute(path: Path) -> nbformat.NotebookNode:
    """Run a notebook and return it with the outputs, without run times, temporary paths and properties of the machine.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for small models beside other programs
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
    """Run the notebooks named by `words`, or all of `FOLDER`; with --write, save their outputs."""
    for path in [Path(word) for word in words if word != "--write"] or sorted(FOLDER.glob("*.ipynb")):
        began = time.monotonic()
        notebook = execute(path)
        sys.stdout.write(f"{path.name}: {time.monotonic() - began:.1f} s\n")
        if "--write" in words:
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
