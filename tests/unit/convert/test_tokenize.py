"""Texts to tokens, compared with the tokenizer itself."""

import pickle

import numpy as np
import pytest
from command_line import ok
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import dataload
from dataload.convert import convert
from dataload.convert.mapping import Tokenize
from dataload.errors import ConfigError, SourceNotFoundError, WorkerError

TEXTS = [f"the cat number {i} sat on {'the mat ' * (i % 4)}" for i in range(20)]


@pytest.fixture
def file(tmp_path):
    words = {word: number for number, word in enumerate(["?", *sorted({w for text in TEXTS for w in text.split()})])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.post_processor = processors.TemplateProcessing("<end> $A", special_tokens=[("<end>", len(words))])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def documents(pattern):
    source = dataload.open(pattern, format="tokens", documents=True, window=1, ends="drop")
    tokens = source.read_batch(np.arange(len(source)))["tokens"][:, 0]
    return [part.tolist() for part in np.split(tokens, np.cumsum(source.sequence_lengths)[:-1])]


def test_texts_become_documents_in_shards(tmp_path, file):
    tokenizer = Tokenizer.from_file(file)
    end = tokenizer.token_to_id("<end>")
    with dataload.create(tmp_path / "texts.tar") as writer:
        writer.extend({"text": text} for text in TEXTS)
    arguments = ["convert", f"{tmp_path}/texts.tar", f"{tmp_path}/t-{{00..02}}.npy", "--tokenizer", file]
    for part in ("1/2", "2/2"):
        ok(*arguments, "--end-token", "<end>", "--part", part)
    ok(*arguments, "--end-token", "<end>", "--merge")
    expected = [[*tokenizer.encode(text, add_special_tokens=False).ids, end] for text in TEXTS]
    assert documents(f"{tmp_path}/t-{{00..02}}.npy") == expected
    report = convert(dataload.MemorySource(TEXTS), tmp_path / "u.bin", format="tokens", map=Tokenize.of(file), shards=2)
    assert documents(report.pattern) == [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]


def test_a_changed_tokenizer_is_another_conversion(tmp_path, file):
    source = dataload.MemorySource(TEXTS)
    convert(source, tmp_path / "t.npy", format="tokens", map=Tokenize.of(file))
    again = pickle.loads(pickle.dumps(Tokenize.of(file)))
    convert(source, tmp_path / "t.npy", format="tokens", map=again, resume=True)
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens(["more"])
    tokenizer.save(file)
    with pytest.raises(WorkerError, match="has changed since the conversion began"):
        convert(
            source, tmp_path / "v.npy", format="tokens", map=Tokenize(file, "text", again.sha256 + "0", None, "uint16")
        )
    with pytest.raises(ConfigError, match="is the journal of a different conversion\n  map"):
        convert(source, tmp_path / "t.npy", format="tokens", map=Tokenize.of(file), resume=True)


def test_what_has_no_text(tmp_path, file):
    tokenize = Tokenize.of(file)
    assert tokenize(b"the cat")["tokens"].tolist() == tokenize({"text": "the cat"})["tokens"].tolist()
    with pytest.raises(ConfigError, match="there is no field 'text': did you mean 'texts'"):
        tokenize({"texts": "a"})
    with pytest.raises(ConfigError, match="expected text, got int: choose its field"):
        tokenize({"text": 3})
    with pytest.raises(ConfigError, match=r"has no special token '<eos>': .*<end>"):
        Tokenize.of(file, end_token="<eos>")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"x\.json is not a tokenizer.json: "):
        Tokenize.of(str(tmp_path / "x.json"))
    with pytest.raises(SourceNotFoundError):
        Tokenize.of(str(tmp_path / "y.json"))
    with pytest.raises(ConfigError, match=r"'t-\{0..3\}.npy' names 4 shards: leave shards and records_per_shard out"):
        convert(dataload.MemorySource(TEXTS), tmp_path / "t-{0..3}.npy", format="tokens", map=tokenize, shards=3)
