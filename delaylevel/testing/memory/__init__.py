"""The in-memory Pulsar, below the surface of the official client."""
