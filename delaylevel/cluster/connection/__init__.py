"""The connection to a cluster: its settings, brokers that hang, and private local brokers."""
