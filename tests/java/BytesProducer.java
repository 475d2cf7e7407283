import java.util.Base64;
import java.util.HashMap;
import java.util.Map;
import java.util.Scanner;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.TypedMessageBuilder;
import org.apache.pulsar.common.schema.KeyValue;
import org.apache.pulsar.common.schema.KeyValueEncodingType;

/**
 * Publishes messages whose keys are bytes. The Java client accepts any bytes as an ordering key and
 * as a key; the Python client accepts only text.
 *
 * <p>Argument: the service URL. Each line of the standard input is one message. Its fields are
 * separated by tabs: the topic; the kind of the key: "ordering" for an ordering key, "key" for
 * keyBytes, "separated" or "inline" for the key of a KeyValue schema; the base64 key (for a
 * KeyValue schema, of a text); the base64 payload; and any number of key=value properties. Each
 * line gets one line of output: "ok" and the message ID, or "failed" and the reason.
 */
public final class BytesProducer {
    public static void main(String[] args) throws Exception {
        PulsarClient client = PulsarClient.builder().serviceUrl(args[0]).build();
        Map<String, Producer<?>> producers = new HashMap<>();
        Scanner lines = new Scanner(System.in, "UTF-8");
        System.out.println("ready");
        while (lines.hasNextLine()) {
            String[] fields = lines.nextLine().split("\t");
            try {
                TypedMessageBuilder<?> message = message(client, fields, producers);
                for (int i = 4; i < fields.length; i++) {
                    String[] pair = fields[i].split("=", 2);
                    message.property(pair[0], pair[1]);
                }
                System.out.println("ok " + message.send());
            } catch (Exception error) {
                System.out.println("failed " + error);
            }
        }
        client.close();
    }

    @SuppressWarnings("unchecked")
    private static TypedMessageBuilder<?> message(
            PulsarClient client, String[] fields, Map<String, Producer<?>> producers)
            throws Exception {
        String topic = fields[0];
        byte[] key = Base64.getDecoder().decode(fields[2]);
        byte[] value = Base64.getDecoder().decode(fields[3]);
        boolean inline = fields[1].equals("inline");
        if (inline || fields[1].equals("separated")) {
            Producer<?> producer = producers.get(topic);
            if (producer == null) {
                KeyValueEncodingType encoding =
                        inline ? KeyValueEncodingType.INLINE : KeyValueEncodingType.SEPARATED;
                producer =
                        client.newProducer(Schema.KeyValue(Schema.STRING, Schema.BYTES, encoding))
                                .topic(topic)
                                .create();
                producers.put(topic, producer);
            }
            return ((Producer<KeyValue<String, byte[]>>) producer)
                    .newMessage()
                    .value(new KeyValue<>(new String(key, "UTF-8"), value));
        }
        Producer<?> producer = producers.get(topic);
        if (producer == null) {
            producer = client.newProducer(Schema.BYTES).topic(topic).create();
            producers.put(topic, producer);
        }
        TypedMessageBuilder<byte[]> message = ((Producer<byte[]>) producer).newMessage();
        message.value(value);
        return fields[1].equals("ordering") ? message.orderingKey(key) : message.keyBytes(key);
    }
}
