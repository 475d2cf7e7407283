"""The admin REST interface of a cluster: HTTP, its client, and credentials."""
