"""No message, chain, note, warning, log, repr, pickle or state repeats a credential, wherever the user wrote it."""

import contextlib
import itertools
import logging
import pickle
import traceback
import warnings
from pathlib import Path

import pytest
from hostile_server import HostileServer
from typer.testing import CliRunner

import dataload
from dataload.cli.app import app
from dataload.convert import convert
from dataload.errors import StoreError, message_of, redacted, traceback_of

obstore = pytest.importorskip("obstore")
MARK = "5ecretMARK"
URLS = {
    "password": "{scheme}://me:MARK@HOST/x-{{0..3}}.tar",
    "user": "{scheme}://MARK@HOST/x.tar",
    "slash in it": "{scheme}://me:a/MARK@HOST/x.tar",
    "query": "{scheme}://HOST/x.tar?sig=MARK&sp=r",
    "query in braces": "{scheme}://HOST/{{a?sig=MARK,b?sig=MARK}}.tar",
    "bare query": "https://HOST/x.tar?MARK",
    "fragment": "{scheme}://HOST/x.tar#MARK",
}
SCHEMES = ("https", "http", "s3", "gs", "az", "sftp", "abfss", "hdfs")
STORAGE = {
    "token": {"token": MARK},
    "unknown option": {"none": MARK},
    "key of a wrong type": {"secret_access_key": [MARK]},
    "header": {"client_options": {"default_headers": {"X-Api-Key": MARK}}},
    "user of a proxy": {"client_options": {"proxy_url": f"http://me:{MARK}@127.0.0.1:1"}},
}


@pytest.fixture
def refusing():
    """The host of a server that refuses everything, and repeats the request in its answer."""

    def answer(handler):
        text = f"{handler.path} {dict(handler.headers)}".encode()
        handler.send(text, {"X-Request": handler.path}, 403)

    with HostileServer(answer) as server:
        yield server.endpoint.removeprefix("http://")


@pytest.fixture
def local(tmp_path):
    with dataload.create(tmp_path / "x.syr") as writer:
        writer.write({"a": 1.0})
    return str(tmp_path / "x.syr")


def entry_points(url, local, tmp_path, options):
    """Return what a user may do with a URL."""
    runner = CliRunner()
    remote = {"remote": {"timeout": 1, "retries": 0, "cache": str(tmp_path / "cache")}, "storage_options": options}
    config = {"source": {"path": url, **remote}, "loader": {"batch_size": 1}}

    def run(*arguments):
        found = runner.invoke(app, arguments)
        assert found.exit_code
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        raise RuntimeError(found.output)

    def write():
        with dataload.open(local) as source:
            convert(source, url, writer_options=remote)

    def create():
        with dataload.create(url, **remote) as writer:
            writer.write({"a": 1.0})

    return {
        "open": lambda: dataload.open(url, **remote),
        "open several": lambda: dataload.open([url, url], **remote),
        "open as a path": lambda: dataload.open(Path(url), **remote),
        "labels": lambda: dataload.open(local, labels=url),
        "create": create,
        "convert": write,
        "a path as a source": lambda: dataload.Loader(url, batch_size=1),
        "error_report": lambda: dataload.Loader([{"a": 1}], batch_size=1, error_report=url),
        "exclude": lambda: dataload.Loader([{"a": 1}], batch_size=1, exclude=url),
        "from_config": lambda: dataload.from_config(config),
        "inspect": lambda: run("inspect", url),
        "index": lambda: run("index", "--manifest", url),
        "verify": lambda: run("verify", url),
        "convert command": lambda: run("convert", url, str(tmp_path / "out.syr")),
        "convert command to": lambda: run("convert", local, url),
    }


def told(error):
    """Return all that can be read of an error, and of those behind it."""
    text, seen = "".join(traceback.format_exception(error)) + message_of(error) + traceback_of(error), set()
    errors = [error]
    while errors and (error := errors.pop()) is not None:
        if id(error) in seen:
            continue
        seen.add(id(error))
        text += repr(error) + str(error) + repr(getattr(error, "__notes__", ""))
        text += "".join(repr(value) for value in vars(error).values())
        with contextlib.suppress(Exception):
            text += repr(pickle.dumps(error))
        errors += [error.__cause__, error.__context__]
    return text


def check(url, local, tmp_path, caplog, options=None):
    caplog.set_level(logging.DEBUG)
    for name, call in entry_points(url, local, tmp_path, options or {}).items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.suppress(AssertionError), pytest.raises(Exception) as error:
                call()
        texts = {"log": caplog.text, "warning": " ".join(str(each.message) for each in caught)}
        texts["error"] = told(error.value)
        for kind, text in texts.items():
            lines = [line for line in text.splitlines() if MARK in line]
            assert not lines, f"the {kind} of {name} tells: {lines[0][:300]}"


def some(cases, sample):
    """Mark all cases but one, which stands for them in `make test`."""
    return [case if case == sample else pytest.param(*case, marks=pytest.mark.remote) for case in cases]


@pytest.mark.parametrize(("place", "scheme"), some(itertools.product(URLS, SCHEMES), ("password", "sftp")))
def test_urls_with_credentials(refusing, local, tmp_path, caplog, place, scheme, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT", f"http://{refusing}")
    url = URLS[place].format(scheme=scheme).replace("HOST", refusing).replace("MARK", MARK)
    check(url, local, tmp_path, caplog)


@pytest.mark.parametrize(
    ("options", "url"),
    some(itertools.product(STORAGE, ["http://HOST/x.tar", "s3://bucket/x.tar"]), ("header", "http://HOST/x.tar")),
)
def test_options_with_credentials(refusing, local, tmp_path, caplog, options, url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT", f"http://{refusing}")
    check(url.replace("HOST", refusing), local, tmp_path, caplog, STORAGE[options])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:a@b/c@host/x.tar", "https://***@host/x.tar"),
        ("http://host:8080/a@b", "http://host:8080/a@b"),
        ("s3://bucket/train-?.tar", "s3://bucket/train-?.tar"),
        ("s3://bucket/date=1/x-?.tar", "s3://bucket/date=1/x-?.tar"),
        ("['sftp://me:secret@h/x', 'b']", "['sftp://***@h/x', 'b']"),
        ("C:/x@y and a:b@c", "C:/x@y and a:b@c"),
    ],
)
def test_what_is_redacted(text, expected):
    assert redacted(text) == expected


def test_a_list_of_urls_is_refused_without_their_credentials():
    with pytest.raises(TypeError) as error:
        dataload.Loader([f"https://me:{MARK}@host/x.tar"], batch_size=1)
    assert MARK not in str(error.value)


@pytest.mark.parametrize("endpoint", ["nonsense", "http://[::1", ""])
def test_an_endpoint_that_obstore_panics_at_is_an_error_of_ours(endpoint, capfd):
    with pytest.raises(StoreError, match="check the endpoint and the other storage_options"):
        dataload.open("s3://bucket/x.tar", storage_options={"endpoint": endpoint, "skip_signature": True})
    capfd.readouterr()  # Rust's own text
