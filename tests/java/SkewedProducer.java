import java.time.Clock;
import java.time.Duration;
import java.util.Base64;
import java.util.HashMap;
import java.util.Map;
import java.util.Scanner;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.TypedMessageBuilder;

/**
 * Publishes messages with wrong publish times. The Python client takes the publish time from the
 * machine's clock inside C++, where no test can change it; the Java client accepts a clock.
 *
 * <p>Argument: the service URL. Each line of the standard input is one message. Its fields are
 * separated by tabs: the topic, the milliseconds by which the clock is ahead, the base64 payload,
 * and any number of key=value properties. Each line gets one line of output: "ok" and the message
 * ID, or "failed" and the reason.
 */
public final class SkewedProducer {
    public static void main(String[] args) throws Exception {
        Map<Long, PulsarClient> clients = new HashMap<>();
        Map<String, Producer<byte[]>> producers = new HashMap<>();
        Scanner lines = new Scanner(System.in, "UTF-8");
        System.out.println("ready");
        while (lines.hasNextLine()) {
            String[] fields = lines.nextLine().split("\t");
            try {
                System.out.println("ok " + publish(args[0], fields, clients, producers));
            } catch (Exception error) {
                System.out.println("failed " + error);
            }
        }
        for (PulsarClient client : clients.values()) {
            client.close();
        }
    }

    private static MessageId publish(
            String url,
            String[] fields,
            Map<Long, PulsarClient> clients,
            Map<String, Producer<byte[]>> producers)
            throws Exception {
        String topic = fields[0];
        long aheadMs = Long.parseLong(fields[1]);
        PulsarClient client = clients.get(aheadMs);
        if (client == null) {
            Clock clock = Clock.offset(Clock.systemUTC(), Duration.ofMillis(aheadMs));
            client = PulsarClient.builder().serviceUrl(url).clock(clock).build();
            clients.put(aheadMs, client);
        }
        Producer<byte[]> producer = producers.get(aheadMs + topic);
        if (producer == null) {
            producer = client.newProducer(Schema.BYTES).topic(topic).enableBatching(false).create();
            producers.put(aheadMs + topic, producer);
        }
        TypedMessageBuilder<byte[]> message =
                producer.newMessage().value(Base64.getDecoder().decode(fields[2]));
        for (int i = 3; i < fields.length; i++) {
            String[] pair = fields[i].split("=", 2);
            message.property(pair[0], pair[1]);
        }
        return message.send();
    }
}
