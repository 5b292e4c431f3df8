"""A provider of credentials that every process can import."""

import json
import os
from datetime import UTC, datetime, timedelta


def short_lived():
    """Return the credentials in TEST_CREDENTIALS, which expire at once; note this in TEST_CALLS."""
    with open(os.environ["TEST_CALLS"], "a") as file:
        file.write(f"{os.getpid()}\n")
    return json.loads(os.environ["TEST_CREDENTIALS"]) | {"expires_at": datetime.now(UTC) + timedelta(seconds=0.01)}
