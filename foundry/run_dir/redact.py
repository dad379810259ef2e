"""What may be shown: texts without secrets and without what a terminal would obey.

A secret is told by its key (`api_key`, `password`), by its form (a token whose issuer is known, the user of an address,
a signed query), or because the configuration took it from the environment (`remember`).
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

MASK = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ALWAYS = frozenset({"password", "passwd", "passphrase", "pwd", "pw", "secret", "secrets", "credential", "credentials"})
_KEYS = frozenset({"api", "access", "private", "auth", "account", "encryption", "signing", "ssh", "license", "service"})
# Such a key says where a secret is, or how large.
_ABOUT = frozenset({"file", "path", "dir", "folder", "name", "env", "length", "size", "dim", "id", "ids"})
# The special tokens of a vocabulary are named like secrets and are none.
_VOCABULARY = frozenset({"bos", "eos", "pad", "unk", "mask", "sep", "cls", "special", "image", "stop", "per", "next"})

# In each pattern a part that may be long starts in one place only, so that masking a text takes linear time.
# An address that went through a path has one slash left.
_USERINFO = re.compile(r"(?<=:/)(/*)[^/\s?#'\"]+@")
# A password may hold characters that end the host of an address; a port and a path are no password.
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
_SHORTEST = 4  # a shorter secret is in too many texts
_SHORT = 8  # a shorter one may be a part of other words

_CACHED = 4096  # a longer text is not kept

_known: dict[str, str] = {}


def remember(secret: str, reference: str = MASK) -> None:
    """Take note of a secret of this process, so that no text shows it.

    Args:
        secret: the value.
        reference: what a file has in its place, such as `${oc.env:API_KEY}`.
    """
    if secret:
        _known[secret] = reference


def known() -> dict[str, str]:
    """The secrets of this process with their references, for a process that it starts."""
    return dict(_known)


def recorded(text: str) -> str:
    """What a file has in place of a value: the reference of a secret, any other value as it is."""
    return _known.get(text, text)


def masked_text(text: str) -> str:
    """`text` without secrets: of its addresses, by their form, by the name they are assigned to, or remembered."""
    text = _masked_by_form(text) if len(text) <= _CACHED else _masked_by_form.__wrapped__(text)
    for secret in sorted(_known, key=len, reverse=True):
        if len(secret) >= _SHORTEST and secret in text:
            word = re.escape(secret)
            text = re.sub(word if len(secret) >= _SHORT else rf"(?<!\w){word}(?!\w)", MASK, text)
    return text


@lru_cache(1024)  # a sweep asks for the same settings again and again
def _masked_by_form(text: str) -> str:
    text = _JWT.sub(lambda found: MASK if found["rest"] else found[0], text)
    text = _ISSUED.sub(MASK, _QUERY.sub(rf"\1{MASK}", _masked_userinfo(text)))
    return _ASSIGNED.sub(_masked_assignment, text) if "=" in text else text


def _masked_userinfo(text: str) -> str:
    """`text` with the users and passwords of addresses masked."""
    for pattern in (_USERINFO, _ODD_USERINFO):
        text = pattern.sub(rf"\1{MASK}@", text)
    return text


def _masked_assignment(found: re.Match[str]) -> str:
    value = found["value"].strip("'\"")
    if value.startswith("${") or not is_secret(found["name"].rpartition(".")[2], value):
        return found[0]
    return f"{found['name']}{found['sign']}{MASK}"


def printable(text: str) -> str:
    """`text` without secrets, escape sequences and other characters that a terminal obeys; lines and tabs stay."""
    return masked_text(_TURNING.sub("", _CONTROLS.sub("", text)))


def one_line(text: str) -> str:
    """`printable` text in one line."""
    return " ".join(printable(text.replace("\r", " ")).split())


def masked(value: Any, name: str = "") -> Any:
    """A copy of a configuration without its secrets.

    Args:
        value: plain containers.
        name: the key `value` stands under.
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
    """Whether a value must not be shown, by the words of its key; numbers and empty values are shown."""
    if value in (None, "") or isinstance(value, bool):
        return False
    words = _words(name)
    if words and words[-1] in _ABOUT:
        return False
    if _ALWAYS.intersection(words):
        return True
    if not words or not isinstance(value, str):
        return False
    before = set(words[:-1])
    if words[-1] in ("token", "jwt", "bearer"):
        return not before & _VOCABULARY
    return words[-1] == "apikey" or (words[-1] == "key" and (bool(before & _KEYS) or _looks_random(value)))


@lru_cache(4096)
def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORDS.findall(name))


def _looks_random(value: str) -> bool:
    """A long word of letters and digits; the name of a column is none."""
    return (
        len(value) >= 16
        and not re.search(r"\s", value)
        and bool(re.search(r"\d", value) and re.search(r"[A-Za-z]", value))
    )
