"""Implementation of the in-memory Pulsar, below the Python code of the official client."""

from delaylevel.cluster.client_parts.parts import ClientPart, require

require(ClientPart.IN_MEMORY)
