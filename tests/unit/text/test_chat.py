"""Chat: which tokens of a conversation are labels."""

import json
import pickle
import subprocess
import sys
from types import MappingProxyType

import numpy as np
import pytest
from chat_tokenizers import make

from dataload import ConfigError
from dataload.text import Chat, Preference


def user(content):
    return {"role": "user", "content": content}


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


TALK = [user("Name a colour."), answer("Blue"), user("One more,\nplease"), answer("Green 🌱 Grün")]


def learnt(transform, sample):
    """The texts that are learnt, one for each run of labels."""
    ids, labels = sample["input_ids"], sample["labels"]
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(labels >= 0)) + 1)
    return [transform.tokenizer.decode(ids[run]) for run in runs if labels[run[0]] >= 0]


ENDS = dict.fromkeys(("chatml", "qwen2_5"), "<|im_end|>\n")
ENDS |= {"llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>\n"}


@pytest.mark.parametrize("name", ENDS)
def test_answers_are_what_the_template_adds_after_its_prompt(name):
    transform = Chat(make(name))
    sample = transform({"messages": TALK, "other": 1})
    assert sample.keys() == {"input_ids", "labels", "attention_mask"}
    rendered = transform.tokenizer.apply_chat_template(TALK, return_dict=True)["input_ids"]
    assert sample["input_ids"].tolist() == rendered
    assert (sample["input_ids"].dtype, sample["labels"].dtype) == (np.int64, np.int64)
    assert sample["attention_mask"].tolist() == [1] * len(rendered)
    learns = sample["labels"] >= 0
    assert (sample["labels"][learns] == sample["input_ids"][learns]).all()
    assert set(sample["labels"][~learns].tolist()) == {-100}
    assert learnt(transform, sample) == [f"Blue{ENDS[name]}", f"Green 🌱 Grün{ENDS[name]}"]
    only = Chat(make(name), train_on="last")({"messages": TALK})
    assert learnt(transform, only) == [f"Green 🌱 Grün{ENDS[name]}"]
    assert (only["input_ids"] == sample["input_ids"]).all()
    every = Chat(make(name), train_on="all")({"messages": TALK})
    assert every["labels"].tolist() == [-100, *rendered[1:]]


@pytest.mark.parametrize("name", ["gemma_training", "llama3_training", "phi3_training", "qwen2_5_training"])
def test_markers_of_a_template_decide_where_there_are_any(name):
    tokenizer = make(name)
    found = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    sample = Chat(tokenizer)({"messages": TALK})
    mask = np.array(found["assistant_masks"], np.bool_)
    assert sample["labels"].tolist() == np.where(mask, found["input_ids"], -100).tolist()
    last = Chat(tokenizer, train_on="last")({"messages": TALK})
    assert len(learnt(Chat(tokenizer), sample)) == 2
    assert learnt(Chat(tokenizer), last) == learnt(Chat(tokenizer), sample)[1:]


def test_a_tokenizer_that_normalizes_and_drops_spaces_labels_the_same_text():
    transform = Chat(make("chatml", kind="marks"))
    sample = transform({"messages": [user("Name the sky."), answer("The  SUN\n"), user("More"), answer("Blue")]})
    texts = [" ".join(text.replace("<|im_end|>", " <|im_end|>").split()) for text in learnt(transform, sample)]
    assert texts == ["the sun <|im_end|>", "blue <|im_end|>"]


@pytest.mark.parametrize("kind", ["bytes", "marks"])
def test_a_token_across_an_edge_of_an_answer_is_learnt(kind):
    tokenizer = make(None, kind=kind)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    text = "Where is the sun? In the sky. Green as the sky is  "
    encoded = tokenizer(text, return_offsets_mapping=True)
    for begin in range(6, 34, 3):
        for end in range(begin + 6, 50, 4):
            talk = [user(text[:begin]), answer(text[begin:end]), user(text[end:])]
            overlaps = [first < end and begin < last for first, last in encoded["offset_mapping"]]
            expected = np.where([False, *overlaps[1:]], encoded["input_ids"], -100).tolist()
            assert Chat(tokenizer)({"messages": talk})["labels"].tolist() == expected, (begin, end)


def test_tools_and_system_messages_are_rendered_and_not_learnt():
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    talk = [
        {"role": "system", "content": "Be short."},
        user("How warm is it?"),
        answer("", tool_calls=[call]),
        {"role": "tool", "content": "24"},
        answer("24 degrees."),
    ]
    transform = Chat(make("qwen2_5"))
    sample = transform({"messages": talk, "tools": tools})
    assert "# Tools" in transform.tokenizer.decode(sample["input_ids"])
    first, second = learnt(transform, sample)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>' in first
    assert second == "24 degrees.<|im_end|>\n"
    as_text = transform({"messages": json.dumps(talk), "tools": json.dumps(tools)})
    assert (as_text["labels"] == sample["labels"]).all()
    mappings = transform({"messages": tuple(map(MappingProxyType, talk)), "tools": tools})
    assert (mappings["labels"] == sample["labels"]).all()
    # In a table, each struct has the keys of all rows.
    table = [{"name": None, "tool_calls": None, **message} for message in talk]
    table[2]["tool_calls"] = [{**call, "function": {"name": "weather", "arguments": {"city": "Rome", "at": None}}}]
    nulls = transform({"messages": table, "tools": [{**tools[0], "strict": None}]})
    assert nulls["input_ids"].tolist() == sample["input_ids"].tolist()
    assert "# Tools" not in transform.tokenizer.decode(transform({"messages": talk, "tools": []})["input_ids"])
    renamed = Chat(make("qwen2_5"), "talk", tools="functions")({"talk": talk, "functions": tools})
    assert (renamed["labels"] == sample["labels"]).all()


THOUGHT = "<think>\nadd\n</think>\n\n"
THINKING = [user("1 + 1?"), answer(THOUGHT + "2"), user("and 1?"), answer(THOUGHT + "3")]


@pytest.mark.parametrize(
    ("name", "talk", "message"),
    [
        ("chatml", [user("Hello?")], "field 'messages' has no assistant turn: its roles are user$"),
        ("chatml", [], r"field 'messages' must be a list of messages, got list \[\]"),
        ("chatml", {"role": "user"}, "field 'messages' must be a list of messages, got dict"),
        ("chatml", "Hello", "field 'messages' is text, and not JSON: Expecting value"),
        ("chatml", [{"from": "gpt", "value": "a"}], "message 0 in field 'messages' must be a dict with .*"),
        ("chatml", ["a"], "message 0 in field 'messages' must be a dict with role and content, got 'a'"),
        ("chatml", ["a" * 99], f"a dict with role and content, got '{'a' * 79}$"),
        ("chatml", [answer("Hi"), user("a")], "begins with an answer, and the chat template has no markers"),
        ("mistral", [user("a"), user("b"), answer("c")], "refuses the conversation in field 'messages': .*"),
        ("gemma", [{"role": "system", "content": "a"}, *TALK], "System role not supported"),
        ("phi3", TALK, r"of field 'messages' are '/s>' from character \d+ if none follow, and '\|user\|>"),
        ("qwen3", THINKING, "the chat template is not prefix-stable, so it .* the first 2 messages of field"),
    ],
)
def test_conversations_that_cannot_be_labelled(name, talk, message):
    with pytest.raises(ConfigError, match=message):
        Chat(make(name))({"messages": talk})


def test_samples_that_lack_fields_or_labels():
    with pytest.raises(ConfigError, match="there is no field 'messages': choose from talk"):
        Chat(make())({"talk": TALK})
    with pytest.raises(ConfigError, match="field 'tools' is text, and not JSON"):
        Chat(make("qwen2_5_training"))({"messages": TALK, "tools": "{"})
    nothing = "{% for message in messages %}{{ message['role'] }}{% generation %}{% endgeneration %}{% endfor %}"
    with pytest.raises(ConfigError, match="the labels of the conversation in field 'messages' are all -100"):
        Chat(make(), chat_template=nothing)({"messages": TALK})
    shrinks = "{{ 'x' * (9 - messages|length) }}"
    with pytest.raises(ConfigError, match="are 'xxx' from character 5 if none follow, and '' if others do"):
        Chat(make(), chat_template=shrinks)({"messages": TALK})


def test_a_transform_is_a_value_with_a_digest():
    one, same = Chat(make()), Chat(make())
    assert one == same
    assert hash(one) == hash(same)
    assert one.fingerprint() == same.fingerprint()
    same.tokenizer(["a", "a a"], padding=False, truncation=True, max_length=1)  # leaves settings in the tokenizer
    for other in (Chat(make(), train_on="last"), Chat(make("llama3")), Chat(make(kind="marks")), Chat(make(), "talk")):
        assert other != one
    changed = [type("Mine", (Chat,), {"__call__": function})(make()) for function in (lambda *_: 1, lambda *_: 2)]
    assert len({each.fingerprint() for each in (*changed, one)}) == 3, "the code of a class of one's own counts"
    assert one != Chat(make(), options={"a": 1}) != Chat(make(), options={"a": 2})
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one
    assert (copy({"messages": TALK})["labels"] == one({"messages": TALK})["labels"]).all()
    assert "tokenizer" not in repr(one)


def test_a_sample_is_restored_from_its_compact_form():
    pair = {"prompt": "How?", "chosen": "Well", "rejected": "I do not know"}
    for transform, sample in ((Chat(make()), {"messages": TALK}), (Preference(make()), pair)):
        made = transform(sample)
        restored = transform.restore(transform.compact(made))
        assert [*restored] == [*made]
        for name, values in made.items():
            assert (restored[name].dtype, restored[name].tolist()) == (values.dtype, values.tolist())
            for other in (values + 1, values.astype(np.int32), values[:-1]):
                assert transform.compact({**made, name: other}) == b"", "it would not be restored"
            assert transform.compact({key: each for key, each in made.items() if key != name}) == b""
        assert transform.compact({**made, "other": np.arange(2)}) == b""


@pytest.mark.slow_suite  # another process imports transformers
def test_the_digest_is_the_same_in_another_process_and_by_name(tmp_path):
    tokenizer = make()
    tokenizer.save_pretrained(tmp_path)
    code = f"from dataload.text import Chat; print(Chat({str(tmp_path)!r}).fingerprint())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert found.stdout.strip() == Chat(str(tmp_path)).fingerprint()
    assert Chat(tmp_path).tokenizer.chat_template == tokenizer.chat_template


def test_truncation_of_the_tokenizer_is_turned_off():
    tokenizer = make()
    tokenizer(["Name a colour."], truncation=True, max_length=2)
    assert len(Chat(tokenizer)({"messages": TALK})["labels"]) > 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_on": "user"}, "train_on is 'user': choose from all, assistant, last"),
        ({"messages": 3}, "messages must be text, got 3"),
        ({"tokenizer": 3}, "tokenizer must be a fast tokenizer of transformers .*; got 'int'"),
        ({"tokenizer": "/nowhere/at-all"}, "the tokenizer '/nowhere/at-all' cannot be loaded: "),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        Chat(**{"tokenizer": make(), **settings})
