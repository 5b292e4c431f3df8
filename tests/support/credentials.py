"""A provider of credentials that every process can import."""

import os
from datetime import UTC, datetime, timedelta


def short_lived():
    """Return the credentials in TEST_ACCESS_KEY and TEST_SECRET_KEY, which expire at once; note this in TEST_CALLS."""
    with open(os.environ["TEST_CALLS"], "a") as file:
        file.write(f"{os.getpid()}\n")
    return {
        "access_key_id": os.environ["TEST_ACCESS_KEY"],
        "secret_access_key": os.environ["TEST_SECRET_KEY"],
        "expires_at": datetime.now(UTC) + timedelta(seconds=0.01),
    }
