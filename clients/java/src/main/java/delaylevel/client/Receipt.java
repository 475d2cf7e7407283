package delaylevel.client;

import delaylevel.client.DelayLevelException.Reason;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Objects;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.zip.CRC32;

/**
 * The receipt of a scheduled message: all that its cancellation needs. Its text ({@link #toString})
 * is safe to store, and the Python package reads and writes the same.
 *
 * @param id the ID of the message
 * @param dueMs its due time, ms since the epoch
 * @param target the full name of its business topic
 * @param levelTopic the full name of the level topic
 * @param key its key; empty for none
 * @param place the place that stored it, tenant/namespace/partition:ledger:entry; empty if it is not
 *     known
 * @param sentDirectly true if the message was due when it was sent: it went straight to its business
 *     topic, and nothing can cancel it
 */
public record Receipt(
        String id,
        long dueMs,
        String target,
        String levelTopic,
        String key,
        String place,
        boolean sentDirectly) {
    private static final String PREFIX = "dl1.";
    private static final int CHECKSUM_BYTES = 4;
    private static final Pattern LATER = Pattern.compile("dl([0-9]+)\\..*", Pattern.DOTALL);

    /** Creates a receipt. Key and place may be null. */
    public Receipt {
        Objects.requireNonNull(id);
        key = key == null ? "" : key;
        place = place == null ? "" : place;
    }

    /** Returns the text of the receipt. */
    @Override
    public String toString() {
        Map<String, Object> value = new LinkedHashMap<>();
        value.put("due", dueMs);
        value.put("target", target);
        value.put("topic", levelTopic);
        value.put("id", id);
        if (!key.isEmpty()) {
            value.put("key", key);
        }
        if (!place.isEmpty()) {
            value.put("at", place);
        }
        if (sentDirectly) {
            value.put("direct", true);
        }
        byte[] text = Json.write(value).getBytes(StandardCharsets.UTF_8);
        byte[] data = ByteBuffer.allocate(text.length + CHECKSUM_BYTES)
                .put(text).putInt(checksum(text)).array();
        return PREFIX + Base64.getUrlEncoder().withoutPadding().encodeToString(data);
    }

    /**
     * Parses the text of a receipt; white space around it is ignored.
     *
     * @throws DelayLevelException it is not the text of a receipt, or it is damaged, or only a later
     *     version understands it
     */
    public static Receipt parse(String text) {
        String stripped = text.strip();
        if (!stripped.startsWith(PREFIX)) {
            Matcher later = LATER.matcher(stripped);
            throw refusal(later.matches()
                    ? "the receipt " + shortened(text) + " is of version " + later.group(1)
                            + ", and this client understands version 1: upgrade it"
                    : shortened(text) + " is not a receipt: it does not begin with '" + PREFIX
                            + "'; copy the whole text that schedule() returned");
        }
        try {
            return read((Map<?, ?>) Json.parse(checked(stripped.substring(PREFIX.length()))));
        } catch (ClassCastException | IllegalArgumentException | ArithmeticException
                | DelayLevelException error) {
            throw refusal("the receipt " + shortened(text) + " is damaged (" + error.getMessage()
                    + "): copy the whole text that schedule() returned");
        }
    }

    private static Receipt read(Map<?, ?> value) {
        String id = text(value, "id", "");
        if (id.isEmpty()) {
            throw new IllegalArgumentException("it has no ID");
        }
        long due = value.get("due") instanceof Long number ? number : 0;
        if (due <= 0 || due > Envelope.LATEST_DUE_MS) {
            throw new IllegalArgumentException("its due time is " + value.get("due"));
        }
        return new Receipt(
                id,
                due,
                TopicName.parse(text(value, "target", null)).toString(),
                TopicName.parse(text(value, "topic", null)).toString(),
                text(value, "key", ""),
                text(value, "at", ""),
                Boolean.TRUE.equals(value.get("direct")));
    }

    private static String text(Map<?, ?> value, String name, String otherwise) {
        Object found = value.containsKey(name) ? value.get(name) : otherwise;
        if (!(found instanceof String string)) {
            throw new IllegalArgumentException(name + " is not a text");
        }
        return string;
    }

    private static String checked(String text) {
        byte[] data = Base64.getUrlDecoder().decode(text);
        int length = Math.max(0, data.length - CHECKSUM_BYTES);
        byte[] body = Arrays.copyOf(data, length);
        boolean whole = data.length > CHECKSUM_BYTES
                && ByteBuffer.wrap(data, length, CHECKSUM_BYTES).getInt() == checksum(body);
        if (!whole) {
            throw new IllegalArgumentException("it is cut off or changed: its checksum is wrong");
        }
        try {
            return StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(body)).toString();
        } catch (CharacterCodingException error) {
            throw new IllegalArgumentException("it is not UTF-8", error);
        }
    }

    private static int checksum(byte[] data) {
        CRC32 hash = new CRC32();
        hash.update(data);
        return (int) hash.getValue();
    }

    private static String shortened(String text) {
        return "'" + (text.length() <= 40 ? text : text.substring(0, 40) + "\u2026") + "'";
    }

    private static DelayLevelException refusal(String message) {
        return new DelayLevelException(Reason.INVALID_INPUT, message);
    }
}
