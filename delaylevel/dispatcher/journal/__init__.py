"""The journal of a window partition: what was published from it, and what may have been.

Theory of operation
===================

The dispatcher takes messages from a window topic and publishes them in the order of their due
times, not of their positions. A cumulative acknowledgement cannot record that. The journal does:
from it, the next owner of the partition knows which messages it must not publish again. It also
carries the IDs that identify copies, and the next sequence ID of each target.

The journal is a topic with one partition for each window partition. Its producer (`topic.Journal`)
is exclusive, with fencing: as soon as another dispatcher opens the partition, the broker refuses
every record of the earlier owner. A batch is published only after its intent is confirmed. Hence
the first rule: **no journal record, no publish**.

`JournalState` is the sum of the records. The running owner applies each record as it makes it, and
a later owner applies the same records when it reads the journal. `DelayQueue` makes the records;
`PartitionOwner` and its `BatchPublisher` append them, in the same thread, so that the journal has
them in this order.

Order in time
-------------
1. An intent is confirmed before the first of its messages is sent. All records before it in the
   journal are then confirmed too.
2. Within a target, sequence IDs rise in the order of sending, through one producer at a time. The
   broker stores the messages in this order, so its last sequence ID tells how much of an intent it
   has stored. Sending stops at the first message of a batch that the client refuses. After an
   unclear failure, the producer is replaced: only a new one can ask for the last sequence ID.
3. A commit is written after every message of the intent is confirmed by its target, by the held or
   the dead-letter topic, or is dropped because its target does not exist.
4. The source is acknowledged up to a low watermark only after the journal has confirmed that
   low watermark.
5. After a takeover, the unresolved intents of a target are resolved before anything is published
   to it. A later sequence ID would make an earlier message look stored. `PartitionOwner` resolves
   all of them, and has this confirmed, before it reads the window topic.

States of one message
---------------------
- *pending*: in the window topic, and in none of the states below. The journal does not mention it.
- *intended*: part of an open intent, which is one without a Commit or Resolved record.
- *released*: published, set aside, or dropped. The journal has its position. It also has its ID,
  so that copies are recognized. The exception is a message that was set aside because its target
  refused it (*held* in the records): it comes back with its ID, from the held topic or by a replay
  from the dead-letter topic.
- *below*: its position is below the low watermark. The source may be acknowledged up to there, and
  the journal forgets the position. It keeps the ID until enough newer ones replace it. A copy that
  was left out gets here from pending.

State and record -> state; "-" marks pairs that an owner never writes. A Commit or Resolved record
whose intent is older than the journal's first record is ignored.

===================================  ========  ========================  ==================  =====
record                               pending   intended                  released            below
===================================  ========  ========================  ==================  =====
Intent, lists the message            intended  -                         -                   -
Commit of its intent                 -         released, ID remembered   -                   -
Commit of its intent, held position  -         released, ID not kept     -                   -
Resolved of its intent, listed       -         released, ID remembered   -                   -
Resolved of its intent, not listed   -         pending                   -                   -
LowWatermark above its position      below     -                         below               below
LowWatermark at or below it          pending   intended                  released            below
SnapshotChunk                        pending   intended                  released            below
===================================  ========  ========================  ==================  =====

A low watermark never passes a message that is intended or waits for its due time. Low watermarks
never go back: a lower one than before is ignored.

Recovery
--------
1. Lock the window and the journal partition, and open the journal. It now has one writer.
2. Read it from its acknowledged position to its end, and add the records up to a `JournalState`.
3. Find out what the broker has stored of each open intent. With deduplication: the messages up to
   the last sequence ID of their target (none if the target is gone or cannot be opened). Without:
   unknown, so none. Write a Resolved record that lists these messages.
4. Write a snapshot, and acknowledge the journal up to its first chunk.
5. Read the window topic from the low watermark, or from the acknowledged position if that is later.
   Skip released positions, leave out copies by their IDs, and put the rest into the delay queue.
6. Publish nothing until all messages stored at the takeover are read, but wait at most 60 s.

A crash leads to this:

==============================================  =================================================
crash                                           outcome
==============================================  =================================================
before the intent is stored                     Still pending; nothing was sent. Published once.
after that, before the message is sent          Resolved without it: pending again. Published
                                                once.
after the message is stored, before the commit  With deduplication: Resolved lists it, not
                                                published again. Without: pending again, a second
                                                copy with the same ID.
after its target refused it, before the commit  Pending again; a second copy with the same ID if
                                                it was set aside already. With deduplication it
                                                counts as stored if a later message of its target
                                                was stored meanwhile.
after the commit, before the low watermark      Released. Read again, and skipped.
after the low watermark, before the source is   Below. Reading starts at the low watermark, and
acknowledged                                    the next checkpoint acknowledges.
between two chunks of a snapshot                The incomplete snapshot is passed over. The
                                                records before it are still in the journal.
==============================================  =================================================

Snapshots
---------
A snapshot is a whole `JournalState`: the low watermark, a Roaring bitmap of the released positions
from there on, the highest released position, the IDs, the open intents, the next intent number, and
the next sequence ID of each target. It is cut into chunks that fit into a message. A complete one
stands for everything before its first chunk; records between its chunks come after it. The owner
writes one at a takeover, when the journal has grown by 8 MiB and by twice the last snapshot, and
when it stops. Then it acknowledges the journal up to the first chunk, so that the broker can delete
what is before.
"""
