"""Removal of secrets and terminal control characters from text before it is shown or recorded.

A secret is recognized by its key (`api_key`, `password`), by its form (a token with a known prefix, the user part of a
URL, a signed query), or because the configuration read it from the environment (`remember`).
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

MASK = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET = frozenset({"password", "passwd", "passphrase", "pwd", "pw", "secret", "secrets", "credential", "credentials"})
_KEYS = frozenset({"api", "access", "private", "auth", "account", "encryption", "signing", "ssh", "license", "service"})
# Keys that end with these words hold the location or the size of a secret, not the secret.
_METADATA = frozenset({"file", "path", "dir", "folder", "name", "env", "length", "size", "dim", "id", "ids"})
# The special tokens of a vocabulary (bos_token) have names like secrets.
_VOCABULARY = frozenset({"bos", "eos", "pad", "unk", "mask", "sep", "cls", "special", "image", "stop", "per", "next"})

# In each pattern, unbounded parts can start at one place only, so that masking takes linear time.
# A URL that was converted to a path has only one slash left.
_USERINFO = re.compile(r"(?<=:/)(/*)[^/\s?#'\"]+@")
# A password may contain characters that would end the host of a URL; a port and a path are not a password.
_ODD_USERINFO = re.compile(
    r"(?<=:/)(/*)[^/\s?#'\":@\[]{0,200}:(?!\d{1,5}[/?#])[^\s\"]{0,200}?@(?:[^/\s?#'\"@]{0,200}@)*"
)
_QUERY = re.compile(
    r"([?&;][\w.-]*(?:token|key|secret|password|passwd|pwd|sig|signature|credential)=)[^&;\s'\"]+", re.IGNORECASE
)
_ISSUED = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|A(?:KIA|SIA)[0-9A-Z]{16}|dapi[0-9a-f]{32})"
)
_JWT = re.compile(r"\beyJ[\w-]{8,}(?P<rest>\.[\w-]{8,}\.[\w-]+)?")
_ASSIGNED = re.compile(
    r"(?<![\w.+/-])(?P<name>[\w.+/-]*\w)(?P<sign>=)"
    r"(?P<value>\"[^\"]*\"|'[^']*'|\$\{[^}\s,;&'\"]*\}|[^\s,;&'\"]+)"
)
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TURNING = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_SHORTEST = 4  # shorter secrets are not masked: they occur in too many texts
_SHORT = 8  # shorter secrets are masked as whole words only

_CACHED = 4096  # longer texts are not cached

_secrets: dict[str, str] = {}


def remember(secret: str, reference: str = MASK) -> None:
    """Register a secret of this process, which `masked_text` then masks if it has at least four characters.

    Args:
        secret: the value.
        reference: text that replaces the secret in recorded configurations, such as `${oc.env:API_KEY}`.
    """
    if secret:
        _secrets[secret] = reference


def known_secrets() -> dict[str, str]:
    """Return the secrets of this process with their references, to pass to a child process."""
    return dict(_secrets)


def recorded(text: str) -> str:
    """Return the text to write to a file in place of a value: the reference of a secret, any other value unchanged."""
    return _secrets.get(text, text)


def masked_text(text: str) -> str:
    """Return `text` with secrets masked: in URLs, known token formats, values of secret keys, and remembered values."""
    text = _masked_by_form(text) if len(text) <= _CACHED else _masked_by_form.__wrapped__(text)
    for secret in sorted(_secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST and secret in text:
            word = re.escape(secret)
            text = re.sub(word if len(secret) >= _SHORT else rf"(?<!\w){word}(?!\w)", MASK, text)
    return text


@lru_cache(1024)  # a sweep masks the same settings many times
def _masked_by_form(text: str) -> str:
    text = _JWT.sub(lambda match: MASK if match["rest"] else match[0], text)
    text = _ISSUED.sub(MASK, _QUERY.sub(rf"\1{MASK}", _masked_userinfo(text)))
    return _ASSIGNED.sub(_masked_assignment, text) if "=" in text else text


def _masked_userinfo(text: str) -> str:
    """Return `text` with the users and passwords of URLs masked."""
    for pattern in (_USERINFO, _ODD_USERINFO):
        text = pattern.sub(rf"\1{MASK}@", text)
    return text


def _masked_assignment(match: re.Match[str]) -> str:
    value = match["value"].strip("'\"")
    if value.startswith("${") or not is_secret(match["name"].rpartition(".")[2], value):
        return match[0]
    return f"{match['name']}{match['sign']}{MASK}"


def printable(text: str) -> str:
    """Return `text` without secrets, escape sequences and other control characters; newlines and tabs are kept."""
    return masked_text(_TURNING.sub("", _CONTROLS.sub("", text)))


def one_line(text: str) -> str:
    """Return `text` as `printable` does, in one line with single spaces."""
    return " ".join(printable(text.replace("\r", " ")).split())


def masked(value: Any, name: str = "") -> Any:
    """Return a copy of a configuration with its secrets masked.

    Args:
        value: a configuration, or a part of one, as plain containers.
        name: key of `value` in its parent.
    """
    if isinstance(value, Mapping):
        if is_secret(name, "x"):
            return {
                key: masked(item, f"{name}_{key}") if isinstance(item, Mapping) else MASK for key, item in value.items()
            }
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(item, name) for item in value]
    if is_secret(name, value):
        return MASK
    return masked_text(value) if isinstance(value, str) else value


def is_secret(name: str, value: Any) -> bool:
    """Return whether a value must be masked, judging by the words of its key; never for booleans and empty values.

    Numbers are masked only for keys such as `password`.
    """
    if value in (None, "") or isinstance(value, bool):
        return False
    words = _words(name)
    if words and words[-1] in _METADATA:
        return False
    if _SECRET.intersection(words):
        return True
    if not words or not isinstance(value, str):
        return False
    qualifiers = set(words[:-1])
    if words[-1] in ("token", "jwt", "bearer"):
        return not qualifiers & _VOCABULARY
    return words[-1] == "apikey" or (words[-1] == "key" and (bool(qualifiers & _KEYS) or _looks_random(value)))


@lru_cache(4096)
def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORDS.findall(name))


def _looks_random(value: str) -> bool:
    """Return whether a value has 16 or more characters, letters and digits but no space, unlike a column's name."""
    return (
        len(value) >= 16
        and not re.search(r"\s", value)
        and bool(re.search(r"\d", value) and re.search(r"[A-Za-z]", value))
    )
