package delaylevel.client;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Clock;
import java.time.Duration;
import java.time.Instant;
import java.time.LocalDate;
import java.util.Base64;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Objects;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.TypedMessageBuilder;
import org.apache.pulsar.client.api.transaction.Transaction;
import org.apache.pulsar.common.schema.KeyValue;
import org.apache.pulsar.common.schema.KeyValueEncodingType;

/**
 * A program for the integration tests, which are in Python: it obeys the JSON commands of its
 * standard input, one a line, and answers each with a line of JSON.
 *
 * <p>Arguments: the service URL, and "transactions", or the milliseconds by which the clock of the
 * client is ahead. Commands: open, send, flush, close, subscribe, receive.
 */
public final class Session {
    /** A value with a schema. */
    public static final class Order {
        public String name;
        public double amount;
        public Long note;

        static Order of(String name) {
            Order order = new Order();
            order.name = name;
            order.amount = name.length() + 0.5;
            return order;
        }

        @Override
        public String toString() {
            return name + " " + amount + " " + note;
        }
    }

    private static final Map<String, Schema<?>> SCHEMAS = new HashMap<>();

    static {
        SCHEMAS.put("bytes", Schema.BYTES);
        SCHEMAS.put("string", Schema.STRING);
        SCHEMAS.put("int64", Schema.INT64);
        SCHEMAS.put("date", Schema.LOCAL_DATE);
        SCHEMAS.put("avro", Schema.AVRO(Order.class));
        SCHEMAS.put("json", Schema.JSON(Order.class));
        SCHEMAS.put("inline", pair(Schema.AVRO(Order.class), KeyValueEncodingType.INLINE));
        SCHEMAS.put("separated", pair(Schema.AVRO(Order.class), KeyValueEncodingType.SEPARATED));
        SCHEMAS.put("numbered", Schema.KeyValue(
                Schema.INT32, Schema.STRING, KeyValueEncodingType.SEPARATED));
    }

    private final PulsarClient client;
    private final Map<String, DelayLevelProducer<Object>> producers = new HashMap<>();
    private final Map<String, Producer<Object>> plain = new HashMap<>();
    private final Map<String, Consumer<Object>> consumers = new HashMap<>();

    private Transaction transaction;

    private Session(PulsarClient client) {
        this.client = client;
    }

    private static <T> Schema<KeyValue<String, T>> pair(Schema<T> value, KeyValueEncodingType kind) {
        return Schema.KeyValue(Schema.STRING, value, kind);
    }

    /** Obeys commands until the input ends. */
    public static void main(String[] args) throws Exception {
        String option = args.length > 1 ? args[1] : "0";
        boolean transactions = option.equals("transactions");
        Duration ahead = Duration.ofMillis(transactions ? 0 : Long.parseLong(option));
        try (PulsarClient client = PulsarClient.builder().serviceUrl(args[0])
                .clock(Clock.offset(Clock.systemUTC(), ahead))
                .enableTransaction(transactions).build()) {
            Session session = new Session(client);
            BufferedReader lines = new BufferedReader(
                    new InputStreamReader(System.in, StandardCharsets.UTF_8));
            System.out.println("{\"ready\":true}");
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                Map<String, Object> answer = new LinkedHashMap<>();
                try {
                    session.obey((Map<?, ?>) Json.parse(line), answer);
                } catch (DelayLevelException error) {
                    answer.put("refused", error.reason().name());
                    answer.put("message", error.getMessage());
                } catch (Exception error) {
                    answer.put("failed", error.getClass().getSimpleName());
                    answer.put("message", String.valueOf(error.getMessage()));
                }
                System.out.println(Json.write(answer));
            }
        }
    }

    private void obey(Map<?, ?> command, Map<String, Object> answer) throws Exception {
        String name = text(command, "name");
        switch (text(command, "do")) {
            case "open" -> open(command, name, answer);
            case "send", "schedule", "reschedule" -> send(command, producers.get(name), answer);
            case "send-plain" -> sendPlain(command, plain.get(name));
            case "open-plain" -> plain.put(name, client.newProducer(schema(command))
                    .topic(text(command, "topic"))
                    .sendTimeout(0, TimeUnit.SECONDS) // as transactions need it
                    .enableBatching(command.containsKey("batching"))
                    .create());
            case "begin" -> transaction = client.newTransaction()
                    .withTransactionTimeout(60, TimeUnit.SECONDS).build().get();
            case "commit" -> transaction.commit().get();
            case "cancel" -> cancel(command, producers.get(name), answer);
            case "flush" -> producers.get(name).flush();
            case "close" -> producers.get(name).close();
            case "subscribe" -> consumers.put(name, client.newConsumer(schema(command))
                    .topic(text(command, "topic"))
                    .subscriptionName("java")
                    .subscriptionType(SubscriptionType.Shared)
                    .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                    .subscribe());
            case "receive" -> receive(consumers.get(name), answer);
            case "many" -> many(command, producers.get(name), answer);
            default -> throw new IllegalArgumentException("unknown command " + command);
        }
    }

    private void open(Map<?, ?> command, String name, Map<String, Object> answer) throws Exception {
        if (command.containsKey("plain")) {
            plain.put(name, client.newProducer(schema(command))
                    .topic(text(command, "plain")).enableBatching(false).create());
        }
        DelayLevelProducerBuilder<Object> builder =
                DelayLevelProducer.builder(client, schema(command))
                        .topic(text(command, "topic"))
                        .adminUrl(text(command, "admin"));
        builder.levelTopic(text(command, "levelTopic"));
        if (command.containsKey("pending")) {
            builder.maxPendingMessages((int) number(command, "pending"));
            builder.blockIfQueueFull((Boolean) command.get("block"));
        }
        if (command.containsKey("timeoutMs")) {
            builder.sendTimeout(Duration.ofMillis(number(command, "timeoutMs")));
        }
        if (command.containsKey("compression")) {
            builder.compressionType(CompressionType.valueOf(text(command, "compression")));
        }
        producers.put(name, builder.create());
        answer.put("levelTopic", producers.get(name).levelTopic());
    }

    private void send(
            Map<?, ?> command, DelayLevelProducer<Object> producer, Map<String, Object> answer)
            throws PulsarClientException {
        DelayedMessage<Object> message = producer.newMessage().value(value(command));
        if (command.containsKey("key")) {
            message.key(text(command, "key"));
        }
        if (command.containsKey("keyBytes")) {
            message.keyBytes(bytes(command, "keyBytes"));
        }
        message.orderingKey(bytes(command, "orderingKey"));
        properties(command).forEach(message::property);
        if (command.containsKey("eventTime")) {
            message.eventTime(number(command, "eventTime"));
        }
        message.messageId(text(command, "id"));
        if (command.containsKey("at")) {
            message.deliverAt(number(command, "at"));
        }
        if (command.containsKey("afterMs")) {
            message.deliverAfter(Duration.ofMillis(number(command, "afterMs")));
        }
        if (command.containsKey("expiresAfterMs")) {
            message.expiresAfter(Duration.ofMillis(number(command, "expiresAfterMs")));
        }
        if (command.get("do").equals("reschedule")) {
            DelayedMessage.Rescheduled done =
                    message.reschedule(Receipt.parse(text(command, "receipt")));
            answer.put("receipt", done.receipt().toString());
            answer.put("status", done.outcome().status().name());
        } else if (command.get("do").equals("schedule")) {
            answer.put("receipt", message.schedule().toString());
        } else {
            answer.put("stored", message.send().toString());
        }
    }

    private static void cancel(
            Map<?, ?> command, DelayLevelProducer<Object> producer, Map<String, Object> answer)
            throws PulsarClientException {
        CompletableFuture<CancelOutcome> sent = command.containsKey("receipt")
                ? producer.cancelAsync(text(command, "receipt"))
                : producer.cancelAsync(
                        text(command, "id"),
                        Instant.ofEpochMilli(number(command, "at")),
                        text(command, "key"));
        producer.flushAsync();
        CancelOutcome outcome = DelayLevelProducer.await(sent);
        answer.put("status", outcome.status().name());
        answer.put("reason", outcome.reason());
    }

    /** Sends the same message with the plain client, for comparison. */
    private void sendPlain(Map<?, ?> command, Producer<Object> producer) throws Exception {
        TypedMessageBuilder<Object> message = command.containsKey("inTransaction")
                ? producer.newMessage(transaction) : producer.newMessage();
        message.value(value(command));
        if (command.containsKey("key")) {
            message.key(text(command, "key"));
        }
        if (command.containsKey("keyBytes")) {
            message.keyBytes(bytes(command, "keyBytes"));
        }
        if (command.containsKey("orderingKey")) {
            message.orderingKey(bytes(command, "orderingKey"));
        }
        message.properties(properties(command));
        if (command.containsKey("eventTime")) {
            message.eventTime(number(command, "eventTime"));
        }
        message.send();
    }

    /** Sends many small messages without waiting; counts those that were stored. */
    private void many(
            Map<?, ?> command, DelayLevelProducer<Object> producer, Map<String, Object> answer) {
        Map<String, Long> outcomes = new TreeMap<>();
        int count = (int) number(command, "count");
        CompletableFuture<?>[] all = new CompletableFuture<?>[count];
        for (int i = 0; i < count; i++) {
            String text = Integer.toString(i);
            all[i] = producer.newMessage()
                    .value(text.getBytes(StandardCharsets.UTF_8))
                    .deliverAfter(Duration.ofMillis(number(command, "afterMs")))
                    .sendAsync()
                    .handle((MessageId id, Throwable error) -> {
                        String outcome = error == null ? "stored" : error.getClass().getSimpleName();
                        synchronized (outcomes) {
                            outcomes.merge(outcome, 1L, Long::sum);
                        }
                        return null;
                    });
        }
        CompletableFuture.allOf(all).join();
        outcomes.forEach((outcome, times) -> answer.put(outcome, times));
    }

    /** Answers with every field of the next message; with nothing if none comes within 30 s. */
    private static void receive(Consumer<Object> consumer, Map<String, Object> answer)
            throws PulsarClientException {
        Message<Object> message = consumer.receive(30, TimeUnit.SECONDS);
        if (message == null) {
            return;
        }
        consumer.acknowledge(message);
        Map<String, String> properties = new TreeMap<>(message.getProperties());
        answer.put("ours", properties.containsKey(Envelope.ID));
        properties.keySet().removeIf(name -> name.startsWith(Envelope.PREFIX));
        answer.put("properties", properties);
        answer.put("data", base64(message.getData()));
        answer.put("null", message.getValue() == null);
        answer.put("value", message.getValue() instanceof byte[] raw
                ? base64(raw)
                : Objects.toString(message.getValue()));
        answer.put("keyBytes", base64(message.getKeyBytes()));
        answer.put("orderingKey", base64(message.getOrderingKey()));
        answer.put("eventTime", message.getEventTime());
        byte[] version = message.getSchemaVersion();
        answer.put("schemaVersion", base64(version));
    }

    @SuppressWarnings("unchecked")
    private static Schema<Object> schema(Map<?, ?> command) {
        return (Schema<Object>) SCHEMAS.get(text(command, "schema"));
    }

    private static Object value(Map<?, ?> command) {
        String text = text(command, "value");
        if (text == null) {
            return null;
        }
        return switch (text(command, "schema")) {
            case "bytes" -> Base64.getDecoder().decode(text);
            case "int64" -> Long.valueOf(text);
            case "date" -> LocalDate.parse(text);
            case "avro", "json" -> Order.of(text);
            case "inline", "separated" -> new KeyValue<>(text(command, "pairKey"), Order.of(text));
            case "numbered" -> new KeyValue<>((int) number(command, "pairKey"), text);
            default -> text;
        };
    }

    private static Map<String, String> properties(Map<?, ?> command) {
        Map<String, String> found = new LinkedHashMap<>();
        if (command.get("properties") instanceof Map<?, ?> given) {
            given.forEach((name, value) -> found.put((String) name, (String) value));
        }
        return found;
    }

    private static String base64(byte[] bytes) {
        return bytes == null ? null : Base64.getEncoder().encodeToString(bytes);
    }

    private static byte[] bytes(Map<?, ?> command, String name) {
        String found = text(command, name);
        return found == null ? null : Base64.getDecoder().decode(found);
    }

    private static String text(Map<?, ?> command, String name) {
        return (String) command.get(name);
    }

    private static long number(Map<?, ?> command, String name) {
        return ((Number) command.get(name)).longValue();
    }
}
