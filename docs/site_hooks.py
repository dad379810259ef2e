"""Hooks of MkDocs that turn the repository's pages into a site; mkdocs.yml names this file.

Pages are written for the repository and link to any of its files. On the site, the README becomes the start page,
notebooks become pages, and a code file that a page links to becomes a page with the code. Links are changed to these
pages; a link without a target fails a strict build.
"""

import base64
import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(?:(?<=\]\()|(?<=src=\")|(?<=srcset=\"))(?P<path>[^)#\s:\"]+)(?P<anchor>#[^)\s\"]*)?(?=[)\"])")
_REFERENCE = re.compile(r"<!-- reference: ([\w.]+) -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages for files that MkDocs does not find: top-level pages, notebooks, and linked code files."""
    origins = {file.src_uri: ROOT / "docs" / file.src_uri for file in files.documentation_pages()}
    for name, uri in TOP.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
        origins[uri] = ROOT / name
    for notebook in sorted((ROOT / "docs").rglob("*.ipynb")):
        uri = site_uri(notebook)
        text, pictures = notebook_page(notebook)
        files.append(File.generated(config, uri, content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"{Path(uri).parent}/{name}", content=content))
    for origin in origins.values():
        for match in _LINK.finditer(origin.read_text(encoding="utf-8")):
            target = (origin.parent / match["path"]).resolve()
            uri = site_uri(target)
            if uri.startswith("source/") and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, content=source_page(target)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change links to pages of the site, and replace `<!-- reference: NAME -->` by the documentation of NAME."""
    here = page.file.src_uri
    names = {uri: name for name, uri in TOP.items()}
    origin = ROOT / names[here] if here in names else ROOT / "docs" / here

    def link(match: re.Match[str]) -> str:
        uri = site_uri((origin.parent / match["path"]).resolve())
        return os.path.relpath(uri, Path(here).parent) + (match["anchor"] or "") if uri else match[0]

    if here == "comparison.md":
        page.meta["hide"] = ["toc"]  # a wide table
    return _REFERENCE.sub(r"::: \1", _LINK.sub(link, markdown))


def site_uri(path: Path) -> str:
    """Return the page of the site for a file of the repository; empty if the file does not exist."""
    if not path.is_file() or not path.is_relative_to(ROOT):
        return ""
    name = path.relative_to(ROOT).as_posix()
    if name in TOP:
        return TOP[name]
    inside = name.removeprefix("docs/")
    if path.suffix == ".ipynb":
        return inside.removesuffix(".ipynb") + ".md"
    return inside if inside != name and path.suffix != ".py" else f"source/{name}.md"


def source_page(path: Path) -> str:
    """Return the Markdown page of a code file."""
    language = {".py": "python", ".yaml": "yaml", ".cfg": "ini"}.get(path.suffix, "text")
    text = path.read_text(encoding="utf-8").rstrip()
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path.relative_to(ROOT)}\n\n````{language}\n{text}\n````\n"


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as a Markdown page with the outputs of its cells, and its PNG pictures by file name."""
    parts, pictures = list[str](), dict[str, bytes]()
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = _joined(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode(_joined(data["image/png"]))
                parts.append(f"![{_joined(data['text/plain'])}]({name})")
            elif text := _joined(data["text/plain"]).rstrip():
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n", pictures


def _joined(text: Any) -> str:
    """Join a text that a notebook stores as one string or as a list of lines."""
    return text if isinstance(text, str) else "".join(text)
