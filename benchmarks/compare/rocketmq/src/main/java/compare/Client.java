package compare;

import java.io.BufferedOutputStream;
import java.io.DataOutputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Instant;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Client of RocketMQ: publishes, consumes and cancels, as benchmarks/compare/client.py describes. */
public final class Client {
  private static final int IN_FLIGHT = 5000;
  private static final int CALLS = 16;
  private static final int SIZE = 1024;

  private final Map<String, String> options = new HashMap<>();

  private Client(String[] arguments) {
    for (String each : Arrays.asList(arguments).subList(1, arguments.length)) {
      String[] parts = each.split("=", 2);
      options.put(parts[0], parts[1]);
    }
  }

  /** Runs the action that the first argument names. */
  public static void main(String[] arguments) throws Exception {
    Client client = new Client(arguments);
    switch (arguments[0]) {
      case "topic" -> client.topic();
      case "publish" -> client.publish();
      case "consume" -> client.consume();
      case "cancel" -> client.cancel();
      default -> throw new IllegalArgumentException(arguments[0]);
    }
    System.exit(0);
  }

  private void topic() throws Exception {
    DefaultMQProducer producer = producer();
    producer.createTopic("TBW102", options.get("topic"), 4, null);
    say("ready");
  }

  private void publish() throws Exception {
    long[] dues = numbers("plan");
    boolean named = options.get("named").equals("yes");
    byte[] confirmed = new byte[dues.length];
    String[] handles = new String[named ? dues.length : 0];
    AtomicInteger count = new AtomicInteger();
    AtomicInteger refused = new AtomicInteger();
    Queue<Integer> todo = new ConcurrentLinkedQueue<>();
    for (int number = 0; number < dues.length; number++) {
      todo.add(number);
    }
    Semaphore permits = new Semaphore(IN_FLIGHT);
    DefaultMQProducer producer = producer();
    Thread progress =
        new Thread(
            () -> {
              while (true) {
                say("progress " + count.get());
                pause(20);
              }
            });
    progress.setDaemon(true);
    progress.start();
    long began = System.nanoTime();
    long deadline = began + TimeUnit.SECONDS.toNanos(Long.parseLong(options.get("limit_s")));
    while (count.get() < dues.length && System.nanoTime() < deadline) {
      Integer number = todo.poll();
      if (number == null) {
        pause(1);
        continue;
      }
      permits.acquire();
      Message message = new Message(options.get("topic"), body(number, dues[number]));
      message.setDeliverTimeMs(dues[number]);
      SendCallback callback =
          new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
              permits.release();
              if (result.getSendStatus() != SendStatus.SEND_OK) {
                again();
                return;
              }
              confirmed[number] = 1;
              if (named) {
                handles[number] = result.getRecallHandle();
              }
              count.incrementAndGet();
            }

            @Override
            public void onException(Throwable error) {
              permits.release();
              if (refused.get() == 0) {
                System.err.println(error);
              }
              again();
            }

            private void again() {
              refused.incrementAndGet();
              todo.add(number);
            }
          };
      try {
        producer.send(message, callback);
      } catch (Exception error) {
        callback.onException(error);
        pause(20);
      }
    }
    double seconds = (System.nanoTime() - began) / 1e9;
    if (options.get("sure").equals("yes")) {
      Files.write(Path.of(options.get("out")), confirmed);
    } else if (count.get() < dues.length) {
      throw new IllegalStateException("messages were not stored");
    }
    if (named) {
      Files.write(Path.of(options.get("handles")), Arrays.asList(handles));
    }
    say("result {\"seconds\": " + seconds + ", \"repeated\": " + refused.get() + "}");
  }

  private void consume() throws Exception {
    FileOutputStream file = new FileOutputStream(options.get("out"), true);
    DataOutputStream out = new DataOutputStream(new BufferedOutputStream(file, 1 << 16));
    MessageListenerConcurrently listener =
        (messages, context) -> {
          Instant now = Instant.now();
          long arrived = now.getEpochSecond() * 1_000_000 + now.getNano() / 1000;
          synchronized (out) {
            try {
              for (MessageExt each : messages) {
                byte[] body = each.getBody();
                out.writeLong(Long.reverseBytes(digits(body, 0, 12)));
                out.writeLong(Long.reverseBytes(digits(body, 12, 25)));
                out.writeLong(Long.reverseBytes(arrived));
              }
            } catch (IOException error) {
              throw new IllegalStateException(error);
            }
          }
          return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        };
    DefaultMQPushConsumer consumer = consumer(listener);
    Runtime.getRuntime()
        .addShutdownHook(
            new Thread(
                () -> {
                  consumer.shutdown();
                  flush(out);
                }));
    say("ready");
    while (true) {
      pause(200);
      flush(out);
    }
  }

  /** Returns a consumer that runs. A start fails if one request fails, so it is repeated. */
  private DefaultMQPushConsumer consumer(MessageListenerConcurrently listener) throws Exception {
    while (true) {
      DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("bench");
      consumer.setNamesrvAddr(options.get("servers"));
      consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
      consumer.subscribe(options.get("topic"), "*");
      consumer.setConsumeMessageBatchMaxSize(32);
      consumer.registerMessageListener(listener);
      try {
        consumer.start();
        return consumer;
      } catch (IllegalStateException error) {
        System.err.println(error);
        consumer.shutdown();
        pause(200);
      }
    }
  }

  private void cancel() throws Exception {
    long[] chosen = numbers("numbers");
    String[] handles = Files.readAllLines(Path.of(options.get("handles"))).toArray(String[]::new);
    byte[] done = new byte[chosen.length];
    DefaultMQProducer producer = producer();
    ExecutorService pool = Executors.newFixedThreadPool(CALLS);
    long began = System.nanoTime();
    for (int i = 0; i < chosen.length; i++) {
      int place = i;
      pool.submit(
          () -> {
            try {
              producer.recallMessage(options.get("topic"), handles[(int) chosen[place]]);
              done[place] = 1;
            } catch (Exception error) {
              System.err.println(error);
            }
          });
    }
    pool.shutdown();
    pool.awaitTermination(60, TimeUnit.SECONDS);
    double seconds = (System.nanoTime() - began) / 1e9;
    Files.write(Path.of(options.get("out")), done);
    say("result {\"seconds\": " + seconds + "}");
  }

  private DefaultMQProducer producer() throws Exception {
    DefaultMQProducer producer = new DefaultMQProducer("publisher");
    producer.setNamesrvAddr(options.get("servers"));
    producer.start();
    return producer;
  }

  private long[] numbers(String option) throws IOException {
    ByteBuffer bytes = ByteBuffer.wrap(Files.readAllBytes(Path.of(options.get(option))));
    long[] found = new long[bytes.remaining() / Long.BYTES];
    bytes.order(ByteOrder.LITTLE_ENDIAN).asLongBuffer().get(found);
    return found;
  }

  private static byte[] body(int number, long due) {
    byte[] body = new byte[SIZE];
    Arrays.fill(body, (byte) 'x');
    byte[] stamp = String.format("%012d%013d", number, due).getBytes(StandardCharsets.US_ASCII);
    System.arraycopy(stamp, 0, body, 0, stamp.length);
    return body;
  }

  private static long digits(byte[] body, int from, int to) {
    return Long.parseLong(new String(body, from, to - from, StandardCharsets.US_ASCII));
  }

  private static void flush(DataOutputStream out) {
    synchronized (out) {
      try {
        out.flush();
      } catch (IOException error) {
        throw new IllegalStateException(error);
      }
    }
  }

  private static void pause(long ms) {
    try {
      Thread.sleep(ms);
    } catch (InterruptedException error) {
      throw new IllegalStateException(error);
    }
  }

  private static void say(String line) {
    System.out.println(line);
    System.out.flush();
  }
}
