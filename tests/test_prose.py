"""Readability of prose: the rate of odd phrasings in each tree stays below a limit that is only lowered."""

import json

import pytest
from support import prose


@pytest.fixture(scope="module", params=prose.TREES)
def tree(request):
    """Return the name of a tree and the count of its odd phrasings."""
    return request.param, prose.count_tree(prose.ROOT / request.param)


def test_prose_stays_within_the_limit(tree):
    name, count = tree
    limit = prose.read_limits()[name]
    if count.rate > limit:
        worst = "\n  ".join(count.worst(15))
        rates = f"{count.rate:.2f} odd phrasings per 1,000 words, limit {limit:.2f}"
        pytest.fail(f"{name}: {rates}. Rewrite new or touched sentences. The worst of the tree:\n  {worst}")


def test_limit_leaves_room_for_fewer_than_ten_odd_phrasings(tree):
    name, count = tree
    limit = prose.read_limits()[name]
    assert limit < count.rate_with(10), f"{name}: lower the limit with `python tests/support/prose.py --limits`"


def write(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


PYTHON = '''"""Of which there are none."""

# Says what
# it is told.
def function(x):
    """Return the path."""
    raise ValueError(f"what becomes of {x} is to be decided" + "what")  # whatever it takes
'''


def test_count_covers_docstrings_comments_and_messages_of_python(tmp_path):
    count = prose.count_tree(write(tmp_path, "module.py", PYTHON))
    found = sorted((s.line, s.text, s.num_odd) for s in count.odd_sentences)
    assert found == [
        (1, "Of which there are none.", 2),
        (3, "Says what it is told.", 2),
        (7, "what becomes of X is to be decided", 2),
        (7, "whatever it takes", 1),
    ]
    assert count.num_words == 21


def test_sentences_of_a_docstring_have_their_own_line_numbers(tmp_path):
    path = write(tmp_path, "module.py", '"""Return the path.\n\nThe path is absolute. What it\nnames exists.\n"""\n')
    assert prose.count_tree(path).worst(1) == [f"{path}:3: What it names exists."]


def test_count_ignores_markdown_code_and_yaml_values(tmp_path):
    page = write(tmp_path, "page.md", "# What\n\n```text\nwhat\n```\n\nRun `what` in [a file](what.md), where it is.\n")
    options = write(tmp_path, "options.yaml", "key: what  # the one that counts\n")
    assert [s.text for s in prose.count_tree(page).odd_sentences] == ["# What", "Run X in [a file], where it is."]
    assert [s.text for s in prose.count_tree(options).odd_sentences] == ["the one that counts"]


def test_count_ignores_strings_in_tests(monkeypatch, tmp_path):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    path = write(tmp_path / "tests", "test_part.py", PYTHON)
    assert all("becomes" not in s.text for s in prose.count_tree(path).odd_sentences)


def test_lower_limits_never_raises_a_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "TREES", ("page.md",))
    monkeypatch.setattr(prose, "LIMITS", tmp_path / "limits.json")
    write(tmp_path, "page.md", "word " * 998 + "what what")
    prose.lower_limits()
    assert json.loads(prose.LIMITS.read_text()) == {"page.md": 2 + prose.MARGIN}
    write(tmp_path, "page.md", "word " * 999 + "what")
    prose.lower_limits()
    assert prose.read_limits() == {"page.md": 1 + prose.MARGIN}
    write(tmp_path, "page.md", "word " * 990 + "what " * 10)
    prose.lower_limits()
    assert prose.read_limits() == {"page.md": 1 + prose.MARGIN}
