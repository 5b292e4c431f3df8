"""WebDataset's reading, writing and decoding, through `dataload.storage`; commands and pickles need consent."""

import functools
import importlib.util
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlparse

from dataload import errors
from dataload._util.lazy import load_optional
from dataload.errors import ConfigError
from dataload.sources.tar.reader import TarSource
from dataload.storage import Remote, is_url, local_path, storage_of
from dataload.storage.backend import FileStream

wds: Any = load_optional("webdataset", needed_by="dataload.compat.webdataset", extra="webdataset")


class Untyped:
    """A class of webdataset, as type checkers see it: the package has no types."""

    if TYPE_CHECKING:
        close: Any
        compose: Any
        decode: Any

        def __init__(self, *args: Any, **kw: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...


def base(name: str, module: Any = wds) -> type[Untyped]:
    """Return a class of webdataset, to derive from."""
    return getattr(module, name)


_BUFFER_BYTES = 1 << 20
_SCHEMES = ("s3", "gs", "az", "http", "https")  # that our storage reads, unless the user has a handler of his own
_PICKLED = ("pkl", "pickle", "pyd", "pth")
_HANDLERS = dict(wds.gopen_schemes)


def check_pipe(urls: Any, allow_pipe: bool) -> None:
    """Raise a ConfigError if a URL is a command and commands are not allowed."""
    for url in [urls] if isinstance(urls, str) else urls:
        if isinstance(url, str) and any(map(_is_command, url.split("::"))) and not allow_pipe:
            raise ConfigError(
                f"{url!r} runs a command in a shell: pass allow_pipe=True if all URLs are your own", key="allow_pipe"
            )


def _is_command(url: str) -> bool:
    scheme, colon, _ = url.partition(":")
    return urlparse(scheme + colon).scheme == "pipe"  # as webdataset reads it: in any case, and without blanks


def is_remote(url: str) -> bool:
    """Return whether our storage reads a URL, and not a file, a command or a handler that the user has registered."""
    scheme = urlparse(url).scheme
    handlers = wds.gopen_schemes
    return is_url(url) and scheme in _SCHEMES and handlers.get(scheme) is _HANDLERS.get(scheme)


def gopen(
    url: str, mode: str = "rb", *args: Any, allow_pipe: bool = False, remote: Remote | None = None, **kw: Any
) -> Any:
    """Open a file or a URL as a stream; ``pipe:`` only with `allow_pipe`."""
    url = importlib.import_module("webdataset.gopen").rewrite_url(url)
    check_pipe(url, allow_pipe)
    if not is_remote(url):
        return wds.gopen(url, mode, *args, **kw)
    storage = storage_of(url, remote)
    if mode == "wb":
        return _Upload(storage, url)
    return io.BufferedReader(_Stream(storage.open(url, whole=True)), _BUFFER_BYTES)


class _Stream(FileStream):
    """An open object, which is closed with its stream."""

    def close(self) -> None:
        if not self.closed:
            self._file.__exit__(None, None, None)
        super().close()


class _Upload:
    """A file that becomes an object when it is closed."""

    def __init__(self, storage: Any, url: str) -> None:
        self._part = storage.create(url, overwrite=True)
        self._file = self._part.create()
        self.write, self.flush, self.tell = self._file.write, self._file.flush, self._file.tell

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()
            self._part.publish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
            self._part.abort()


class Opener:
    """Opens archives as streams: the stage of a pipeline that follows the list of shards."""

    def __init__(
        self, handler: Any, *, allow_pipe: bool, remote: Remote | None = None, names_file: bool = True
    ) -> None:
        self._handler, self._allow_pipe, self._remote, self._names_file = handler, allow_pipe, remote, names_file

    def __call__(self, sources: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yield a dict of ``url`` and ``stream`` for each URL, or dict with ``url``."""
        for source in sources:
            url = source["url"] if isinstance(source, dict) else source
            check_pipe(url, self._allow_pipe)
            try:
                opened = self._open(url)
            except Exception as error:
                error.args = (*error.args, url)
                if self._handler(error):
                    continue
                break
            try:
                yield opened
            finally:
                if not url.startswith("pipe:"):  # the end of a command may be an error
                    opened["stream"].close()

    def _open(self, url: str) -> dict[str, Any]:
        path = local_path(url) if urlparse(url).scheme in ("", "file") else None
        if is_remote(url) and self._remote is not None and self._remote.options.cache is not None:
            lease = storage_of(url, self._remote).lease(url)
            return {"url": url, "stream": open(lease.path, "rb"), "local_path": lease.path, "lease": lease}
        opened = {"url": url, "stream": gopen(url, allow_pipe=self._allow_pipe, remote=self._remote)}
        return {**opened, "local_path": path} if path and self._names_file else opened


def tarfile_samples(
    src: Iterable[Any],
    handler: Any = wds.reraise_exception,
    select_files: Any = None,
    rename_files: Any = None,
    *,
    allow_pipe: bool = False,
) -> Iterator[dict[str, Any]]:
    """Generate the samples of a stream of URLs, as WebDataset does."""
    tar = wds.tariterators
    opened = Opener(handler, allow_pipe=allow_pipe, names_file=False)(src)
    files = tar.tar_file_expander(opened, handler=handler, select_files=select_files, rename_files=rename_files)
    return tar.group_by_keys(files, handler=handler)


tarfile_to_samples = wds.pipelinefilter(tarfile_samples)


_writer: Any = importlib.util.module_from_spec(cast("Any", importlib.util.find_spec("webdataset.writer")))
_writer.__spec__.loader.exec_module(_writer)  # a copy, whose writers open by ours
_writer.gopen = functools.partial(gopen, allow_pipe=True)


class TarWriter(base("TarWriter", _writer)):
    """WebDataset's writer of one archive, here or at a URL; ``pipe:`` only with `allow_pipe`."""

    def __init__(self, fileobj: Any, *args: Any, allow_pipe: bool = False, **kw: Any) -> None:
        check_pipe([fileobj], allow_pipe)
        super().__init__(fileobj, *args, **kw)


class ShardWriter(base("ShardWriter", _writer)):
    """WebDataset's writer of several archives, here or at URLs; ``pipe:`` only with `allow_pipe`."""

    def __init__(self, pattern: str, *args: Any, allow_pipe: bool = False, **kw: Any) -> None:
        check_pipe([pattern], allow_pipe)
        super().__init__(pattern, *args, **kw)


def _refuse_pickle(*_: Any) -> None:
    raise ConfigError(
        f"components .{', .'.join(_PICKLED)} are pickles, which can run any code: pass allow_pickle=True if you trust "
        "the archives, or leave them out with only=",
        key="allow_pickle",
    )


def _decode_basic(key: str, data: bytes) -> Any:
    return (_refuse_pickle if key.rpartition(".")[2] in _PICKLED else wds.autodecode.basichandlers)(key, data)


def _safe(post: Sequence[Any] | None, allow_pickle: bool) -> list[Any]:
    """Return the last handlers of a decoder; WebDataset's own handlers unpickle only if allowed."""
    basic = wds.autodecode.basichandlers
    chosen = [basic] if post is None else list(post)
    return chosen if allow_pickle else [_decode_basic if each is basic else each for each in chosen]


class Decoder(base("Decoder")):
    """WebDataset's decoder, which unpickles only with `allow_pickle`."""

    def __init__(
        self, handlers: Any, pre: Any = None, post: Any = None, *args: Any, allow_pickle: bool = False, **kw: Any
    ) -> None:
        super().__init__(handlers, pre, _safe(post, allow_pickle), *args, **kw)


def decode(*args: Any, post: Any = None, allow_pickle: bool = False, **kw: Any) -> Any:
    """Return the stage that decodes samples; it unpickles only with `allow_pickle`."""
    return wds.decode(*args, post=_safe(post, allow_pickle), **kw)


def xdecode(*args: Any, allow_pickle: bool = False, **kw: Any) -> Any:
    """Return the stage that decodes samples from streams; it unpickles only with `allow_pickle`."""
    refused = [] if allow_pickle else [("*.pyd", _refuse_pickle)]  # the last decoder that fits a name is used
    return wds.xdecode(*args, **{"defaults": [*wds.filters.default_decoders, *refused], **kw})


class FluidInterface(base("FluidInterface")):
    """WebDataset's methods; `decode` and `xdecode` load pickles only if allowed."""

    allow_pickle = False

    def decode(self, *args: Any, post: Any = None, **kw: Any) -> Self:
        return super().decode(*args, post=_safe(post, self.allow_pickle), **kw)

    def xdecode(self, *args: Any, **kw: Any) -> Self:
        return self.compose(xdecode(*args, allow_pickle=self.allow_pickle, **kw))


class FluidWrapper(FluidInterface, base("FluidWrapper")):
    """WebDataset's methods for any data set."""


def why_streams(given: Mapping[str, Any], pipeline: Sequence[Any], urls: Sequence[str]) -> str | None:
    """Return why archives cannot be read at random, as far as the arguments tell."""
    if type(pipeline[0]) is not wds.SimpleShardList:
        return f"{type(pipeline[0]).__name__} chooses them"
    for name, does, known in (
        ("select_files", "works on files", (None,)),
        ("rename_files", "works on files", (None,)),
        ("nodesplitter", "chooses them", (None, wds.split_by_node, wds.single_node_only)),
        ("workersplitter", "chooses them", (None, False, wds.split_by_worker)),
    ):
        if given[name] not in known:
            return f"{name} {does}"
    if "GOPEN_REWRITE" in os.environ:
        return "GOPEN_REWRITE is set"
    for url in urls:
        if url == "-" or url.startswith("pipe:") or (is_url(local_path(url)) and not is_remote(url)):
            return f"{url} is a stream"
    return None


def open_archives(urls: Sequence[str], remote: Remote | None, handler: Any) -> tuple[Sequence[str], TarSource] | str:
    """Return the archives, without those that are missing if `handler` continues; or why they can only be streams."""
    options: dict[str, Any] = {} if remote is None else {"remote": remote}
    bad_index, index = None, None
    while True:
        source = TarSource([local_path(url) for url in urls], case_sensitive=False, index=index, **options)
        try:
            with warnings.catch_warnings():  # of files of one name, which are an oddity
                warnings.simplefilter("ignore")
                oddity = source.oddity()
        except errors.SourceNotFoundError as error:
            there = [url for url in urls if local_path(url) != error.path]
            if not 0 < len(there) < len(urls) or not _continues(handler, error):
                return str(error)
            urls = there
        except errors.CorruptFileError as error:
            if index is False:
                return str(error)
            bad_index, index = error, False
        except errors.StoreError:
            raise  # later it may answer, and the order must not depend on that
        except (errors.SourceError, ConfigError) as error:
            return str(error)
        else:
            if oddity is None and bad_index is not None:
                warnings.warn(f"archives are scanned, because an index beside them is bad: {bad_index}", stacklevel=2)
            return oddity or (urls, source)


def _continues(handler: Any, error: Exception) -> bool:
    try:
        return bool(handler(error))
    except Exception:
        return False  # it is raised when its turn comes
