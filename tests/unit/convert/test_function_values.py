"""Conversions are continued only with a function that uses equal values."""

import json
import re

import numpy as np
import pytest

import dataload
from dataload import ConfigError
from dataload.convert import convert

DIGEST = r"Python 3\.\d+, [0-9a-f]{32}"


class Stop(BaseException):
    pass


def source_of(count):
    return dataload.MemorySource([{"n": np.array(i)} for i in range(count)])


def run(path, function, *, stop=None, **options):
    def progress(done, _):
        if done == stop:
            raise Stop

    given = {"shards": 4, "map": function, "progress": progress, **options}
    if stop is None:
        return convert(source_of(8), path, **given)
    with pytest.raises(Stop):
        convert(source_of(8), path, **given)
    return None


def numbers(path):
    return [int(record["n"]) for record in dataload.open(path)]


def make(factor):
    return lambda sample: {"n": sample["n"] * factor}


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, sample):
        return {"n": sample["n"] * self.factor}


class Model(Scale):
    """Its state cannot be seen."""

    def __init__(self, factor):
        super().__init__(factor)
        self.weights = iter(x for x in ())


def forget_values(path):
    """Make the journal one of 0.2."""
    journal = json.loads(path.read_text())
    journal["options"] = {name: value for name, value in journal["options"].items() if not name.endswith(" values")}
    path.write_text(json.dumps(journal))


@pytest.mark.parametrize("build", [make, Scale])
@pytest.mark.parametrize("stop", [6, None])
def test_only_a_function_of_equal_values_goes_on(tmp_path, build, stop):
    run(tmp_path / "a.syr", build(2), stop=stop)
    told = rf"is the journal of a different conversion\n  map values: {DIGEST} when it began, {DIGEST} now$"
    with pytest.raises(ConfigError, match=told):
        run(tmp_path / "a.syr", build(3), resume=True)
    report = run(tmp_path / "a.syr", build(2), resume=True)
    assert (report.records, report.notes) == (8, ())
    assert report.resumed > 0
    assert numbers(tmp_path) == [*range(0, 16, 2)]
    options = json.loads((tmp_path / ".a.syr.convert.json").read_text())["options"]
    assert re.fullmatch(DIGEST, options["map values"])
    assert list(options) == ["keep_key", "map", "map values"]


MODEL = f"{__name__}.Model"
REMEDY = f"give the object a method fingerprint(), or the module of {MODEL} a `version`"
UNNOTICED = f"{MODEL}, whose changes cannot be noticed, because it uses an object of 'generator'"
NOTE = f"the function is {UNNOTICED}: {REMEDY}"


def test_a_function_of_unknown_values_is_not_resumed(tmp_path):
    run(tmp_path / "a.syr", Model(2), stop=6)
    with pytest.raises(ConfigError) as caught:
        run(tmp_path / "a.syr", Model(3), resume=True)
    assert str(caught.value) == (
        f"cannot resume: {tmp_path}/.a.syr.convert.json was begun with {UNNOTICED}: pass overwrite=True to start over. "
        f"To resume the next time, {REMEDY}"
    )
    report = run(tmp_path / "a.syr", Model(3), overwrite=True)
    assert report.notes == (NOTE,)
    report = run(tmp_path / "a.syr", Model(4), resume=True)  # nothing is left to do
    assert report.notes == (NOTE,)
    (tmp_path / "a-00001-of-00004.syr").write_bytes(b"damaged")
    with pytest.raises(
        ConfigError, match=r"a-00001-of-00004\.syr has changed, and .*json was begun with .*Model, whose"
    ):
        run(tmp_path / "a.syr", Model(4), resume=True)


def test_a_version_or_a_fingerprint_vouches_for_unknown_values(tmp_path, monkeypatch):
    class Known(Model):
        def fingerprint(self):
            return f"{self.factor}"

    run(tmp_path / "b.syr", Known(2), stop=6)
    with pytest.raises(ConfigError, match="map values"):
        run(tmp_path / "b.syr", Known(3), resume=True)
    assert run(tmp_path / "b.syr", Known(2), resume=True).notes == ()
    monkeypatch.setitem(globals(), "__version__", "1.0")
    run(tmp_path / "a.syr", Model(2), stop=6)
    assert run(tmp_path / "a.syr", Model(2), resume=True).notes == ()
    monkeypatch.setitem(globals(), "__version__", "1.1")
    with pytest.raises(ConfigError, match=r"map: .*version 1\.0, .* when it began, .*version 1\.1"):
        run(tmp_path / "a.syr", Model(2), resume=True)


BEGAN = (
    "{}.convert.json was begun by dataload 0.2, which did not note the values that {} uses, so records of two "
    "functions could be mixed: finish it with 0.2, or pass overwrite=True"
)
MADE = f"{__name__}.make.<locals>.<lambda>"


def test_what_0_2_began_is_not_mixed(tmp_path):
    run(tmp_path / "a.syr", make(2), stop=6)
    forget_values(tmp_path / ".a.syr.convert.json")
    with pytest.raises(ConfigError) as caught:
        run(tmp_path / "a.syr", make(2), resume=True)
    assert str(caught.value) == f"cannot resume: {BEGAN.format(f'{tmp_path}/.a.syr', MADE)}"
    run(tmp_path / "b.syr", make(2), part=(1, 2))
    forget_values(tmp_path / ".b.syr.convert.json")
    for options in ({"part": (1, 2)}, {"part": (2, 2)}, {"merge": True}):
        with pytest.raises(ConfigError, match=r"was begun by dataload 0\.2, which did not note the values that"):
            run(tmp_path / "b.syr", make(2), **options)


def test_what_0_2_completed_stays_with_a_note(tmp_path):
    run(tmp_path / "a.syr", make(2))
    forget_values(tmp_path / ".a.syr.convert.json")
    report = run(tmp_path / "a.syr", make(3), resume=True)
    message = f"dataload 0.2 converted this, and did not note the values that {__name__}.make.<locals>.<lambda> uses"
    assert report.notes == (f"{message}: whether they have changed cannot be told",)
    assert numbers(tmp_path) == [*range(0, 16, 2)]
    (tmp_path / "a-00001-of-00004.syr").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"has changed, and .* was begun by dataload 0\.2, which did not note"):
        run(tmp_path / "a.syr", make(3), resume=True)
