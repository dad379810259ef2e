"""Names of settings in other frameworks, from the table in names.csv, and the equivalent overrides of foundry."""

import csv
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Options = Callable[[str], Sequence[str]]
"""Signature `options(group)`: returns the options of a group, empty if there is no group of this name."""

OTHERS = "others"
"""`system` of names in common use, and of frameworks whose fields were not read one by one."""

_TABLE = Path(__file__).with_name("names.csv")
_MOST_ALTERNATIVES = 3


@dataclass(frozen=True)
class Name:
    """Row of the table: a key of another framework, with one value or for all values.

    Attributes:
        system: framework that has the key.
        version: version of the framework that was read; empty for names in common use.
        key: dotted key, as the framework spells it.
        value: value that the row applies to; empty for all values without their own row.
        ours: equivalent overrides of foundry, separated by spaces; empty without a counterpart. `{value}` is the value
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
        """Overrides that `ours` has in brackets, which choose options."""
        return self._split()[0]

    @property
    def overrides(self) -> list[str]:
        """Overrides outside of brackets, with their placeholders."""
        return self._split()[1]

    @property
    def settings(self) -> list[str]:
        """Keys and groups that the overrides outside of brackets set."""
        return [override.partition("=")[0].lstrip("+") for override in self.overrides]

    def _split(self) -> tuple[list[str], list[str]]:
        match = re.fullmatch(r"(?:\[(.*?)\] )?(.*)", self.ours)
        assert match is not None
        return shlex.split(match[1] or ""), shlex.split(match[2])

    def write(self, value: str | None, settings: Collection[str], options: Options) -> str | None:
        """Return the overrides as typed in a shell; None if the row has no override for this value.

        Args:
            value: value as typed; None if it is unknown.
            settings: dotted paths of the settings that the chosen options have.
            options: lists the options of a group; nothing is written for a row that chooses an unknown option.
        """
        words = re.findall(r"[^\s,;:\[\](){}'\"]+", value or "")
        try:
            lines = [override.format(*words, value="..." if value is None else value) for override in self.overrides]
        except IndexError:
            return None
        for number, override in enumerate(lines):
            key, _, option = override.partition("=")
            if "." not in key and value is not None and (group_options := options(key)) and option not in group_options:
                option = plain(option)
                lines[number] = f"{key}={option}"
                if option not in group_options:
                    return None
        if not set(self.settings) <= set(settings):
            backbone_lines = [override.replace("model.", "model.backbone.", 1) for override in lines]
            in_backbone = {override.partition("=")[0] for override in backbone_lines} <= set(settings)
            lines = backbone_lines if in_backbone else self.choices + lines
        return " ".join(map(quoted, lines)) or None


@cache
def names() -> tuple[Name, ...]:
    """Return all rows of the table."""
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(Name(**row) for row in csv.DictReader(file))


@cache
def names_of(key: str) -> tuple[str, ...]:
    """Return the names that other frameworks have for a setting, according to the table."""
    leaf = plain(key.rpartition(".")[2])
    keys = (row.key for row in names() if row.settings == [key] and plain(row.key) not in (leaf, plain(key)))
    return tuple(dict.fromkeys(keys))


def own_options(group: str) -> list[str]:
    """Return foundry's own options of a group; empty if there is no group of this name."""
    from foundry.config.composition.compose import config_dir  # would be a circular import at module level

    return sorted(path.stem for path in Path(config_dir(), group).glob("*.yaml")) if "." not in group else []


def plain(word: str) -> str:
    """Return a name or a value in lower case, with underscores, without quotes and prefixes."""
    return word.strip().strip("'\"").lower().replace("-", "_").lstrip("+~")


def is_name(key: str) -> bool:
    """Return True if another framework has a key of this name. The last parts of a dotted key are compared."""
    return bool(_rows(key, None))


def hint(key: str, value: str | None, settings: Collection[str], options: Options = own_options) -> str:
    """Return the hint `; write x=1` for a key of another framework, or an empty string.

    If frameworks differ in the meaning of the key, the hint lists the alternatives.

    Args:
        key: key as typed, under any prefix. The longest suffix that a framework has is used.
        value: value as typed; None if it is unknown.
        settings: dotted paths of the settings that the chosen options have.
        options: lists the options of a group.
    """
    return _format_hint(key, _rows(key, value), value, settings, options)


def option_hint(group: str, value: str, options: Options) -> str:
    """Return the hint `; write x=y` for another framework's name or spelling of an option, or an empty string."""
    rows = [row for row in names() if row.value and plain(row.value) == plain(value)]
    rows = [row for row in rows if group in row.settings or row.key == group]
    rows = [row for row in rows if row.key == group] or rows
    if not rows and plain(value) in options(group):
        return f"; write {group}={plain(value)}"
    return _format_hint(group, rows[:1], value, (), options)


def _format_hint(key: str, rows: Sequence[Name], value: str | None, settings: Collection[str], options: Options) -> str:
    rows_by_text = dict[str, list[Name]]()
    for row in _rows_for_group(key, rows, settings):
        if (text := row.write(value, settings, options)) is not None:
            rows_by_text.setdefault(text, []).append(row)
    if len(rows_by_text) == 1:
        (text, (first, *_)), *_ = rows_by_text.items()
        return f"; write {text}{f' ({first.note})' if first.note else ''}"
    if rows_by_text:
        alternatives = [
            f"{text} ({_format_systems(alternative_rows)})" for text, alternative_rows in rows_by_text.items()
        ]
        return f"; write {' or '.join(alternatives[:_MOST_ALTERNATIVES])}"
    for row in rows:
        if row.note and not row.ours:
            whose = "it" if row.system == OTHERS else f"{row.key} of {row.system}"
            return f"; {whose} has no direct counterpart: {row.note}"
    if groups := {key for row in rows for key in row.settings if options(key)}:
        group = min(groups)
        return f"; choose {group}= from {', '.join(options(group))}"
    return ""


def _rows(key: str, value: str | None) -> Sequence[Name]:
    """Return the rows of all frameworks that match a value and the longest known suffix of a key."""
    parts = plain(key).split(".")
    for number in range(len(parts)):
        if rows := _by_suffix().get(".".join(parts[number:])):
            exact = [row for row in rows if len(row.key.split(".")) == len(parts) - number] or rows
            return _rows_for_value(exact, value)
    return []


def _rows_for_value(rows: Sequence[Name], value: str | None) -> Sequence[Name]:
    """Return the rows for this value, or if this value has no row, the rows without a value, or else all rows."""
    same_value = [row for row in rows if row.value and value is not None and _in_yaml(row.value) == _in_yaml(value)]
    return same_value or [row for row in rows if not row.value] or rows


def _in_yaml(value: str) -> str:
    """Return a value in normalized form. As in YAML, `no` and `off` are false, `yes` and `on` are true."""
    word = plain(value)
    return {"no": "false", "off": "false", "yes": "true", "on": "true"}.get(word, word)


def _rows_for_group(key: str, rows: Sequence[Name], settings: Collection[str]) -> Sequence[Name]:
    """Return the rows that fit the group of the key and the chosen options; all rows if none fits."""
    group = plain(key).partition(".")[0] if "." in key else ""
    same_group = [row for row in rows if any(word.partition(".")[0] == group for word in row.settings)]
    rows = same_group or rows
    available = [row for row in rows if row.choices and set(row.settings) <= set(settings)]
    return [row for row in rows if not row.choices or row in available] if available else rows


def _format_systems(rows: Sequence[Name]) -> str:
    systems = dict.fromkeys(row.system for row in rows)
    value = next((row.value for row in rows if row.value), "")
    return f"{next(iter(systems))}: {value}" if value else next(iter(systems))


def quoted(override: str) -> str:
    """Quote an override for a shell."""
    return override if re.fullmatch(r"[\w.,:/=+@%^~-]*", override) else shlex.quote(override)


@cache
def _by_suffix() -> dict[str, list[Name]]:
    """Return the rows of the table, by every suffix of their dotted keys."""
    index = dict[str, list[Name]]()
    for row in names():
        parts = plain(row.key).split(".")
        for number in range(len(parts)):
            index.setdefault(".".join(parts[number:]), []).append(row)
    return index
