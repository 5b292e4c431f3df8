"""The errors of obstore: whether repeating the request may help, and their reasons without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from dataload._util.failures import MACHINE_ERRNOS
from dataload.errors import printable

_LONGEST_REASON = 300
_PERMANENT = re.compile(
    r"status(?: code:)? 4(?!08|29)\d\d|non-partial|NotImplemented|InvalidToken|builder error|NotSupported"
    r"|\bParse\(|expected u64|(?:Invalid|Missing)ContentLength|ParseContentRange|UnexpectedRange"
)
_SYSTEM = re.compile(r"os error (\d+)")
_THROTTLED = re.compile(r"status(?: code:)? (?:429|503)")
_QUERY = re.compile(r"\?[^\s\"'<>)]*")
_CODE = re.compile(r"<Code>(\w+)</Code>|\bParse\(\s*(?:Header\(\s*)?(\w+)")  # of S3, or of hyper


def is_permanent(error: Exception, errors: Any) -> bool:
    """Return whether a request would fail again; `errors` is the module `obstore.exceptions`."""
    kinds = ("PermissionDeniedError", "UnauthenticatedError", "NotSupportedError", "InvalidPathError")
    kinds += ("UnknownConfigurationKeyError",)
    permanent = isinstance(error, (ValueError, TypeError, *(getattr(errors, kind) for kind in kinds)))
    return permanent or _PERMANENT.search(str(error)) is not None


def is_of_machine(error: Exception) -> bool:
    """Return whether the system could not even make the request."""
    found = _SYSTEM.search(str(error))
    return found is not None and int(found[1]) in MACHINE_ERRNOS


def is_throttled(error: BaseException) -> bool:
    """Return whether a store asks for fewer requests."""
    return _THROTTLED.search(str(error)) is not None


def failure_reason(error: BaseException, secrets: Iterable[str]) -> str:
    """Return a short text for an error, without `secrets`."""
    text = str(error)
    code = _CODE.search(text)
    # An answer of the server, which may repeat parts of the request, follows.
    text = " ".join(re.split(r"\n\s*\n|<\?xml|<Error>|: <", text)[0].split())
    for secret in secrets:
        text = text.replace(secret, "***")
    text = printable(_QUERY.sub("?...", text), _LONGEST_REASON, kept="")
    return f"{text or type(error).__name__}{f' ({code[1] or code[2]})' if code else ''}"
