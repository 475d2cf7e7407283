package delaylevel.client;

import delaylevel.client.DelayLevelException.Reason;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.atomic.AtomicLong;

/** The rules of docs/wire.md for one producer and one state of its level topic, without I/O. */
final class Routing {
    /** Values of {@link Route#level} for messages that go into no level. */
    static final int BUSINESS = -1;

    static final int WINDOW = -2;

    private static final int RUN = 1000;
    private static final int FRAMING = 16;

    /**
     * The destination of a message.
     *
     * @param level the level's index, or BUSINESS or WINDOW
     * @param partition the partition of that topic; -1 for the business topic
     * @param deliverAtMs the time until which the broker delays the message; 0 for no delay
     */
    record Route(int level, int partition, long deliverAtMs) {
        static final Route TO_BUSINESS = new Route(BUSINESS, -1, 0);
    }

    final Description description;
    final int sizeLimit;
    private final int reserve;
    private final int maxMessageSize;
    private final Description.Level[] levels;
    private final AtomicLong unkeyed;

    Routing(Description description, int maxMessageSize) {
        this.description = description;
        this.maxMessageSize = maxMessageSize;
        levels = description.levels().list().toArray(new Description.Level[0]);
        int windows = description.windowPartitions();
        unkeyed = new AtomicLong((long) ThreadLocalRandom.current().nextInt(windows) * RUN);
        // LZ4 adds the most to a payload that it cannot compress, 1 byte in 255.
        reserve = description.reserve() + maxMessageSize / 255;
        sizeLimit = maxMessageSize - reserve;
    }

    private static int bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8).length;
    }

    /**
     * Returns the route of a delayed message.
     *
     * @param keyOrId the key, or without one the application's own ID; null or empty for neither
     * @throws DelayLevelException the delay is too long
     */
    Route route(long dueMs, long nowMs, String keyOrId) {
        if (dueMs <= nowMs) {
            return Route.TO_BUSINESS;
        }
        Route parked = levelRoute(dueMs, nowMs);
        if (parked != null) {
            return parked;
        }
        if (!description.tracker()) {
            return new Route(BUSINESS, -1, dueMs);
        }
        return new Route(WINDOW, windowPartition(keyOrId), 0);
    }

    /**
     * Returns the route of a cancellation: that of its message, but never to the business topic.
     *
     * @param dueMs the due time of the message
     * @param key its key; null or empty for none
     * @param id its ID
     * @throws DelayLevelException no message can have this due time
     */
    Route cancellationRoute(long dueMs, long nowMs, String key, String id) {
        Route parked = dueMs <= nowMs ? null : levelRoute(dueMs, nowMs);
        return parked != null
                ? parked
                : new Route(WINDOW, description.windowPartition(key, id), 0);
    }

    /** Returns the route of a record into a level; null if it is nearly due. */
    private Route levelRoute(long dueMs, long nowMs) {
        long remaining = dueMs - nowMs;
        long maximum = description.levels().maximumMs();
        if (remaining > maximum && !description.levels().recirculate()) {
            throw new DelayLevelException(
                    Reason.DELAY_TOO_LONG,
                    "a delay of " + Duration.ofMillis(remaining) + " is beyond the longest "
                            + "level (" + Duration.ofMillis(maximum) + "): expand the level "
                            + "topic (`delaylevel levels expand`), or create one whose overflow is "
                            + "'recirculate'; the message was not sent");
        }
        for (int i = 0; i < levels.length; i++) {
            long unit = levels[i].unitMs();
            if (remaining >= unit) {
                int k = (int) Math.min(remaining / unit - 1, levels[i].partitions() - 1);
                long handOff = nowMs + (k + 1) * unit - levels[i].leadMs();
                return new Route(i, k, description.byFunction() ? handOff : 0);
            }
        }
        return null;
    }

    private int windowPartition(String keyOrId) {
        int partitions = description.windowPartitions();
        if (keyOrId != null && !keyOrId.isEmpty()) {
            return Description.windowPartition(keyOrId, partitions);
        }
        // In runs, so that batches fill.
        return (int) (unkeyed.getAndIncrement() / RUN % partitions);
    }

    /** Returns the full name of the partition for a parked message. */
    String topicOf(Route route) {
        String topic = route.level == WINDOW ? description.windowTopic() : levels[route.level].topic();
        return topic + "-partition-" + route.partition;
    }

    /** Refuses a message that later hops could not send. */
    void checkSize(byte[] body, String key, byte[] orderingKey, Map<String, String> properties) {
        int size = body == null ? 0 : body.length;
        if (key != null && !key.isEmpty()) {
            size += bytes(key) + FRAMING;
        }
        if (orderingKey != null && orderingKey.length > 0) {
            size += orderingKey.length + FRAMING;
        }
        for (Map.Entry<String, String> each : properties.entrySet()) {
            if (!each.getKey().startsWith(Envelope.PREFIX)) {
                size += bytes(each.getKey()) + bytes(each.getValue()) + 2 * FRAMING;
            }
        }
        if (size > sizeLimit) {
            throw new DelayLevelException(
                    Reason.MESSAGE_TOO_LARGE,
                    "the message has " + size + " bytes, and a parked message at most " + sizeLimit
                            + ": uncompressed, with keys and properties. Later hops could not send "
                            + "it: the broker's limit is " + maxMessageSize + " bytes, and they add "
                            + "up to " + reserve + ". Store the payload elsewhere and send a "
                            + "reference to it; or, if the broker's maxMessageSize is higher, give "
                            + "the builder maxMessageSize. The message was not sent");
        }
    }

    /** Returns true if this routing may be replaced by that of another description. */
    boolean isExtendedBy(Description found) {
        return description.isSameAs(found) && found.former().contains(description.levels());
    }
}
