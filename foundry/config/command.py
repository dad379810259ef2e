"""`key=value` arguments of commands other than training, with the grammar, types and errors of a run's overrides."""

import errno
import json
import os
import platform
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry import __version__
from foundry.config.composition.start_dir import check_start_dir
from foundry.config.diagnostics.flags import JSON, Flag, split_flags
from foundry.config.packages import conflict_message
from foundry.config.setting import check_fields
from foundry.config.sources import is_url, local_path, why_no_url
from foundry.core.errors import ConfigError, Violation, as_text, nearest
from foundry.core.exit_codes import ExitCode
from foundry.run_dir.mirror.reading import NoRunError, fetch_run, fetch_runs
from foundry.run_dir.mirror.store import StoreError, why_not_a_store
from foundry.run_dir.outputs import Recognizer, folder_refusal, refusal
from foundry.run_dir.redact import one_line, printable
from foundry.run_dir.strict_json import encode

Options = TypeVar("Options")

_WIDTH = 118
_INTERPOLATION = re.compile(r"(?<!\\)(\\\\)*\$\{")
_OF_THE_PATH = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EINVAL,
)
"""Errors caused by the given path, so that the command was invalid; other errors are caused by the machine."""


@dataclass(frozen=True)
class Outcome:
    """Result of a command.

    Attributes:
        facts: JSON values printed with `--json`; NaN and infinite numbers become strings.
        exit_code: exit code of the command.
    """

    facts: Mapping[str, Any]
    exit_code: int = ExitCode.SUCCESS


def command(schema: type[Options], run: Callable[[Options], Outcome], *, name: str, doc: str) -> None:
    """Parse the arguments after the command's name, and run the command; errors are handled as in `run_words`.

    Args:
        schema: frozen dataclass of `setting`s with the options.
        run: called with the parsed options.
        name: name of the command, for the help page.
        doc: description of the command, for the help page.
    """
    run_words(
        lambda words: run(parse_options(schema, words)), name=name, write_help=lambda: help_text(schema, name, doc)
    )


def run_words(run: Callable[[list[str]], Outcome], *, name: str, write_help: Callable[[], str]) -> None:
    """Run a command with the arguments after its name; exit with code 2 and a line for each error in the arguments.

    An unreadable or unwritable file is also reported in a line: with exit code 2 if the path is invalid, else 1. The
    traceback of any other exception is printed without secrets.

    Args:
        run: called with the arguments, without `--json`.
        name: name of the command, for messages.
        write_help: returns the page of `--help`.
    """
    words, as_json = take_json(sys.argv[1:])
    try:
        with output_may_close():
            if answer_help(words, write_help):
                return
            check_start_dir()
            with facts_alone() if as_json else nullcontext():
                outcome = run(words)
            if as_json:
                print_facts(outcome.facts)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(ExitCode.REFUSED)
    except KeyboardInterrupt:
        sys.exit(ExitCode.SIGINT)
    except OSError as error:
        sys.stderr.write(f"{name}: {one_line(str(error))}\n")
        sys.exit(ExitCode.REFUSED if error.errno in _OF_THE_PATH else ExitCode.FAILED)
    except Exception:
        sys.stderr.write(printable(traceback.format_exc()))
        sys.exit(ExitCode.FAILED)
    if outcome.exit_code:
        sys.exit(outcome.exit_code)


def take_json(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without `--json`, and whether `--json` was among them."""
    return [word for word in arguments if word != JSON], JSON in arguments


@contextmanager
def facts_alone() -> Iterator[None]:
    """Redirect standard output, also of child processes, to standard error, so that only facts are printed to it."""
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print facts as one JSON object, without secrets."""
    sys.stdout.write(f"{printable(json.dumps(json.loads(encode(facts)), indent=2))}\n")


@contextmanager
def output_may_close() -> Iterator[None]:
    """Exit with code 141 if the reader of the output, such as `head`, closes the pipe.

    Pending output to the pipe, or to a closed terminal, is dropped, since Python would exit with code 120.
    """
    try:
        yield
    except BrokenPipeError:
        sys.exit(ExitCode.SIGPIPE)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError as error:  # other errors are raised again and reported when Python exits
                if error.errno in (errno.EPIPE, errno.EIO):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def parse_options(schema: type[Options], overrides: list[str], *, refusals: Mapping[str, str] | None = None) -> Options:
    """Parse `key=value` arguments.

    Args:
        schema: dataclass of the options.
        overrides: the arguments.
        refusals: options and groups that this schema lacks, with the reason, which completes the message `is VALUE but
            ...`.

    Raises:
        ConfigError: lists all errors in the arguments.
    """
    options, violations = OmegaConf.structured(schema), list[Violation]()
    OmegaConf.set_readonly(options, None)
    OmegaConf.set_struct(options, True)
    names = [item.name for item in fields(schema)]  # type: ignore[arg-type] # a dataclass, by contract
    flags, overrides = split_flags(overrides, {})
    for flag in flags:
        message = f"is not a valid argument; {_suggest_override(flag, [*names, *(refusals or ())])}"
        violations.append(Violation(flag.text, message))
    for text in overrides:
        try:
            override = OverridesParser.create().parse_overrides([text])[0]
        except HydraException:
            violations.append(
                Violation(
                    text, "is not of the form key=value; quote values with spaces, commas, = or special characters"
                )
            )
            continue
        if (violation_of_override := _check_override(override, names, refusals or {})) is not None:
            violations.append(violation_of_override)
            continue
        try:
            OmegaConf.update(options, override.key_or_group, override.value())
        except (OmegaConfBaseException, OverflowError) as error:
            from foundry.config.diagnostics.override_errors import explain_value

            violations.append(explain_value(override, error))
    wrong_keys = {violation.key for violation in violations} | {flag.key for flag in flags}
    missing = sorted(OmegaConf.missing_keys(options) - wrong_keys)
    violations += [Violation(key, f"has no value; give it as {key}=...") for key in missing]
    if violations:
        raise ConfigError(violations)
    result = OmegaConf.to_object(options)
    if violations := list(check_fields(result, "")):
        raise ConfigError(violations)
    assert isinstance(result, schema)
    return result


def _suggest_override(flag: Flag, names: Sequence[str]) -> str:
    if flag.key in names:
        return f"write {flag.key}={flag.value}"
    return f"give options as key=value{nearest(flag.key, names)} (options: {', '.join(names)})"


def _check_override(override: Override, names: Sequence[str], refusals: Mapping[str, str]) -> Violation | None:
    """Return the error of a syntactically valid override, regardless of the options' types.

    None if there is no error.
    """
    key = override.key_or_group
    if key not in names and (reason := refusals.get(key, refusals.get(key.partition(".")[0]))) is not None:
        value = override.value()
        return Violation(key, f"is {value if isinstance(value, str) else override.get_value_string()} but {reason}")
    if key not in names:
        return Violation(key, f"is not an option{nearest(key, names)} (options: {', '.join(names)})")
    if override.type is not OverrideType.CHANGE or override.package is not None:
        return Violation(key, f"is given as {override.input_line}; commands accept only {key}=value")
    text = override.get_value_string()
    if override.is_sweep_override():
        return Violation(key, f"is {text} but takes one value; quote text with commas, as in {key}='\"a, b\"'")
    if _INTERPOLATION.search(text):
        return Violation(key, f"is {text} but commands do not resolve interpolations; write the value itself")
    return None


def quoted(text: str) -> str:
    """Quote a text as a value of Hydra's grammar."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def folder_option(key: str, text: str) -> Path:
    """Return the path that an option names, with `~` expanded.

    Raises:
        ConfigError: the path is empty or a URL, or the user after `~` does not exist.
    """
    if not text:
        raise ConfigError(Violation(key, "is empty; give a folder, or . for the current folder"))
    return local_path(key, text)


def run_option(key: str, text: str, which: str | None = None) -> Path:
    """Return the directory of a run that an option names; a run in a store is copied to the cache first.

    Args:
        key: the option.
        text: a path, or the URL that the run had as `checkpoint.mirror`.
        which: checkpoint to copy from a store: "last", "best", or a step number; None for the small files alone.

    Raises:
        ConfigError: as in `folder_option`; or the run or checkpoint at the URL does not exist or cannot be read.
    """
    return _fetched(key, text, lambda: fetch_run(text, which)) if is_url(text) else folder_option(key, text)


def runs_option(key: str, text: str) -> Path:
    """Return the directory with the runs that an option names; the small files of runs in a store are copied first.

    Raises:
        ConfigError: as in `run_option`.
    """
    return _fetched(key, text, lambda: fetch_runs(text)) if is_url(text) else folder_option(key, text)


def _fetched(key: str, url: str, fetch: Callable[[], Path]) -> Path:
    if (reason := why_not_a_store(url)) is not None:
        raise ConfigError(Violation(key, f"{reason} (given: {as_text(url)})"))
    if (reason := why_no_url(url)) is not None:
        raise ConfigError(Violation(key, f"is {as_text(url)}, which this machine cannot use: {reason}"))
    try:
        return fetch()
    except NoRunError as error:
        raise ConfigError(Violation(key, f"is {as_text(url)}, which {error}; give the URL of a run")) from None
    except StoreError as error:
        message = f"is {as_text(url)}, which cannot be read: {error}; check the URL, the credentials and the network"
        raise ConfigError(Violation(key, message)) from None


def require_out(run: str, out: str | None) -> None:
    """Require an output path for a run in a store, which is only read.

    Raises:
        ConfigError: the run is a URL, but `out` is not set.
    """
    if is_url(run) and out is None:
        raise ConfigError(Violation("out", f"has no value, and run={as_text(run)} is only read; give it as out=..."))


def print_path(path: Path, label: str = "") -> None:
    """Print the path of an output file or folder, without secrets and control characters."""
    sys.stdout.write(printable(f"{label}{path}\n"))


def check_writable(key: str, folder: Path) -> None:
    """Check before any work that a folder can be created and written to.

    Args:
        key: option that names the folder.
        folder: the folder, which may not exist yet.

    Raises:
        ConfigError: the folder cannot be created or written to.
    """
    ancestor = next(path for path in (folder, *folder.parents) if os.path.lexists(path) or path == path.parent)
    if not ancestor.is_dir():
        problem = "a broken symbolic link" if ancestor.is_symlink() else "not a folder"
        raise ConfigError(Violation(key, f"is {folder} but {ancestor} is {problem}; choose another"))
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise ConfigError(Violation(key, f"is {folder} but {ancestor} is not writable; choose another"))


def check_output(key: str, path: Path, *, own_name: str | None = None, is_earlier: Recognizer | None = None) -> None:
    """Refuse, before any work, a file that a command must not write; `foundry.run_dir.outputs` has the rules.

    Args:
        key: option that names the file.
        path: path of the file.
        own_name: as `own_output` in `refusal`.
        is_earlier: as in `refusal`.

    Raises:
        ConfigError: states reason and remedy.
    """
    check_writable(key, path.parent)
    if (reason := refusal(path, own_output=own_name, is_earlier=is_earlier)) is not None:
        raise ConfigError(Violation(key, reason))


def check_output_folder(key: str, folder: Path) -> None:
    """Refuse, before any work, an output folder that is not new or empty, or that belongs to a run.

    Raises:
        ConfigError: states reason and remedy.
    """
    check_writable(key, folder)
    if (reason := folder_refusal(folder)) is not None:
        raise ConfigError(Violation(key, reason))


def answer_help(arguments: Sequence[str], write_help: Callable[[], str]) -> bool:
    """Print the help page for `--help`, or the versions for `--version`; return True if one of these was given.

    Args:
        arguments: arguments after the command's name.
        write_help: returns the help page.
    """
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(write_help())
        return True
    if "--version" in arguments:
        sys.stdout.write(f"{versions()}\n")
        return True
    return False


def versions() -> str:
    """Return the versions of foundry, Python, torch and Hydra, without importing these packages.

    A second line warns if a 0.1 build is installed next to this version.
    """
    from importlib.metadata import PackageNotFoundError, version

    packages = []
    for name in ("torch", "hydra-core"):
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            packages.append(f"{name} not installed")
    line = f"foundry {__version__} (Python {platform.python_version()}, {', '.join(packages)})"
    return "\n".join(filter(None, (line, conflict_message())))


def help_text(schema: type[Any], name: str, doc: str, *, prefix: str = "") -> str:
    """Return the help page of a command: usage, description and options.

    Args:
        schema: dataclass of the options.
        name: name of the command.
        doc: description of the command.
        prefix: prefix of the options' names.
    """
    return "\n".join([*usage(name), "", doc, "", *option_lines(schema, prefix)]) + "\n"


def usage(name: str) -> list[str]:
    """Return the usage lines of a help page."""
    return [f"{name.replace('.', ' ')} key=value ... [--json]", f"python -m {name} key=value ... [--json]"]


def option_lines(schema: type[Any], prefix: str = "", omitted: Container[str] = ()) -> list[str]:
    """Return one or more lines for each option: its description, and its default value in the command's syntax.

    Args:
        schema: dataclass of the options.
        prefix: prefix of the options' names.
        omitted: names of options to omit.
    """
    options = [item for item in fields(schema) if "doc" in item.metadata and item.name not in omitted]
    width = max(16, *(len(prefix + item.name) for item in options)) + 3
    lines = list[str]()
    for item in options:
        default = item.default if item.default_factory is NO_DEFAULT else item.default_factory()
        text = f"{item.metadata['doc']} ({_default_text(default)})"
        head = f"  {prefix + item.name}".ljust(width)
        lines += textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * width)
    return lines


def _default_text(value: object) -> str:
    if value in ("???", NO_DEFAULT):
        return "required"
    if isinstance(value, Enum):
        return f"default {value.name}"
    literals = {None: "null", True: "true", False: "false"}
    return f"default {literals[value] if value is None or isinstance(value, bool) else value}"
