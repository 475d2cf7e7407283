"""Communication with Pulsar: connection, admin REST, readers, publishers, partition locks."""
