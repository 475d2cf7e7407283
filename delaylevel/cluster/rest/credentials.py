"""The credentials of a Pulsar client, for the admin interface of its cluster.

The client's authentication objects are opaque: they tell their method and nothing else. Their
constructors are public, so what these were given is kept with the object.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import pulsar

from .http import RestOptions

_GIVEN = "_delaylevel_given"


def _keep_arguments(kind: Any) -> None:
    """Let a constructor keep what it is given with the object."""
    create = kind.__init__

    @functools.wraps(create)
    def keeping(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        setattr(self, _GIVEN, inspect.signature(create).bind(self, *args, **kwargs).arguments)

    kind.__init__ = keeping


for _kind in (pulsar.AuthenticationToken, pulsar.AuthenticationTLS):
    _keep_arguments(_kind)


def admin_credentials(authentication: Any) -> RestOptions:
    """Return the options of an admin client with the credentials of a Pulsar client, if known."""
    given: Mapping[str, Any] = getattr(authentication, _GIVEN, {})
    if "token" in given:
        return RestOptions(token=given["token"])
    if given:
        return RestOptions(
            tls_certificate_file=given["certificate_path"],
            tls_private_key_file=given["private_key_path"],
        )
    return RestOptions()
