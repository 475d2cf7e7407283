"""Alias of :mod:`delaylevel.cluster.rest.admin`."""

from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.rest.http import RestOptions

__all__ = ["Admin", "RestOptions"]
