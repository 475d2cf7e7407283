package delaylevel.client;

import delaylevel.client.DelayLevelException.Reason;
import delaylevel.client.DelayLevelProducerBuilder.Settings;
import delaylevel.client.DelayedMessage.Rescheduled;
import delaylevel.client.Routing.Route;
import java.lang.System.Logger;
import java.lang.System.Logger.Level;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Supplier;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.MessageIdAdv;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.TypedMessageBuilder;
import org.apache.pulsar.client.api.schema.KeyValueSchema;
import org.apache.pulsar.common.schema.KeyValue;
import org.apache.pulsar.common.schema.KeyValueEncodingType;

/**
 * A producer whose messages may be due in hours, days or months.
 *
 * <p>It wraps your own {@link PulsarClient}. Messages without a delay go to the business topic.
 * Delayed ones go to the partition of the level topic that fits their delay; movers and dispatchers
 * deliver them to the business topic when they are due. The level topic must exist. The producer
 * reads its description, and follows an expansion without a restart. Several threads may use it.
 *
 * @param <T> the type of the values
 */
public final class DelayLevelProducer<T> implements AutoCloseable {
    private static final Logger LOG = System.getLogger(DelayLevelProducer.class.getName());
    private static final long REFRESH_EVERY_NS = TimeUnit.SECONDS.toNanos(60);
    private static final long REFUSED_EVERY_NS = TimeUnit.SECONDS.toNanos(1);
    private static final long CHECK_MS = 5000;
    /** Not empty, because the Python client drops empty payloads that it compresses. */
    private static final byte[] CANCELLATION = "cancel".getBytes(StandardCharsets.UTF_8);
    private static final String SENT_DIRECTLY =
            "it was due when it was sent, and went straight to its topic";

    private final DelayLevelProducerBuilder<T> options;
    private final AdminRest admin;
    private final String target;
    private final String reference;
    private final Settings settings;
    private final Producer<T> business;
    private final Semaphore room;
    private final ExecutorService executor = Executors.newCachedThreadPool(task -> {
        Thread thread = new Thread(task, "delaylevel-producer");
        thread.setDaemon(true);
        return thread;
    });
    private final Map<PartitionKey, Partition> partitions = new ConcurrentHashMap<>();
    private final AtomicBoolean refreshing = new AtomicBoolean();
    private volatile Routing routing;
    private volatile long readNs = System.nanoTime();
    private volatile boolean closed;

    DelayLevelProducer(
            DelayLevelProducerBuilder<T> options,
            AdminRest admin,
            Description description,
            String target,
            String reference,
            Settings settings,
            Producer<T> business) {
        this.options = options;
        this.admin = admin;
        this.target = target;
        this.reference = reference;
        this.settings = settings;
        this.business = business;
        room = new Semaphore(options.maxPendingMessages);
        routing = new Routing(description, options.maxMessageSize);
        if (settings.timeoutIsLong()) {
            LOG.log(Level.WARNING, "sendTimeout={0} ms is above the lead of level topic {1}: a "
                    + "message that waits in the client for longer than the lead can be handed off "
                    + "late", settings.sendTimeoutMs(), description.topic());
        }
    }

    /** Returns a builder for a producer of bytes. */
    public static DelayLevelProducerBuilder<byte[]> builder(PulsarClient client) {
        return builder(client, Schema.BYTES);
    }

    /** Returns a builder for a producer of values with this schema. */
    public static <T> DelayLevelProducerBuilder<T> builder(PulsarClient client, Schema<T> schema) {
        return new DelayLevelProducerBuilder<>(client, schema);
    }

    /** Returns a new message, to be sent with {@link DelayedMessage#sendAsync()}. */
    public DelayedMessage<T> newMessage() {
        return new DelayedMessage<>(this);
    }

    /** Sends a value to the business topic, without a delay. */
    public CompletableFuture<MessageId> sendAsync(T value) {
        return newMessage().value(value).sendAsync();
    }

    /** Sends a value that is due at a time. */
    public CompletableFuture<MessageId> sendAsync(T value, Instant deliverAt) {
        return newMessage().value(value).deliverAt(deliverAt).sendAsync();
    }

    /** Sends a value that is due after a delay. */
    public CompletableFuture<MessageId> sendAsync(T value, Duration deliverAfter) {
        return newMessage().value(value).deliverAfter(deliverAfter).sendAsync();
    }

    /** Completes when all messages sent so far are stored; fails if one of them was not. */
    public CompletableFuture<Void> flushAsync() {
        List<CompletableFuture<Void>> all = new ArrayList<>();
        all.add(business.flushAsync());
        partitions.values().forEach(partition -> all.add(partition.flush()));
        return CompletableFuture.allOf(all.toArray(new CompletableFuture<?>[0]));
    }

    /** Waits until all messages sent so far are stored. */
    public void flush() throws PulsarClientException {
        await(flushAsync());
    }

    /** Closes the producers. The client stays open. Messages that wait for a producer fail. */
    @Override
    public void close() throws PulsarClientException {
        closed = true;
        List<CompletableFuture<Void>> all = new ArrayList<>();
        all.add(business.closeAsync());
        partitions.values().forEach(partition -> all.add(partition.close()));
        // The executor is not shut down: an opening in progress needs it to close its producer. Idle
        // threads end by themselves.
        await(CompletableFuture.allOf(all.toArray(new CompletableFuture<?>[0])));
    }

    /** Returns the full name of the level topic. */
    public String levelTopic() {
        return routing.description.topic().toString();
    }

    /** Returns the longest delay that is accepted. */
    public Duration longestDelay() {
        return Duration.ofMillis(routing.description.levels().maximumMs());
    }

    /**
     * Cancels a scheduled message. The future completes when the cancellation is stored, with the
     * outcome {@code ACCEPTED}: the dispatcher decides when it arrives there, and stores its decision
     * in the outcomes topic of the level topic. A message that was due when it was sent is
     * {@code TOO_LATE} at once. To cancel twice does no harm.
     */
    public CompletableFuture<CancelOutcome> cancelAsync(Receipt receipt) {
        try {
            checkOwn(receipt);
        } catch (DelayLevelException error) {
            return CompletableFuture.failedFuture(error);
        }
        PulsarClientException full = takeRoom();
        if (full != null) {
            return CompletableFuture.failedFuture(full);
        }
        CompletableFuture<CancelOutcome> sent = receipt.sentDirectly()
                ? CompletableFuture.completedFuture(CancelOutcome.of(
                        CancelOutcome.Status.TOO_LATE, receipt, SENT_DIRECTLY))
                : sendCancellation(receipt).thenApply(stored -> CancelOutcome.of(
                        CancelOutcome.Status.ACCEPTED, receipt, ""));
        return sent.whenComplete((outcome, error) -> room.release());
    }

    /** Refuses the receipt of a message of another producer, and one that nobody can cancel. */
    private void checkOwn(Receipt receipt) {
        String topic = levelTopic();
        if (!receipt.target().equals(target) || !receipt.levelTopic().equals(topic)) {
            throw new DelayLevelException(
                    Reason.INVALID_INPUT,
                    "the receipt is that of a message for " + receipt.target() + " in level topic "
                            + receipt.levelTopic() + ", and this producer sends to " + target
                            + " through " + topic + ": use a producer of the receipt's topics; "
                            + "nothing was sent");
        }
        routing.description.checkCancellable();
    }

    /** Cancels the message of a receipt that is given as text. */
    public CompletableFuture<CancelOutcome> cancelAsync(String receipt) {
        try {
            return cancelAsync(Receipt.parse(receipt));
        } catch (DelayLevelException error) {
            return CompletableFuture.failedFuture(error);
        }
    }

    /**
     * Cancels the message with an ID of the application.
     *
     * @param messageId the ID
     * @param deliverAt the due time with which it was sent
     * @param key the key with which it was sent; null for none
     */
    public CompletableFuture<CancelOutcome> cancelAsync(
            String messageId, Instant deliverAt, String key) {
        long dueMs;
        try {
            dueMs = newMessage().deliverAt(deliverAt).dueMs(0);
            Envelope.checkId(messageId);
            if (dueMs == 0) {
                throw Envelope.invalidDelay(
                        "deliverAt is 1970: give the due time of the message; nothing was sent");
            }
        } catch (DelayLevelException error) {
            return CompletableFuture.failedFuture(error);
        }
        return cancelAsync(new Receipt(messageId, dueMs, target, levelTopic(), key, "", false));
    }

    /**
     * Cancels a scheduled message, and waits until the cancellation is stored.
     *
     * @throws DelayLevelException the receipt or the level topic does not allow it
     * @throws PulsarClientException the cancellation could not be stored
     */
    public CancelOutcome cancel(Receipt receipt) throws PulsarClientException {
        CompletableFuture<CancelOutcome> sent = cancelAsync(receipt);
        if (!sent.isDone()) {
            flushAsync(); // do not wait for a batch to fill
        }
        return await(sent);
    }

    private CompletableFuture<MessageId> sendCancellation(Receipt receipt) {
        return retried(() -> {
            Routing now = routing;
            long nowMs = options.clock.millis();
            Route route =
                    now.cancellationRoute(receipt.dueMs(), nowMs, receipt.key(), receipt.id());
            Map<String, String> all =
                    Envelope.cancellation(receipt.dueMs(), target, receipt.id());
            return partition(now, route, false).send(producer -> {
                TypedMessageBuilder<byte[]> builder =
                        producer.newMessage().value(CANCELLATION).properties(all);
                if (!receipt.key().isEmpty()) {
                    builder.key(receipt.key());
                }
                if (route.deliverAtMs() > 0) {
                    builder.deliverAt(route.deliverAtMs());
                }
                return builder.sendAsync();
            });
        });
    }

    CompletableFuture<MessageId> sendAsync(DelayedMessage<T> message) {
        return sendAsync(message, message.messageId, null);
    }

    CompletableFuture<Receipt> scheduleAsync(DelayedMessage<T> message) {
        if (!message.hasDelay()) {
            return CompletableFuture.failedFuture(Envelope.invalidDelay(
                    "a scheduled message has a due time: give deliverAt or deliverAfter, or call "
                            + "send(); the message was not sent"));
        }
        // A position is not enough: the client sends a message again after a broken connection, and
        // both copies must have the ID of the receipt.
        String id = message.messageId != null
                ? message.messageId
                : UUID.randomUUID().toString().replace("-", "");
        Place place = new Place();
        place.key = message.key;
        return sendAsync(message, id, place).thenApply(stored -> place.receipt(id, stored));
    }

    CompletableFuture<Rescheduled> rescheduleAsync(DelayedMessage<T> message, Receipt old) {
        try {
            checkOwn(old);
            if (old.id().equals(message.messageId)) {
                throw new DelayLevelException(
                        Reason.INVALID_INPUT,
                        "messageId is that of the message to replace: the new message would be a copy "
                                + "of it, and be cancelled with it. Leave it out, or give another "
                                + "one; nothing was sent");
            }
        } catch (DelayLevelException error) {
            return CompletableFuture.failedFuture(error);
        }
        message.replaces = old.id();
        // Not in a thread of the client: cancelling may wait for room.
        return scheduleAsync(message).thenComposeAsync(
                stored -> cancelAsync(old).handle((outcome, error) -> {
                    if (error != null) {
                        throw new DelayLevelException(
                                Reason.NOT_CANCELLED,
                                "the cancellation of message " + old.id() + " was not confirmed ("
                                        + error + "): cancel it again, twice does no harm. The new "
                                        + "message is stored; its receipt is " + stored,
                                error);
                    }
                    return new Rescheduled(stored, outcome);
                }),
                executor);
    }

    /** The place of a scheduled message, filled in when it is sent. */
    private final class Place {
        private long dueMs;
        private String key;
        private String topic = target;

        Receipt receipt(String id, MessageId stored) {
            String place = null;
            boolean direct = topic.equals(target);
            // A topic with deduplication confirms copies without a position.
            if (stored instanceof MessageIdAdv found && found.getLedgerId() >= 0) {
                String partition = direct && found.getPartitionIndex() >= 0
                        ? "-partition-" + found.getPartitionIndex()
                        : "";
                place = topic.substring(TopicName.SCHEME.length()) + partition
                        + ":" + found.getLedgerId() + ":" + found.getEntryId();
            }
            return new Receipt(id, dueMs, target, levelTopic(), key, place, direct);
        }
    }

    private CompletableFuture<MessageId> sendAsync(
            DelayedMessage<T> message, String id, Place place) {
        long dueMs;
        long expiresMs;
        try {
            long nowMs = options.clock.millis();
            dueMs = message.dueMs(nowMs);
            expiresMs = message.expiresMs(dueMs, nowMs);
            if (id != null) {
                Envelope.checkId(id);
            }
            if (place != null) {
                place.dueMs = dueMs == 0 ? nowMs : dueMs;
            }
        } catch (DelayLevelException error) {
            return CompletableFuture.failedFuture(error);
        }
        PulsarClientException full = takeRoom();
        if (full != null) {
            return CompletableFuture.failedFuture(full);
        }
        return retried(() -> sendDue(message, id, dueMs, expiresMs, place))
                .whenComplete((stored, error) -> room.release());
    }

    /** Sends a message; if its delay is too long, the description is read again first. */
    private CompletableFuture<MessageId> retried(Supplier<CompletableFuture<MessageId>> send) {
        try {
            return send.get();
        } catch (DelayLevelException error) {
            return error.reason() == Reason.DELAY_TOO_LONG
                    ? sendAfterRefresh(send, error)
                    : CompletableFuture.failedFuture(error);
        } catch (RuntimeException error) { // of the schema, for example
            return CompletableFuture.failedFuture(error);
        }
    }

    private PulsarClientException takeRoom() {
        if (closed) {
            return new PulsarClientException.AlreadyClosedException("the producer is closed");
        }
        if (room.tryAcquire()) {
            return null;
        }
        if (!options.blockIfFull) {
            return new PulsarClientException.ProducerQueueIsFullError(
                    options.maxPendingMessages + " messages are not stored yet: wait for some, raise "
                            + "maxPendingMessages, or set blockIfQueueFull; the message was not "
                            + "sent");
        }
        try {
            room.acquire();
            return null;
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
            return new PulsarClientException(error);
        }
    }

    private CompletableFuture<MessageId> sendDue(
            DelayedMessage<T> message, String id, long dueMs, long expiresMs, Place place) {
        if (dueMs == 0) {
            Map<String, String> all = Envelope.undelayed(message.properties, id, target);
            return sendToBusiness(message, all, 0);
        }
        refreshIfOld();
        Routing now = routing;
        Payload payload = null;
        String keyOrId = id;
        long nowMs = options.clock.millis();
        if (dueMs > nowMs) {
            payload = payload(message);
            keyOrId = payload.key == null || payload.key.isEmpty() ? keyOrId : payload.key;
        }
        Route route = now.route(dueMs, nowMs, keyOrId);
        // The Python client cannot decompress an empty payload, and drops the message.
        boolean compressed = payload != null && payload.body != null && payload.body.length > 0;
        String compression = compressed ? settings.compressionName() : null;
        Envelope envelope = new Envelope(
                dueMs, target, id, reference, compression, expiresMs, message.replaces);
        if (route.level() == Routing.BUSINESS) {
            Map<String, String> all = envelope.delivered(message.properties);
            return sendToBusiness(message, all, route.deliverAtMs());
        }
        if (place != null) {
            place.key = payload.key;
            place.topic = now.topicOf(route);
        }
        return sendToLevel(message, payload, envelope.parked(message.properties), route, now);
    }

    private CompletableFuture<MessageId> sendToBusiness(
            DelayedMessage<T> message, Map<String, String> properties, long deliverAtMs) {
        TypedMessageBuilder<T> builder = business.newMessage().value(message.value);
        if (message.key != null) {
            builder.key(message.key);
        }
        if (message.keyBytes != null) {
            builder.keyBytes(message.keyBytes);
        }
        fill(builder, message, properties, deliverAtMs);
        return builder.sendAsync();
    }

    private CompletableFuture<MessageId> sendToLevel(
            DelayedMessage<T> message,
            Payload payload,
            Map<String, String> properties,
            Route route,
            Routing now) {
        now.checkSize(payload.body, payload.key, message.orderingKey, properties);
        boolean compressed = properties.containsKey(Envelope.COMPRESSION);
        return partition(now, route, compressed).send(producer -> {
            TypedMessageBuilder<byte[]> builder = producer.newMessage().value(payload.body);
            if (payload.key != null) {
                builder.key(payload.key);
            }
            fill(builder, message, properties, route.deliverAtMs());
            return builder.sendAsync();
        });
    }

    private Partition partition(Routing now, Route route, boolean compressed) {
        PartitionKey key = new PartitionKey(route.level(), route.partition(), compressed);
        Partition partition = partitions.get(key);
        if (partition == null) {
            String topic = now.topicOf(route);
            partition = partitions.computeIfAbsent(key, each -> new Partition(
                    () -> open(topic, each), executor, settings.sendTimeoutMs()));
        }
        return partition;
    }

    private static void fill(
            TypedMessageBuilder<?> builder,
            DelayedMessage<?> message,
            Map<String, String> properties,
            long deliverAtMs) {
        builder.properties(properties);
        if (message.orderingKey != null) {
            builder.orderingKey(message.orderingKey);
        }
        if (message.eventTimeMs > 0) {
            builder.eventTime(message.eventTimeMs);
        }
        if (deliverAtMs > 0) {
            builder.deliverAt(deliverAtMs);
        }
    }

    /** One producer of a partition. Only messages with a payload are compressed. */
    private record PartitionKey(int level, int partition, boolean compressed) {}

    /** The encoded value of a message, and its key as text. */
    private record Payload(byte[] body, String key) {}

    private Payload payload(DelayedMessage<T> message) {
        DelayedMessage.text(message.orderingKey, "the ordering key");
        if (options.schema instanceof KeyValueSchema<?, ?> schema
                && schema.getKeyValueEncodingType() == KeyValueEncodingType.SEPARATED) {
            return separated(schema, message);
        }
        String key = message.keyBytes != null
                ? DelayedMessage.text(message.keyBytes, "the key")
                : message.key;
        return new Payload(message.value == null ? null : options.schema.encode(message.value), key);
    }

    private <K, V> Payload separated(KeyValueSchema<K, V> schema, DelayedMessage<T> message) {
        @SuppressWarnings("unchecked")
        KeyValue<K, V> value = (KeyValue<K, V>) message.value;
        if (message.key != null || message.keyBytes != null) {
            throw new DelayLevelException(
                    Reason.UNSUPPORTED_OPTION,
                    "a key was given, but with separated encoding it is that of the KeyValue; the "
                            + "message was not sent");
        }
        byte[] key = value == null || value.getKey() == null
                ? new byte[0]
                : schema.getKeySchema().encode(value.getKey());
        if (key.length == 0) {
            throw new DelayLevelException(
                    Reason.UNSUPPORTED_OPTION,
                    "a parked message cannot keep the null or empty key of a KeyValue with "
                            + "separated encoding: give a key, or use the encoding INLINE; the "
                            + "message was not sent");
        }
        byte[] body = value.getValue() == null
                ? null
                : schema.getValueSchema().encode(value.getValue());
        return new Payload(body, DelayedMessage.text(key, "the key of the KeyValue"));
    }

    // -- producers of partitions

    /** Opens the producer of a partition, unless the level topic was deleted or replaced. */
    private CompletableFuture<Producer<byte[]>> open(String topic, PartitionKey key) {
        return CompletableFuture.supplyAsync(this::end, executor)
                .completeOnTimeout("", CHECK_MS, TimeUnit.MILLISECONDS)
                .thenCompose(end -> {
                    if (!end.isEmpty()) {
                        // A producer would create the partition again without a subscription, and
                        // the broker would delete the messages there.
                        throw new DelayLevelException(
                                Reason.LEVEL_TOPIC,
                                "level topic " + levelTopic() + " was " + end + "; the message was "
                                        + "not sent");
                    }
                    boolean inWindow = key.level == Routing.WINDOW;
                    ProducerBuilder<byte[]> builder =
                            settings.applyTo(options.client.newProducer(Schema.BYTES), inWindow);
                    if (!key.compressed) {
                        builder.compressionType(CompressionType.NONE);
                    }
                    return builder.topic(topic).createAsync();
                });
    }

    /** Returns what has become of the level topic, with the remedy; empty if it is still there. */
    private String end() {
        Description known = routing.description;
        try {
            Description found = admin.describe(known.topic());
            if (found == null) {
                return "deleted: create it again with `delaylevel levels create`, then a new "
                        + "producer";
            }
            return known.isSameAs(found) ? "" : "replaced by another one: create a new producer";
        } catch (DelayLevelException error) {
            if (error.reason() == Reason.LEVEL_TOPIC) {
                throw error;
            }
            return ""; // the admin interface fails; opening the producer tells
        }
    }

    // -- the description

    private void refreshIfOld() {
        if (System.nanoTime() - readNs >= REFRESH_EVERY_NS && refreshing.compareAndSet(false, true)) {
            CompletableFuture.runAsync(this::refresh, executor)
                    .whenComplete((done, error) -> refreshing.set(false));
        }
    }

    private CompletableFuture<MessageId> sendAfterRefresh(
            Supplier<CompletableFuture<MessageId>> send, DelayLevelException refusal) {
        Routing known = routing;
        return CompletableFuture.supplyAsync(() -> {
            synchronized (refreshing) {
                if (routing == known && System.nanoTime() - readNs >= REFUSED_EVERY_NS) {
                    refresh();
                }
            }
            if (routing == known) {
                throw refusal;
            }
            return send.get();
        }, executor).thenCompose(sent -> sent);
    }

    /** Reads the description again; uses it if it extends the present one. */
    private void refresh() {
        readNs = System.nanoTime();
        Description known = routing.description;
        Description found;
        try {
            found = admin.describe(known.topic());
        } catch (DelayLevelException error) {
            LOG.log(Level.WARNING, "level topic {0} cannot be read again: {1}", known.topic(),
                    error.getMessage());
            return;
        }
        use(found);
    }

    /** Uses a description if it extends the present one. */
    private void use(Description found) {
        Description known = routing.description;
        if (found == null) {
            LOG.log(Level.WARNING, "level topic {0} does not exist any more", known.topic());
        } else if (!known.isSameAs(found)) {
            LOG.log(Level.WARNING, "level topic {0} was replaced by another one: create a new "
                    + "producer", known.topic());
        } else if (routing.isExtendedBy(found)) {
            LOG.log(Level.INFO, "level topic {0} was expanded", known.topic());
            routing = new Routing(found, options.maxMessageSize);
        }
    }

    static <V> V await(CompletableFuture<V> future) throws PulsarClientException {
        try {
            return future.get();
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
            throw new PulsarClientException(error);
        } catch (ExecutionException error) {
            Throwable cause = error.getCause();
            while (cause instanceof CompletionException && cause.getCause() != null) {
                cause = cause.getCause();
            }
            if (cause instanceof RuntimeException refusal) {
                throw refusal;
            }
            throw PulsarClientException.unwrap(cause);
        }
    }
}
