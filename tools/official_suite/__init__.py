"""The test suite of the official Python client, run with our classes in place of its own.

Usage, from the root of the repository::

    python -m tools.official_suite CHECKOUT

CHECKOUT is a checkout of apache/pulsar-client-python, at the version of the installed client.
"""
