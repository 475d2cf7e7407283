package delaylevel.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;

import java.lang.reflect.Proxy;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClientException;
import org.junit.jupiter.api.Test;

/** The producer of a partition, while it is opened. */
class PartitionTest {
    private final CompletableFuture<Producer<byte[]>> opening = new CompletableFuture<>();
    private final AtomicInteger attempts = new AtomicInteger();
    private final AtomicInteger closed = new AtomicInteger();
    private final List<Integer> sent = Collections.synchronizedList(new ArrayList<>());
    private final Partition partition = partition(60_000);

    private Partition partition(long timeoutMs) {
        return new Partition(
                () -> {
                    attempts.incrementAndGet();
                    return opening;
                },
                Runnable::run,
                timeoutMs);
    }

    @SuppressWarnings("unchecked")
    private Producer<byte[]> producer() {
        return (Producer<byte[]>) Proxy.newProxyInstance(
                getClass().getClassLoader(), new Class<?>[] {Producer.class}, (self, method, args) -> {
                    if (method.getName().equals("closeAsync")) {
                        closed.incrementAndGet();
                    }
                    return CompletableFuture.completedFuture(null);
                });
    }

    private CompletableFuture<MessageId> send(Partition to, int number) {
        return to.send(producer -> {
            sent.add(number);
            return CompletableFuture.completedFuture(MessageId.earliest);
        });
    }

    @Test
    void messagesWaitInOrderForOneOpening() {
        CompletableFuture<MessageId> first = send(partition, 1);
        send(partition, 2);
        CompletableFuture<Void> flushed = partition.flush();
        assertFalse(first.isDone() || flushed.isDone());
        opening.complete(producer());
        flushed.join();
        send(partition, 3);
        assertEquals(MessageId.earliest, first.join());
        assertEquals(List.of(1, 2, 3), sent);
        assertEquals(1, attempts.get());
    }

    @Test
    void aFailedOpeningEndsAllMessagesAndTheNextOneTriesAgain() {
        CompletableFuture<MessageId> first = send(partition, 1);
        CompletableFuture<MessageId> second = send(partition, 2);
        opening.completeExceptionally(new IllegalStateException("refused"));
        for (CompletableFuture<MessageId> each : List.of(first, second)) {
            CompletionException error = assertThrows(CompletionException.class, each::join);
            assertInstanceOf(IllegalStateException.class, error.getCause());
        }
        send(partition, 3);
        assertEquals(2, attempts.get());
        assertEquals(List.of(), sent);
    }

    @Test
    void aMessageThatWaitsTooLongFailsAndIsNotSentLater() {
        Partition impatient = partition(20);
        CompletableFuture<MessageId> first = send(impatient, 1);
        CompletionException error = assertThrows(CompletionException.class, first::join);
        assertInstanceOf(PulsarClientException.TimeoutException.class, error.getCause());
        opening.complete(producer());
        assertEquals(List.of(), sent);
    }

    @Test
    void aMessageThatCannotBeBuiltDoesNotStopTheOthers() {
        CompletableFuture<MessageId> first = partition.send(producer -> {
            throw new IllegalArgumentException("damaged");
        });
        CompletableFuture<MessageId> second = send(partition, 2);
        opening.complete(producer());
        assertThrows(CompletionException.class, first::join);
        assertEquals(MessageId.earliest, second.join());
    }

    @Test
    void closingEndsWaitingMessagesAndALateProducer() {
        CompletableFuture<MessageId> first = send(partition, 1);
        partition.close().join();
        CompletionException error = assertThrows(CompletionException.class, first::join);
        assertInstanceOf(PulsarClientException.AlreadyClosedException.class, error.getCause());
        opening.complete(producer());
        assertEquals(1, closed.get());
        assertThrows(CompletionException.class, () -> send(partition, 2).join());
        assertEquals(List.of(), sent);
    }
}
