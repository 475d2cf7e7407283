package delaylevel.client;

import delaylevel.client.DelayLevelException.Reason;
import java.net.http.HttpClient;
import java.time.Clock;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Schema;

/**
 * The options of a {@link DelayLevelProducer}.
 *
 * <p>Options that delayed messages cannot keep do not exist: encryption, chunks, a router, an access
 * mode other than Shared.
 *
 * @param <T> the type of the values
 */
public final class DelayLevelProducerBuilder<T> {
    static final int LARGEST_BATCH = 1024;
    private static final int SMALLEST_MAX_MESSAGE_SIZE = 16 * 1024;

    final PulsarClient client;
    final Schema<T> schema;
    String topic;
    private String adminUrl;
    private Supplier<String> adminToken;
    private HttpClient adminHttp;
    private String levelTopic;
    private String levelNamespace;
    boolean blockIfFull = true;
    int maxPendingMessages = 10_000;
    private Long sendTimeoutMs;
    private boolean batching = true;
    private int batchingMaxMessages = 1000;
    private Duration batchingMaxPublishDelay = Duration.ofMillis(10);
    private CompressionType compression = CompressionType.NONE;
    int maxMessageSize = 5 * 1024 * 1024;
    Clock clock = Clock.systemUTC();

    DelayLevelProducerBuilder(PulsarClient client, Schema<T> schema) {
        this.client = client;
        this.schema = schema;
    }

    /** Sets the business topic; required. */
    public DelayLevelProducerBuilder<T> topic(String name) {
        topic = name;
        return this;
    }

    /** Sets the address of the admin interface, where the level topic describes itself; required. */
    public DelayLevelProducerBuilder<T> adminUrl(String url) {
        adminUrl = url;
        return this;
    }

    /** Sets the source of the token for the admin interface; it is asked at each request. */
    public DelayLevelProducerBuilder<T> adminToken(Supplier<String> token) {
        adminToken = token;
        return this;
    }

    /** Sets the HTTP client for the admin interface, for example one with your own TLS settings. */
    public DelayLevelProducerBuilder<T> adminHttpClient(HttpClient http) {
        adminHttp = http;
        return this;
    }

    /** Sets the name of the level topic, if it is not the default one. */
    public DelayLevelProducerBuilder<T> levelTopic(String name) {
        levelTopic = name;
        return this;
    }

    /** Sets the tenant/namespace of the level topic, if it is not that of the business topic. */
    public DelayLevelProducerBuilder<T> levelNamespace(String namespace) {
        levelNamespace = namespace;
        return this;
    }

    /** Sets whether sending blocks while the queue is full (the default), or fails. */
    public DelayLevelProducerBuilder<T> blockIfQueueFull(boolean block) {
        blockIfFull = block;
        return this;
    }

    /** Sets the largest number of messages of this producer that are not stored yet. */
    public DelayLevelProducerBuilder<T> maxPendingMessages(int messages) {
        maxPendingMessages = messages;
        return this;
    }

    /** Sets the send timeout; the default is the shortest lead, from 5 to 30 s. */
    public DelayLevelProducerBuilder<T> sendTimeout(Duration timeout) {
        sendTimeoutMs = timeout.toMillis();
        return this;
    }

    /** Sets whether messages are batched; the default is true. */
    public DelayLevelProducerBuilder<T> enableBatching(boolean enable) {
        batching = enable;
        return this;
    }

    /** Sets the largest number of messages in a batch; never above 1,024. */
    public DelayLevelProducerBuilder<T> batchingMaxMessages(int messages) {
        batchingMaxMessages = messages;
        return this;
    }

    /** Sets the time that a message waits for others of its batch. */
    public DelayLevelProducerBuilder<T> batchingMaxPublishDelay(Duration delay) {
        batchingMaxPublishDelay = delay;
        return this;
    }

    /** Sets the compression, also for every later hop. */
    public DelayLevelProducerBuilder<T> compressionType(CompressionType type) {
        compression = type;
        return this;
    }

    /** Sets the broker's maxMessageSize, if it is not the default. */
    public DelayLevelProducerBuilder<T> maxMessageSize(int bytes) {
        maxMessageSize = bytes;
        return this;
    }

    /** Sets the source of the present time. */
    DelayLevelProducerBuilder<T> clock(Clock source) {
        clock = source;
        return this;
    }

    /**
     * Finds the level topic, opens the producer of the business topic, and returns the producer.
     *
     * @throws DelayLevelException the level topic is missing, foreign, for other topics, or only a
     *     later version understands it; or an option does not fit
     * @throws PulsarClientException the business topic cannot be opened
     */
    public DelayLevelProducer<T> create() throws PulsarClientException {
        if (topic == null || adminUrl == null) {
            throw new DelayLevelException(
                    Reason.INVALID_INPUT,
                    (topic == null ? "topic" : "adminUrl") + " is not set: a producer needs the "
                            + "business topic, and the admin interface to read its level topic");
        }
        if (levelTopic != null && levelNamespace != null) {
            throw new DelayLevelException(
                    Reason.INVALID_INPUT,
                    "levelTopic is " + levelTopic + " and levelNamespace is " + levelNamespace
                            + ": give one of them; the name of a topic contains its namespace");
        }
        if (maxMessageSize < SMALLEST_MAX_MESSAGE_SIZE || maxPendingMessages < 1) {
            throw new DelayLevelException(
                    Reason.INVALID_INPUT,
                    "maxMessageSize=" + maxMessageSize + ", maxPendingMessages="
                            + maxPendingMessages + ": give a broker's maxMessageSize of at least "
                            + SMALLEST_MAX_MESSAGE_SIZE + " bytes, and at least one message");
        }
        TopicName target = TopicName.parse(topic);
        HttpClient http = adminHttp != null
                ? adminHttp
                : HttpClient.newBuilder().connectTimeout(Duration.ofSeconds(10)).build();
        AdminRest admin = new AdminRest(http, adminUrl, adminToken);
        Description description = find(admin, target);
        Settings settings = settings(description);
        Producer<T> business = settings.applyTo(client.newProducer(schema), true)
                .topic(target.toString())
                .create();
        try {
            String reference = SchemaReference.of(admin, target, schema);
            return new DelayLevelProducer<>(
                    this, admin, description, target.toString(), reference, settings, business);
        } catch (RuntimeException error) {
            business.closeAsync();
            throw error;
        }
    }

    Description find(AdminRest admin, TopicName target) {
        TopicName name;
        if (levelTopic != null) {
            name = TopicName.parse(levelTopic);
        } else {
            List<TopicName> names = target.levelTopics(levelNamespace);
            TopicName found = admin.firstFor(target, names);
            name = found != null ? found : names.get(0);
        }
        Description found = admin.describe(name);
        if (found == null) {
            throw new DelayLevelException(
                    Reason.LEVEL_TOPIC,
                    "level topic " + name + " does not exist: create it with `delaylevel levels "
                            + "create " + target + "`");
        }
        found.checkTarget(target.toString());
        return found;
    }

    /** Returns the settings of the producers of level topics. */
    Settings settings(Description description) {
        long lead = description.levels().smallestLeadMs();
        long timeout = sendTimeoutMs != null
                ? sendTimeoutMs
                : Math.min(Math.max(lead, 5000), 30_000);
        if (timeout <= 0) {
            throw new DelayLevelException(
                    Reason.UNSUPPORTED_OPTION,
                    "sendTimeout=" + timeout + " ms cannot be combined with a delay-level topic: a "
                            + "message that waits in the client without a limit ends up behind "
                            + "younger ones in its partition and is handed off too late; set it to "
                            + "at most the lead (" + Duration.ofMillis(lead) + ")");
        }
        return new Settings(
                batching && !description.byFunction(),
                batching,
                Math.min(batchingMaxMessages, LARGEST_BATCH),
                batchingMaxPublishDelay,
                timeout,
                sendTimeoutMs != null && timeout > lead,
                compression,
                blockIfFull);
    }

    /** The settings of the producers of level topics. */
    record Settings(
            boolean batched,
            boolean batchedInWindow,
            int batchingMaxMessages,
            Duration batchingMaxPublishDelay,
            long sendTimeoutMs,
            boolean timeoutIsLong,
            CompressionType compression,
            boolean blockIfFull) {
        /** Returns the compression as the envelope names it; null for none. */
        String compressionName() {
            return switch (compression) {
                case NONE -> null;
                case ZLIB -> "ZLib";
                default -> compression.name();
            };
        }

        <V> ProducerBuilder<V> applyTo(ProducerBuilder<V> builder, boolean inWindow) {
            boolean batches = inWindow ? batchedInWindow : batched;
            builder.sendTimeout((int) Math.min(sendTimeoutMs, Integer.MAX_VALUE), TimeUnit.MILLISECONDS)
                    .blockIfQueueFull(blockIfFull)
                    .compressionType(compression)
                    .enableBatching(batches);
            if (batches) {
                builder.batchingMaxMessages(batchingMaxMessages)
                        .batchingMaxPublishDelay(
                                batchingMaxPublishDelay.toNanos(), TimeUnit.NANOSECONDS);
            }
            return builder;
        }
    }
}
