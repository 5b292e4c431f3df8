"""Settings of remote data: sizes, stores' options that keep secrets, URLs."""

import copy
import pickle

import pytest

from dataload.errors import ConfigError
from dataload.storage import Remote, RemoteOptions
from dataload.storage.remote.requests import split_url
from dataload.storage.remote.settings import StoreOptions, parse_bytes

SECRET = "tops3cret-value"


def provider():
    return {"access_key_id": "key", "secret_access_key": SECRET, "expires_at": None}


class Provider:
    def __call__(self):
        return provider()


def test_bytes():
    known = {7: 7, "500GB": 500 * 10**9, "64 MiB": 64 << 20, "1.5kb": 1500, "10": 10, "2T": 2 * 10**12, "8B": 8}
    for text, count in known.items():
        assert parse_bytes("budget", text) == count


BYTES = "must be a number of bytes such as 500GB"
WRONG = [
    *(({"budget": wrong}, f"budget {BYTES}") for wrong in ("", "GB", "-1GB", "0", "1 XB", "1e9")),
    ({"budget": 0}, "budget must be an integer >= 1 or text, got 0"),
    *(({"budget": wrong}, f"budget must be an integer >= 1, text or None; got {wrong}") for wrong in (True, 1.5)),
    ({"timeout": None}, "timeout must be a number of seconds above 0, got None"),
    ({"part_bytes": "x"}, f"part_bytes {BYTES}"),
    ({"mode": "range"}, "mode is 'range': did you mean 'ranges'"),
    ({"connections": 0}, "connections must be an integer >= 1, got 0"),
    ({"retries": -1}, "retries must be an integer >= 0, got -1"),
    ({"timeout": 0}, "timeout must be a number of seconds above 0"),
    ({"cashe": "x"}, "remote has no option 'cashe': did you mean 'cache'"),
    *(({"cache": wrong}, "cache must be a directory of this machine, got '") for wrong in ("", "s3://a/b", "a\0b")),
    (5, "remote must be a table of options, got int"),
]


def test_a_cache_may_be_a_file_url():
    assert RemoteOptions(cache="file:///a%20b").cache == "/a b"


@pytest.mark.parametrize(("options", "match"), WRONG)
def test_wrong_options(options, match):
    with pytest.raises(ConfigError, match=match) as caught:
        Remote.of(None, options)
    assert caught.value.key in (match.partition(" ")[0], "cashe")
    with pytest.raises(ConfigError, match="storage_options must be a table of options, got str") as caught:
        Remote.of(SECRET)
    assert SECRET not in str(caught.value)
    assert caught.value.value is None


@pytest.mark.parametrize(
    "options",
    [
        {"secret_access_key": SECRET},
        {"AWS_SECRET_ACCESS_KEY": SECRET},
        {"config": {"azure_storage_account_key": SECRET}},
        {"client_options": {"default_headers": {"authorization": SECRET}}},
        {"client_options": {"proxy_url": f"http://user:{SECRET}@proxy"}},
        {"endpoint": f"https://user:{SECRET}@host"},
        {"some_option_of_a_later_release": SECRET},
    ],
)
def test_secrets_are_neither_shown_nor_sent(options):
    remote = Remote.of(options)
    assert SECRET not in repr(remote) + str(remote.store) + repr(vars(RemoteOptions))
    with pytest.raises(ConfigError, match=r"may be secret and is not sent.*environment.*credential_provider") as caught:
        pickle.dumps(remote)
    assert SECRET not in str(caught.value) + repr(caught.value.__dict__)
    assert remote.store.arguments() == options
    assert remote.store == StoreOptions(options) != StoreOptions({})
    assert copy.deepcopy(remote.store) is remote.store


def test_a_pickle_may_be_made_while_other_threads_learn_of_objects():
    class Meanwhile:
        def __reduce__(self):
            return remote.versions.setdefault("memory://b/more") or str, ()

    remote = Remote(versions=dict.fromkeys(("memory://b/x", "memory://b/y"), Meanwhile()))
    assert len(pickle.loads(pickle.dumps(remote)).versions) == 2


@pytest.mark.parametrize("given", [provider, Provider, f"{__name__}:provider"])
def test_providers_are_sent_by_reference(given):
    data = pickle.dumps(StoreOptions({"region": "us-east-1", "skip_signature": False, "credential_provider": given}))
    assert SECRET.encode() not in data
    found = pickle.loads(data).arguments()["credential_provider"]
    assert found is provider or isinstance(found, Provider)


def test_providers_that_cannot_be_sent():
    with pytest.raises(ConfigError, match="credential_provider is not a function or class of an importable module"):
        pickle.dumps(StoreOptions({"credential_provider": lambda: provider()}))
    with pytest.raises(ConfigError, match="'nowhere:f' must be an importable 'module:function'"):
        StoreOptions({"credential_provider": "nowhere:f"}).arguments()


@pytest.mark.parametrize(
    ("url", "base", "key"),
    [
        ("s3://bucket/a/b.tar", "s3://bucket", "a/b.tar"),
        ("S3://bucket", "s3://bucket", ""),
        ("gs://bucket/a%20b", "gs://bucket", "a%20b"),
        ("s3://bucket/a?b#c", "s3://bucket", "a?b#c"),
        ("https://host:8000/a%20b", "https://host:8000", "a b"),
        ("az://container/a/", "az://container", "a"),
    ],
)
def test_urls(url, base, key):
    assert split_url(url) == (base, key)


HIDDEN = [f"https://user:{SECRET}@h/a", f"https://h/a?signature={SECRET}", f"s3://{SECRET}@b/a", f"http://h/a#{SECRET}"]


def test_urls_that_are_refused():
    with pytest.raises(ConfigError, match=r"URLs begin with one of s3://, gs://.*file://"):
        split_url("ftp://host/a")
    for url in HIDDEN:
        with pytest.raises(ConfigError, match="URL has a user, a password, a query or a frag") as caught:
            split_url(url)
        assert SECRET not in str(caught.value) + repr(vars(caught.value))
