"""Hooks of the documentation site: links, API reference and notebooks."""

import json
from types import SimpleNamespace

import pytest
from support.scripts import ROOT, load_script

pytest.importorskip("mkdocs", reason="needs the extra docs")


@pytest.fixture(scope="module")
def hooks():
    return load_script("site_hooks")


def linked(hooks, markdown, *, page):
    file = SimpleNamespace(src_uri=page)
    return hooks.on_page_markdown(markdown, page=SimpleNamespace(file=file, meta={}), config=None, files=None)


def test_site_rewrites_links_to_its_own_pages(hooks):
    start = '[a](docs/plan.md) [b](CONTRIBUTING.md#tests) [c](docs/notebooks/own_model.ipynb) src="docs/site.css"'
    assert linked(hooks, start, page="index.md") == (
        '[a](plan.md) [b](contributing.md#tests) [c](notebooks/own_model.md) src="site.css"'
    )
    page = "[a](../CHANGELOG.md) [b](../foundry/eval.py) [c](plan.md#x) [d](https://example.org/a.md) [e](gone.md)"
    assert linked(hooks, page, page="faq.md") == (
        "[a](changelog.md) [b](source/foundry/eval.py.md) [c](plan.md#x) [d](https://example.org/a.md) [e](gone.md)"
    )
    assert linked(hooks, "[a](../library.md)", page="notebooks/own_model.md") == "[a](../library.md)"


def test_reference_comment_inserts_api_documentation(hooks):
    assert (
        linked(hooks, "<!-- reference: foundry.commands.library.run -->", page="reference.md")
        == "::: foundry.commands.library.run"
    )


def test_notebook_page_includes_outputs_and_pictures(hooks, tmp_path):
    answers = [
        {"output_type": "stream", "text": ["one\n", "two\n"]},
        {"output_type": "display_data", "data": {"image/png": "aGk=", "text/plain": "a curve"}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n"]},
        {"cell_type": "code", "source": "print(1)", "outputs": answers},
    ]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    text, pictures = hooks.notebook_page(tmp_path / "n.ipynb")
    assert text == "# Title\n\n\n```python\nprint(1)\n```\n\n```text\none\ntwo\n```\n\n![a curve](n_0.png)\n"
    assert pictures == {"n_0.png": b"hi"}


def test_notebooks_are_stored_with_outputs():
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert any(cell["outputs"] for cell in cells), "run python docs/run_notebooks.py --write"
