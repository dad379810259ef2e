"""Programs `python` and `foundry` for PATH that run foundry's commands in forks of a process with all imports.

The first foundry command in a `WarmPython` and the first of each foundry module in this process start cold, without a
fork. Calls of `python` that are no foundry command run the interpreter.
"""

import json
import os
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from support.warm import CONTEXT, become, start_server

_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

def start_cold():
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])

if sys.argv[1:2] != ["-m"] or sys.argv[2:3] == [] or sys.argv[2].partition(".")[0] != "foundry":
    start_cold()
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([os.getcwd(), sys.argv[2], sys.argv[3:], dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [1, 2])
server.sendall(request)
answer = server.makefile()
if (process := answer.readline()) == "cold\\n":
    start_cold()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: os.kill(int(process), number))
code = int(answer.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
_known_modules: set[str] = set()


class WarmPython:
    """Context manager with a folder for PATH; a command is killed if the client process that waits for it ends."""

    def __enter__(self):
        self._temporary = tempfile.TemporaryDirectory(prefix="foundry-python-")
        self.folder = Path(self._temporary.name)
        self._is_first = True
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(address := str(self.folder / "server"))
        self._server.listen()
        client = self.folder / "python"
        client.write_text(_CLIENT.format(python=sys.executable, address=address), encoding="utf-8")
        console_script = self.folder / "foundry"
        console_script.write_text(f'#!/bin/sh\nexec {client} -m foundry "$@"\n', encoding="utf-8")
        for program in (client, console_script):
            program.chmod(0o700)
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._temporary.cleanup()

    def _serve(self):
        with suppress(OSError):  # the socket is closed
            while True:
                connection, _ = self._server.accept()
                size, streams, *_ = socket.recv_fds(connection, 8, 2)
                with connection.makefile("rb") as file:
                    cwd, module, words, environment = json.loads(file.read(int.from_bytes(size, "big")))
                if self._is_first or module not in _known_modules:
                    self._is_first = False
                    _known_modules.add(module)
                    connection.sendall(b"cold\n")
                    connection.close()
                    for stream in streams:
                        os.close(stream)
                else:
                    arguments = (cwd, module, words, environment, [Connection(stream) for stream in streams])
                    threading.Thread(target=_attend, args=(connection, arguments), daemon=True).start()


def _attend(connection, arguments):
    """Start the process, report its pid and exit code to the client, and kill it if the client ends first."""
    with connection:
        start_server()
        process = CONTEXT.Process(target=_be, args=arguments)
        process.start()
        for stream in arguments[-1]:
            stream.close()
        connection.sendall(f"{process.pid}\n".encode())
        if process.sentinel not in wait([process.sentinel, connection]):
            process.kill()
        process.join()
        with suppress(OSError):
            connection.sendall(f"{process.exitcode}\n".encode())


def _be(cwd, module, words, environment, streams):
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    os.environ.clear()
    os.environ.update(environment)
    become(module, words, cwd, environment.get("PYTHONPATH", ""))
