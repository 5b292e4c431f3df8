"""Names of fields: those that are not known, and fields that are chosen."""

import pytest

from dataload.catalog.facts import common_classes, require_known, row_bytes, select_fields, with_classes
from dataload.errors import ConfigError
from dataload.types import FieldSpec


def test_fields_are_chosen_in_order_and_unknown_ones_are_told():
    require_known(["a", "b"], ["b", "a", "c"])
    require_known([], [])
    with pytest.raises(ConfigError, match=r"^there is no field 'lable': did you mean 'label'\?") as caught:
        require_known(["x", "lable", "other"], {"x": 1, "label": 2})
    assert (caught.value.key, caught.value.value) == ("fields", "lable")
    for owner, text in (("data.syr", r"^data\.syr has no field 'y'"), ([1], r"^\[1\] has no field 'y'")):
        with pytest.raises(ConfigError, match=text) as caught:
            require_known(["y"], ["x"], owner, key="offsets")
        assert caught.value.key == "offsets"
    assert [*select_fields({"a": 1, "b": 2, "c": 3}, ["c", "a"]).items()] == [("c", 3), ("a", 1)]
    with pytest.raises(ConfigError, match="records are int, not fields: choose a codec to read fields a, b"):
        select_fields(3, ["a", "b"])
    with pytest.raises(ConfigError):
        select_fields({"a": 1}, ["b"])


NUMBERS, TEXT, NAMED = FieldSpec("int64", ()), FieldSpec("str", ()), FieldSpec("uint8", (), ("x", "y"))


def test_the_bytes_of_a_record_are_those_of_its_arrays():
    fields = {"x": FieldSpec("float32", (3, None)), "n": NUMBERS, "word": TEXT, "any": FieldSpec("int16")}
    assert row_bytes(fields) == 3 * 4 + 8 + 2


def test_classes_of_fields():
    fields = {"label": NUMBERS, "word": TEXT, "known": NAMED, "other": NUMBERS}
    found = with_classes(fields, {"label": ("a",), "word": ("a",), "known": ("a",)})
    assert found == {**fields, "label": FieldSpec("int64", (), ("a",))}
    parts = [("a.tar", {"label": NAMED, "x": TEXT}), ("b.tar", {"label": NUMBERS}), ("c.tar", {"label": NAMED})]
    assert common_classes(parts, "paths") == {"label": ("x", "y")}
    other = [*parts, ("d.tar", {"label": FieldSpec("int64", (), ("y", "x"))})]
    with pytest.raises(ConfigError, match=r"'label' stands for other classes in a\.tar than in d\.tar: open") as caught:
        common_classes(other, "paths")
    assert caught.value.key == "paths"
