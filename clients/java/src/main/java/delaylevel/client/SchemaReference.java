package delaylevel.client;

import delaylevel.client.DelayLevelException.Reason;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.HexFormat;
import java.util.List;
import java.util.function.UnaryOperator;
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
        UnaryOperator<String> canonical = Json::canonicalDefinition;
        for (UnaryOperator<String> form : List.of(canonical, Json::essentials)) {
            for (Version each : versions) {
                if (each.type.equals(type)
                        && form.apply(each.definition).equals(form.apply(own))) {
                    return each.definition;
                }
            }
        }
        return null;
    }

    /** Returns the reference to a definition as it is registered. */
    static String of(String type, String definition) {
        byte[] canonical =
                Json.canonicalDefinition(definition).getBytes(StandardCharsets.UTF_8);
        try {
            byte[] digest = MessageDigest.getInstance("SHA-256").digest(canonical);
            return type + ":" + HexFormat.of().formatHex(digest, 0, 8);
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException(error); // every Java has it
        }
    }
}
