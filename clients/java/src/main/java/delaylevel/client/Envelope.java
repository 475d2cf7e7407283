package delaylevel.client;

import delaylevel.client.DelayLevelException.Reason;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;

/**
 * The {@code delaylevel.*} properties of a parked message. Null stands for an absent one, and an
 * expiry of 0.
 */
record Envelope(
        long dueMs,
        String target,
        String id,
        String schema,
        String compression,
        long expiresMs,
        String replaces) {
    static final String PREFIX = "delaylevel.";
    static final String DUE = PREFIX + "due";
    static final String TARGET = PREFIX + "target";
    static final String ID = PREFIX + "id";
    static final String SCHEMA = PREFIX + "schema";
    static final String COMPRESSION = PREFIX + "compression";
    static final String KIND = PREFIX + "kind";
    static final String EXPIRES = PREFIX + "expires";
    static final String REPLACES = PREFIX + "replaces";

    static final long EARLIEST_DUE_MS = 100_000_000_000L;
    static final long LATEST_DUE_MS = 253_402_300_799_999L;
    static final int LONGEST_ID = 512;

    /** The types of schemas that a mover can declare. */
    static final Set<String> SCHEMA_TYPES =
            Set.of("STRING", "INT8", "INT16", "INT32", "INT64", "FLOAT", "DOUBLE", "JSON", "AVRO",
                    "PROTOBUF", "PROTOBUF_NATIVE");

    /** Returns all properties of the cancellation of a message. */
    static Map<String, String> cancellation(long dueMs, String target, String id) {
        return Map.of(
                DUE, Long.toString(dueMs), TARGET, target, ID, id, KIND, "cancel");
    }

    /** A record that cannot be understood. */
    static final class Damaged extends DelayLevelException {
        private static final long serialVersionUID = 1L;

        final String property;

        Damaged(String property, String message) {
            super(Reason.ENVELOPE, message);
            this.property = property;
        }
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

    /** Refuses an expiry that is not after the due time, or has passed. */
    static void checkExpiry(long expiresMs, long dueMs, long nowMs) {
        if (dueMs == 0) {
            throw invalidDelay("an expiry is for delayed messages: give deliverAt or deliverAfter, "
                    + "too; the message was not sent");
        }
        if (expiresMs <= dueMs) {
            throw invalidDelay("the expiry " + expiresMs + " is not later than the due time " + dueMs
                    + ": the message would never be released; it was not sent");
        }
        if (expiresMs > LATEST_DUE_MS || expiresMs <= nowMs) {
            throw invalidDelay("the expiry " + expiresMs + (expiresMs <= nowMs
                    ? " has passed" : " is beyond the year 9999") + "; the message was not sent");
        }
    }

    static DelayLevelException invalidDelay(String message) {
        return new DelayLevelException(Reason.INVALID_DELAY, message);
    }

    private static String shortened(String text) {
        int characters = Math.min(40, text.codePointCount(0, text.length()));
        return text.substring(0, text.offsetByCodePoints(0, characters));
    }
}
