package delaylevel.client;

import delaylevel.client.DelayLevelException.Reason;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;

/**
 * The {@code delaylevel.*} properties of a parked message, or of a control record. Null stands for an
 * absent one, and an expiry of 0.
 */
record Envelope(
        long dueMs,
        String target,
        String id,
        String schema,
        long attempt,
        String compression,
        String kind,
        long expiresMs,
        String replaces) {
    static final String PREFIX = "delaylevel.";
    static final String DUE = PREFIX + "due";
    static final String TARGET = PREFIX + "target";
    static final String ID = PREFIX + "id";
    static final String SCHEMA = PREFIX + "schema";
    static final String COMPRESSION = PREFIX + "compression";
    static final String ATTEMPT = PREFIX + "attempt";
    static final String KIND = PREFIX + "kind";
    static final String EXPIRES = PREFIX + "expires";
    static final String REPLACES = PREFIX + "replaces";
    static final String UNREADABLE = PREFIX + "unreadable";

    /** The kind of a cancellation. */
    static final String CANCEL = "cancel";

    static final long EARLIEST_DUE_MS = 100_000_000_000L;
    static final long LATEST_DUE_MS = 253_402_300_799_999L;
    static final int LONGEST_ID = 512;

    /** The types of schemas that a mover can declare. */
    static final Set<String> SCHEMA_TYPES =
            Set.of("STRING", "INT8", "INT16", "INT32", "INT64", "FLOAT", "DOUBLE", "JSON", "AVRO",
                    "PROTOBUF", "PROTOBUF_NATIVE");

    private static final Set<String> COMPRESSIONS = Set.of("LZ4", "ZLib", "ZSTD", "SNAPPY");
    private static final Set<String> KINDS = Set.of(CANCEL);

    /** Creates the envelope of a message. */
    Envelope(
            long dueMs, String target, String id, String schema, long attempt, String compression) {
        this(dueMs, target, id, schema, attempt, compression, null, 0, null);
    }

    /** Returns the envelope of the cancellation of a message. */
    static Envelope cancellation(long dueMs, String target, String id) {
        return new Envelope(dueMs, target, id, null, 0, null, CANCEL, 0, null);
    }

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
        if (kind != null && !KINDS.contains(kind)) {
            throw new Damaged(KIND, KIND + " is '" + shortened(kind)
                    + "': this version does not know this kind of record");
        }
        long due = time(DUE, properties.get(DUE));
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
        if (kind != null && id == null) {
            throw new Damaged(
                    ID, ID + " is missing: a record of kind '" + kind + "' names its message");
        }
        if ("".equals(id)) {
            throw new Damaged(ID, ID + " is empty: different messages would be taken for one");
        }
        String schema = properties.get(SCHEMA);
        if (schema != null) {
            checkReference(schema);
        }
        String attempt = properties.get(ATTEMPT);
        String compression = properties.get(COMPRESSION);
        String expires = properties.get(EXPIRES);
        String replaces = properties.get(REPLACES);
        return new Envelope(
                due,
                target,
                id,
                schema,
                attempt == null ? 0 : number(ATTEMPT, attempt),
                compression != null && COMPRESSIONS.contains(compression) ? compression : null,
                kind,
                expires == null ? 0 : time(EXPIRES, expires),
                "".equals(replaces) ? null : replaces);
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
        if (kind != null) {
            all.put(KIND, kind);
        }
        if (expiresMs > 0) {
            all.put(EXPIRES, Long.toString(expiresMs));
        }
        if (replaces != null) {
            all.put(REPLACES, replaces);
        }
        return all;
    }

    /** Returns all properties of the business message. */
    Map<String, String> delivered(Map<String, String> application) {
        Map<String, String> all = undelayed(application, id, target);
        all.put(DUE, Long.toString(dueMs));
        return all;
    }

    /** Returns all properties of a message without a delay: none of ours but those of an own ID. */
    static Map<String, String> undelayed(
            Map<String, String> application, String id, String target) {
        Map<String, String> all = new LinkedHashMap<>();
        application.forEach((name, value) -> {
            if (!name.startsWith(PREFIX)) {
                all.put(name, value);
            }
        });
        if (id != null) {
            all.put(ID, id);
            all.put(TARGET, target);
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

    private static long time(String name, String text) {
        long ms = number(name, text);
        if (ms > LATEST_DUE_MS) {
            throw new Damaged(name, name + " is " + ms + ", beyond the year 9999");
        }
        return ms;
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
