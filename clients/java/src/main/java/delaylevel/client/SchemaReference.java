package delaylevel.client;

import delaylevel.client.DelayLevelException.Reason;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.function.BiPredicate;
import java.util.stream.Collectors;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.common.schema.SchemaInfo;

/** The reference to the schema of a payload, for the envelope. */
final class SchemaReference {
    private SchemaReference() {}

    /** A version of a schema in the registry. */
    record Version(long number, String type, String definition) {}

    /** Returns the reference to a schema that the business topic has; null for plain bytes. */
    static String of(AdminRest admin, TopicName target, Schema<?> schema) {
        SchemaInfo info = schema.getSchemaInfo();
        if (info == null || !Envelope.SCHEMA_TYPES.contains(info.getType().name())) {
            return null;
        }
        String type = info.getType().name();
        String own = new String(info.getSchema(), StandardCharsets.UTF_8);
        String registered = registered(admin.schemas(target), type, own);
        if (registered == null) {
            throw new DelayLevelException(
                    Reason.UNSUPPORTED_OPTION,
                    "the registry of " + target + " has no version of the " + type + " schema of "
                            + "this producer, so movers could not name it: was the topic deleted? "
                            + "Create a new producer, or one with a schema whose text the registry "
                            + "has");
        }
        return of(type, registered);
    }

    /** Returns the registered definition that the registry takes for this one; null if none. */
    static String registered(List<Version> versions, String type, String own) {
        BiPredicate<String, String> text = String::equals; // it comes before notes
        for (BiPredicate<String, String> matches : List.of(text, SchemaReference::isSame)) {
            for (Version each : versions) {
                if (each.type.equals(type) && matches.test(each.definition, own)) {
                    return each.definition;
                }
            }
        }
        return null;
    }

    private static boolean isSame(String one, String other) {
        return Objects.equals(essentials(one), essentials(other));
    }

    /** Returns a definition as JSON without its notes, as the registry compares it; null for none. */
    private static Object essentials(String definition) {
        try {
            Object value = withoutNotes(Json.parse(definition));
            return value instanceof Map<?, ?> map && map.isEmpty() ? null : value;
        } catch (IllegalArgumentException notJson) {
            return definition.isEmpty() ? null : definition;
        }
    }

    private static Object withoutNotes(Object value) {
        if (value instanceof List<?> list) {
            return list.stream().map(SchemaReference::withoutNotes).collect(Collectors.toList());
        }
        if (!(value instanceof Map<?, ?> map)) {
            return value;
        }
        Map<Object, Object> found = new HashMap<>(map);
        found.keySet().removeAll(Set.of("doc", "aliases"));
        found.replaceAll((name, item) -> name.equals("default") ? item : withoutNotes(item));
        return found;
    }

    /** Returns the reference to a definition as it is registered. */
    static String of(String type, String definition) {
        try {
            byte[] digest = MessageDigest.getInstance("SHA-256")
                    .digest(definition.getBytes(StandardCharsets.UTF_8));
            return type + ":" + HexFormat.of().formatHex(digest, 0, 8);
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException(error); // every Java has it
        }
    }
}
