"""Names that are imported on first use, and names that have moved."""

import sys

import pytest

MODULE = """
from dataload._util.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, {"digits": "string", "say": "json:dumps"}, moved={"ConfigError": "dataload.errors"}, submodules=("inner",)
)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "lazy_package").mkdir()
    (tmp_path / "lazy_package" / "__init__.py").write_text(MODULE)
    (tmp_path / "lazy_package" / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("lazy_package")
    for name in [name for name in sys.modules if name.startswith("lazy_package")]:
        del sys.modules[name]


def test_names_are_imported_on_first_use_and_kept(package):
    assert "digits" not in vars(package)
    assert package.digits == "0123456789"
    assert package.say([1]) == "[1]"
    assert vars(package)["digits"] is package.digits
    assert package.inner.value == 1
    assert {"digits", "say", "inner"} <= {*dir(package)}
    with pytest.raises(AttributeError, match=r"module 'lazy_package' has no attribute 'other'"):
        _ = package.other


def test_a_name_that_has_moved_warns_each_time_at_the_line_that_uses_it(package):
    message = r"^lazy_package\.ConfigError is deprecated: use dataload\.errors\.ConfigError$"
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match=message) as warned:
            found = package.ConfigError
        assert found.__module__ == "dataload.errors"
        assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=message) as warned:
        exec(compile("from lazy_package import ConfigError", "user.py", "exec"), {})
    assert {one.filename for one in warned} == {"user.py"}
    assert "ConfigError" not in dir(package)
