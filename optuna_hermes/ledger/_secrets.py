"""Removal of passwords from database URLs and from texts that quote them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import quote, quote_plus, unquote, unquote_plus

_HIDDEN = "***"

# Letters: a shorter password is a part of many words, and is hidden after ":" and "=" alone.
_LEAST = 3

_SECRET_KEY = re.compile(r"pass|pwd|secret|token", re.IGNORECASE)


def without_password(url: str) -> str:
    """A URL without its passwords, before the host and among its options.

    Example:
        >>> without_password("postgresql://ann:s3cret@host/study?sslpassword=x")
        'postgresql://ann:***@host/study?sslpassword=***'
    """
    for secret in _written(url):
        url = re.sub(rf"([:=]){re.escape(secret)}(?=[@&]|$)", rf"\1{_HIDDEN}", url)
    return url


def redacted(text: str, url: str) -> str:
    """A text without the passwords of a URL, plain or percent-encoded."""
    spellings = {spelled for secret in _written(url) for spelled in _spellings(secret)}
    # The longest first: one spelling may be a part of another.
    for spelled in sorted(spellings, key=len, reverse=True):
        if len(spelled) < _LEAST:
            text = re.sub(rf"([:=]['\"]?){re.escape(spelled)}(?!\w)", rf"\1{_HIDDEN}", text)
        else:
            text = text.replace(spelled, _HIDDEN)
    return text


def _written(url: str) -> Iterator[str]:
    """The passwords of a URL as written in it."""
    _, separator, rest = url.partition("://")
    if not separator:
        return
    place = re.split(r"[/?#]", rest, maxsplit=1)[0]
    # A password may contain characters that should have been percent-encoded, such as "/" or "@".
    user, at, _ = (place if "@" in place else rest).rpartition("@")
    if at and ":" in user:
        yield user.partition(":")[2]
    for option in rest.partition("?")[2].split("&"):
        key, _, value = option.partition("=")
        if _SECRET_KEY.search(key) and value:
            yield value


def _spellings(secret: str) -> set[str]:
    plain = {secret, unquote(secret), unquote_plus(secret)}
    quoted = {quote(each, safe=safe) for each in plain for safe in ("", "/")}
    return (plain | quoted | {quote_plus(each) for each in plain}) - {""}
