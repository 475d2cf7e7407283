"""The private parts of the Pulsar client that we use: all of them are in this package.

Pulsar's Python client is a layer of checks over a native core (the module ``_pulsar``). Calling the
core directly is several times faster, and some things are possible only there. Neither the core nor
the attributes that lead to it are documented, so another version of the client may lack them. Only
the versions in ``setup.cfg`` were tested; with any other one, the import of this package fails.

| module | contents |
|---|---|
| `cores` | cores of all objects, opening without threads, schemas, checks, and states of threads |
| `aio` | the same for ``pulsar.asyncio``, imported only with it |
"""

from __future__ import annotations

import pulsar

from delaylevel.errors import PrerequisiteError

#: The tested releases of the client, as in ``setup.cfg``.
REQUIRED = "pulsar-client>=3.13,<3.14"
if not pulsar.__version__.startswith("3.13."):
    raise PrerequisiteError(
        f"pulsar-client {pulsar.__version__} is installed, and delaylevel was not tested with it: "
        f"pip install '{REQUIRED}'"
    )

# Bound here: an application may replace the client's classes with ours.
CLIENT = pulsar.Client
CREATE_PRODUCER = pulsar.Client.create_producer
PRODUCER = pulsar.Producer
