"""Count phrasings that make technical prose hard to read, and limit their rate in each tree of the repository.

    python tests/support/prose.py [PATH...]            rate of each path, by default of each tree
    python tests/support/prose.py --worst 20 [PATH...] also the worst sentences, with file and line
    python tests/support/prose.py --limits             lower the limits in prose_limits.json to the current rates

Prose is: docstrings, comments and messages (strings of four words or more) of Python, comments of YAML, and Markdown
without code blocks. In `tests/`, strings other than docstrings are data and do not count.
"""

import argparse
import ast
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Path(__file__).with_name("prose_limits.json")
TREES = ("README.md", "benchmarks", "conf", "docs", "foundry", "tests")
MARGIN = 3
"""Additional odd phrasings that `--limits` allows in each tree, so that deleting a good sentence fails no test."""
MIN_WORDS = 4
"""Minimum words of a message; shorter strings are names and keys."""

_CONDITION = r"(?:it|there|they|one|a|an|the|its) (?:is|are|has|have|can|does|was|were)"
_ODD = re.compile(
    r"\b(?:"
    + "|".join(
        (
            r"what\b(?!\s*\?)(?!'s new)",
            r"(?:of|by|to|from|in|at|for|with|without|under|over) (?:which|whom)\b",
            r"(?:that which|those (?:that|of|which|who)|the one (?:that|of)|the ones)\b",
            r"(?:is|are|was|were|be|has|have) (?:none|no (?:one|other|others|such|more))\b",
            r"(?:an? own|of (?:its|their|his|one's|your|a user's|foundry's|the user's) own)\b",
            r"(?:is|are|be|was|were|been) (?:told|said|asked|known again)\b",
            r"says? (?:so|how|which|what|that|nothing|otherwise)\b",
            r"(?:others'?|another's|likewise|besides|thereof|therein|whereby)\b",
            r"such\b(?! as\b)",
            r"(?:wherever|whoever|whichever|whatever)\b",
            rf"(?:^|(?<=[,;:.]\s))where\b|where {_CONDITION}\b",
            r"(?:is|are) to be \w+ed\b",
            r"(?:nor|save for|in that|but for|minds?)\b",
        )
    )
    + ")"
)
"""Phrasings that established training libraries rarely use; matched against lower-case sentences."""
_WORD = re.compile(r"[A-Za-z][A-Za-z']*")
_STRING_OR_COMMENT = re.compile(
    r"""(\"{3}|'{3})(?:\\.|[^\\])*?\1|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*""", re.DOTALL
)
"""Python's strings and comments: 30 times faster than `tokenize`."""
_SENTENCE_END = re.compile(r"(?<=[.;:!?])\s+|\n\s*\n|\n\s*(?=\w+: )")


@dataclass(frozen=True)
class Sentence:
    """A sentence with its file, line, number of words and number of odd phrasings."""

    file: Path
    line: int
    text: str
    num_words: int
    num_odd: int


@dataclass(frozen=True)
class Count:
    """Number of words and odd phrasings of a tree, and the sentences with odd phrasings."""

    num_words: int
    num_odd: int
    odd_sentences: tuple[Sentence, ...]

    @property
    def rate(self) -> float:
        """Odd phrasings per 1,000 words."""
        return self.rate_with(0)

    def rate_with(self, more: int) -> float:
        """Return the rate with this many additional odd phrasings."""
        return 1000 * (self.num_odd + more) / max(self.num_words, 1)

    def worst(self, most: int) -> list[str]:
        """Return the sentences with the highest density as `file:line: sentence`."""
        densest = sorted(self.odd_sentences, key=lambda s: s.num_odd / (s.num_words + 8), reverse=True)
        return [f"{_shown_path(s.file)}:{s.line}: {s.text[:220]}" for s in densest[:most]]


def count_tree(path: Path) -> Count:
    """Count the prose in a file, or in all files of a folder."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in _READERS)
    sentences = [sentence for file in files for sentence in _sentences(file)]
    odd = tuple(s for s in sentences if s.num_odd)
    return Count(sum(s.num_words for s in sentences), sum(s.num_odd for s in odd), odd)


def read_limits() -> dict[str, float]:
    """Return the highest rate allowed in each tree."""
    limits: dict[str, float] = json.loads(LIMITS.read_text(encoding="utf-8"))
    return limits


def lower_limits() -> None:
    """Set each limit to the current rate plus the margin, unless the limit is lower already."""
    limits = read_limits() if LIMITS.exists() else {}
    for tree in TREES:
        now = math.ceil(100 * count_tree(ROOT / tree).rate_with(MARGIN)) / 100
        limits[tree] = min(now, limits.get(tree, now))
    LIMITS.write_text(json.dumps(limits, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _sentences(file: Path) -> Iterator[Sentence]:
    source = file.read_text(encoding="utf-8")
    for first_line, text in _READERS[file.suffix](source, file):
        start = 0
        for end in [*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]:
            sentence = " ".join(text[start:end].split())
            if num_words := len(_WORD.findall(sentence)):
                line = first_line + text.count("\n", 0, start)
                yield Sentence(file, line, sentence, num_words, len(_ODD.findall(sentence.lower())))
            start = end


def _read_python(source: str, file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of docstrings, blocks of comments, and messages."""
    only_docstrings = file.is_relative_to(ROOT / "tests")
    for node in _nodes(ast.parse(source)):
        if only_docstrings:
            node = node.value if isinstance(node, ast.Expr) else None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        else:
            continue
        if len(_WORD.findall(text)) >= MIN_WORDS:
            yield node.lineno, text
    yield from _comment_blocks(source)


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes below it, except the literal parts of f-strings; faster than `ast.walk`."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        ignored = ast.Constant if isinstance(node, ast.JoinedStr) else ()
        for value in vars(node).values():
            if isinstance(value, list):
                nodes += [n for n in value if isinstance(n, ast.AST) and not isinstance(n, ignored)]
            elif isinstance(value, ast.AST):
                nodes.append(value)


def _comment_blocks(source: str) -> Iterator[tuple[int, str]]:
    """Yield first line and text of each block of comment lines and of each trailing comment."""
    block: list[str] = []
    first_line = line = 1
    position = 0
    for token in _STRING_OR_COMMENT.finditer(source):
        line += source.count("\n", position, token.start())
        position = token.start()
        if not token[0].startswith("#") or token[0].startswith(("# type:", "# noqa", "#!")):
            continue
        is_alone = not source[source.rfind("\n", 0, position) + 1 : position].strip()
        if not (block and is_alone and line == first_line + len(block)):
            if block:
                yield first_line, "\n".join(block)
            block, first_line = [], line
        block.append(token[0].lstrip("# "))
    if block:
        yield first_line, "\n".join(block)


def _read_markdown(source: str, _: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each paragraph, without code and link targets."""
    source = re.sub(r"```.*?```", lambda match: "\n" * match[0].count("\n"), source, flags=re.DOTALL)
    source = re.sub(r"`[^`\n]*`", "X", source)
    line = 1
    for block in re.split(r"(\n\s*\n)", source):
        if block.strip():
            yield line, re.sub(r"\]\([^)]*\)", "]", block)
        line += block.count("\n")


def _read_yaml(source: str, _: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.splitlines(), 1):
        if "#" in line:
            yield number, line.split("#", 1)[1].strip()


_READERS = {".py": _read_python, ".md": _read_markdown, ".yaml": _read_yaml, ".yml": _read_yaml}


def _shown_path(file: Path) -> Path:
    return file.relative_to(ROOT) if file.is_relative_to(ROOT) else file


def main(arguments: Sequence[str] | None = None) -> None:
    """Print rates and worst sentences, or lower the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--worst", type=int, default=0, metavar="N")
    parser.add_argument("--limits", action="store_true")
    options = parser.parse_args(arguments)
    if options.limits:
        lower_limits()
    limits = read_limits()
    for path in options.paths or [ROOT / tree for tree in TREES]:
        file = path.resolve()
        count = count_tree(file)
        limit = limits.get(str(_shown_path(file)))
        allowed = "" if limit is None else f", limit {limit:g}"
        sys.stdout.write(
            f"{_shown_path(file)}: {count.num_odd} in {count.num_words:,} words, {count.rate:.2f} per 1,000{allowed}\n"
        )
        for sentence in count.worst(options.worst):
            sys.stdout.write(f"    {sentence}\n")


if __name__ == "__main__":
    main()
