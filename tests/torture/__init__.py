"""A random fault test: real processes, real faults, and an audit that believes none of them.

``make torture`` starts a private broker, everything that takes part in the delivery of delayed
messages, and then breaks it at random. Every process notes in a ledger of its own what it sent,
what was confirmed, cancelled and received. Pure functions compare the ledgers in the end.

====================  ==============================================================
`ledger`              the files that every process writes, and what they say together
`invariants`          the rules, as pure functions of a story
`stage`               names of the level topics, targets and processes, and orders to these
`scene`               the broker, the topics and the processes of a run
`process`             the processes, which are started again when they end
`part`                the program of the processes
`clients`             the parts that send, with the Python or the Java producer, and receive
`faults`              the faults, in groups
`run`                 one run from its beginning to its result
====================  ==============================================================
"""
