"""The private parts of the Pulsar client that we use: all of them are in this package.

Pulsar's Python client is a layer of checks over a native core (the module ``_pulsar``). Calling the
core directly is several times faster, and some things are possible only there. Neither the core nor
the attributes that lead to it are documented, so a version of the client may lack them.

:class:`.parts.ClientPart` lists them, each with its public replacement. They are looked for once,
when the package is imported, in the client's own code; this takes microseconds. The functions of
the other modules take a part if it is there, and otherwise its replacement. Loops call them once
and keep the result. Without a replacement they raise a
:class:`~delaylevel.errors.PrerequisiteError` that names the part and the version of the client.

| module | contents |
|---|---|
| `parts` | the list, and the search |
| `sending` | cores of producers and clients, opening without threads, schemas |
| `receiving` | cores of readers, consumers and messages |
| `checks` | the client's own checks of arguments |
| `aio` | the same for ``pulsar.asyncio``, imported only with it |
"""
