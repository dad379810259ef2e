"""Names of settings in other systems, from the table in names.csv, and the overrides that stand for them here."""

import csv
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Options = Callable[[str], Sequence[str]]
"""`options(group)`: the options of a group, empty for a name that is no group."""

OTHERS = "others"
"""System of the rows with names that are common, or of a system whose fields were not read one by one."""

_TABLE = Path(__file__).with_name("names.csv")
_MOST_ALTERNATIVES = 3


@dataclass(frozen=True)
class Name:
    """A row of the table: a key of another system, with one value of it or any.

    Attributes:
        system: the system that has the key.
        version: the version of the system that was read; empty for names that are common.
        key: dotted, as the system spells it.
        value: the value that the row is about; empty: any other.
        ours: overrides to type here, separated by spaces; empty without a counterpart. `{value}` is the value
            as typed, `{0}` and `{1}` its words. Choices in brackets are needed if the chosen options lack the key.
        note: a remark, or the reason why a name has no counterpart.
    """

    system: str
    version: str
    key: str
    value: str
    ours: str
    note: str

    @property
    def choices(self) -> list[str]:
        """The overrides in brackets."""
        return self._split()[0]

    @property
    def overrides(self) -> list[str]:
        """The overrides outside of brackets, with their placeholders."""
        return self._split()[1]

    @property
    def settings(self) -> list[str]:
        """The keys and groups that the overrides outside of brackets set."""
        return [override.partition("=")[0].lstrip("+") for override in self.overrides]

    def _split(self) -> tuple[list[str], list[str]]:
        found = re.fullmatch(r"(?:\[(.*?)\] )?(.*)", self.ours)
        assert found is not None
        return shlex.split(found[1] or ""), shlex.split(found[2])

    def write(self, value: str | None, known: Collection[str], options: Options) -> str | None:
        """Return the overrides as they are typed in a shell; None if the row has no override for this value.

        Args:
            value: as typed; None if it is unknown.
            known: dotted paths of the settings that the chosen options have.
            options: lists a group's options; a choice of another one is not written.
        """
        words = re.findall(r"[^\s,;:\[\](){}'\"]+", value or "")
        try:
            written = [override.format(*words, value="..." if value is None else value) for override in self.overrides]
        except IndexError:
            return None
        for number, override in enumerate(written):
            key, _, option = override.partition("=")
            if "." not in key and value is not None and (listed := options(key)) and option not in listed:
                option = plain(option)
                written[number] = f"{key}={option}"
                if option not in listed:
                    return None
        if not set(self.settings) <= set(known):
            backbone = [override.replace("model.", "model.backbone.", 1) for override in written]
            in_backbone = {override.partition("=")[0] for override in backbone} <= set(known)
            written = backbone if in_backbone else self.choices + written
        return " ".join(map(quoted, written)) or None


@cache
def names() -> tuple[Name, ...]:
    """All rows of the table."""
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(Name(**row) for row in csv.DictReader(file))


@cache
def names_of(key: str) -> tuple[str, ...]:
    """The names that other systems have for a setting, as the table lists them."""
    leaf = plain(key.rpartition(".")[2])
    found = (row.key for row in names() if row.settings == [key] and plain(row.key) not in (leaf, plain(key)))
    return tuple(dict.fromkeys(found))


def own_options(group: str) -> list[str]:
    """Return the options that foundry itself has in a group, empty for a name that is no group."""
    from foundry.config.composition.compose import config_dir  # which imports this module when it explains errors

    return sorted(path.stem for path in Path(config_dir(), group).glob("*.yaml")) if "." not in group else []


def plain(word: str) -> str:
    """Return a name or a value in lower case, with underscores, without quotes and prefixes."""
    return word.strip().strip("'\"").lower().replace("-", "_").lstrip("+~")


def is_name(key: str) -> bool:
    """Return whether another system has a key of this name; of a dotted one the last parts count."""
    return bool(_rows(key, None))


def hint(key: str, value: str | None, known: Collection[str], options: Options = own_options) -> str:
    """`; write x=1` for a key that is another system's, in one line with all that differ; else nothing.

    Args:
        key: as typed, at any place; of its path as many last parts count as some system has.
        value: as typed; None if it is unknown.
        known: dotted paths of the settings that the chosen options have.
        options: lists the options of a group.
    """
    return _told(key, _rows(key, value), value, known, options)


def option_hint(group: str, value: str, options: Options) -> str:
    """`; write x=y` for a value of a group that is none of its options, but one of another system; else nothing."""
    rows = [row for row in names() if row.value and plain(row.value) == plain(value)]
    rows = [row for row in rows if group in row.settings or row.key == group]
    rows = [row for row in rows if row.key == group] or rows
    if not rows and plain(value) in options(group):
        return f"; write {group}={plain(value)}"
    return _told(group, rows[:1], value, (), options)


def _told(key: str, rows: Sequence[Name], value: str | None, known: Collection[str], options: Options) -> str:
    written = dict[str, list[Name]]()
    for row in _fitting(key, rows, known):
        if (text := row.write(value, known, options)) is not None:
            written.setdefault(text, []).append(row)
    if len(written) == 1:
        (text, (first, *_)), *_ = written.items()
        return f"; write {text}{f' ({first.note})' if first.note else ''}"
    if written:
        alternatives = [f"{text} ({_whose(those)})" for text, those in written.items()]
        return f"; write {' or '.join(alternatives[:_MOST_ALTERNATIVES])}"
    for row in rows:
        if row.note and not row.ours:
            whose = "it" if row.system == OTHERS else f"{row.key} of {row.system}"
            return f"; {whose} has no counterpart: {row.note}"
    if groups := {key for row in rows for key in row.settings if options(key)}:
        group = min(groups)
        return f"; choose {group}= from {', '.join(options(group))}"
    return ""


def _rows(key: str, value: str | None) -> Sequence[Name]:
    """The rows about a key and its value, of all systems."""
    parts = plain(key).split(".")
    for number in range(len(parts)):
        if rows := _by_suffix().get(".".join(parts[number:])):
            exact = [row for row in rows if len(row.key.split(".")) == len(parts) - number] or rows
            return _about(exact, value)
    return []


def _about(rows: Sequence[Name], value: str | None) -> Sequence[Name]:
    """The rows about a value, else those about any value that has no row of its own, else all."""
    same = [row for row in rows if row.value and value is not None and _in_yaml(row.value) == _in_yaml(value)]
    return same or [row for row in rows if not row.value] or rows


def _in_yaml(value: str) -> str:
    """Return a plain value; `no`, `off`, `yes` and `on` as the truth values that they are in YAML."""
    word = plain(value)
    return {"no": "false", "off": "false", "yes": "true", "on": "true"}.get(word, word)


def _fitting(key: str, rows: Sequence[Name], known: Collection[str]) -> Sequence[Name]:
    """Return the rows that fit the group of the key and the chosen options; all rows if none fits."""
    group = plain(key).partition(".")[0] if "." in key else ""
    here = [row for row in rows if any(word.partition(".")[0] == group for word in row.settings)]
    rows = here or rows
    chosen = [row for row in rows if row.choices and set(row.settings) <= set(known)]
    return [row for row in rows if not row.choices or row in chosen] if chosen else rows


def _whose(rows: Sequence[Name]) -> str:
    systems = dict.fromkeys(row.system for row in rows)
    value = next((row.value for row in rows if row.value), "")
    return f"{next(iter(systems))}: {value}" if value else next(iter(systems))


def quoted(override: str) -> str:
    """An override as it is typed in a shell."""
    return override if re.fullmatch(r"[\w.,:/=+@%^~-]*", override) else shlex.quote(override)


@cache
def _by_suffix() -> dict[str, list[Name]]:
    """The rows by all endings of their keys."""
    index = dict[str, list[Name]]()
    for row in names():
        parts = plain(row.key).split(".")
        for number in range(len(parts)):
            index.setdefault(".".join(parts[number:]), []).append(row)
    return index
