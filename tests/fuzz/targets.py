"""What the fuzzer runs: one function of bytes for each parser, and inputs to begin with.

A target may end in an error of dataload, and in nothing else. What a parser gives is compared with a slower parser
of the same bytes where there is one, so that a wrong record counts as a crash does.
"""

import atexit
import io
import json
import os
import resource
import shutil
import struct
import tarfile
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy as np

import dataload
from dataload._util.caches import DecodedCache
from dataload._util.failures import owner_of
from dataload.catalog import arrays
from dataload.catalog.arrays import IndexKey
from dataload.catalog.evidence import is_same
from dataload.catalog.facts import DataSetFacts, Evidence, Found, ShardFacts
from dataload.catalog.manifest import Manifest
from dataload.codecs import example, msgpack, npz, tensorprotos
from dataload.codecs.audio import decode_audio, decode_rate
from dataload.codecs.decoders import DECODERS
from dataload.config import apply_overrides, read_config
from dataload.convert.ledger import Journal
from dataload.errors import ConfigError, CorruptFileError, DataloadError, SourceError, SourceNotFoundError
from dataload.loader.failures import read_excluded
from dataload.sources.array_record import riegeli, tfds, tfds_info
from dataload.sources.array_record.layout import Decompressor
from dataload.sources.array_record.reader import ArrayRecordSource
from dataload.sources.arrow.parquet import ParquetSource
from dataload.sources.arrow.reader import ArrowSource, CsvSource
from dataload.sources.folder import files as zip_members
from dataload.sources.format import describe_head
from dataload.sources.jsonl.records import JsonlSource
from dataload.sources.lmdb.reader import LMDBSource
from dataload.sources.lmdb.torchrecord import TorchRecordSource
from dataload.sources.lmdb.tree import list_subdatabases
from dataload.sources.mds.reader import MDSSource, parse_index
from dataload.sources.registry import detect
from dataload.sources.syrah.reader import SyrahSource
from dataload.sources.tar import header as tar
from dataload.sources.tar import samples as tar_samples
from dataload.sources.tar import table as tar_table
from dataload.sources.tar.reader import TarSource, WidsSource
from dataload.sources.tar.writer import write_index
from dataload.sources.tfrecord.records import TFRecordSource
from dataload.sources.tokens.reader import TokenSource
from dataload.storage import base_name, kept, storage_of
from dataload.streams.state import MultiStreamState
from dataload.testing.compare import difference

GOLDEN = Path(__file__).parents[1] / "golden"
MOST_RECORDS = 16
OPENING_BYTES = 64 << 20  # beside twice the size of the file
RECORD_BYTES = 1 << 24
READING_BYTES = 1 << 30
PACKAGE_BYTES = 8 << 30  # of address space, which array_record's threads reserve: it crashes or hangs if it gets none
LONGEST_SEED = 400_000

READING = {"cache": False, "max_record_bytes": RECORD_BYTES}

Target = Callable[[bytes], None]


def same(got, want, what):
    found = difference(got, want, what)
    if found:
        raise AssertionError(found)


def outcome(call):
    """What it gives, or that it refuses; it must know why before memory is exhausted."""
    try:
        return call()
    except (SourceError, ConfigError) as error:
        cause = error
        while cause is not None:
            if isinstance(cause, MemoryError):
                raise AssertionError("it takes too much memory") from error
            cause = cause.__cause__
        if isinstance(error, SourceNotFoundError):
            return "refused"  # it names a file that does not exist
        if owner_of(error) not in ("record", "user"):  # skipping would not help, or it looks like a bug
            raise AssertionError(f"a damaged file is said to be the {owner_of(error)}'s fault: {error}") from error
        return "refused"


@contextmanager
def little_memory(extra):
    """Let the process take so many more bytes of memory while this is entered."""
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # another system
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + extra if soft == resource.RLIM_INFINITY else min(used + extra, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@cache
def directory():
    """For the files of one process."""
    path = tempfile.mkdtemp(prefix="dataload-fuzz-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def as_file(data: bytes, name: str) -> Path:
    path = directory() / name
    path.write_bytes(data)
    return path


def read_all(source, size, more=0, *, strict=True):
    """Read every record, singly and together.

    Args:
        source: The source.
        size: Bytes of its file.
        more: Bytes of memory to allow beside what should be enough.
        strict: Whether records must be refused together if, and only if, one of them is refused alone.
    """
    with source, suppress(SourceError, ConfigError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with little_memory(2 * size + OPENING_BYTES + more):
            length = outcome(lambda: len(source))
        if length == "refused":
            return
        indices = list(range(min(length, MOST_RECORDS)))
        with little_memory(READING_BYTES + more):
            together = outcome(lambda: source.read(indices))
            one_by_one = [outcome(lambda index=index: source[index]) for index in indices]
            if "refused" in one_by_one:
                one_by_one = "refused"
            if strict or "refused" not in (together, one_by_one):
                same(together, one_by_one, "records read together")
            if together != "refused" and together:
                columns = outcome(lambda: source.read_batch(indices))
                want = outcome(lambda: dataload.default_collate(together))
                same(columns, want, "read_batch")
            source.fingerprint()


# Bytes of one record.


def run_npy(data):
    want = got = None
    with suppress(Exception):
        want = np.load(io.BytesIO(data), allow_pickle=False)
    with suppress(CorruptFileError, dataload.errors.UnsupportedFormatError):
        got = npz.parse_npy(data)
    if got is not None:
        same(got, want, "the array")


def run_each(*calls, memory=PACKAGE_BYTES):
    """Call each function on the bytes, which it may refuse."""

    def run(data):
        for call in calls:
            with little_memory(memory):
                outcome(lambda call=call: call(data))

    return run


@cache
def original_fields():
    return [npz.decode(data) for data in seeds_npz()]


def run_npz(data):
    """Each member has a checksum: no value of the seeds is served altered."""
    with little_memory(OPENING_BYTES):
        record = outcome(lambda: npz.decode(data, RECORD_BYTES))
    if record != "refused":
        for name, value in record.items():
            known = [fields[name] for fields in original_fields() if name in fields]
            if known and all(difference(value, one, name) for one in known):
                raise AssertionError(f"field {name!r} was altered")


def run_codec(decode, decode_batch):
    def run(data):
        with little_memory(4 * OPENING_BYTES):
            record = outcome(lambda: decode(data, RECORD_BYTES))
            batch = outcome(lambda: decode_batch([data, data], None, RECORD_BYTES))
        if batch is not None and not isinstance(batch, str):
            if record == "refused":
                raise AssertionError("the batch is read, the record refused")
            same(batch, dataload.default_collate([decode(data), decode(data)]), "the batch")

    return run


def run_image(data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with little_memory(OPENING_BYTES):
            outcome(lambda: DECODERS["image"].decode(data, limit=RECORD_BYTES))


def run_audio(data):
    """libsndfile's own limits are far above those of a record."""
    with little_memory(OPENING_BYTES + RECORD_BYTES):
        outcome(lambda: decode_audio(data, limit=RECORD_BYTES))
        outcome(lambda: decode_rate(data))


def run_zip(data):
    """A member that `zipfile` reads, too, has the same content: each has a checksum."""
    with little_memory(OPENING_BYTES):
        found = outcome(lambda: zip_members.read_members(lambda at, n: data[at : at + n], len(data), "x.zip"))
    if found == "refused":
        return
    for row, name in enumerate(found.names[:MOST_RECORDS]):
        start, stored, size = int(found.starts[row]), int(found.stored[row]), int(found.sizes[row])
        if start + stored > len(data):
            raise AssertionError(f"{name!r} lies outside of the archive")
        content, checksum = memoryview(data[start : start + int(found.spans[row])]), int(found.checksums[row])
        if size <= RECORD_BYTES:
            with little_memory(4 * RECORD_BYTES):
                got = outcome(
                    lambda: zip_members.unpack(content, stored, size, checksum, deflated=bool(found.deflated[row]))  # noqa: B023
                )
            with suppress(Exception):
                want = zipfile.ZipFile(io.BytesIO(data)).read(name)
                if got != "refused" and bytes(got) != want:
                    raise AssertionError(f"{name!r} was altered")


# Files.


def run_file(name, make, *variants, strict=True, **options):
    """Read the bytes as a file, with the options in each variant."""

    def run(data):
        for variant in variants or ({},):
            reading = READING if strict else {"max_record_bytes": RECORD_BYTES}
            source = make(as_file(data, name), **reading, **options, **variant)
            read_all(source, len(data), PACKAGE_BYTES if not strict else 0, strict=strict)

    return run


def run_archive_and_index(data):
    """An index that belongs to no such archive, believed or not."""
    path, index = small_archive(), as_file(data, "other.idx")
    for verify in (True, False):
        read_all(TarSource(path, index=index, verify_index=verify, **READING), path.stat().st_size + len(data))


def run_wids(data):
    for number in range(3):
        as_file((GOLDEN / f"wids/part-{number}.tar").read_bytes(), f"part-{number}.tar")
    with suppress(SourceError, ConfigError):
        read_all(WidsSource(as_file(data, "x.json"), **READING), len(data) + 30_720)


def run_tar(data):
    path = as_file(data, "x.tar")
    members = outcome(lambda: list(tar.scan(lambda o, n: data[o : o + n], len(data), "x.tar")))
    if members == "refused":
        return
    for member in members:
        if member.offset % 512 or member.offset + member.size > len(data):
            raise AssertionError(f"{member} lies outside of the archive")
    with suppress(SourceError, ConfigError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_index(path, path.with_suffix(".idx"), strict=False, overwrite=True)
        if whole(members):
            by_index, scanned = (
                outcome(lambda index=index: list(TarSource(path, index=index, cache=False)[:MOST_RECORDS]))
                for index in (None, False)
            )
            same(by_index, scanned, "records by the index")
    path.with_suffix(".idx").unlink(missing_ok=True)
    read_all(TarSource(path, index=False, decode="auto", **READING), len(data))


def whole(members):
    """Whether an index can hold these members."""
    parts = [tar_samples.split_name(member.name) for member in members]
    return all(part and part[1] and b"." in member.name for part, member in zip(parts, members, strict=True)) and all(
        member.name.split() == [member.name] for member in members
    )


def run_tar_index(data):
    got = outcome(lambda: tar_table.parse_index(data, "x.idx"))
    if isinstance(got, str):
        return
    lines = plain_lines(data, len(got), named=got.keys is not None)
    rows = np.arange(len(got))
    firsts = [got.start(index) for index in range(len(got))] + [len(got.blocks)]
    offsets, sizes = got.offsets(slice(None)).tolist(), got.lengths(slice(None)).tolist()
    for index, line in enumerate(lines):
        span = range(firsts[index], firsts[index + 1])
        mine = [(got.extensions[got.code(c)], offsets[c], sizes[c]) for c in span]
        same(mine, [(tar_samples.decode_name(e), o, s) for e, o, s, _ in line], f"line {index + 2}")
        if got.keys is not None:
            same(got.keys.names(rows[index : index + 1]), [plain_key(line[0][3])], "the key")


def plain_key(name):
    base = name.rfind(b"/") + 1
    dot = name.find(b".", base)
    return tar_samples.decode_name(name[:dot] if dot >= 0 else name)


def plain_lines(data, count, named):
    """The simplest reading of an index."""
    fields = 4 if named else 3
    lines = []
    for line in data.split(b"\n")[1 : count + 1]:
        words = line.split()
        groups = [words[i : i + fields] for i in range(0, len(words), fields)]
        lines.append([(group[0], int(group[1]), int(group[2]), group[3] if named else b"") for group in groups])
    return lines


@cache
def small_archive():
    path = directory() / "cached.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name in ("a.jpg", "a.cls", "b.jpg", "c.jpg", "c.cls"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    os.utime(path, (1_600_000_000, 1_600_000_000))
    return path


def run_index_cache(data):
    """Whatever the file of the cache holds: the archive's records, or those of a table that is consistent."""
    path = small_archive()
    key = IndexKey.of("tar", (str(path),), ("scanned",))
    file = storage_of(str(path)).map(str(path))
    # The checksums are made right, or nothing behind them would ever be reached.
    for content in (data, signed(data, key.text)):
        Path(next(key.places()).path).write_bytes(content)
        table = tar_table._load(key, file)
        if table is not None:
            ends = table.offsets(slice(None)) + table.lengths(slice(None))
            if len(ends) and (int(ends.max()) > file.size or int(table.offsets(slice(None)).min()) < 0):
                raise AssertionError("a component outside of the archive")
            if table.keys is not None:
                table.keys.names(np.arange(len(table)))
            read_all(TarSource(path, index=False), path.stat().st_size + len(content))
    Path(next(key.places()).path).unlink()


def signed(data, text):
    """The file with its header's key and both checksums made right, as far as there is a header."""
    if len(data) < 24:
        return data
    length = struct.unpack_from("<I", data, 16)[0]
    try:
        head = json.loads(data[24 : 24 + length])
        head["key"] = text
        start = -(-(24 + length) // 64) * 64
        body = data[start:]
        head["sum"] = kept._checksum(np.frombuffer(body, np.uint8))
        encoded = json.dumps(head).encode()
    except (ValueError, TypeError, RecursionError):
        return data
    packed = struct.pack("<16sII", kept._MAGIC, len(encoded), zlib.crc32(encoded)) + encoded
    return packed.ljust(-(-len(packed) // 64) * 64, b"\0") + body


def parsed_chunks(data):
    return riegeli.parse_chunks(lambda at, length: data[at : at + length], len(data), Decompressor(DecodedCache(0)))


def run_riegeli(data):
    chunks = parsed_chunks(data)
    if chunks is None:
        return
    if len(chunks):
        spans = chunks.spans(np.arange(len(chunks.edges) - 1))
        if int(spans.starts.min()) < 0 or int((spans.starts + spans.lengths).max()) > len(data) + 1:
            raise AssertionError("a chunk outside of the file")


def run_array_record(data):
    """Our own reader, through a map."""
    if parsed_chunks(data) is not None:
        path = as_file(data, "x.array_record")
        for verify in (False, True):
            source = ArrayRecordSource(path, verify=verify, **READING)
            read_all(source, len(data), PACKAGE_BYTES, strict=False)


@cache
def original_records():
    """The records of the seeds."""
    found = {"refused"}
    for data in seeds_riegeli():
        with ArrayRecordSource(as_file(data, "seed.array_record"), cache=False) as source, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            length = outcome(lambda source=source: len(source))
            for index in range(0 if length == "refused" else length):
                found.add(outcome(lambda source=source, index=index: source[index]))
    return found


def run_array_record_hashes(data):
    """Records that were altered, and whose hashes were not: none is served."""
    if parsed_chunks(data) is None:
        return
    with ArrayRecordSource(as_file(data, "x.array_record"), verify=True, cache=False) as source:
        length = outcome(lambda: len(source))
        for index in range(0 if length == "refused" else min(length, MOST_RECORDS)):
            record = outcome(lambda index=index: source[index])
            if record not in original_records():
                raise AssertionError(f"record {index} was altered")


def run_array_record_library(data):
    """What stands between a file and the package's reader, which gives some records alone that it refuses in lists."""
    source = ArrayRecordSource(as_file(data, "x.array_record"), reader_options="readahead_buffer_size:0")
    read_all(source, len(data), PACKAGE_BYTES)


def run_lmdb_file(data):
    path = as_file(data, "x.mdb")
    trees = outcome(lambda: list_subdatabases(str(path)))
    names = [] if isinstance(trees, str) else [tree.name.decode(errors="replace") for tree in trees[:3]]
    for name in (None, *names):
        read_all(LMDBSource(path, subdatabase=name, **READING), len(data))
        outcome(lambda name=name: len(LMDBSource(path, subdatabase=name, verify=True)))
    read_all(TorchRecordSource(path, **READING), len(data))


def run_mds(data):
    """One text as an index and as a shard that the index of another data set lists."""
    with suppress(DataloadError):
        for shard in parse_index(data, "index.json"):
            if shard.name.startswith("/") or ".." in shard.name.split("/"):
                raise AssertionError("a file outside of the directory")
    folder = directory() / "mds"
    if not folder.exists():
        shutil.copytree(GOLDEN / "mds/all", folder)
    index = json.loads((folder / "index.json").read_text())
    index["shards"] = index["shards"][:1]
    index["shards"][0]["raw_data"] |= {"bytes": len(data), "basename": "x.mds"}
    index["shards"][0]["samples"] = int.from_bytes(data[:4], "little")
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "x.mds").write_bytes(data)
    read_all(MDSSource(folder, max_record_bytes=RECORD_BYTES), len(data))


@cache
def loader():
    return dataload.Loader(dataload.RangeSource(50), batch_size=4, shuffle=True, seed=0)


def run_tfds(data):
    text = data.decode(errors="replace")
    outcome(lambda: tfds_info.parse_info(text, "dataset_info.json"))
    features = outcome(lambda: tfds.parse_features(text, "features.json"))
    for record in seeds_example() if not isinstance(features, str) else ():
        outcome(lambda record=record: features.decode(record))


def run_config(data):
    """One text as each kind of config, as the value of a setting, and as a setting."""
    text = data.decode(errors="replace")
    for suffix in (".yaml", ".toml", ".json"):
        with suppress(DataloadError):
            read_config(str(as_file(data, f"x{suffix}")), [])
    for override in (f"loader.batch_size={text}", text):
        with suppress(DataloadError):
            apply_overrides({"loader": {"batch_size": 4}}, [override])


def run_state(data):
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        return
    with suppress(DataloadError):
        MultiStreamState.from_json(state)
    with suppress(DataloadError):
        loader().load_state_dict(state)
        batch = next(iter(loader()), None)
        if batch is not None and not 0 <= int(batch["index"].min()) <= int(batch["index"].max()) < 50:
            raise AssertionError("records that there are not")


def run_journal(data):
    with suppress(DataloadError):
        found = Journal.parse(data, "x.json")
        list(found.differences(found))
        [is_same(shard, str(directory() / "missing")) for shard in found.finished.values()]


def run_manifest(data):
    with suppress(DataloadError):
        found = Manifest.parse(data, "dataload.json")
        same(Manifest.parse(found.to_bytes(), "dataload.json"), found, "written and read again")
        for entry in found.data_sets:
            if any("/" in name or name.startswith(".") for name in entry.names):
                raise AssertionError("a shard outside of the directory")
            if sum(entry.records) >= 1 << 63 or len(entry.shards) != len({*entry.names}):
                raise AssertionError("shards that cannot be")
            list(entry.stale(dict.fromkeys(entry.names, Found(0))))
    path = as_file(data, "dataload.json")
    with suppress(DataloadError):
        dataload.open(path.parent)


def run_error_report(data):
    with suppress(DataloadError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        indices = read_excluded(str(as_file(data, "x.jsonl")), dataload.RangeSource(50))
        if indices is not None and not 0 <= int(indices.min()) <= int(indices.max()) < 50:
            raise AssertionError("records that there are not")


# Inputs to begin with.


def golden(*patterns):
    files = [path for pattern in patterns for path in sorted(GOLDEN.glob(pattern)) if path.is_file()]
    return [path.read_bytes() for path in files if path.stat().st_size <= LONGEST_SEED]


def seeds_npy():
    arrays = [np.arange(6.0).reshape(2, 3), np.array("ab"), np.zeros((0, 3), ">i2"), np.asfortranarray(np.eye(3))]
    found = []
    for array in arrays:
        stream = io.BytesIO()
        np.save(stream, array)
        found.append(stream.getvalue())
    return found


def seeds_npz():
    found = []
    for save in (np.savez, np.savez_compressed):
        stream = io.BytesIO()
        save(stream, x=np.arange(5), y=np.array("text"))
        found.append(stream.getvalue())
    return [*found, npz.encode({"x": np.arange(3), "b": b"bytes", "s": "text", "n": 3})]


RECORD = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "i": np.arange(3), "b": b"bytes", "s": "text"}


def seeds_example():
    return [example.encode({"x": RECORD["x"].ravel(), "i": RECORD["i"], "b": b"bytes"}), b""]


def seeds_tensorprotos():
    return [tensorprotos.encode(RECORD), tensorprotos.encode({"label": b"7", "x": np.arange(3, dtype=np.int32)})]


def seeds_msgpack():
    return [msgpack.encode(RECORD), msgpack.encode({"a": 1})]


def seeds_image():
    from PIL import Image

    found = []
    for kind in ("JPEG", "PNG", "GIF", "BMP"):
        stream = io.BytesIO()
        Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(stream, kind)
        found.append(stream.getvalue())
    return found


def seeds_tar_index():
    own = [b"v1.2 2\njpg 512 10 a.jpg cls 1536 1 a.cls\njpg 2560 3 b.jpg\n", b"v1.1 1\njpg 512 10\n"]
    return [*own, *golden("tar/idx/*", "tar/bad_idx/*")][:40]


def seeds_archive_and_index():
    path = small_archive()
    index = directory() / "seed.idx"
    write_index(path, index, strict=False, overwrite=True)
    return [index.read_bytes(), b"v1.1 1\njpg 512 0\n", b"v1.2 1\njpg 0 0 a.jpg\n"]


KEPT_NAMES = (
    ".x.dataload-index", ".x.convert.json", f".dataload.filter-{'0' * 32}.arrays", f".dataload.lengths-{'0' * 32}.npy",
    ".x.convert.json.lock", ".dataload.json.index.log", "dataload.json",
)  # fmt: skip


def run_kept(data):
    """Whatever the files of a directory hold: they are listed, and what a manifest names stays."""
    place = directory() / "kept"
    place.mkdir(exist_ok=True)
    for name in KEPT_NAMES:
        (place / name).write_bytes(data)
    found = arrays.list_data(str(place))
    if len(found) < len(KEPT_NAMES) - 3 or not {base_name(each.path) for each in found} < {*KEPT_NAMES}:
        raise AssertionError(f"only {found}")
    arrays.remove([each for each in found if each.removal != "never"])
    if not (place / KEPT_NAMES[-1]).exists() or ((place / KEPT_NAMES[3]).exists() != (KEPT_NAMES[3].encode() in data)):
        raise AssertionError("what stays differs")
    shutil.rmtree(place)


def seeds_kept():
    head = {"shards": [["a", 0, 1]], "finished": {}}
    return [*seeds_index_cache(), json.dumps(head).encode(), json.dumps(KEPT_NAMES).encode()]


def seeds_index_cache():
    path = small_archive()
    table = tar_table._make(storage_of(str(path)).map(str(path)), False, "error", None)
    key = IndexKey.of("tar", (str(path),), ("scanned",))
    stream = io.BytesIO()
    kept._write(stream, key.text, tar_table._pack(table))
    return [stream.getvalue()]


def seeds_audio():
    import soundfile

    found: list[bytes] = []
    for kind, subtype in (("WAV", "PCM_16"), ("WAVEX", "PCM_24"), ("FLAC", None), ("OGG", None), ("OGG", "OPUS")):
        stream = io.BytesIO()
        soundfile.write(stream, np.sin(np.arange(400) / 9), 8_000, format=kind, subtype=subtype)
        found.append(stream.getvalue())
    return found


def seeds_zip():
    found: list[bytes] = []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", method) as archive:
            for name in ("a/1.txt", "a/é.txt", "b/"):
                archive.writestr(zipfile.ZipInfo(name), name.encode() * 9, method)
            with archive.open("large", "w", force_zip64=True) as member:
                member.write(b"xyz" * 50)
            archive.comment = b"PK"
        found.append(stream.getvalue())
    return found


def seeds_riegeli():
    found = [data for data in golden("arrayrecord/*.array_record") if len(data) <= 140_000]
    for sizes in ([3, 3, 3], [1, 200, 0, 5]):
        path = directory() / "seed.array_record"
        with dataload.create(path, options="group_size:1,uncompressed", overwrite=True) as writer:
            writer.extend(bytes([65 + place]) * size for place, size in enumerate(sizes))
        found.append(path.read_bytes())
    return found


def seeds_tokens():
    found = [np.arange(20, dtype=np.uint16).tobytes(), bytes([7, 0] * 9)]
    stream = io.BytesIO()
    np.save(stream, np.arange(20, dtype=np.uint16))
    return [*found, stream.getvalue()]


def seeds_tables(*suffixes, **options):
    """Files of our writers: arrays, lists, text and bytes, in several groups."""

    def seeds():
        found = []
        for number, suffix in enumerate(suffixes):
            path = directory() / f"seed{number}{suffix}"
            with dataload.create(path, overwrite=True, **options) as writer:
                writer.extend({"n": i, "t": f"text {i}", "l": list(range(i))} for i in range(12))
            found.append(path.read_bytes())
        return found

    return seeds


def seeds_arrow():
    plain, compressed = (seeds_tables(".arrow", group_bytes=100, compression=name)() for name in (None, "zstd"))
    return [*plain, *compressed, *nested_tables(), *golden("hugging_face/saved/*.arrow")]


def nested_tables():
    """Tables of permuted tensors, and of dictionaries and tensors in structures and lists."""
    import pyarrow as pa

    kind = pa.fixed_shape_tensor(pa.int16(), [2, 3], permutation=[1, 0], dim_names=["height", "width"])
    storage = pa.FixedSizeListArray.from_arrays(pa.array(range(24), pa.int16()), 6)
    tensors, words = pa.ExtensionArray.from_storage(kind, storage), pa.array(["a", "b", "a", "c"]).dictionary_encode()
    structs = pa.StructArray.from_arrays([tensors, words], names=["inner", "word"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 3, 3, 4]), structs)
    several = pa.FixedSizeListArray.from_arrays(tensors, 2).take(pa.array([0, 1, 0, 1]))
    table = pa.table({"tensors": tensors, "word": words, "structs": structs, "lists": lists, "several": several})
    found = []
    for compression in (None, "zstd"):
        stream, options = io.BytesIO(), pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(stream, table.schema, options=options) as writer:
            writer.write_table(table)
        found.append(stream.getvalue())
    return found


def seeds_config():
    table = {"source": {"path": ["a.tar", "b.tar"], "decode": "auto"}, "sampler": {"kind": "pool", "pool_size": 64}}
    table["loader"] = {"batch_size": 4, "num_workers": 2, "executor": "threads", "seed": 1}
    yaml = b"source: &a {path: x.tar}\nother: *a\nwhen: 2001-12-31\nloader:\n  batch_size: 0x10\n  seed: 1_000\n"
    toml = b"[source]\npath = 'x.tar'\n[[sampler.parent]]\nkind='shuffle'\n[loader]\nbatch_size = 4\nt = 2001-12-31\n"
    settings = [
        b"4",
        b"loader.seed=5",
        b'{"a": [1, 2.5, null]}',
        b"[x, 'y', 1e3]",
        b"2001-12-31T00:00:00Z",
        b"{a = {c = 2}}",
    ]
    return [json.dumps(table).encode(), yaml, toml, *settings]


def seeds_journal():
    shard = {"bytes": 10, "sha256": "00", "mtime_ns": 5}
    journal = {"source": "f", "records": 10, "format": "tar", "options": {"index": "True"}, "version": 1}
    journal |= {"shards": [["a.tar", 0, 5], ["b.tar", 5, 10]], "finished": {"a.tar": shard}}
    return [json.dumps(journal, indent=1).encode()]


def seeds_manifest():
    shards = [ShardFacts("a-0.syr", 10, 5, "0a" * 32, evidence=Evidence(0, '"e"')), ShardFacts("a-1.syr", 11, 6)]
    fields = {"x": dataload.FieldSpec("float32", (3, None))}
    one = DataSetFacts.of("a-{0..1}.syr", "syrah", shards, fields=fields, options={"shapes": {"x": [3, -1]}})
    other = DataSetFacts.of("b", "array_record", [ShardFacts("b", 0, 0)], options={"codec": "npz"})
    return [Manifest((one, other)).to_bytes(), Manifest((one,)).to_bytes(), Manifest().to_bytes()]


def seeds_error_report():
    line = {"epoch": 0, "step": 1, "index": 7, "source": "RangeSource", "shard": None, "record": 7, "key": None}
    line |= {"stage": "read", "error": "ValueError", "cause": "bad", "replaced_by": None}
    return [b"".join(json.dumps({**line, "index": index, "record": index}).encode() + b"\n" for index in (7, 11, 49))]


def seeds_state():
    from copy import deepcopy

    taken = [deepcopy(loader().state_dict())]
    batches = iter(loader())
    next(batches)
    taken.append(loader().state_dict())
    rows = MultiStreamState.__dataclass_fields__
    taken.append({**dict.fromkeys(rows, 1), "version": 1, "rows": [[0, 0, 0]], "streams": []})
    return [json.dumps(state).encode() for state in taken]


TABLE = {"strict": False}
UNSIGNED = {"window": 3, "dtype": "uint16"}
TARGETS: dict[str, tuple[Target, Callable[[], list[bytes]]]] = {
    "npy": (run_npy, seeds_npy),
    "npz": (run_npz, seeds_npz),
    "example": (run_codec(example.decode, example.decode_batch), seeds_example),
    "tensorprotos": (run_codec(tensorprotos.decode, tensorprotos.decode_batch), seeds_tensorprotos),
    "caffe2": (run_each(tensorprotos.scan_record), seeds_tensorprotos),
    "msgpack": (run_each(lambda data: msgpack.decode(data, RECORD_BYTES), memory=4 * OPENING_BYTES), seeds_msgpack),
    "image": (run_image, seeds_image),
    "audio": (run_audio, seeds_audio),
    "text": (
        run_each(*(DECODERS[name].decode for name in ("json", "cls", "txt"))),
        lambda: [b'{"a": [1, 2.5, null]}', b"17", "größe".encode()],
    ),
    "detect": (run_each(detect, describe_head), lambda: golden("syrah/basic.syr", "tar/tars/*")[:5]),
    "syrah": (run_file("x.syr", SyrahSource), lambda: [data for data in golden("syrah/*.syr") if len(data) < 20_000]),
    "tar": (run_tar, lambda: [data for data in golden("tar/tars/*.tar") if len(data) < 60_000]),
    "zip": (run_zip, seeds_zip),
    "tar_index": (run_tar_index, seeds_tar_index),
    "archive_and_index": (run_archive_and_index, seeds_archive_and_index),
    "index_cache": (run_index_cache, seeds_index_cache),
    "kept": (run_kept, seeds_kept),
    "riegeli": (run_riegeli, seeds_riegeli),
    "array_record": (run_array_record, seeds_riegeli),
    "array_record_hashes": (run_array_record_hashes, seeds_riegeli),
    "array_record_library": (run_array_record_library, seeds_riegeli),
    "lmdb_file": (run_lmdb_file, lambda: golden("torchrecord/*/data.mdb", "torchrecord/*.lmdb")),
    "tokens": (run_file("x.npy", TokenSource, window=3, stride=2), seeds_tokens),
    "raw_tokens": (run_file("x.bin", TokenSource, {}, {"end_token": 7, "ends": "pad"}, **UNSIGNED), seeds_tokens),
    "parquet": (run_file("x.parquet", ParquetSource, **TABLE), seeds_tables(".parquet", group_bytes=100)),
    "arrow": (run_file("x.arrow", ArrowSource, **TABLE), seeds_arrow),
    "csv": (run_file("x.csv", CsvSource, **TABLE), lambda: [b'n,t\n1,a\n2,"b\nc"\n', b"x\n1.5\n\n2020-01-02\n"]),
    "jsonl": (run_file("x.jsonl", JsonlSource, cache=False, **TABLE), seeds_tables(".jsonl")),
    "jsonl_gz": (run_file("x.jsonl.gz", JsonlSource, **TABLE), seeds_tables(".jsonl.gz")),
    "tfrecord": (
        run_file(
            "x.tfrecord", TFRecordSource, {}, {"codec": "example"}, {"codec": "sequence_example"}, {"verify": True}
        ),
        lambda: golden("tfrecord/*.tfrecord*"),
    ),
    "mds": (run_mds, lambda: golden("mds/all/*", "mds/images/index.json")),
    "wids": (run_wids, lambda: golden("wids/shards.json")),
    "tfds": (run_tfds, lambda: golden("tfds/demo/**/*.json")),
    "state": (run_state, seeds_state),
    "config": (run_config, seeds_config),
    "journal": (run_journal, seeds_journal),
    "manifest": (run_manifest, seeds_manifest),
    "error_report": (run_error_report, seeds_error_report),
}
"""By name: what to run, and what makes the first inputs."""
