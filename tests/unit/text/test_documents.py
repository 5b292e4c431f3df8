"""Preferences, documents with gaps, and prefixes."""

import numpy as np
import pytest
from chat_tokenizers import make

from dataload import ConfigError, Loader, Pad, SampleContext
from dataload.text import FillInTheMiddle, Pairs, Preference, PrefixLM

PROMPT = [{"role": "user", "content": "Where is the sun?"}]
CHOSEN = [{"role": "assistant", "content": "In the sky."}]
REJECTED = [{"role": "assistant", "content": "I do not know, and who does?"}]
PAIR = {"prompt": PROMPT, "chosen": CHOSEN, "rejected": REJECTED}
POLICIES = {"input_ids": Pad(0), "labels": Pad(-100), "attention_mask": Pad(0)}


def text_of(transform, sample, prefix=""):
    ids, labels = sample[f"{prefix}input_ids"], sample[f"{prefix}labels"]
    decode = transform.tokenizer.decode
    return decode(ids[labels < 0]), decode(ids[labels >= 0])


@pytest.mark.parametrize(
    "sample",
    [
        PAIR,
        {"chosen": PROMPT + CHOSEN, "rejected": PROMPT + REJECTED},
        {"prompt": PROMPT[0]["content"], "chosen": PROMPT + CHOSEN, "rejected": PROMPT + REJECTED},
        {"prompt": "Where is the sun?", "chosen": "In the sky.", "rejected": "I do not know, and who does?"},
    ],
)
def test_both_answers_follow_the_prompt(sample):
    transform = Preference(make())
    found = transform(sample)
    prompt = "<|im_start|>user\nWhere is the sun?<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(transform, found, "chosen_") == (prompt, "In the sky.<|im_end|>\n")
    assert text_of(transform, found, "rejected_") == (prompt, "I do not know, and who does?<|im_end|>\n")
    assert found.keys() == {f"{which}_{name}" for which in ("chosen", "rejected") for name in POLICIES}


def test_an_answer_in_brackets_is_text():
    transform = Preference(make())
    found = transform({"prompt": "[A] or [B]?", "chosen": "[]", "rejected": "[1, 2]"})
    assert [text_of(transform, found, f"{which}_")[1] for which in ("chosen", "rejected")] == [
        f"{answer}<|im_end|>\n" for answer in ("[]", "[1, 2]")
    ]


def test_one_batch_has_the_chosen_and_then_the_rejected():
    transform = Preference(make())
    other = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (batch,) = Loader([PAIR, other], batch_size=2, transform=transform, collate=Pairs(POLICIES))
    samples = [transform(each) for each in (PAIR, other)]
    longest = max(len(each[f"{which}_labels"]) for each in samples for which in ("chosen", "rejected"))
    assert {name: column.shape for name, column in batch.items()} == dict.fromkeys(POLICIES, (4, longest))
    for row, (sample, which) in enumerate([(0, "chosen"), (1, "chosen"), (0, "rejected"), (1, "rejected")]):
        labels = samples[sample][f"{which}_labels"]
        assert batch["labels"][row].tolist() == labels.tolist() + [-100] * (longest - len(labels))
    with_margin = [{**sample, "margin": 0.5} for sample in samples]
    assert Pairs(POLICIES)(with_margin)["margin"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "sample", "message"),
    [
        ("chatml", {"prompt": PROMPT, "chosen": CHOSEN}, "there is no field 'rejected': "),
        ("chatml", {**PAIR, "rejected": CHOSEN}, "the fields 'chosen' and 'rejected' are equal: nothing is preferred"),
        ("chatml", {"chosen": CHOSEN, "rejected": REJECTED}, "field 'chosen' begins with an answer"),
        ("mistral", {**PAIR, "prompt": PROMPT * 2}, "refuses the conversation in field 'chosen': .*must alternate"),
        ("chatml", {**PAIR, "prompt": 3}, "field 'prompt' must be a list of messages, got int 3"),
    ],
)
def test_preferences_that_cannot_be_labelled(name, sample, message):
    with pytest.raises(ConfigError, match=message):
        Preference(make(name))(sample)


def test_an_answer_without_tokens_has_no_labels():
    contents = Preference(make(), chat_template="{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(ConfigError, match="the answer in field 'rejected' has no tokens: its labels would all be -100"):
        contents({"prompt": "a", "chosen": "b", "rejected": ""})


TEXT = "def add(a, b):\n    return a + b  # Grün 🌱\n"
GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def parts_of(transform, sample):
    """The order of the parts, and the document."""
    text = transform.tokenizer.decode(sample["input_ids"])
    assert text.endswith("</s>")
    text = text.removesuffix("</s>")
    if GAP[0] not in text:
        return "plain", text
    if text.startswith("".join(GAP[:2])):
        suffix, rest = text.removeprefix("".join(GAP[:2])).split(GAP[2])
        return "spm", (suffix, rest)
    prefix, rest = text.removeprefix(GAP[0]).split(GAP[1])
    suffix, middle = rest.split(GAP[2])
    return "psm", prefix + middle + suffix


def test_documents_are_cut_at_two_characters_in_both_orders():
    transform = FillInTheMiddle(make())
    orders = []
    for index in range(200):
        sample = transform({"text": TEXT}, SampleContext(index, 0, 7))
        order, found = parts_of(transform, sample)
        orders.append(order)
        if order == "spm":
            suffix, rest = found
            assert TEXT.endswith(suffix)
            assert rest == TEXT.removesuffix(suffix)  # prefix and middle, one after the other
        else:
            assert found == TEXT
        assert sample["labels"].tolist() == [-100, *sample["input_ids"][1:]]
    counts = {order: orders.count(order) for order in orders}
    assert 70 < counts["plain"] < 130
    assert 30 < counts["psm"] < 70
    assert 30 < counts["spm"] < 70
    for settings, expected in (
        ({"rate": 0}, "plain"),
        ({"rate": 1, "spm_rate": 0}, "psm"),
        ({"rate": 1, "spm_rate": 1}, "spm"),
    ):
        always = FillInTheMiddle(make(), **settings)
        assert {parts_of(always, always({"text": TEXT}, SampleContext(i, 0, 0)))[0] for i in range(9)} == {expected}


def test_documents_are_cut_where_earlier_versions_cut_them():
    gaps, prefix = FillInTheMiddle(make(), rate=1), PrefixLM(make())
    cut = [gaps.tokenizer.decode(gaps({"text": "abc"}, SampleContext(i, 0, 0))["input_ids"]) for i in (0, 4, 6, 8)]
    assert [text.replace("<|fim_", "<").removesuffix("</s>") for text in cut] == [
        "<prefix|><suffix|>c<middle|>ab",  # suffix, prefix (which is empty), middle
        "<prefix|><suffix|><middle|>abc",
        "<prefix|>a<suffix|>c<middle|>b",
        "<prefix|>abc<suffix|><middle|>",
    ]
    counts = [
        [prefix({"text": text}, SampleContext(i, 0, 0))["prefix_mask"].sum() for i in range(6)]
        for text in ("abcd", "a")
    ]
    assert counts == [[1, 3, 1, 2, 1, 1], [0] * 6], "at least one token is learnt"


def test_gaps_are_the_same_for_any_workers_and_others_in_the_next_epoch():
    source = [{"text": f"{TEXT}{i}"} for i in range(12)]
    settings = {"batch_size": 4, "transform": FillInTheMiddle(make(), rate=1), "collate": POLICIES, "seed": 3}
    with Loader(source, **settings) as one, Loader(source, **settings, num_workers=2) as other:
        epochs = [[batch["input_ids"] for batch in one] for _ in range(2)]
        for batch, again in zip(epochs[0], other, strict=True):
            assert batch.tolist() == again["input_ids"].tolist()
    assert [batch.tolist() for batch in epochs[0]] != [batch.tolist() for batch in epochs[1]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 1.5}, "rate must be a number from 0 to 1, got 1.5"),
        ({"spm_rate": -1}, "spm_rate must be a number from 0 to 1, got -1"),
        (
            {"sentinels": ("<p>", "<s>", "<m>")},
            "lacks the tokens of prefix, suffix and middle, such as <p>, <s>, <m>: add",
        ),
        ({"sentinels": ("<s>", "</s>")}, "lacks the tokens of prefix, suffix and middle"),
    ],
)
def test_wrong_settings_of_gaps(settings, message):
    with pytest.raises(ConfigError, match=message):
        FillInTheMiddle(make(), **settings)


def test_a_prefix_is_not_learnt_whether_given_or_cut_at_a_random_token():
    transform = PrefixLM(make(), prefix="prompt")
    sample = transform({"prompt": "Where is the sun? ", "text": "In the sky."}, SampleContext(0, 0, 0))
    assert text_of(transform, sample) == ("Where is the sun? ", "In the sky.</s>")
    assert (sample["prefix_mask"] == (sample["labels"] < 0)).all()
    assert sample["prefix_mask"].dtype == np.int8
    transform = PrefixLM(make())
    cuts = set()
    for index in range(60):
        sample = transform({"text": TEXT}, SampleContext(index, 0, 0))
        assert transform.tokenizer.decode(sample["input_ids"]) == f"{TEXT}</s>"
        count = int(sample["prefix_mask"].sum())
        assert sample["prefix_mask"].tolist() == [1] * count + [0] * (len(sample["labels"]) - count)
        assert (sample["labels"][max(count, 1) :] >= 0).all()
        cuts.add(count)
    assert len(cuts) > 15
    assert max(cuts) < len(sample["labels"]) - 1


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"text": 3}, "field 'text' must be text, got int"),
        ({"txt": "a"}, "there is no field 'text': did you mean 'txt'"),
        ({"text": ""}, "field 'text' is empty: nothing follows the prefix"),
        ("a", "there is no field 'text': the sample is not a record"),
    ],
)
def test_texts_that_cannot_be_cut(sample, message):
    with pytest.raises(ConfigError, match=message):
        PrefixLM(make())(sample, SampleContext(0, 0, 0))


@pytest.mark.parametrize(
    ("added", "bos", "begin"),
    [
        ("<s> $A", "<s>", "<s>"),
        ("<s> $A <s>", "<s>", "<s>"),
        ("$A <s>", "<unk>", ""),
        ("<s> $A", None, ""),
    ],
)
def test_begin_tokens_are_added_where_the_tokenizer_adds_them(added, bos, begin):
    from tokenizers import processors

    tokenizer = make(bos_token=bos, eos_token=None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(added, special_tokens=[("<s>", 1)])
    sample = PrefixLM(tokenizer, prefix="prompt")({"prompt": "a", "text": b"b"}, SampleContext(0, 0, 0))
    assert tokenizer.decode(sample["input_ids"]) == f"{begin}ab"
    assert sample["prefix_mask"].tolist() == [1] * (2 if begin else 1) + [0]
