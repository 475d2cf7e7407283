package delaylevel.client;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.LongAdder;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;

/**
 * A program for benchmarks/bench_java.py. Arguments: service URL, admin URL. Each line of the input is
 * "side topic messages delays-in-ms,…"; the answer is "rate" and the messages per second.
 */
public final class Bench {
    private static final Map<String, String> PROPERTIES =
            Map.of("customer", "c-1234", "kind", "reminder");
    private static final int PENDING = 5000;

    private final PulsarClient client;
    private final String adminUrl;
    private final byte[] body = new byte[1024];
    private final Map<String, DelayLevelProducer<byte[]>> wrappers = new HashMap<>();
    private final Map<String, Producer<byte[]>> plain = new HashMap<>();

    private Bench(PulsarClient client, String adminUrl) {
        this.client = client;
        this.adminUrl = adminUrl;
        Arrays.fill(body, (byte) 'x');
    }

    /** Measures until the input ends. */
    public static void main(String[] args) throws Exception {
        try (PulsarClient client = PulsarClient.builder().serviceUrl(args[0]).build()) {
            Bench bench = new Bench(client, args[1]);
            BufferedReader lines = new BufferedReader(
                    new InputStreamReader(System.in, StandardCharsets.UTF_8));
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                String[] fields = line.split(" ");
                long[] delays =
                        Arrays.stream(fields[3].split(",")).mapToLong(Long::parseLong).toArray();
                System.out.println("rate "
                        + bench.run(fields[0], fields[1], Integer.parseInt(fields[2]), delays));
            }
        }
    }

    private double run(String side, String topic, int messages, long[] delays) throws Exception {
        LongAdder stored = new LongAdder();
        long start;
        if (side.equals("wrapper")) {
            DelayLevelProducer<byte[]> producer = wrappers.get(topic);
            if (producer == null) {
                producer = DelayLevelProducer.builder(client)
                        .topic(topic).adminUrl(adminUrl).maxPendingMessages(PENDING).create();
                wrappers.put(topic, producer);
            }
            start = System.nanoTime();
            for (int i = 0; i < messages; i++) {
                count(producer.newMessage()
                        .value(body)
                        .properties(PROPERTIES)
                        .key("customer-1234")
                        .deliverAfter(Duration.ofMillis(delays[i % delays.length]))
                        .sendAsync(), stored);
            }
            producer.flush();
        } else {
            Producer<byte[]> producer = plain.get(topic);
            if (producer == null) {
                producer = client.newProducer().topic(topic)
                        .blockIfQueueFull(true).maxPendingMessages(PENDING).create();
                plain.put(topic, producer);
            }
            start = System.nanoTime();
            for (int i = 0; i < messages; i++) {
                var message = producer.newMessage()
                        .value(body).properties(PROPERTIES).key("customer-1234");
                if (side.equals("plain")) {
                    message.deliverAfter(delays[i % delays.length], TimeUnit.MILLISECONDS);
                }
                count(message.sendAsync(), stored);
            }
            producer.flush();
        }
        while (stored.sum() < messages) {
            Thread.sleep(1);
        }
        return messages * 1e9 / (System.nanoTime() - start);
    }

    private static void count(CompletableFuture<MessageId> sent, LongAdder stored) {
        sent.whenComplete((id, error) -> {
            if (error != null) {
                throw new AssertionError(error); // the program never ends then
            }
            stored.increment();
        });
    }
}
