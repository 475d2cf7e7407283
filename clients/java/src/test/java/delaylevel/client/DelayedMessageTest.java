package delaylevel.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import delaylevel.client.DelayLevelException.Reason;
import java.time.Duration;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import org.junit.jupiter.api.Test;

/** The times of a message. */
class DelayedMessageTest {
    private static final long NOW_MS = 1_800_000_000_000L;
    private static final Duration FOREVER = ChronoUnit.FOREVER.getDuration();

    private static DelayedMessage<byte[]> message() {
        return new DelayedMessage<>(null);
    }

    private static void assertRefused(DelayedMessage<byte[]> message) {
        DelayLevelException error = assertThrows(
                DelayLevelException.class,
                () -> message.expiresMs(message.dueMs(NOW_MS), NOW_MS));
        assertEquals(Reason.INVALID_DELAY, error.reason());
    }

    @Test
    void timesThatFitNoLongAreRefusedAsOthers() {
        assertRefused(message().deliverAt(Instant.MAX));
        assertRefused(message().deliverAt(Instant.MIN));
        assertRefused(message().deliverAfter(FOREVER));
        DelayedMessage<byte[]> tomorrow = message().deliverAfter(Duration.ofDays(1));
        assertRefused(tomorrow.expiresAfter(FOREVER));
        assertRefused(tomorrow.expiresAfter(FOREVER.negated()));
        assertRefused(message().deliverAfter(Duration.ofDays(1)).expiresAt(Instant.MAX));
    }

    @Test
    void dueTimesAreRoundedUpAndExpiriesDown() {
        Instant time = Instant.ofEpochMilli(NOW_MS).plusNanos(1);
        assertEquals(NOW_MS + 1, message().deliverAt(time).dueMs(0));
        assertEquals(
                NOW_MS,
                message().deliverAt(NOW_MS - 5).expiresAt(time).expiresMs(NOW_MS - 5, NOW_MS - 9));
    }
}
