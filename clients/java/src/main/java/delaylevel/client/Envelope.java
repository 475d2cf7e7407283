package delaylevel.client;

import delaylevel.client.DelayLevelException.Reason;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;

/** The {@code delaylevel.*} properties of a parked message. Null stands for an absent one. */
record Envelope(
        long dueMs, String target, String id, String schema, long attempt, String compression) {
    static final String PREFIX = "delaylevel.";
    static final String DUE = PREFIX + "due";
    static final String TARGET = PREFIX + "target";
    static final String ID = PREFIX + "id";
    static final String SCHEMA = PREFIX + "schema";
    static final String COMPRESSION = PREFIX + "compression";
    static final String ATTEMPT = PREFIX + "attempt";
    static final String KIND = PREFIX + "kind";
    static final String UNREADABLE = PREFIX + "unreadable";

    static final long EARLIEST_DUE_MS = 100_000_000_000L;
    static final long LATEST_DUE_MS = 253_402_300_799_999L;
    static final int LONGEST_ID = 512;

    /** The types of schemas that a mover can declare. */
    static final Set<String> SCHEMA_TYPES =
            Set.of("STRING", "INT8", "INT16", "INT32", "INT64", "FLOAT", "DOUBLE", "JSON", "AVRO",
                    "PROTOBUF", "PROTOBUF_NATIVE");

    private static final Set<String> COMPRESSIONS = Set.of("LZ4", "ZLib", "ZSTD", "SNAPPY");

    /** A parked message that cannot be understood. */
    static final class Damaged extends DelayLevelException {
        private static final long serialVersionUID = 1L;

        final String property;

        Damaged(String property, String message) {
            super(Reason.ENVELOPE, message);
            this.property = property;
        }
    }

    /**
     * Reads the properties of a parked message.
     *
     * @throws Damaged the message must not be delivered
     */
    static Envelope read(Map<String, String> properties) {
        if (properties.containsKey(UNREADABLE)) {
            throw new Damaged(UNREADABLE, properties.get(UNREADABLE));
        }
        String kind = properties.get(KIND);
        if (kind != null) {
            throw new Damaged(KIND, KIND + " is '" + shortened(kind)
                    + "': this version does not know this kind of record");
        }
        long due = number(DUE, properties.get(DUE));
        if (due > LATEST_DUE_MS) {
            throw new Damaged(DUE, DUE + " is " + due + ", beyond the year 9999");
        }
        String target = properties.get(TARGET);
        if (target == null) {
            throw new Damaged(TARGET, TARGET + " is missing: not a parked message");
        }
        try {
            target = TopicName.parse(target).toString();
        } catch (DelayLevelException error) {
            throw new Damaged(TARGET, TARGET + ": " + error.getMessage());
        }
        String id = properties.get(ID);
        if ("".equals(id)) {
            throw new Damaged(ID, ID + " is empty: different messages would be taken for one");
        }
        String schema = properties.get(SCHEMA);
        if (schema != null) {
            checkReference(schema);
        }
        String attempt = properties.get(ATTEMPT);
        String compression = properties.get(COMPRESSION);
        return new Envelope(
                due,
                target,
                id,
                schema,
                attempt == null ? 0 : number(ATTEMPT, attempt),
                compression != null && COMPRESSIONS.contains(compression) ? compression : null);
    }

    /** Returns all properties of the message while it is parked. */
    Map<String, String> parked(Map<String, String> application) {
        Map<String, String> all = delivered(application);
        all.put(TARGET, target);
        if (schema != null) {
            all.put(SCHEMA, schema);
        }
        if (compression != null) {
            all.put(COMPRESSION, compression);
        }
        return all;
    }

    /** Returns all properties of the business message. */
    Map<String, String> delivered(Map<String, String> application) {
        Map<String, String> all = undelayed(application, id);
        all.put(DUE, Long.toString(dueMs));
        return all;
    }

    /** Returns all properties of a message without a delay: none of ours but an own ID. */
    static Map<String, String> undelayed(Map<String, String> application, String id) {
        Map<String, String> all = new LinkedHashMap<>();
        application.forEach((name, value) -> {
            if (!name.startsWith(PREFIX)) {
                all.put(name, value);
            }
        });
        if (id != null) {
            all.put(ID, id);
        }
        return all;
    }

    /** Refuses an ID of the application that is empty or too long. */
    static void checkId(String id) {
        int length = id.codePointCount(0, id.length());
        if (length < 1 || length > LONGEST_ID) {
            throw new DelayLevelException(
                    Reason.INVALID_INPUT,
                    "a message ID has 1 to " + LONGEST_ID + " characters, not " + length + ": '"
                            + shortened(id) + "'");
        }
    }

    /** Refuses a due time that was given in another unit; 0 is none. */
    static void checkDue(long dueMs) {
        String given = "deliverAt=" + dueMs;
        if (dueMs < 0) {
            throw invalidDelay(given + " is before 1970; the message was not sent");
        }
        if (dueMs > LATEST_DUE_MS) {
            throw invalidDelay(given + " is beyond the year 9999, as if given in micro- or "
                    + "nanoseconds: give milliseconds; the message was not sent");
        }
        if (dueMs < EARLIEST_DUE_MS && dueMs != 0) {
            throw invalidDelay(given + " is " + java.time.Instant.ofEpochMilli(dueMs)
                    + " when read as milliseconds: multiply seconds by 1000; the message was not "
                    + "sent");
        }
    }

    static DelayLevelException invalidDelay(String message) {
        return new DelayLevelException(Reason.INVALID_DELAY, message);
    }

    /** Returns the ID of a message by the place where it was stored first. */
    static String stableId(String partitionTopic, long ledger, long entry, int batch) {
        String topic = partitionTopic.startsWith(TopicName.SCHEME)
                ? partitionTopic.substring(TopicName.SCHEME.length())
                : partitionTopic;
        return topic + ":" + ledger + ":" + entry + ":" + batch;
    }

    private static void checkReference(String text) {
        int colon = text.indexOf(':');
        if (colon < 1 || colon == text.length() - 1) {
            throw new Damaged(SCHEMA, SCHEMA + " is '" + text + "', not TYPE:digest");
        }
        String type = text.substring(0, colon);
        if (!SCHEMA_TYPES.contains(type)) {
            throw new Damaged(
                    SCHEMA,
                    SCHEMA + " is " + shortened(type) + ": the Python client cannot declare it");
        }
    }

    private static long number(String name, String text) {
        if (text == null) {
            throw new Damaged(name, name + " is missing: not a parked message");
        }
        if (!text.matches("[0-9]{1,19}")) {
            throw new Damaged(name, name + " is '" + shortened(text) + "', not a whole number");
        }
        try {
            return Long.parseLong(text);
        } catch (NumberFormatException tooLarge) {
            return Long.MAX_VALUE;
        }
    }

    private static String shortened(String text) {
        int characters = Math.min(40, text.codePointCount(0, text.length()));
        return text.substring(0, text.offsetByCodePoints(0, characters));
    }
}
