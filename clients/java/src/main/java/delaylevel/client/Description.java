package delaylevel.client;

import delaylevel.client.DelayLevelException.Reason;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.zip.CRC32;

/** The description that a level topic stores in its properties. */
record Description(
        TopicName topic,
        Levels levels,
        Set<String> targets,
        boolean byFunction,
        boolean tracker,
        String windowTopic,
        int windowPartitions,
        int reserve,
        List<Levels> former) {
    static final String DESCRIPTION = "delaylevel.description";
    static final String PLAN = "delaylevel.plan";
    static final String MEMBER_OF = "delaylevel.member-of";
    static final String TARGET_PREFIX = "delaylevel.target.";

    /** The format of descriptions; later ones are refused. */
    private static final long FORMAT = 1;

    /** One level; durations in ms. */
    record Level(String topic, int partitions, long unitMs, long maximumMs, long leadMs) {}

    /** A list of levels, from coarse to fine. */
    record Levels(boolean recirculate, List<Level> list) {
        long maximumMs() {
            return list.get(0).maximumMs();
        }

        long smallestLeadMs() {
            return list.stream().mapToLong(Level::leadMs).min().orElseThrow();
        }
    }

    /** Returns true if another description is of this level topic, expanded or before that. */
    boolean isSameAs(Description other) {
        boolean sameLevels = levels.equals(other.levels)
                || former.contains(other.levels)
                || other.former.contains(levels);
        return sameLevels
                && byFunction == other.byFunction
                && tracker == other.tracker
                && (!tracker || windowPartitions == other.windowPartitions);
    }

    /**
     * Reads the properties of a level topic; null if they have no description.
     *
     * @throws DelayLevelException the description is damaged, or only a later version knows it
     */
    static Description read(TopicName topic, Map<String, String> properties) {
        String text = properties.get(DESCRIPTION);
        if (text == null) {
            return null;
        }
        try {
            return parse(topic, (Map<?, ?>) Json.parse(text), properties.keySet());
        } catch (DelayLevelException error) {
            if (error.reason() == Reason.UPGRADE_REQUIRED) {
                throw error;
            }
            throw damaged(topic, error);
        } catch (ClassCastException | IllegalArgumentException error) {
            throw damaged(topic, error);
        }
    }

    private static DelayLevelException damaged(TopicName topic, Exception error) {
        return new DelayLevelException(
                Reason.LEVEL_TOPIC,
                "the description of level topic " + topic + " cannot be read: "
                        + error.getMessage(),
                error);
    }

    private static Description parse(TopicName topic, Map<?, ?> value, Set<String> properties) {
        checkFormat(topic, value);
        Set<String> targets = new TreeSet<>();
        for (Object target : (List<?>) required(value, "targets")) {
            targets.add(TopicName.parse((String) target).toString());
        }
        for (String name : properties) {
            if (name.startsWith(TARGET_PREFIX)) {
                String added = name.substring(TARGET_PREFIX.length());
                targets.add(TopicName.parse(added).toString());
            }
        }
        List<Levels> former = new ArrayList<>();
        if (value.get("former") instanceof List<?> lists) {
            lists.forEach(each -> former.add(levels((Map<?, ?>) each)));
        }
        boolean tracker = choice(value, "final_window", "tracker", "broker");
        Map<?, ?> topics = (Map<?, ?>) required(value, "topics");
        return new Description(
                topic,
                levels(value),
                targets,
                choice(value, "mover", "function", "service"),
                tracker,
                tracker ? (String) required(topics, "window") : null,
                (int) number(value, "window_partitions"),
                (int) number(value, "reserve"),
                former);
    }

    private static void checkFormat(TopicName topic, Map<?, ?> value) {
        Object version = required(value, "version");
        require(
                version instanceof Long number && number > 0,
                "version is " + version + ", not the number of a format");
        if ((Long) version > FORMAT) {
            throw new DelayLevelException(
                    Reason.UPGRADE_REQUIRED,
                    "level topic " + topic + " is described in format " + version
                            + ", and this version of the Java client reads formats up to " + FORMAT
                            + ": upgrade it");
        }
    }

    private static Levels levels(Map<?, ?> value) {
        List<Level> found = new ArrayList<>();
        for (Object item : (List<?>) required(value, "levels")) {
            Map<?, ?> level = (Map<?, ?>) item;
            found.add(new Level(
                    (String) required(level, "topic"),
                    (int) number(level, "partitions"),
                    number(level, "unit_ms"),
                    number(level, "maximum_ms"),
                    number(level, "lead_ms")));
        }
        require(!found.isEmpty(), "there are no levels");
        return new Levels(choice(value, "overflow", "recirculate", "reject"), found);
    }

    private static Object required(Map<?, ?> value, String name) {
        require(value.get(name) != null, name + " is missing");
        return value.get(name);
    }

    /** Returns true for one word, false for the other. */
    private static boolean choice(Map<?, ?> value, String name, String one, String other) {
        Object found = required(value, name);
        require(found.equals(one) || found.equals(other), name + " is " + found);
        return found.equals(one);
    }

    private static long number(Map<?, ?> value, String name) {
        require(required(value, name) instanceof Long number && number > 0,
                name + " is " + value.get(name));
        return (Long) value.get(name);
    }

    private static void require(boolean condition, String message) {
        if (!condition) {
            throw new IllegalArgumentException(message);
        }
    }

    /** Refuses a business topic that is not a target. */
    void checkTarget(String target) {
        if (!targets.contains(target)) {
            throw new DelayLevelException(
                    Reason.TARGET_NOT_ALLOWED,
                    "level topic " + topic + " does not carry messages for " + target
                            + ", only for " + String.join(", ", targets)
                            + ": add the target with `delaylevel levels create`, or name another "
                            + "level topic");
        }
    }

    /** Returns the window partition of a message with this key or ID. */
    static int windowPartition(String keyOrId, int partitions) {
        CRC32 hash = new CRC32();
        hash.update(keyOrId.getBytes(StandardCharsets.UTF_8));
        return (int) (hash.getValue() % partitions);
    }

    /** Returns the window partition of a message with this key and ID, and of its cancellation. */
    int windowPartition(String key, String id) {
        return windowPartition(key == null || key.isEmpty() ? id : key, windowPartitions);
    }

    /** Refuses a cancellation unless a dispatcher that understands it decides about it. */
    void checkCancellable() {
        if (!tracker) {
            throw new DelayLevelException(
                    Reason.LEVEL_TOPIC,
                    "messages of level topic " + topic + " cannot be cancelled: its final window is "
                            + "'broker', so the broker releases them, and it cannot take one back; "
                            + "create a level topic with final window 'tracker'; nothing was sent");
        }
    }
}
