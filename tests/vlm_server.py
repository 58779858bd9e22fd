"""A real `transformers serve` process, and a proxy in front of it that behaves as networks and servers do at times."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(model: Path, port: int) -> subprocess.Popen:
    """Start serving a model; returns before it answers."""
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--device", "cpu"]
    command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for(port: int, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).read()
            return
        except OSError:
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.1)


def stop(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def serving(model: Path) -> Iterator[str]:
    """The base URL of a server of this model."""
    port = free_port()
    process = start_server(model, port)
    try:
        wait_for(port)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        stop(process)


Fault = Callable[[BaseHTTPRequestHandler, bytes], None]


class Proxy:
    """Forwards to a server; each question first takes a fault from `faults`, in order, as long as there are any.

    Attributes:
        questions: chat completion requests that came in, as parsed JSON.
        times: when they came, in seconds of time.monotonic().
        edit: changes a reply's parsed JSON before it goes back.
    """

    def __init__(self, base_url: str) -> None:
        self.faults: list[Fault | None] = []
        self.always: Fault | None = None
        self.questions: list[dict] = []
        self.times: list[float] = []
        self.keys: list[str | None] = []
        self.edit: Callable[[dict], None] = lambda reply: None
        self._lock = threading.Lock()
        proxy, target = self, base_url.removesuffix("/v1")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                proxy.keys.append(self.headers.get("Authorization"))
                if proxy.always is not None:
                    return proxy.always(self, b"")
                self.forward(urllib.request.Request(target + self.path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with proxy._lock:
                    proxy.questions.append(json.loads(body))
                    proxy.times.append(time.monotonic())
                    fault = proxy.faults.pop(0) if proxy.faults else proxy.always
                headers = {"Content-Type": "application/json"}
                request = urllib.request.Request(target + self.path, data=body, headers=headers)
                if fault is None:
                    self.forward(request)
                else:
                    fault(self, body)

            def forward(self, request: urllib.request.Request) -> None:
                try:
                    with urllib.request.urlopen(request, timeout=60) as reply:
                        status, body = reply.status, reply.read()
                except urllib.error.HTTPError as error:
                    status, body = error.code, error.read()
                except OSError:
                    return close(self, b"")
                if request.data is not None and status == 200:
                    parsed = json.loads(body)
                    proxy.edit(parsed)
                    body = json.dumps(parsed).encode()
                answer(self, status, body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def answer(
    handler: BaseHTTPRequestHandler, status: int, body: bytes, kind: str = "application/json", **more: str
) -> None:
    handler.send_response(status)
    for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **more}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def status(code: int, **headers: str) -> Fault:
    """An error status with a message."""
    body = json.dumps({"error": {"message": f"injected {code}"}}).encode()
    return lambda handler, _: answer(handler, code, body, **headers)


def garbage(body: bytes, kind: str = "application/json") -> Fault:
    """Success, with a body that is no chat completion."""
    return lambda handler, _: answer(handler, 200, body, kind)


def slow(seconds: float) -> Fault:
    """Nothing for so long, then a closed connection."""

    def fault(handler: BaseHTTPRequestHandler, _: bytes) -> None:
        time.sleep(seconds)
        close(handler, b"")

    return fault


def close(handler: BaseHTTPRequestHandler, _: bytes) -> None:
    """Close the connection without a word."""
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def cut(handler: BaseHTTPRequestHandler, _: bytes) -> None:
    """Promise a body, and close the connection in the middle of it."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    close(handler, b"")
