"""The journal of a window partition: what was published from it, and what may have been.

Theory of operation
===================

The dispatcher takes messages from a window topic and publishes them in the order of their due
times, not of their positions. A cumulative acknowledgement cannot record that. The journal does:
from it, the next owner of the partition knows which messages it must not publish again. It also
carries the IDs that identify copies, and the next sequence ID of each target.

The journal is a topic with one partition for each window partition. Its producer (`topic.Journal`)
is exclusive, with fencing, and only the process that has locked the partition opens it. That
usually ends an earlier owner, but proves nothing: the broker can accept two such producers at once.
The proof is the order of the entries, by the rule of `RecordOrder`: an owner begins with a claim,
and from then on no record of an earlier owner counts, for itself and for every reader. A record is
*confirmed* here if the broker has stored it and it counts. A message is sent only within a second
after a confirmed record was written. Hence the first rule: **no journal record, no publish**.

`JournalState` is the sum of the records. The running owner applies each record as it makes it, and
a later owner applies the same records when it reads the journal. `DelayQueue` makes the records;
`PartitionOwner` and its `InFlightBatches` append them, in the same thread, so
that the journal has them in this order.

Order in time
-------------
A *target* is one producer of a business topic: each partition (with deduplication), schema and
compression has its own. A batch has messages of one target only, so that no target delays the
release of another one's.

1. When a message is sent or set aside, the last record that the journal has confirmed is less than
   1 s old, by the monotonic clock and by the wall clock. Otherwise another one is confirmed first,
   because another dispatcher may have taken over meanwhile. After idle times, this is done shortly
   before the next message is due. So an owner sends nothing that is due later than a second after
   the next owner's claim.
2. Without deduplication, a batch is sent at once. A Released record is written after every message
   is confirmed by its target, by the held or the dead-letter topic, or is dropped because its
   target does not exist. These records are gathered for half a second.
3. With deduplication, an intent is confirmed before the first of its messages is sent. In a burst,
   the next intents are written while the last ones are not confirmed, and each message is sent once
   its own is. A Commit record releases the batch, at the latest before the next intent.
4. Within a target, sequence IDs rise in the order of sending, through one producer at a time. The
   broker stores the messages in this order, so its last sequence ID tells how much of an intent it
   has stored. After an unclear failure, the producer is replaced: only a new one can ask for the
   last sequence ID. It then sends what is not stored again, with the same IDs.
5. With deduplication, a message that its target has certainly not stored (the client refuses it,
   or the target cannot be opened) leaves a gap that a later sequence ID would hide. So nothing is
   sent to its target until a Refused record is confirmed, and the message is set aside only after
   that.
6. The source is acknowledged up to a low watermark only after the journal has confirmed that
   low watermark.
7. After a takeover, nothing is published to a target until its unresolved intents are resolved: a
   later sequence ID would make an earlier message look stored. The next intent is confirmed after
   their Commit records, because the journal keeps the order.
8. A message is cancelled by a Disposition record, and only if it is pending and was not due 5 s
   after the takeover, nor 5 s after the latest publish time of a record: by rule 1, no earlier
   owner has sent it then, nor will, whatever the clocks of both say. Snapshots keep that time. What
   is stored more than 5 s after the takeover can be cancelled in any case: no earlier owner sends
   it any more. The outcome is published after the journal has confirmed the record. An outcome
   without a record of its own follows a LowWatermark record. So each outcome is that of the owner
   at the time of its decision.
9. The first message that waits for the end of a pause is preceded by a Paused record, and the first
   one of the target that is sent or set aside afterwards by another one, which is confirmed. What
   waited in between was not sent, so it can be cancelled after a takeover, too.

States of one message
---------------------
- *pending*: in the window topic, and in none of the states below. The journal does not mention it.
  It waits for its due time, or for its target.
- *intended* (with deduplication): part of an open intent, which is one without a Commit record. A
  message that is being published without one is pending here.
- *refused* (with deduplication): its target has certainly not stored it, and it is set aside
  instead, also after a takeover. Its intent may be open or resolved.
- *released*: published, set aside, or dropped. The journal has its position. It also has its ID,
  so that copies are recognized. The exception is a dead letter (*held* in the records): a replay
  brings it back with the same ID and attempt. A message of the held topic comes back with the next
  attempt, which is part of the remembered ID, so a second copy of it is recognized, too.
- *cancelled*: its ID is known as that of a cancelled message, and it is dropped whenever it is met.
  The journal does not have its position: after a takeover it is a copy of a known message.
- *below*: its position is below the low watermark. The source may be acknowledged up to there, and
  the journal forgets the position. It keeps the ID until enough newer ones replace it. A copy that
  was left out gets here from pending.

State and record -> state; "+ID" means that the ID is remembered; "-" marks pairs that an owner
never writes. A Commit record whose intent is older than the journal's first record is ignored.

==================================  =========  ============  ============  ========  =========
record                              pending    intended      refused       released  cancelled
==================================  =========  ============  ============  ========  =========
Released, lists the message         released   -             -             -         -
Released, lists it as held          released   -             -             -         -
Intent, lists the message           intended   intended      refused       -         -
Refused, lists the message          -          refused       refused       -         -
Commit of its intent                -          released +ID  released +ID  -         -
Commit of its intent, held          -          released      released      -         -
Commit that lists it as stored      -          released +ID  -             -         -
Commit that lists others as stored  -          pending       refused       released  -
Disposition, cancelled, its ID      cancelled  -             -             -         cancelled
Disposition of another kind, ID     -          intended      refused       -         -
LowWatermark above its position     below      -             below         below     below
LowWatermark at or below it         pending    intended      refused       released  cancelled
SnapshotChunk                       pending    intended      refused       released  cancelled
==================================  =========  ============  ============  ========  =========

A message that is below stays there. A Released record adds the ID, except for a held message. A
message is in two open intents if an earlier owner may still send it: see recovery, step 3.

A *cancellation* is a record of the window topic, too. It is pending until its outcome is decided
and stored in the outcomes topic; then a Released record has its position, without an ID.

A low watermark never passes a message that is intended, or waits for its due time or its target.
Low watermarks never go back: a lower one than before is ignored.

Recovery
--------
1. Lock the window and the journal partition, and open the journal.
2. Read it from its acknowledged position to its end, add the records up to a `JournalState`, and
   claim it. The claim fails if anything was written meanwhile.
3. Begin to resolve each open intent. The broker is asked in the background for the last sequence
   ID of the target: the messages up to there are stored, except refused ones. Only a topic that
   does not exist has stored nothing. While a target refuses to be opened, its intents stay open:
   their messages wait, and the low watermark does not pass them. A Commit record lists what is
   stored, once all messages of its intent have an answer. The client of an earlier owner, which was
   suspended, may still send what is not stored, once nobody else uses the producer's name. So an
   intent of these messages without sequence IDs precedes this Commit record. It stays open, in
   later recoveries too, until they are released again. None of them expires: the release has a
   higher sequence ID, so the broker then drops what that client sends.
4. Write a snapshot, which contains the open intents, and acknowledge the journal up to its first
   chunk.
5. Read the window topic from the low watermark, or from the acknowledged position if that is later.
   Skip released positions, leave out copies by their IDs, keep messages of open intents until these
   are resolved, and put the rest into the delay queue.
6. Publish nothing until all messages stored at the takeover are read, but wait at most 60 s, and
   no longer once the spill disk takes no more of them.

A crash leads to this:

==============================================  =================================================
crash                                           outcome
==============================================  =================================================
before a message is sent                        Still pending. Published once.
after it is stored, before the Released or      With deduplication: the broker has it, so it is
Commit record                                   not published again. Without: pending, a second
                                                copy with the same ID. This concerns what the
                                                gathered records would have released: about half
                                                a second of messages, or a second if they are few.
suspended with messages that are not sent       They are not sent: the record that has to be
                                                confirmed first is refused, or does not count.
after the client refused it, before the         With deduplication. No later ID was sent, so the
Refused record is stored                        last one is below its own: pending again.
after the Refused record, before the Commit     Refused: set aside again, not published. The held
                                                or dead-letter topic may then have it twice;
                                                copies of a held message are dropped by their ID.
the same without deduplication                  Pending again; a second copy with the same ID if
                                                it was set aside already.
while earlier intents are not resolved          They are still open, in the snapshot too. The
                                                next owner asks again.
after that record, before the low watermark     Released. Read again, and skipped.
after the low watermark, before the source is   Below. Reading starts at the low watermark, and
acknowledged                                    the next checkpoint acknowledges.
before the Disposition record of a cancelled    Pending. The cancellation is read again.
message is stored
after that, before its outcome is stored        Cancelled. The cancellation is read again, and the
                                                outcome is published again.
after that, before its Released record          The same: the outcome is there twice.
between two chunks of a snapshot                The incomplete snapshot is passed over. The
                                                records before it are still in the journal.
==============================================  =================================================

The broker forgets the last sequence ID of a producer that has been absent for 6 h (its default). An
intent that stays unresolved for longer counts as not stored.

Snapshots
---------
A snapshot is a whole `JournalState`: the low watermark, a Roaring bitmap of the released positions
from there on, the highest released position, the IDs, the open intents, the next intent number, the
next sequence ID of each target, the refused positions, the paused targets, the due time up to which
messages may have been sent, and the IDs of Disposition records. It is cut into chunks that fit into
a message. A complete one stands for everything before its first chunk; records between its chunks
come after it. The owner writes one at a takeover, when the journal has grown by 8 MiB and by twice
the last snapshot, and when it stops. Then it acknowledges the journal up to the first chunk, so
that the broker can delete what is before.
"""
