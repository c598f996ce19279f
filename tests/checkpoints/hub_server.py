"""A stand-in for the Hugging Face hub: the few endpoints that a download asks, on this machine."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """Serves the folder of each repository in `repositories`, and keeps what was asked in `log`."""

    daemon_threads = True

    def __init__(self, repositories):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = {name: Path(folder) for name, folder in repositories.items()}
        self.log = []  # (method, path, range)
        self.cut = {}  # file name: bytes after which the first download of it breaks off

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def downloads(self):
        """Names of the files that were fetched, in order of their names."""
        return sorted(
            {path.rsplit("/", 1)[1] for method, path, _ in self.log if method == "GET" and "/resolve/" in path}
        )


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer("HEAD")

    def do_GET(self):
        self.answer("GET")

    def answer(self, method):
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        self.server.log.append((method, path, self.headers.get("Range")))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(tree|revision)/([^/]+))?/?", path)
        file = re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        folder = self.server.repositories.get(match[1]) if match else None
        if folder is None:
            return self.reply(401, b"", {"X-Error-Code": "RepoNotFound"})
        if (api[3] or "main" if api else file[2]) not in ("main", "v1", COMMIT):
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if file:
            return self.send_file(folder / file[3], method)
        names = sorted(item.name for item in folder.iterdir())
        if api[2] != "tree":
            return self.reply(200, {"id": match[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]})
        entries = [
            {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": etag(folder / name)}
            for name in names
        ]
        return self.reply(200, entries)

    def reply(self, status, body, headers=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_file(self, path, method):
        if not path.is_file():
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        data, start = path.read_bytes(), 0
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start = int(asked[1])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag(path)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if method == "GET":
            cut = self.server.cut.pop(path.name, None)
            self.wfile.write(data[start : start + cut] if cut else data[start:])
            self.close_connection = bool(cut)


def etag(path):
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def running(repositories):
    """A hub that answers while the block lasts."""
    hub = Hub(repositories)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
