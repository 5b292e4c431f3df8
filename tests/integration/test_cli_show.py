"""``dataload show`` as a user runs it: any batch in the terminal, and as a page."""

import io
import json
import re
import shutil
import struct
import subprocess
import wave
import zlib
from base64 import b64decode
from html.parser import HTMLParser

import numpy as np
import pytest
from command_line import ok
from made_files import pack

import dataload
from dataload.analysis.shown import preview

HOSTILE = "<script>alert(1)</script><img src=http://evil.test/x onerror=alert(2)>&\x07\u202e</pre>"


def show(*arguments):
    return ok("show", *arguments)


class Parsed(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.words = [], []
        with open(path, encoding="utf-8") as file:
            self.feed(file.read())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config():
    """20 records with an image, a sound, a hostile text, bytes and numbers; batches of 4."""
    y, x = np.mgrid[0:50, 0:400].astype(np.uint8)
    with dataload.create("data.syr") as writer:
        for index in range(20):
            sound = np.sin(np.arange(800) * (0.1 + index / 100)).astype(np.float32)
            image = np.stack([x, y, np.full_like(x, index)], -1)
            record = {"image": image, "audio": sound, "sample_rate": 8000, "text": HOSTILE, "x": np.arange(3.0) + index}
            writer.write(record)
    write("train.toml", "data.syr", loader={"batch_size": 4, "shuffle": True, "seed": 3})
    return "train.toml"


def write(name, source, **sections):
    """Write a config."""
    lines = ["[source]", f"path = {json.dumps(source)}"]
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    with open(name, "w") as file:
        file.write("\n".join(lines))


def loader(**settings):
    return dataload.Loader(dataload.open("data.syr"), shuffle=True, seed=3, **{"batch_size": 4, **settings})


def assert_safe(page):
    """Nothing that runs or asks the network."""
    assert {tag for tag, _ in page.elements} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "nav", "a", "div", "table", "tr", "th",
        "td", "article", "span", "dl", "dt", "dd", "img", "audio", "pre", "i", "svg", "rect", "text",
    }  # fmt: skip
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        link = attributes.get("src") or attributes.get("href") or "#"
        assert link.startswith(("#", "data:image/png;base64,", "data:audio/wav;base64,")), (tag, link[:80])
    assert page.all("meta")[1]["content"].startswith("default-src 'none'")


def test_the_terminal_names_records_and_values(config):
    batch = loader().batch(0, 2)
    printed = show(config, "--step", 2, "--rows", 2)
    assert "epoch 0, step 2 of 5" in printed
    assert re.search(r"image +uint8 +\(4, 50, 400, 3\) +0 to 255", printed)
    assert printed.count("  sample_rate: 8000\n") == 2
    for row in range(2):
        index = int(batch["image"][row, 0, 0, 2])
        assert re.search(rf"row {row}\n  index {index}: record {index} of .*data.syr, from byte [\d,]+\n", printed)
    assert "row 2" not in printed
    assert "and 2 more rows, which --rows adds" in printed
    assert "\x07" not in printed
    padded = ("--set", "loader.batch_size=11", "--set", "loader.tail=pad")
    rows = re.findall(r"^row .*$", show(config, "--step", 1, "--rows", 11, *padded), re.MULTILINE)
    assert rows == [f"row {row}{' (filler)' if row >= 9 else ''}" for row in range(11)]


def test_the_page_has_pictures_sound_and_text_and_runs_nothing(config):
    batch = loader().batch(0, 1)
    assert "wrote page.html" in show(config, "--step", 1, "--html", "page.html")
    page = Parsed("page.html")
    assert_safe(page)
    assert len(page.all("article")) == 4
    text = HOSTILE.replace("\x07", r"\x07").replace("\u202e", r"\u202e")
    assert page.text.count(text) == 4
    from PIL import Image

    for row, (image, sound) in enumerate(zip(page.all("img"), page.all("audio"), strict=True)):
        pixels = np.asarray(Image.open(io.BytesIO(b64decode(image["src"].partition(",")[2]))))
        whole = batch["image"][row]
        means = whole[:48, :399].reshape(16, 3, 133, 3, 3).mean(axis=(1, 3)).astype(np.uint8)  # a third of each side
        assert np.array_equal(pixels, means)
        with wave.open(io.BytesIO(b64decode(sound["src"].partition(",")[2]))) as played:
            assert (played.getframerate(), played.getnframes()) == (8000, 800)
            frames = np.frombuffer(played.readframes(800), np.int16) / 32767
        assert np.allclose(frames, batch["audio"][row], atol=1e-4)


def test_packed_rows_show_their_segments_and_records():
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, 90, size).tolist() for size in rng.integers(2, 9, 30)]
    with dataload.create("tokens.jsonl") as writer:
        for each in tokens:
            writer.write({"tokens": each})
    sampler = {"kind": "packing", "length_of": "tokens", "row_length": 16}
    write("pack.toml", "tokens.jsonl", sampler=sampler, loader={"batch_size": 2})
    show("pack.toml", "--step", 1, "--html", "page.html")
    page = Parsed("page.html")
    assert_safe(page)
    places = re.findall(r"index (\d+): record \d+ of [^:]+, at (\d+) to (\d+)", page.text)
    records = [tuple(map(int, found)) for found in places]
    assert records
    for index, start, stop in records:
        assert stop - start == len(tokens[index])
    with dataload.from_config("pack.toml") as packed:
        assert len(page.all("i")) == sum(len(np.unique(row)) for row in packed.batch(0, 1)["segment_ids"])
    shown = [attributes.get("class") for attributes in page.all("span") if (attributes.get("class") or "")[:1] in "tp"]
    assert len(shown) == 2 * 16


def test_the_steps_around_a_state(config):
    run_before = loader()
    iterator = iter(run_before)
    for _ in range(3):
        last = next(iterator)
    with open("state.json", "w") as file:
        json.dump(run_before.state_dict(), file)
    printed = show(config, "--state", "state.json")
    for step, batch in ((2, last), (3, next(iterator))):
        heading, after = f"epoch 0, step {step} of ", f"epoch 0, step {step + 1} of "
        assert preview(batch["x"][0]) in printed.partition(heading)[2].partition(after)[0]
    printed = show(config, "--state", "state.json", "--set", "loader.batch_size=2", "--step", 6)
    assert preview(loader().batch(0, 3)["x"][0]) in printed


def bomb(side):
    """A PNG file of a few bytes that claims to have side * side pixels."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(1 << 16))), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_records_of_a_data_set_with_hostile_files():
    contents = {"a.png": bomb(30_000), "b.png": b"\x89PNG\r\n\x1a\nbroken", "c.wav": b"RIFF\0\0\0\0WAVE", "d.cls": b"3"}
    named = {f"{name.replace('.', '_')}.{name[2:]}": content for name, content in contents.items()}
    pack("a.tar", [(f"{key}.{name}", content) for key in ("one", "two") for name, content in named.items()])
    show("a.tar", "--records", "0:2", "--html", "page.html")
    page = Parsed("page.html")
    assert_safe(page)
    assert page.all("img") == page.all("audio") == []
    assert f"{len(bomb(30_000)):,} bytes: 89 50 4e 47" in page.text
    assert "record 1 of a.tar, key 'two'" in page.text or "key 'two'" in page.text


def test_histograms_come_from_the_statistics():
    with dataload.create("labels.jsonl") as writer:
        for index in range(30):
            writer.write({"label": index % 3, "text": "a" * (index % 5)})
    ok("stats", "labels.jsonl")
    show("labels.jsonl", "--records", "0:2", "--html", "page.html")
    page = Parsed("page.html")
    assert "label: records per value" in page.text
    assert len(page.all("rect")) >= 3


@pytest.mark.train
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
@pytest.mark.parametrize("width", [420, 1200])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_draws_the_page(config, width, dark, tmp_path):
    from PIL import Image

    show(config, "--step", 1, "--html", "page.html")
    options = "--headless --no-sandbox --disable-gpu --hide-scrollbars --screenshot=page.png"
    options += f" --user-data-dir={tmp_path}/p --window-size={width},900"
    options += f" --blink-settings=preferredColorScheme={int(not dark)} file://{tmp_path}/page.html"
    subprocess.run(["chromium", *options.split()], check=True, capture_output=True, timeout=50)
    pixels = np.asarray(Image.open("page.png").convert("RGB")).astype(int)
    assert pixels.shape == (900, width, 3)
    page = [20, 23, 28] if dark else [255, 255, 255]
    assert pixels[2, 2].tolist() == page
    assert (pixels[:, -3] == page).all(), "nothing runs over the right edge"
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 500, "the pictures are drawn"


LABELLED = {"input_ids": [1, 2, 3, 0], "labels": [-100, -100, 3, -100], "attention_mask": [1, 1, 1, 0]}


@pytest.mark.parametrize(
    ("record", "kinds"),
    [
        (LABELLED, ["", "", "learnt", "pad"]),
        ({"input_ids": LABELLED["input_ids"], "labels": LABELLED["labels"]}, ["", "", "learnt", ""]),
        ({f"chosen_{name}": values for name, values in LABELLED.items()} | {"margin": 1.5}, ["", "", "learnt", "pad"]),
        # Labels that are not the tokens at their place are shown by themselves.
        ({**LABELLED, "labels": [2, 3, -100, -100]}, ["", "", "", "pad", "", "", "", ""]),
    ],
)
def test_a_page_shows_what_is_learnt_in_colour(record, kinds):
    with open("chat.jsonl", "w") as file:
        file.write(json.dumps(record) + "\n")
    show("chat.jsonl", "--records", "0:1", "--html", "page.html")
    page = Parsed("page.html")
    spans = [given.get("class", "") for given in page.all("span") if "mono" not in given.get("class", "")]
    assert spans == kinds
    text = page.text
    assert ("labels" in text, "attention_mask" in text) == (len(kinds) > 4, False)


def test_labels_of_packed_rows_keep_the_colours_of_their_segments_and_minus_100_is_no_token():
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a")).save("tokenizer.json")
    records = [{"input_ids": [1, 2, 1], "labels": [-100, 2, 1]}, {"input_ids": [2], "labels": [-100]}]
    with open("chat.jsonl", "w") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))
    table = '[source]\npath = "chat.jsonl"\n[sampler]\nkind = "packing"\nrow_length = 5\nlength_of = "input_ids"\n'
    table += '[sampler.sampler]\nkind = "sequential"\n[loader]\nbatch_size = 1\npad_value = { labels = -100 }\n'
    with open("train.toml", "w") as file:
        file.write(table)
    show("train.toml", "--step", "0", "--tokenizer", "tokenizer.json", "--html", "page.html")
    page = Parsed("page.html")
    spans = [attributes for attributes in page.all("span") if "title" in attributes]
    assert [span.get("class") for span in spans] == ["t0", "t0 learnt", "t0 learnt", "t1", "pad"]
    assert "bcbca" in page.text
    odd = json.dumps({"input_ids": [1, -100], "n": [1, -100]})
    with open("odd.jsonl", "w") as file:
        file.write(odd + "\n")
    show("odd.jsonl", "--records", "0:1", "--tokenizer", "tokenizer.json", "--html", "page.html")
    assert "b-100" in Parsed("page.html").text
