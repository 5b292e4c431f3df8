"""Settings of a training job's data, from a dict, TOML, YAML or JSON.

```toml
[source]
path = "train-{000..127}.tar"     # relative to this file
decode = "auto"

[sampler]                         # or `shuffle = true` in the section `loader`
kind = "pool_shuffle"
pool_size = 4096

[loader]
batch_size = 256
```

One error names all keys, types and ranges that are wrong, each with its value and what is allowed there. Settings that
contradict each other are an error of the class that they are for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dataload._util.lazy import load_optional
from dataload.config.files import anchor_paths, apply_overrides, plain_value, read_file
from dataload.config.problems import config_error, find_problems

if TYPE_CHECKING:
    from dataload.config.models import DataloadConfig

__all__ = ["json_schema", "read_config"]

_MOST_FINDINGS = 100  # that one error lists; each takes up to a millisecond to explain


def read_config(config: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()) -> DataloadConfig:
    """Read and check a config; see `dataload.from_config` for its arguments and errors.

    Paths in a file are relative to it, those in a dict and in `overrides` to the working directory.
    """
    pydantic = load_optional("pydantic", needed_by="a config", extra="config")
    from dataload.config.models import DataloadConfig, tables

    if isinstance(config, Mapping):
        origin, data = "config", plain_value(config, "config")
    else:
        origin = os.fspath(config)
        data = anchor_paths(plain_value(read_file(origin), origin), os.path.dirname(os.path.abspath(origin)))
    if overrides:
        data = plain_value(apply_overrides(data, overrides), origin)
    try:
        return DataloadConfig.model_validate(data)
    except pydantic.ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[:_MOST_FINDINGS]
    raise config_error(find_problems(details, data, tables()), origin)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a config, for editors."""
    load_optional("pydantic", needed_by="the schema of configs", extra="config")
    from dataload.config.models import DataloadConfig

    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **DataloadConfig.model_json_schema()}
