"""Live queries about the messages that a dispatcher keeps, answered while it releases them.

Theory of operation. The thread of a partition owner changes the delay queue, and it must not wait
for a query. So a query has two steps:

1. A `QueueQuestion` is an event for the owner. It copies references, not rows: the columns of the
   pending rows in memory are arrays that never change, and files are only appended to. This takes
   well under a millisecond, whatever the number of messages, and gives one consistent moment.
2. The thread of the HTTP service cuts, sorts and formats these rows (`QueueView`), in numpy, Arrow
   and system calls, which leave the interpreter to the owner. Where it runs Python code, it takes
   its turn for a slice of some tenths of a millisecond, behind all owners (`turns.py`).

A message that is cancelled leaves its row only at its due time, and nobody searches for it before.
So an answer has such rows, and says how many there are.

A file that is used up between the two steps is gone; then the question is asked again.
"""
