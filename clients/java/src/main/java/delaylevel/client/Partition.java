package delaylevel.client;

import java.util.ArrayDeque;
import java.util.Queue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import java.util.function.Supplier;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClientException;

/**
 * The producer of one partition, opened in the background by its first message. Messages wait in
 * order until it is open, at most for the send timeout.
 */
final class Partition {
    /** The sending of one message by an open producer. */
    interface Send extends Function<Producer<byte[]>, CompletableFuture<MessageId>> {}

    private record Waiting(Send send, CompletableFuture<MessageId> result) {}

    private final Supplier<CompletableFuture<Producer<byte[]>>> open;
    private final Executor executor;
    private final long timeoutMs;
    private final Queue<Waiting> waiting = new ArrayDeque<>();
    private CompletableFuture<Void> opening;
    private boolean closed;
    private volatile Producer<byte[]> producer;

    /**
     * Creates a partition without a producer.
     *
     * @param open the opening of the producer; must not block
     * @param executor the runner of what may block
     * @param timeoutMs the time that a message may wait for the opening
     */
    Partition(
            Supplier<CompletableFuture<Producer<byte[]>>> open, Executor executor, long timeoutMs) {
        this.open = open;
        this.executor = executor;
        this.timeoutMs = timeoutMs;
    }

    CompletableFuture<MessageId> send(Send send) {
        Producer<byte[]> opened = producer;
        return opened != null ? send.apply(opened) : sendUnopened(send);
    }

    private synchronized CompletableFuture<MessageId> sendUnopened(Send send) {
        if (producer != null) {
            return send.apply(producer);
        }
        if (closed) {
            return CompletableFuture.failedFuture(alreadyClosed());
        }
        Waiting message = new Waiting(send, new CompletableFuture<>());
        waiting.add(message);
        CompletableFuture.delayedExecutor(timeoutMs, TimeUnit.MILLISECONDS)
                .execute(() -> message.result.completeExceptionally(
                        new PulsarClientException.TimeoutException(
                                "the partition was not opened within " + timeoutMs + " ms")));
        if (opening == null) {
            // Not in a thread of the client: the queue is drained there, which may block.
            opening = open.get().handleAsync(this::opened, executor);
        }
        return message.result;
    }

    private Void opened(Producer<byte[]> found, Throwable error) {
        // A failed opening ends all messages. The next one opens the partition again.
        for (Waiting message = next(found); message != null; message = next(found)) {
            if (found == null) {
                message.result.completeExceptionally(error);
            } else if (!message.result.isDone()) { // otherwise it has timed out
                give(message, found);
            }
        }
        return null;
    }

    private static void give(Waiting message, Producer<byte[]> found) {
        CompletableFuture<MessageId> sent;
        try {
            sent = message.send.apply(found);
        } catch (RuntimeException error) { // the others must not wait for ever
            sent = CompletableFuture.failedFuture(error);
        }
        sent.whenComplete((id, failure) -> {
            if (failure == null) {
                message.result.complete(id);
            } else {
                message.result.completeExceptionally(failure);
            }
        });
    }

    /** Returns the next waiting message; null once there is none, and the partition is open. */
    private synchronized Waiting next(Producer<byte[]> found) {
        Waiting message = waiting.poll();
        if (message == null) {
            opening = null;
            if (found != null && closed) {
                found.closeAsync();
            } else {
                producer = found;
            }
        }
        return message;
    }

    /** Completes when the messages sent so far are stored, or have failed. */
    CompletableFuture<Void> flush() {
        CompletableFuture<Void> first;
        synchronized (this) {
            first = opening == null ? CompletableFuture.completedFuture(null) : opening;
        }
        return first.thenCompose(opened -> {
            Producer<byte[]> found = producer;
            return found == null ? CompletableFuture.completedFuture(null) : found.flushAsync();
        });
    }

    CompletableFuture<Void> close() {
        Queue<Waiting> ended;
        synchronized (this) {
            closed = true;
            ended = new ArrayDeque<>(waiting);
            waiting.clear();
        }
        ended.forEach(message -> message.result.completeExceptionally(alreadyClosed()));
        Producer<byte[]> found = producer;
        return found == null ? CompletableFuture.completedFuture(null) : found.closeAsync();
    }

    private static PulsarClientException alreadyClosed() {
        return new PulsarClientException.AlreadyClosedException("the producer is closed");
    }
}
