package delaylevel.client;

import delaylevel.client.DelayLevelException.Reason;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.Instant;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.TypedMessageBuilder;

/**
 * A message that is being built, as with the client's own {@link TypedMessageBuilder}.
 *
 * <p>The options of the client that a parked message cannot keep (sequence IDs, replication) do not
 * exist here. Instances are not safe for use by several threads.
 *
 * @param <T> the type of the values
 */
public final class DelayedMessage<T> {
    private static final Duration LONGEST = Duration.ofMillis(Envelope.LATEST_DUE_MS);

    private final DelayLevelProducer<T> producer;
    final Map<String, String> properties = new LinkedHashMap<>();
    T value;
    String key;
    byte[] keyBytes;
    byte[] orderingKey;
    long eventTimeMs;
    String messageId;
    private Long deliverAtMs;
    private Duration deliverAfter;
    private Long expiresAtMs;
    private Duration expiresAfter;
    String replaces;

    DelayedMessage(DelayLevelProducer<T> producer) {
        this.producer = producer;
    }

    /** Sets the value; null for a null value. */
    public DelayedMessage<T> value(T newValue) {
        value = newValue;
        return this;
    }

    /** Sets the key. */
    public DelayedMessage<T> key(String newKey) {
        key = newKey;
        keyBytes = null;
        return this;
    }

    /** Sets the key by its bytes. Those of a parked message must be UTF-8. */
    public DelayedMessage<T> keyBytes(byte[] newKey) {
        keyBytes = newKey;
        key = null;
        return this;
    }

    /** Sets the ordering key. That of a parked message must be UTF-8. */
    public DelayedMessage<T> orderingKey(byte[] newKey) {
        orderingKey = newKey;
        return this;
    }

    /** Adds a property. Names that begin with "delaylevel." are left out. */
    public DelayedMessage<T> property(String name, String newValue) {
        properties.put(name, newValue);
        return this;
    }

    /** Adds properties. */
    public DelayedMessage<T> properties(Map<String, String> more) {
        properties.putAll(more);
        return this;
    }

    /** Sets the event time, ms since the epoch. */
    public DelayedMessage<T> eventTime(long ms) {
        eventTimeMs = ms;
        return this;
    }

    /**
     * Sets an ID of the application, of 1 to 512 characters.
     *
     * <p>It identifies the message together with its topic and key: of several messages with the
     * same three, the dispatcher delivers the first that reaches its window, whatever their due
     * times and contents, and a cancellation ends all of them. So a resend makes a copy, not a
     * second message, and a message under the ID of a cancelled one is dropped. Without an ID,
     * every message that is sent is a separate one.
     */
    public DelayedMessage<T> messageId(String id) {
        messageId = id;
        return this;
    }

    /** Sets the due time, ms since the epoch; 0 for no delay. A past time is due now. */
    public DelayedMessage<T> deliverAt(long ms) {
        deliverAtMs = ms;
        return this;
    }

    /** Sets the due time, rounded up to a millisecond. */
    public DelayedMessage<T> deliverAt(Instant instant) {
        boolean rounded = instant.getNano() % 1_000_000 != 0;
        return deliverAt(epochMs(instant) + (rounded ? 1 : 0));
    }

    /** Sets the delay from the time of sending; zero for no delay. */
    public DelayedMessage<T> deliverAfter(Duration delay) {
        deliverAfter = delay;
        return this;
    }

    /** Sets the time, ms since the epoch, from which the message is not released any more. */
    public DelayedMessage<T> expiresAt(long ms) {
        expiresAtMs = ms;
        return this;
    }

    /** Sets the time from which the message is not released any more. */
    public DelayedMessage<T> expiresAt(Instant instant) {
        return expiresAt(epochMs(instant));
    }

    /** Sets the time from due time to expiry. */
    public DelayedMessage<T> expiresAfter(Duration time) {
        expiresAfter = time;
        return this;
    }

    /** Sends the message; the future fails if it was refused or could not be stored. */
    public CompletableFuture<MessageId> sendAsync() {
        return producer.sendAsync(this);
    }

    /**
     * Sends the message and waits until it is stored.
     *
     * @throws DelayLevelException the message was refused
     * @throws PulsarClientException the message could not be stored
     */
    public MessageId send() throws PulsarClientException {
        CompletableFuture<MessageId> sent = sendAsync();
        if (!sent.isDone()) {
            producer.flushAsync(); // do not wait for a batch to fill
        }
        return DelayLevelProducer.await(sent);
    }

    /**
     * Sends the message; the future has its receipt, by which it can be cancelled. A message without
     * an ID of the application gets a random one.
     */
    public CompletableFuture<Receipt> scheduleAsync() {
        return producer.scheduleAsync(this);
    }

    /**
     * Sends the message, waits until it is stored, and returns its receipt.
     *
     * @throws DelayLevelException the message was refused
     * @throws PulsarClientException the message could not be stored
     */
    public Receipt schedule() throws PulsarClientException {
        CompletableFuture<Receipt> sent = scheduleAsync();
        if (!sent.isDone()) {
            producer.flushAsync(); // do not wait for a batch to fill
        }
        return DelayLevelProducer.await(sent);
    }

    /**
     * Sends the message in the place of a scheduled one: it is stored first, and then the old one is
     * cancelled. At least one of the two is delivered; if the outcome is TOO_LATE, both are. The
     * message has an ID of its own.
     */
    public CompletableFuture<Rescheduled> rescheduleAsync(Receipt old) {
        return producer.rescheduleAsync(this, old);
    }

    /**
     * Sends the message in the place of a scheduled one, and waits until both records are stored.
     *
     * @throws DelayLevelException the message was refused; or, with the reason NOT_CANCELLED and the
     *     new receipt in the text, it is stored and the old one may not be cancelled
     * @throws PulsarClientException the message could not be stored
     */
    public Rescheduled reschedule(Receipt old) throws PulsarClientException {
        CompletableFuture<Rescheduled> sent = rescheduleAsync(old);
        if (!sent.isDone()) {
            producer.flushAsync(); // do not wait for a batch to fill
        }
        return DelayLevelProducer.await(sent);
    }

    /**
     * The result of a reschedule.
     *
     * @param receipt the receipt of the new message
     * @param outcome the outcome of the cancellation of the old one
     */
    public record Rescheduled(Receipt receipt, CancelOutcome outcome) {}

    /** Returns true if the message has a due time or a delay, even if these are zero. */
    boolean hasDelay() {
        return deliverAtMs != null || deliverAfter != null;
    }

    /** Returns the due time in ms; 0 for none. */
    long dueMs(long nowMs) {
        if (deliverAtMs != null && deliverAfter != null) {
            throw Envelope.invalidDelay("deliverAt (" + deliverAtMs + ") and deliverAfter ("
                    + deliverAfter + ") are both given: give one of them; the message was not sent");
        }
        if (deliverAfter == null) {
            long due = deliverAtMs == null ? 0 : deliverAtMs;
            Envelope.checkDue(due);
            return due;
        }
        if (deliverAfter.isNegative()) {
            throw Envelope.invalidDelay("deliverAfter is negative (" + deliverAfter
                    + "): a delay is zero or more; the message was not sent");
        }
        if (deliverAfter.isZero()) {
            return 0;
        }
        if (deliverAfter.compareTo(LONGEST) > 0) {
            throw Envelope.invalidDelay("deliverAfter=" + deliverAfter
                    + " is beyond the year 9999; the message was not sent");
        }
        boolean rounded = deliverAfter.getNano() % 1_000_000 != 0;
        long due = nowMs + deliverAfter.toMillis() + (rounded ? 1 : 0);
        Envelope.checkDue(due);
        return due;
    }

    /** Returns the expiry in ms; 0 for none. */
    long expiresMs(long dueMs, long nowMs) {
        if (expiresAtMs == null && expiresAfter == null) {
            return 0;
        }
        if (expiresAtMs != null && expiresAfter != null) {
            throw Envelope.invalidDelay(
                    "expiresAt and expiresAfter are both given: give one of them; the message was not "
                            + "sent");
        }
        long expires = expiresAtMs != null ? expiresAtMs : dueMs + bounded(expiresAfter).toMillis();
        Envelope.checkExpiry(expires, dueMs, nowMs);
        return expires;
    }

    /** Returns a time in ms; one that does not fit is refused when the message is sent. */
    private static long epochMs(Instant instant) {
        Duration sinceEpoch = Duration.between(Instant.EPOCH, instant);
        return bounded(sinceEpoch).toMillis();
    }

    /** Returns a duration, shortened to one that is refused as too long or as negative. */
    private static Duration bounded(Duration duration) {
        if (duration.compareTo(LONGEST) > 0) {
            return LONGEST.plusMillis(1);
        }
        return duration.isNegative() ? Duration.ofMillis(-1) : duration;
    }

    /**
     * Returns the bytes of a key as text.
     *
     * @throws DelayLevelException the bytes are not UTF-8
     */
    static String text(byte[] bytes, String what) {
        if (bytes == null) {
            return null;
        }
        try {
            return StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(bytes)).toString();
        } catch (CharacterCodingException error) {
            throw new DelayLevelException(
                    Reason.UNSUPPORTED_OPTION,
                    what + " is not UTF-8: movers cannot read it, and the message would become a "
                            + "dead letter. Encode it as text, for example in base64; the message "
                            + "was not sent",
                    error);
        }
    }
}
