"""An S3 server on loopback (moto), and a TCP proxy in front of it that breaks connections."""

import logging
import os
import shutil
import socket
import threading
import urllib.request
import uuid
from contextlib import contextmanager, suppress

import pytest

BUCKET = "bucket"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "foundry-test-access", "AWS_SECRET_ACCESS_KEY": "foundry-test-secret-value"}


class Server:
    """A server whose only bucket is `bucket`; `uploads` has method, path and bytes of each request with a body."""

    def __init__(self):
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self.uploads = []
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._count, threaded=True)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def _count(self, environ, start_response):
        if environ["REQUEST_METHOD"] in ("PUT", "POST"):
            size = int(environ.get("HTTP_X_AMZ_DECODED_CONTENT_LENGTH") or environ.get("CONTENT_LENGTH") or 0)
            self.uploads.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], size))
        return self._app(environ, start_response)

    def close(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/moto-api/reset", data=b""):
            pass  # moto keeps its objects in global variables, which the next server of this process would have
        self._server.shutdown()
        self._thread.join()


class Proxy:
    """Forwards connections to a port; `cut` ends all connections and refuses new ones until `restore`.

    With `limit`, each connection is ended after this number of bytes from the client.
    """

    def __init__(self, port):
        self._target, self._is_cut, self.limit = port, False, None
        self._sockets = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        self._is_cut = True
        for connection in list(self._sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def restore(self):
        self._is_cut, self.limit = False, None

    def _accept(self):
        while True:
            with suppress(OSError):
                client, _ = self._listener.accept()
                if self._is_cut:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets |= {client, server}
                for source, sink, limit in ((client, server, self.limit), (server, client, None)):
                    threading.Thread(target=self._pump, args=(source, sink, limit), daemon=True).start()

    def _pump(self, source, sink, limit):
        sent = 0
        with suppress(OSError):
            while (data := source.recv(65536)) and not self._is_cut:
                sink.sendall(data)
                sent += len(data)
                if limit is not None and sent > limit:
                    break
        for connection in (source, sink):
            self._sockets.discard(connection)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def environment(port):
    """Return the environment variables that make fsspec's `s3://` use a server on loopback."""
    return {
        **CREDENTIALS,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }


@contextmanager
def s3_server(monkeypatch=None):
    """Yield a server with an empty bucket; its address and credentials are in the environment of this process."""
    pytest.importorskip("s3fs", reason="s3:// needs s3fs: pip install -e '.[s3]'")
    pytest.importorskip("moto", reason="the S3 server of the tests is moto: pip install -e '.[test]'")
    import boto3

    server = Server()
    before = dict(os.environ)
    os.environ.update(environment(server.port))
    try:
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield server
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.close()


@contextmanager
def store_url(scheme, tmp_path):
    """Yield the URL of an empty place in a store of a kind: file, memory or s3."""
    name = uuid.uuid4().hex
    if scheme == "file":
        yield f"file://{tmp_path / name}"
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    elif scheme == "memory":
        yield f"memory://{name}"
    else:
        with s3_server():
            yield f"s3://{BUCKET}/{name}"
