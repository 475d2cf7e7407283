package delaylevel.client;

/** A refusal: the message was not sent, or the producer was not created. The text has the remedy. */
public class DelayLevelException extends RuntimeException {
    private static final long serialVersionUID = 1L;

    /** The kinds of refusals. */
    public enum Reason {
        /** A name, ID or key that cannot be used. */
        INVALID_INPUT,
        /** A due time that is out of range or given twice. */
        INVALID_DELAY,
        /** A delay beyond the longest level, with the overflow "reject". */
        DELAY_TOO_LONG,
        /** An option that a parked message cannot keep. */
        UNSUPPORTED_OPTION,
        /** A message that later hops could not send. */
        MESSAGE_TOO_LARGE,
        /** A level topic that is missing, damaged or not one of ours. */
        LEVEL_TOPIC,
        /** A level topic that only a later version understands. */
        UPGRADE_REQUIRED,
        /** A level topic for other business topics. */
        TARGET_NOT_ALLOWED,
        /** An admin interface that refuses, or does not answer. */
        ADMIN,
        /** A record that cannot be understood. */
        ENVELOPE,
        /** A reschedule that has stored the new message, but could not cancel the old one. */
        NOT_CANCELLED
    }

    private final Reason reason;

    DelayLevelException(Reason reason, String message) {
        this(reason, message, null);
    }

    DelayLevelException(Reason reason, String message, Throwable cause) {
        super(message, cause);
        this.reason = reason;
    }

    /** Returns the kind of the refusal. */
    public Reason reason() {
        return reason;
    }
}
