"""Plugin of pytest that replaces the client's classes before a test module imports them.

It reads these environment variables:

``OFFICIAL_SUITE_MODE``   ``plain``, ``levels-off``, ``levels-on`` or ``wrap``
``OFFICIAL_SUITE_ADMIN``  address of the admin REST interface
``OFFICIAL_SUITE_TOKEN``  token of a superuser, for creating level topics
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import pulsar
import pulsar.asyncio

import delaylevel
import delaylevel.asyncio
from delaylevel.admin import Admin

MODE = os.environ["OFFICIAL_SUITE_MODE"]
_ACCESS = {
    "admin_url": os.environ["OFFICIAL_SUITE_ADMIN"],
    "admin_token": os.environ["OFFICIAL_SUITE_TOKEN"],
}


def with_levels(base: Any) -> Any:
    """Return a subclass of one of our clients that creates producers with a level topic."""

    class Client(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **_ACCESS, **kwargs)

        @functools.wraps(base.create_producer)
        def create_producer(self, *args: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("enable_delay_level_topic", True)
            return super().create_producer(*args, **kwargs)

    return Client


def _twin(client: Any, plain: type) -> Any:
    """Return a plain client that shares the connection of a client."""
    twin: Any = object.__new__(plain)
    twin.__dict__ = client.__dict__
    return twin


def _options(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call of ``create_producer``, without the topic and the schema."""
    given = inspect.signature(function).bind(None, *args, **kwargs).arguments
    return {name: given[name] for name in list(given)[2:] if name != "schema"}


def wrapping(plain: Any, wrap: Any) -> Any:
    """Return a subclass of a client of either kind whose producers are wrapped."""

    def wrapped(client: Any, producer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = _options(plain.create_producer, args, kwargs)
        admin = Admin(_ACCESS["admin_url"], token=_ACCESS["admin_token"])
        return wrap(producer, _twin(client, plain), admin=admin, **options)

    if not inspect.iscoroutinefunction(plain.create_producer):

        class Client(plain):
            @functools.wraps(plain.create_producer)
            def create_producer(self, *args: Any, **kwargs: Any) -> Any:
                return wrapped(self, super().create_producer(*args, **kwargs), args, kwargs)

        return Client

    class AsyncClient(plain):
        @functools.wraps(plain.create_producer)
        async def create_producer(self, *args: Any, **kwargs: Any) -> Any:
            producer = await super().create_producer(*args, **kwargs)
            made = wrapped(self, producer, args, kwargs)
            return await made if inspect.isawaitable(made) else made

    return AsyncClient


def replace(mode: str) -> None:
    """Replace the classes of the client as an application would: by names of its modules."""
    if mode == "levels-off":
        pulsar.Client = delaylevel.DelayLevelClient
        pulsar.asyncio.Client = delaylevel.asyncio.DelayLevelClient
    elif mode == "levels-on":
        pulsar.Client = with_levels(delaylevel.DelayLevelClient)
        pulsar.asyncio.Client = with_levels(delaylevel.asyncio.DelayLevelClient)
    elif mode == "wrap":
        pulsar.Client = wrapping(pulsar.Client, delaylevel.wrap)
        pulsar.asyncio.Client = wrapping(pulsar.asyncio.Client, delaylevel.asyncio.wrap)


replace(MODE)
