"""Real servers for tests: `mlflow server`, PostgreSQL, and a relay that stands in front of a server."""

from __future__ import annotations

import datetime
import glob
import http.client
import ipaddress
import os
import pwd
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

START_SECONDS = 90.0


@contextmanager
def mlflow_server(
    uri: str,
    folder: Path,
    *,
    app: str | None = "tokens",
    prefix: str = "",
    environ: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """The address of a server over the store, which is stopped with all its processes at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--app-name", app] if app else []
    command += ["--static-prefix", prefix] if prefix else []
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    log = folder / f"server-{port}.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **quiet, **(environ or {})},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}{prefix}"
        wait_for(f"{address}/health", server, log)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_for(health: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(health, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"the MLflow server does not answer:\n{log.read_text()[-3000:]}")


@contextmanager
def postgresql() -> Iterator[str]:
    """The URI of an empty database of a PostgreSQL server of our own, which is removed at the end.

    It listens on a socket file alone. Where it is not installed the test is skipped, or fails in CI.
    """
    control = shutil.which("pg_ctl") or max(glob.glob("/usr/lib/postgresql/*/bin/pg_ctl"), default=None)
    if control is None:
        line = "no PostgreSQL: apt-get install postgresql"
        if os.environ.get("CI"):
            pytest.fail(line)
        pytest.skip(line)
    # Not under pytest's directory, which is its user's alone: PostgreSQL refuses to run as root.
    folder = Path(tempfile.mkdtemp(prefix="mlflow-tokens-"))
    user = pwd.getpwnam("nobody").pw_uid if os.getuid() == 0 else None
    if user is not None:
        os.chown(folder, user, -1)

    def pg_ctl(*arguments: str) -> None:
        command = [control, "-D", str(folder / "data"), "-l", str(folder / "log"), "-w", *arguments]
        done = subprocess.run(command, check=False, user=user, cwd=folder, stdout=subprocess.DEVNULL)
        assert done.returncode == 0, (folder / "log").read_text() if (folder / "log").exists() else command

    try:
        pg_ctl("initdb", "-o", "-U mlflow -A trust --no-sync")
        pg_ctl("start", "-o", f"-k {folder} -c listen_addresses= -c fsync=off")
        try:
            # SQLAlchemy's default driver is another one.
            yield f"postgresql+psycopg2://mlflow@/postgres?host={folder}"
        finally:
            pg_ctl("stop", "-m", "fast")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Relay:
    """Forwards HTTP requests to a server: as its front, or as the proxy through which it is reached.

    lose_answer: the answer to the next request whose path ends so is lost, after the server has given it.
    answer: given in the server's place: status, headers and body.
    fails: whether the request of this number, from 0, is answered with 503 and goes no further.
    """

    upstream: str
    address: str = ""
    lose_answer: str | None = None
    answer: tuple[int, Mapping[str, str], bytes] | None = None
    fails: Callable[[int], bool] = lambda _: False
    requests: list[str] = field(default_factory=list)

    def count(self, end: str) -> int:
        """Requests so far whose path ends with `end`."""
        return sum(urlsplit(request).path.endswith(end) for request in self.requests)


@contextmanager
def relay(upstream: str = "", certificate: Sequence[Path] | None = None) -> Iterator[Relay]:
    """A relay to the address, speaking TLS if it is given a certificate and its key."""
    state = Relay(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            number = len(state.requests)
            state.requests.append(self.path)
            path = urlsplit(self.path)._replace(scheme="", netloc="").geturl()
            status, headers, content = self._answer(number, path, body)
            if state.lose_answer and urlsplit(path).path.endswith(state.lose_answer):
                state.lose_answer = None
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _forward

        def _answer(self, number: int, path: str, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
            if state.fails(number):
                return 503, {}, b"busy!"
            return state.answer or self._ask(path, body)

        def _ask(self, path: str, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
            kept = {"Authorization", "Content-Type"} & set(self.headers)
            server = http.client.HTTPConnection(urlsplit(state.upstream).netloc, timeout=60)
            try:
                server.request(self.command, path, body, {name: self.headers[name] for name in kept})
                answer = server.getresponse()
                content = answer.read()
                return answer.status, {"Content-Type": answer.headers["Content-Type"]}, content
            finally:
                server.close()

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that does not trust the certificate hangs up: that is what is tested."""

    server = Server(("127.0.0.1", 0), Handler)
    scheme = "http"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        scheme = "https"
    state.address = f"{scheme}://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


def self_signed_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that nobody has signed but its own key, and that key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "mlflow.invalid")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths
