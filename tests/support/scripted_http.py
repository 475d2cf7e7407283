"""HTTP server whose answers a test scripts, and requests to a server of ours."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import urllib3

Answer = tuple[int, dict[str, str], bytes]


class Server:
    """HTTP server with scripted answers that records its requests; with a context, over TLS."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.answer: Callable[[str, str], Answer] = lambda method, path: (204, {}, b"")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.seen.append((self.command, self.path, dict(self.headers), body))
                status, headers, content = outer.answer(self.command, self.path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if status != 204:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = _any  # noqa: N815 (the library's names)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        place = "http://127.0.0.1" if tls is None else "https://localhost"
        self.url = f"{place}:{self._http.server_port}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@contextlib.contextmanager
def scripted(answers: Iterable[Mapping[str, Any]]) -> Iterator[Server]:
    """Run a server that gives the answers of a file in their order, and 404 after the last."""
    left = iter(answers)

    def give(*_: str) -> Answer:
        answer = next(left, {"status": 404, "body": ""})
        headers = {"Location": answer["location"]} if "location" in answer else {}
        return answer["status"], headers, answer["body"].encode()

    with contextlib.closing(Server()) as server:
        server.answer = give
        yield server


def reply(status: int, value: Any) -> Answer:
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


def request(
    port: int, path: str, method: str = "GET", body: str | bytes | None = None, **headers: str
) -> urllib3.BaseHTTPResponse:
    """Return the answer of this machine's server at a port."""
    with urllib3.PoolManager(retries=False, timeout=60) as pool:
        url = f"http://127.0.0.1:{port}{path}"
        return pool.request(method, url, body=body, headers=headers)
