"""`lease.json` of a mirror: the process that writes it, with a heartbeat."""

import json
import logging
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from foundry.run_dir.log import NOTICE
from foundry.run_dir.mirror.snapshot import IDENTITY
from foundry.run_dir.mirror.store import MissingObjectError, Store, StoreError

LEASE = "lease.json"
HEARTBEAT_SECONDS = 10.0
EXPIRY_SECONDS = 35.0
"""Seconds without a change of the heartbeat after which the lease counts as abandoned."""

_SURELY_OLD_SECONDS = 600.0
"""Age of a heartbeat that proves, even if the clocks of two machines differ, that its process has ended."""

_own_tokens = set[str]()
"""Tokens of the leases that this process holds."""

log = logging.getLogger(__name__)


class LeaseHeldError(RuntimeError):
    """Another process writes to the store; the message names it."""


class Lease:
    """The right to write to a store, held by one process at a time.

    Attributes:
        is_lost: whether another process has taken the lease.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._token = store, uuid.uuid4().hex
        self._ended, self._lock = threading.Event(), threading.Lock()
        self.is_lost = False

    def take(self) -> None:
        """Take the lease; if another process has it, wait until its heartbeat has stood still for 35 seconds.

        The wait is omitted if that process ran on this machine and is gone, or its heartbeat is older than ten minutes.

        Raises:
            LeaseHeldError: the other process is alive.
            StoreError: the store cannot be read or written.
        """
        holder = self._read()
        deadline = time.monotonic() + EXPIRY_SECONDS
        if holder and not _is_gone(holder):
            message = "%s was last written by process %s on %s; waiting up to %.0f s for a sign of it"
            log.log(NOTICE, message, self._store.url, holder.get("pid"), holder.get("host"), EXPIRY_SECONDS)
        while holder and not _is_gone(holder) and time.monotonic() < deadline:
            time.sleep(min(1.0, EXPIRY_SECONDS / 10))
            if (now := self._read()) != holder:
                if not now:
                    break
                raise LeaseHeldError(f"process {now.get('pid')} on {now.get('host')} writes to it")
        self._write()
        _own_tokens.add(self._token)

    def keep(self) -> None:
        """Start a thread that sends heartbeats until the lease is released or lost."""
        threading.Thread(target=self._beat, name="mirror-lease", daemon=True).start()

    def check(self) -> bool:
        """Return whether this process still has the lease, which it has not released.

        Without a lease in the store, another process has taken it and given it back.

        Raises:
            StoreError: the store cannot be read, or has no run any more, such as a folder that is not mounted.
        """
        with self._lock:
            if not self.is_lost and (holder := self._read()).get("token") != self._token:
                if not holder and self._store.size(IDENTITY) is None:
                    raise StoreError(f"{self._store.url} has neither {IDENTITY} nor {LEASE} any more; is it mounted?")
                self.is_lost = True
            return not self.is_lost and not self._ended.is_set()

    def release(self) -> None:
        """Give the lease back, if this process has it and the store can be reached."""
        if self._ended.is_set():
            return
        is_own = False
        with suppress(StoreError):
            is_own = self.check()
        self.abandon()
        with suppress(StoreError), self._lock:
            if is_own:
                self._store.remove(LEASE)

    def abandon(self) -> None:
        """Stop the heartbeats without access to the store; the lease expires."""
        self._ended.set()
        _own_tokens.discard(self._token)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            with suppress(StoreError):  # the thread that copies warns of outages
                if not self.check():
                    return
                with self._lock:
                    if not self._ended.is_set():
                        self._write()

    def _read(self) -> dict[str, Any]:
        """Return the lease in the store; empty if it does not exist or is damaged."""
        try:
            return self._store.read_json(LEASE)
        except (MissingObjectError, ValueError):
            return {}

    def _write(self) -> None:
        content = {
            "token": self._token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": _machine(),
            "time": time.time(),
        }
        self._store.write(LEASE, json.dumps(content).encode())


def _is_gone(holder: dict[str, Any]) -> bool:
    """Return whether the process of a lease has certainly ended."""
    pid, since = holder.get("pid"), holder.get("time")
    if isinstance(since, (int, float)) and time.time() - since > _SURELY_OLD_SECONDS:
        return True
    if type(pid) is not int or pid < 1 or holder.get("machine") is None or holder["machine"] != _machine():
        return False
    return holder.get("token") not in _own_tokens if pid == os.getpid() else not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    """Return whether a process of this machine exists and has not ended, as a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def _machine() -> str | None:
    """Return an identity of the running system and its process ids; None on systems other than Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None
