"""Names that files hold and that lead elsewhere, in every format whose files name others.

    make names                  every escaping name at every text in every file, for some minutes
    make names EVERY=5          a fifth of them at the names of files, and one at each other kind of text

Each data set lies beside a folder that holds a copy of it. Its texts, found by walking through its files, are replaced
one at a time. A hook sees each file that the interpreter opens, a server each request. A name must neither be opened
nor asked for, and where it stood for the name of a file, the error says which file has it.
"""

# ruff: noqa: T201 - a script that tells how far it is

import csv
import functools
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from drive import command_line
from object_server import FileServer

import dataload
from dataload.catalog.facts import DataSetFacts, ShardFacts
from dataload.catalog.manifest import Manifest
from dataload.convert import convert
from dataload.convert.indexing import index_shards
from dataload.convert.plan import Measuring
from dataload.errors import ConfigError, DataloadError
from dataload.loader.failures import read_excluded

GOLDEN = Path(__file__).parents[1] / "golden"
OUTSIDE = "outside"
LITERAL = ("home", "brace", "braces")
"""Names that are those of files below the directory, as they stand."""

_LOCAL_EVENTS = ("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir", "subprocess.Popen")


def escapes(target: str, host: str) -> dict[str, str]:
    """Return names that lead to the file `target`, or one of its name at a URL."""
    name, local = os.path.basename(target), target.lstrip("/")
    up = f"{OUTSIDE}/{name}"
    return {
        "absolute": target, "parent": f"../{up}", "inner": f"x/../../{up}", "dots": "..", "root": "/", "empty": "",
        "file": f"file://{target}", "host": f"FILE://localhost{target}", "file2": f"file:{target}",
        "pipe": f"pipe:cat {up}",
        "web": f"{host}/{name}", "user": f"http://u:p@{host[7:]}/{name}", "network": f"//{host[7:]}/{name}",
        "s3": f"s3://{up}",
        "memory": f"memory://{up}", "tfds": f"tfds:../{OUTSIDE}", "hf": f"hf://{up}", "drive": f"C:{target}",
        "unc": f"\\\\{up}",
        "percent": f"%2e%2e/{up}", "slash": f"..%2f{OUTSIDE}%2F{name}", "back": f"..\\{OUTSIDE}\\{name}",
        "home": f"~/{name}",
        "brace": f"{{.,x}}./{up}", "braces": f"{{..,y}}/{up}", "star": f"*/../../{up}", "glob": f"../out*/{name}",
        "nul": f"{name}\0", "line": f".\n./{up}", "tab": f".\t./{up}", "current": ".", "trail": f"{name}/..",
        "double": f"//{local}",
        "surrogate": f"{name}\ud800", "number": 7, "none": None, "long": "x/" * 3000 + name, "query": f"..?/../../{up}",
        "slice": f"../{up}[0:1]", "key": "../{key}.jpg", "dotted": f"./../{up}",
        "deep": f"../../../../../../../../..{target}",
    }  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each text in a document."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], text: Any) -> Any:
    if not path:
        return text
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], text)
    return copy


class Document:
    """A file with texts: JSON, lines of JSON, CSV, or the names of members of an archive."""

    def __init__(self, path: Path) -> None:
        self.path, self.before = path, path.read_bytes()
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                self._members = {name: archive.read(name) for name in archive.namelist()}
            self.value: Any = list(self._members)
        elif path.suffix == ".csv":
            self.value = list(csv.reader(io.StringIO(self.before.decode())))
        elif path.suffix == ".jsonl":
            self.value = [json.loads(line) for line in self.before.splitlines()]
        else:
            self.value = json.loads(self.before)

    @classmethod
    def of(cls, path: Path) -> "Document | None":
        try:
            return cls(path)
        except (ValueError, OSError):
            return None

    def write(self, value: Any) -> bool:
        try:
            self.path.write_bytes(self._encode(value))
        except (ValueError, TypeError, AttributeError):
            return False
        return True

    def _encode(self, value: Any) -> bytes:
        if self.path.suffix == ".zip":
            stream = io.BytesIO()
            with zipfile.ZipFile(stream, "w") as archive:
                for name, old in zip(value, self._members, strict=True):
                    info = zipfile.ZipInfo("x")
                    info.filename = name
                    archive.writestr(info, self._members[old])
            return stream.getvalue()
        if self.path.suffix == ".csv":
            text = io.StringIO()
            csv.writer(text).writerows(value)
            return text.getvalue().encode()
        if self.path.suffix == ".jsonl":
            return "".join(json.dumps(line) + "\n" for line in value).encode()
        return json.dumps(value).encode()


# Data sets: what makes one in a folder, and what uses it.


def use(path: Any, **options: Any) -> None:
    with dataload.open(path, **options) as source:
        indices = list(range(min(len(source), 8)))
        source.read(indices)
        source.read_batch(indices, [*source.fields][:1])
        source.fingerprint()
        for name in [*source.fields][:2]:
            with suppress(ConfigError):  # it has no length
                dataload.record_lengths(source, name)


def copied(name: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copytree(GOLDEN / name, folder)


def archives(folder: Path) -> None:
    folder.mkdir()
    records = [{"__key__": f"{i:03d}", "txt": "x" * i} for i in range(6)]
    convert(dataload.MemorySource(records), folder / "a-{0..1}.tar", keep_key=True)
    index_shards(str(folder), options={"decode": "auto"})
    index_shards(str(folder), options={"decode": "auto"}, measuring=Measuring())


def parts(folder: Path) -> None:
    archives(folder)
    for number in (1, 2):
        index_shards(str(folder), part=(number, 2))


def merge(folder: Path) -> None:
    index_shards(str(folder), merge=True)


def listed_index(folder: Path) -> None:
    """A manifest that lists an index of wids."""
    wids_with_base(folder)
    table = json.loads((folder / "x.json").read_bytes())
    (folder / "x.json").write_text(json.dumps({**table, "shardlist": table["shardlist"][:1]}))
    entry = DataSetFacts.of("x.json", "wids", [ShardFacts("x.json", (folder / "x.json").stat().st_size, 3)])
    (folder / "dataload.json").write_bytes(Manifest((entry,)).to_bytes())


def resized(folder: Path) -> None:
    """Make the sizes in the manifest right again, as who changes the index would."""
    path = folder / "dataload.json"
    table, size = json.loads(path.read_bytes()), (folder / "x.json").stat().st_size
    with suppress(LookupError, TypeError):
        table = changed(table, ("data_sets", 0, "shards", "bytes"), [size])
        path.write_text(json.dumps(changed(table, ("data_sets", 0, "bytes"), size)))
    use(folder)


def wids_with_base(folder: Path) -> None:
    (folder / "inner").mkdir(parents=True)
    for path in (GOLDEN / "wids").glob("*.tar"):
        shutil.copy(path, folder / "inner")
    table = json.loads((GOLDEN / "wids/shards.json").read_text())
    (folder / "x.json").write_text(json.dumps({**table, "base": "inner"}))


def journal(folder: Path) -> None:
    folder.mkdir()
    convert(dataload.RangeSource(8), folder / "a-{0..1}.jsonl")
    convert(dataload.RangeSource(8), folder / "b-{0..1}.jsonl", part=(1, 2))


def resume(folder: Path) -> None:
    for name, more in (("a", {"resume": True}), ("b", {"merge": True})):
        try:
            convert(dataload.RangeSource(8), folder / f"{name}-{{0..1}}.jsonl", **more)
        except DataloadError as error:
            if "have not run" not in str(error) or ".b-" in str(error):
                raise


def images(folder: Path) -> None:
    from PIL import Image

    for number in range(2):
        (folder / f"class{number}").mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(folder / f"class{number}/x.png")
    (folder / "labels.csv").write_text("file,label\nclass0/x.png,a\nclass1/x.png,b\n")
    with zipfile.ZipFile(folder / "x.zip", "w") as archive:
        for number in range(2):
            archive.write(folder / f"class{number}/x.png", f"class{number}/x.png")


def use_images(folder: Path) -> None:
    use(f"folder:{folder}/x.zip")
    use(folder, format="folder", labels=str(folder / "labels.csv"))


def report(folder: Path) -> None:
    folder.mkdir()
    line = {"epoch": 0, "step": 1, "index": 3, "source": "s", "shard": None, "record": 3, "key": None, "stage": "read"}
    (folder / "bad.jsonl").write_text(
        json.dumps(line | {"error": "ValueError", "cause": "c", "replaced_by": None}) + "\n"
    )


def use_report(folder: Path) -> None:
    read_excluded(str(folder / "bad.jsonl"), dataload.RangeSource(8))


Case = tuple[Callable[[Path], None], Callable[[Path], None], str]

CASES: dict[str, Case] = {
    "manifest": (archives, use, "dataload.json"),
    "logs": (parts, merge, ".dataload.json.*"),
    "manifest of wids": (listed_index, resized, "*.json"),
    "wids": (wids_with_base, lambda folder: use(folder / "x.json"), "x.json"),
    "mds": (copied("mds/all"), lambda folder: use(folder, fields=["str"]), "index.json"),
    "mds, compressed": (copied("mds/gz"), use, "index.json"),
    "tfds": (copied("tfds/demo/1.0.0"), lambda folder: use(folder, split="train"), ""),
    "hugging face": (copied("hugging_face/saved"), use, "state.json"),
    "hugging face, splits": (copied("hugging_face/dict"), lambda folder: use(folder / "train"), "state.json"),
    "journals": (journal, resume, ""),
    "images": (images, use_images, "labels.csv"),
    "error report": (report, use_report, ""),
}
"""By name: what makes the data set in a folder that does not exist, what reads it, and which files name the others."""

AT_URLS = {
    "wids": (wids_with_base, "x.json", {}),
    "mds": (copied("mds/all"), "index.json", {"fields": ["str"], "format": "mds"}),
}


class Watch:
    """The files that this process opens, as the interpreter tells."""

    def __init__(self) -> None:
        self.opened: list[str] | None = None
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.opened is not None and event in _LOCAL_EVENTS and arguments:
            first = arguments[0]
            self.opened.append(os.fsdecode(first) if isinstance(first, (str, bytes)) else repr(first))


class Tries:
    """The changed documents of a data set, and what went wrong."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._seen: set[Any] = set()
        self.tried = 0
        self.wrong: list[str] = []

    def of(self, folder: Path, naming: str, host: str) -> Iterator[tuple[str, str, Path, bool]]:
        """Change one text after the other; yield place, kind, the file, and whether it names another one there."""
        outside = folder.parent / OUTSIDE
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            document = Document.of(path)
            for where in [] if document is None else places(document.value):
                old = functools.reduce(lambda value, key: value[key], where, document.value)
                named = bool(naming) and path.match(naming) and is_name(old, path)
                kinds = [*escapes(str(outside / (old if named else path.name)), host).items()]
                for kind, text in self._some(kinds, (path.name, *map(str, where)), named):
                    if document.write(changed(document.value, where, text)):
                        self.tried += 1
                        yield f"{path.name} {where} {kind} {text!r:.80}", kind, path, named and kind not in LITERAL
                path.write_bytes(document.before)

    def _some(self, kinds: list[tuple[str, str]], where: tuple[str, ...], named: bool) -> list[tuple[str, str]]:
        if not self._every:
            return kinds
        shape = tuple("*" if key.isdecimal() else key for key in where)
        if shape in self._seen:
            return []
        self._seen.add(shape)
        first = len(self._seen) % self._every
        return kinds[first :: self._every] if named else kinds[first * 5 % len(kinds) :][:1]


def try_local(name: str, every: int, watch: Watch) -> Tries:
    make, run, naming = CASES[name]
    tries = Tries(every)
    with tempfile.TemporaryDirectory() as top:
        folder, outside, keep = Path(top, "data"), Path(top, OUTSIDE), Path(top, "keep")
        make(folder)
        shutil.copytree(folder, outside)
        shutil.copytree(folder, keep)
        if error := attempt(run, folder):
            tries.wrong.append(f"{name} cannot be read: {error!r:.500}")
        with FileServer(outside) as server:
            for place, _, path, named in tries.of(folder, naming, server.endpoint):
                watch.opened = []
                error = attempt(run, folder)
                opened, watch.opened = watch.opened, None
                bad = [each for each in opened if is_outside(each, str(outside))]
                if bad or server.asked:
                    tries.wrong.append(f"{name}: {place}: opened {bad}, asked for {server.asked}")
                    server.asked.clear()
                if error is not None and not isinstance(error, DataloadError):
                    tries.wrong.append(f"{name}: {place}: {type(error).__name__}: {error!s:.200}")
                elif named and (error is None or path.name not in str(error)):
                    tries.wrong.append(f"{name}: {place}: the error does not name the file: {error!s:.300}")
                if run in (resume, merge):  # they write
                    shutil.copytree(keep, folder, dirs_exist_ok=True)
    return tries


def try_url(name: str, every: int) -> Tries:
    """As `try_local`, with the data set behind one server, and what it may not name behind it and another."""
    make, file, options = AT_URLS[name]
    tries = Tries(every)
    with tempfile.TemporaryDirectory() as top:
        folder, outside = Path(top, "data"), Path(top, OUTSIDE)
        make(folder)
        shutil.copytree(folder, outside)
        with FileServer(top) as own, FileServer(outside) as other:
            url = f"{own.endpoint}/data/{file}"

            def run(_: Path) -> None:
                with dataload.open(url, remote={"retries": 0}, **options) as source:
                    source.read(list(range(min(len(source), 4))))

            if error := attempt(run, folder):
                tries.wrong.append(f"{name} at a URL cannot be read: {error!r:.500}")
            for number, (place, kind, path, _) in enumerate(tries.of(folder, file, other.endpoint)):
                if number % 2:  # instead, the same host
                    path.write_bytes(path.read_bytes().replace(other.endpoint[7:].encode(), own.endpoint[7:].encode()))
                own.asked.clear()
                error = attempt(run, folder)
                # An index of wids may name any archive of its host.
                left = [each for each in own.asked if not each.startswith("/data/") and name != "wids"]
                if other.asked or left or any(".." in unquote(each).split("/") for each in own.asked):
                    tries.wrong.append(f"{name} at a URL: {place} {kind}: asked for {own.asked} and {other.asked}")
                    other.asked.clear()
                if error is not None and not isinstance(error, DataloadError):
                    tries.wrong.append(f"{name} at a URL: {place}: {type(error).__name__}: {error!s:.200}")
    return tries


def is_name(text: str, path: Path) -> bool:
    return (
        0 < len(text) < 200
        and "\0" not in text
        and any((base / text).is_file() for base in (path.parent, path.parent / "inner"))
    )


def is_outside(path: str, outside: str) -> bool:
    return "\0" in path or os.path.realpath(path).startswith(outside)


def attempt(run: Callable[[Path], None], folder: Path) -> BaseException | None:
    """Return the error, or else a warning, with which the data set is read; None if there is neither."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            run(folder)
        except Exception as error:
            return error
    return ConfigError(str(found[-1].message)) if found else None


def main() -> int:
    given = command_line(__doc__, cases=[], every=0)
    tried, failures = 0, 0
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"HOME": home, "XDG_CACHE_HOME": home}
        watch = Watch()
        local = {name: functools.partial(try_local, name, given.every, watch) for name in CASES}
        at_urls = {f"{name} at a URL": functools.partial(try_url, name, given.every) for name in AT_URLS}
        for name, run in (local | at_urls).items():
            if given.cases and name not in given.cases:
                continue
            tries = run()
            print(f"{name:25} {tries.tried:>6} names, {len(tries.wrong)} failures", flush=True)
            for text in tries.wrong[:20]:
                print(f"    {text}", flush=True)
            tried, failures = tried + tries.tried, failures + len(tries.wrong)
    print(f"{tried} names, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
