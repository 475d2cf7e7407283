package delaylevel.client;

import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.HexFormat;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.common.schema.SchemaInfo;

/** The reference to the schema of a payload, for the envelope. */
final class SchemaReference {
    private SchemaReference() {}

    /** Returns the reference to a schema that the business topic has; null for plain bytes. */
    static String of(AdminRest admin, TopicName target, Schema<?> schema) {
        SchemaInfo info = schema.getSchemaInfo();
        if (info == null || !Envelope.SCHEMA_TYPES.contains(info.getType().name())) {
            return null;
        }
        return of(info.getType().name(), admin.registered(target, info));
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
