import os

import numpy as np
import pytest
from format_suite import FormatSuite, digest_of

from dataload.sources.tokens.reader import TokenSource
from dataload.testing import SourceTraits

WINDOW = 16


def tokens_of(record):
    return np.frombuffer(digest_of(record, 2 * WINDOW), "<u2")


class TestTokens(FormatSuite):
    """Arrays that say how long they are."""

    traits = SourceTraits(
        suffix=".npy",
        several_paths=True,
        value_types=(int,),
        corruptions=("cut_in_a_token", "one_token_more", "floats"),
    )

    def write(self, path, records):
        np.save(path, np.array([tokens_of(record) for record in records], "<u2").reshape(-1))

    source, options = TokenSource, {"window": WINDOW, "stride": WINDOW}

    def expected(self, records):
        return [{"tokens": tokens_of(record)} for record in records]

    def corrupt(self, path, kind):
        data = path.read_bytes()
        damaged = {
            "cut_in_a_token": data[:-1],
            "one_token_more": data + b"\0\0",
            "floats": data.replace(b"'<u2'", b"'<f2'"),
        }
        path.write_bytes(damaged[kind])


class TestRawTokens(TestTokens):
    """A file without a header, as nanoGPT and Megatron write them."""

    traits = SourceTraits(
        suffix=".bin",
        several_paths=True,
        value_types=(int,),
        empty_dataset=False,  # what a writer that was killed at its start leaves
        corruptions=("cut_in_a_token",),
    )
    expected_failures = {"check_damaged_files": "any bytes of an even number are tokens"}  # noqa: RUF012

    def write(self, path, records):
        np.array([tokens_of(record) for record in records], "<u2").tofile(path)


@pytest.mark.slow_suite
class TestTokensOfDocuments(FormatSuite):
    """A document of its own length for each record, padded; the starts lie in a file beside the tokens."""

    traits = SourceTraits(suffix=".npy", several_paths=True, value_types=(int,))

    def write(self, path, records):
        documents = [document_of(record) for record in records]
        np.save(path, np.concatenate([np.empty(0, "<u2"), *documents]))
        np.save(f"{path}.starts.npy", np.cumsum([0, *map(len, documents)]))

    def open(self, path):
        documents = [f"{os.fspath(one)}.starts.npy" for one in (path if isinstance(path, list) else [path])]
        return TokenSource(path, window=WINDOW, stride=WINDOW, documents=documents, ends="pad", pad_token=3)

    def expected(self, records):
        documents = [document_of(record) for record in records]
        return [
            {
                "tokens": np.concatenate([document, np.full(WINDOW - len(document), 3, np.uint16)]),
                "token_count": np.array(len(document)),
            }
            for document in documents
        ]


def document_of(record):
    tokens = tokens_of(record)
    return tokens[: 1 + int(tokens[0]) % WINDOW]
