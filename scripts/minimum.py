"""Prints constraints: the lowest version that pyproject.toml allows of each dependency, for `make test-minimum`."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
for text in [
    *project["dependencies"],
    *(each for extra in project["optional-dependencies"].values() for each in extra),
]:
    requirement = Requirement(text)
    for specifier in requirement.specifier:
        if specifier.operator == ">=":
            print(f"{requirement.name}=={specifier.version}{'' if specifier.version.count('.') > 1 else '.*'}")
