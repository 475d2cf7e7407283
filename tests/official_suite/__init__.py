"""The test suite of the official Python client, run with our classes in place of its own.

Usage, from the root of the repository::

    PYTHONPATH=tests python -m official_suite CHECKOUT

CHECKOUT is a checkout of apache/pulsar-client-python, at the version of the installed client.
"""
