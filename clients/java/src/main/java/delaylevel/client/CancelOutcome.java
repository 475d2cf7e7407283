package delaylevel.client;

import java.util.Map;

/**
 * The outcome of one cancellation.
 *
 * @param status the status; all but ACCEPTED are final
 * @param id the ID of the message
 * @param target the full name of its business topic
 * @param key its key as the cancellation gave it; empty for none
 * @param dueMs its due time as the cancellation gave it, ms since the epoch
 * @param decidedMs the time of the dispatcher's decision, ms; null if it is not known
 * @param releasedMs the time of the message's release, ms; null if it was not released, or if the
 *     time is not known
 * @param reason an explanation for people; empty for none
 */
public record CancelOutcome(
        Status status,
        String id,
        String target,
        String key,
        long dueMs,
        Long decidedMs,
        Long releasedMs,
        String reason) {
    private static final String OUTCOME = Envelope.PREFIX + "outcome";
    private static final String DECIDED = Envelope.PREFIX + "decided";
    private static final String RELEASED = Envelope.PREFIX + "released";
    private static final String KEY = Envelope.PREFIX + "key";
    private static final String REASON = Envelope.PREFIX + "reason";

    /** The status of a cancellation. */
    public enum Status {
        /** It is stored, and the dispatcher has not decided yet. */
        ACCEPTED,
        /** The message will never be released. */
        CANCELLED,
        /** The message has been released. */
        TOO_LATE,
        /** No such message arrived by its due time and some time after it. */
        UNKNOWN;

        private static Status named(String text) {
            return switch (text) {
                case "cancelled" -> CANCELLED;
                case "too late" -> TOO_LATE;
                case "unknown" -> UNKNOWN;
                default -> throw damaged(OUTCOME, "'" + text + "'");
            };
        }
    }

    static CancelOutcome of(Status status, Receipt receipt, String reason) {
        return new CancelOutcome(
                status,
                receipt.id(),
                receipt.target(),
                receipt.key(),
                receipt.dueMs(),
                null,
                null,
                reason);
    }

    /**
     * Reads an outcome from the properties of a message in the outcomes topic.
     *
     * @throws DelayLevelException a property is missing or damaged
     */
    public static CancelOutcome read(Map<String, String> properties) {
        String id = required(properties, Envelope.ID);
        if (id.isEmpty()) {
            throw damaged(Envelope.ID, "empty");
        }
        String released = properties.get(RELEASED);
        String target;
        try {
            target = TopicName.parse(required(properties, Envelope.TARGET)).toString();
        } catch (Envelope.Damaged error) {
            throw error;
        } catch (DelayLevelException error) {
            throw damaged(Envelope.TARGET, error.getMessage());
        }
        return new CancelOutcome(
                Status.named(required(properties, OUTCOME)),
                id,
                target,
                properties.getOrDefault(KEY, ""),
                ms(Envelope.DUE, required(properties, Envelope.DUE)),
                ms(DECIDED, required(properties, DECIDED)),
                released == null ? null : ms(RELEASED, released),
                properties.getOrDefault(REASON, ""));
    }

    private static String required(Map<String, String> properties, String name) {
        String found = properties.get(name);
        if (found == null) {
            throw new Envelope.Damaged(name, name + " is missing: not an outcome");
        }
        return found;
    }

    private static long ms(String name, String text) {
        if (!text.matches("[0-9]{1,19}")) {
            throw damaged(name, "'" + text + "', not a time in ms");
        }
        try {
            return Long.parseLong(text);
        } catch (NumberFormatException tooLarge) {
            throw damaged(name, text);
        }
    }

    private static Envelope.Damaged damaged(String name, String value) {
        return new Envelope.Damaged(name, "an outcome is damaged: " + name + " is " + value);
    }
}
