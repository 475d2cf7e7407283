package delaylevel.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;

import delaylevel.client.DelayLevelException.Reason;
import delaylevel.client.Routing.Route;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.stream.Stream;
import org.apache.pulsar.client.api.Schema;
import org.junit.jupiter.api.DynamicContainer;
import org.junit.jupiter.api.DynamicNode;
import org.junit.jupiter.api.DynamicTest;
import org.junit.jupiter.api.TestFactory;

/** The test cases of the wire format, but for those of readers. */
class VectorsTest {
    private static final Set<String> OF_READERS = Set.of("envelopes", "releases");

    private final Map<?, ?> vectors = load();

    private static Map<?, ?> load() {
        Path file = Path.of(System.getProperty("vectors", "../../spec/vectors.json"));
        try {
            return (Map<?, ?>) Json.parse(Files.readString(file));
        } catch (IOException error) {
            throw new java.io.UncheckedIOException(error);
        }
    }

    @TestFactory
    Stream<DynamicNode> everyCaseHasItsAnswer() {
        return vectors.entrySet().stream().filter(section -> !OF_READERS.contains(section.getKey())).map(section -> {
            List<?> cases = (List<?>) section.getValue();
            assertFalse(cases.isEmpty());
            return DynamicContainer.dynamicContainer(
                    (String) section.getKey(),
                    cases.stream().map(each -> test((String) section.getKey(), (Map<?, ?>) each)));
        });
    }

    private DynamicTest test(String section, Map<?, ?> question) {
        return DynamicTest.dynamicTest((String) question.get("name"), () -> {
            Object wanted = question.get("expect");
            Object answer = answer(section, question);
            if ("any".equals(wanted) && answer instanceof Long partition) {
                wanted = inBounds(partition, question);
            }
            assertEquals(wanted, answer);
        });
    }

    private static Object inBounds(Long partition, Map<?, ?> question) {
        return partition >= 0 && partition < number(question, "partitions")
                ? partition
                : "a partition below " + question.get("partitions");
    }

    private Object answer(String section, Map<?, ?> question) throws IOException {
        try {
            return switch (section) {
                case "names" -> names(question);
                case "searches" -> search(question);
                case "answers" -> answers(question);
                case "replacements" -> replacement(question);
                case "expiries" -> expiry(question);
                case "descriptions" -> describe(question);
                case "routes" -> route(question);
                case "window_partitions" -> window(question);
                case "schemas" -> schema(question);
                case "registered" -> registered(question);
                case "properties" -> properties(question);
                case "sizes" -> big(routing(question).sizeLimit);
                case "settings" -> settings(question);
                case "cancellations" -> cancellation(question);
                case "receipts" -> receipt(question);
                case "outcomes" -> outcome(question);
                default -> throw new AssertionError("unknown section " + section);
            };
        } catch (DelayLevelException error) {
            return Map.of("refusal", code(error.reason()));
        }
    }

    private static String code(Reason reason) {
        return reason.name().toLowerCase(Locale.ROOT).replace('_', '-');
    }

    private Object names(Map<?, ?> question) {
        TopicName target = TopicName.parse(text(question, "topic"));
        List<String> found = new ArrayList<>();
        target.levelTopics(text(question, "level_namespace"))
                .forEach(name -> found.add(name.toString()));
        return Map.of("target", target.toString(), "level_topics", found);
    }

    private Object search(Map<?, ?> question) throws IOException {
        TopicName target = TopicName.parse(text(question, "topic"));
        Map<String, Object> answers = new LinkedHashMap<>();
        ((Map<?, ?>) question.get("answers")).forEach((name, found) -> answers.put(
                AdminRest.PREFIX + TopicName.parse((String) name).path() + AdminRest.PARTITIONS,
                found));
        try (Answering server = new Answering((path, number) -> answers.get(path) == null
                ? Map.of("status", 404L, "body", "")
                : Map.of("status", 200L, "body", Json.write(
                        Map.of("partitions", 4, "properties", answers.get(path)))))) {
            return new DelayLevelProducerBuilder<>(null, Schema.BYTES)
                    .levelNamespace(text(question, "level_namespace"))
                    .find(server.admin(), target)
                    .topic().toString();
        }
    }

    private Object answers(Map<?, ?> question) throws IOException {
        List<?> answers = (List<?>) question.get("answers");
        try (Answering server =
                new Answering((path, number) -> (Map<?, ?>) answers.get(number))) {
            Description found = server.admin().describe(TopicName.parse(text(question, "topic")));
            if (found == null) {
                throw new DelayLevelException(Reason.LEVEL_TOPIC, "it does not exist");
            }
            return Map.of("maximum_ms", found.levels().maximumMs(), "requests", server.requests);
        }
    }

    private Object replacement(Map<?, ?> question) {
        Routing known = new Routing(named(question, "known"), 5_242_880);
        try {
            Description found = named(question, "found");
            return found != null && known.isExtendedBy(found) ? "found" : "known";
        } catch (DelayLevelException unreadable) {
            return "known";
        }
    }

    private static Object expiry(Map<?, ?> question) {
        DelayedMessage<byte[]> message = new DelayedMessage<>(null);
        Long now = number(question, "now");
        if (question.get("due") != null) {
            message.deliverAt((Long) question.get("due"));
        }
        if (question.get("expires") != null) {
            message.expiresAt((Long) question.get("expires"));
        }
        long due = message.dueMs(now);
        long expires = message.expiresMs(due, now);
        return due <= now || expires == 0 ? null : Long.toString(expires);
    }

    private static Object describe(Map<?, ?> question) {
        TopicName topic = TopicName.parse(text(question, "topic"));
        Description found = Description.read(topic, texts(question.get("properties")));
        if (found == null) {
            return null;
        }
        List<Object> levels = new ArrayList<>();
        for (Description.Level level : found.levels().list()) {
            levels.add(Map.of(
                    "topic", level.topic(),
                    "partitions", big(level.partitions()),
                    "unit_ms", level.unitMs(),
                    "lead_ms", level.leadMs()));
        }
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("overflow", found.levels().recirculate() ? "recirculate" : "reject");
        answer.put("mover", found.byFunction() ? "function" : "service");
        answer.put("final_window", found.tracker() ? "tracker" : "broker");
        answer.put("targets", List.copyOf(found.targets()));
        answer.put("window_partitions", big(found.windowPartitions()));
        answer.put("maximum_ms", big(found.levels().maximumMs()));
        answer.put("smallest_lead_ms", big(found.levels().smallestLeadMs()));
        answer.put("levels", levels);
        answer.put("window_topic", found.windowTopic());
        answer.put("reserve", big(found.reserve()));
        return answer;
    }

    private Description named(Map<?, ?> question) {
        return named(question, "level_topic");
    }

    private Description named(Map<?, ?> question, String member) {
        for (Object each : (List<?>) vectors.get("descriptions")) {
            Map<?, ?> found = (Map<?, ?>) each;
            if (found.get("name").equals(question.get(member))) {
                TopicName topic = TopicName.parse(text(found, "topic"));
                return Description.read(topic, texts(found.get("properties")));
            }
        }
        throw new AssertionError("no description " + question.get(member));
    }

    private Routing routing(Map<?, ?> question) {
        Long limit = (Long) question.get("max_message_size");
        return new Routing(named(question), limit == null ? 5_242_880 : limit.intValue());
    }

    private Object route(Map<?, ?> question) {
        Routing routing = routing(question);
        Description description = routing.description;
        String target = text(question, "target");
        description.checkTarget(target);
        String key = text(question, "key");
        String id = text(question, "id");
        String keyOrId = key == null || key.isEmpty() ? id : key;
        Route route = Route.TO_BUSINESS;
        Long due = (Long) question.get("due");
        if (due != null) {
            Envelope.checkDue(due);
        }
        if (due != null && due != 0) {
            route = routing.route(due, number(question, "now"), keyOrId);
        }
        if (id != null) {
            Envelope.checkId(id);
        }
        Map<String, Object> answer = new LinkedHashMap<>();
        boolean window = route.level() == Routing.WINDOW;
        if (route.level() == Routing.BUSINESS) {
            answer.put("topic", target);
            answer.put("partition", null);
        } else {
            answer.put("topic", routing.topicOf(route).replaceFirst("-partition-[0-9]+$", ""));
            boolean any = window && (keyOrId == null || keyOrId.isEmpty());
            answer.put("partition", any ? "any" : big(route.partition()));
        }
        answer.put("deliver_at", route.deliverAtMs() == 0 ? null : big(route.deliverAtMs()));
        return answer;
    }

    private static Object window(Map<?, ?> question) {
        String key = text(question, "key");
        String keyOrId = key == null || key.isEmpty() ? text(question, "id") : key;
        if (keyOrId == null) {
            return "any";
        }
        return big(Description.windowPartition(keyOrId, number(question, "partitions").intValue()));
    }

    private static Object schema(Map<?, ?> question) {
        String definition = text(question, "definition");
        return SchemaReference.of(text(question, "type"), definition);
    }

    private static Object registered(Map<?, ?> question) {
        List<SchemaReference.Version> versions = new ArrayList<>();
        for (Object each : (List<?>) question.get("versions")) {
            Map<?, ?> version = (Map<?, ?>) each;
            versions.add(new SchemaReference.Version(
                    versions.size(), text(version, "type"), text(version, "definition")));
        }
        String type = text(question, "type");
        String found =
                SchemaReference.registered(versions, type, text(question, "definition"));
        return found == null ? null : SchemaReference.of(type, found);
    }

    private static Object properties(Map<?, ?> question) {
        Envelope envelope = new Envelope(
                number(question, "due"),
                text(question, "target"),
                text(question, "id"),
                text(question, "schema"),
                text(question, "compression"),
                0,
                null);
        Map<String, String> application = texts(question.get("application"));
        return Map.of(
                "parked", envelope.parked(application),
                "delivered", envelope.delivered(application));
    }

    private Object cancellation(Map<?, ?> question) {
        Routing routing = routing(question);
        routing.description.checkCancellable();
        String id = text(question, "id");
        long due = number(question, "due");
        Route route = routing.cancellationRoute(
                due, number(question, "now"), text(question, "key"), id);
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put(
                "properties",
                Envelope.cancellation(due, text(question, "target"), id));
        answer.put("topic", routing.topicOf(route));
        answer.put("deliver_at", route.deliverAtMs() == 0 ? null : big(route.deliverAtMs()));
        return answer;
    }

    private static Object receipt(Map<?, ?> question) {
        Receipt found = Receipt.parse(text(question, "text"));
        assertEquals(found, Receipt.parse(found.toString()));
        return Map.of(
                "id", found.id(),
                "due", big(found.dueMs()),
                "target", found.target(),
                "level_topic", found.levelTopic(),
                "key", found.key(),
                "place", found.place(),
                "sent_directly", found.sentDirectly());
    }

    private static Object outcome(Map<?, ?> question) {
        CancelOutcome found;
        try {
            found = CancelOutcome.read(texts(question.get("properties")));
        } catch (Envelope.Damaged damaged) {
            return Map.of("refusal", "envelope");
        }
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("status", found.status().name().toLowerCase(Locale.ROOT).replace('_', ' '));
        answer.put("id", found.id());
        answer.put("target", found.target());
        answer.put("key", found.key());
        answer.put("due", big(found.dueMs()));
        answer.put("decided", big(found.decidedMs()));
        answer.put("released", found.releasedMs() == null ? null : big(found.releasedMs()));
        answer.put("reason", found.reason());
        return answer;
    }

    private Object settings(Map<?, ?> question) {
        Map<?, ?> options = (Map<?, ?>) question.get("options");
        DelayLevelProducerBuilder<byte[]> builder =
                new DelayLevelProducerBuilder<>(null, Schema.BYTES);
        options.forEach((name, value) -> {
            switch ((String) name) {
                case "send_timeout_ms" -> builder.sendTimeout(
                        Duration.ofMillis(((Long) value)));
                case "batching_max_messages" -> builder.batchingMaxMessages(
                        ((Long) value).intValue());
                case "batching_enabled" -> builder.enableBatching((Boolean) value);
                default -> throw new AssertionError("unknown option " + name);
            }
        });
        DelayLevelProducerBuilder.Settings found = builder.settings(named(question));
        return Map.of(
                "batched", found.batched(),
                "batched_in_window", found.batchedInWindow(),
                "batching_max_messages", big(found.batchingMaxMessages()),
                "send_timeout_ms", big(found.sendTimeoutMs()),
                "warned", found.timeoutIsLong());
    }

    private static Long big(long value) {
        return value;
    }

    private static Long number(Map<?, ?> value, String name) {
        Long found = (Long) value.get(name);
        assertNotNull(found, name);
        return found;
    }

    private static String text(Map<?, ?> value, String name) {
        return (String) value.get(name);
    }

    private static Map<String, String> texts(Object value) {
        Map<String, String> found = new LinkedHashMap<>();
        ((Map<?, ?>) value).forEach((name, text) -> found.put((String) name, (String) text));
        return found;
    }
}
