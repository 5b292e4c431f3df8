"""``dataload schema``: the JSON schema of a config."""

from dataload.cli.output import print_json
from dataload.config import json_schema


def schema_command() -> None:
    """Print the JSON schema of a config, for editors that check and complete TOML or YAML.

    Example: dataload schema > dataload.schema.json
    """
    print_json(json_schema())
