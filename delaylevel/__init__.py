"""Long-delayed messages through Apache Pulsar, routed from the client's side."""

from delaylevel._version import __version__

__all__ = ["__version__"]
