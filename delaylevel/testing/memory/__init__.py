"""Implementation of the in-memory Pulsar, below the Python code of the official client."""
