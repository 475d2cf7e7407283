"""Answers of the admin interface: their values, redirects, and the reasons of failures."""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.parse import urljoin

import urllib3

from delaylevel.errors import AdminError, BrokerUnreachableError
from delaylevel.model.clock import SystemClock
from delaylevel.model.formatting import format_instant

from .addresses import base_of, host_of

#: The settings of a command that have a token.
TOKEN_NAMED = "--token-file, DELAYLEVEL_TOKEN_FILE"
_LONGEST_REASON = 400


def permission_advice(token: str | None, named: str) -> str:
    """Return the remedy for a refusal; the broker itself does not report an expired token.

    Args:
        named: the name of the setting that has the token.
    """
    if not token:
        return f": this cluster wants a token ({named})"
    expired_ms = _expired_ms(token)
    if expired_ms is not None:
        again = "file" if named == TOKEN_NAMED else "function"
        return (
            f": the token expired at {format_instant(expired_ms)}; put a new one in its place "
            f"({named}: a {again} is read again at every use)"
        )
    return f": check the token ({named}) and what its role may do"


def _expired_ms(token: str) -> int | None:
    """Return the time at which a JSON web token expired, ms since the epoch, or None."""
    try:
        claims = token.split(".")[1]
        expires_ms = int(json.loads(base64.urlsafe_b64decode(claims + "==="))["exp"] * 1000)
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    return expires_ms if expires_ms <= SystemClock().now_ms() else None


def redirection(url: str, answer: urllib3.BaseHTTPResponse) -> str | None:
    """Return the URL to which an answer redirects; None if it is not a redirect.

    Pulsar redirects with 307 to the broker that owns the topic.
    """
    place = answer.headers.get("Location")
    if answer.status not in (307, 308) or not place:
        return None
    place = urljoin(url, place)
    if url.startswith("https:") and not place.startswith("https:"):
        raise AdminError(
            f"{base_of(url)} redirects to {host_of(place)} without TLS; the token was not sent "
            "there: set brokerServicePortTls and webServicePortTls on every broker",
            status=answer.status,
        )
    return place


def broker_away(url: str, asked: str, words: str) -> BrokerUnreachableError:
    """Return the error for a broker that does not answer, although another one redirects to it."""
    host = host_of(url)
    return BrokerUnreachableError(
        f"the broker at {host} does not answer ({words}), and {host_of(asked)} names it as the "
        "broker of the topic: start it again, or wait until another broker takes over its topics, "
        "usually within a minute",
        address=host,
    )


def is_timeout(error: Exception) -> bool:
    # A refused connection is a kind of timeout in urllib3.
    refused = isinstance(error, urllib3.exceptions.NewConnectionError)
    return isinstance(error, urllib3.exceptions.TimeoutError) and not refused


def json_value(answer: urllib3.BaseHTTPResponse) -> Any:
    text = answer.data
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError:
        raise AdminError(
            "the admin interface answered with something that is not JSON: is this address a "
            "Pulsar broker's web address?",
            status=answer.status,
        ) from None


def reason_of(answer: urllib3.BaseHTTPResponse) -> str:
    """Return the broker's reason in one line without stack traces."""
    text = answer.data.decode("utf-8", "replace")
    try:
        value = json.loads(text)
        if isinstance(value, dict):  # "message" comes from the web server
            value = value.get("reason") or value.get("message") or ""
        text = str(value)
    except ValueError:
        text = "" if text.lstrip().startswith("<") else text
    text = text.partition("Stacktrace:")[0]
    text = text.partition("Message:")[2] or text
    return " ".join(text.split())[:_LONGEST_REASON] or (answer.reason or "no reason given")


def failure_words(failure: Exception | None) -> str:
    """Return the reason why there was no answer, without the pool's own wrapping."""
    if isinstance(failure, urllib3.exceptions.NameResolutionError):
        return "the host name is unknown"
    if isinstance(failure, urllib3.exceptions.NewConnectionError):
        return str(failure.__cause__ or failure).rpartition("] ")[2].lower()
    if isinstance(failure, urllib3.exceptions.ConnectTimeoutError):
        return "no connection in time"
    if isinstance(failure, urllib3.exceptions.ReadTimeoutError):
        return "no answer in time"
    if isinstance(failure, urllib3.exceptions.SSLError):
        return f"TLS: {failure}"
    return str(failure)
