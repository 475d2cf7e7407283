package delaylevel.client;

import delaylevel.client.DelayLevelException.Reason;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Locale;
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
        int windowPartitions,
        List<Levels> former) {
    static final String DESCRIPTION = "delaylevel.description";
    static final String PLAN = "delaylevel.plan";
    static final String MEMBER_OF = "delaylevel.member-of";
    static final String TARGET_PREFIX = "delaylevel.target.";

    /** The format of descriptions; later ones are refused. */
    private static final long FORMAT = 1;

    private static final long LONGEST_MS = 36_500L * 86_400_000;
    private static final Map<Long, String> UNITS =
            Map.of(
                    60_000L, "minute",
                    3_600_000L, "hour",
                    86_400_000L, "day",
                    30 * 86_400_000L, "month",
                    365 * 86_400_000L, "year");

    /** One level; durations in ms. */
    record Level(long unitMs, long maximumMs, long leadMs) {
        int partitions() {
            return (int) ((maximumMs + unitMs - 1) / unitMs - 1);
        }

        String suffix() {
            String name = UNITS.getOrDefault(unitMs, exactDuration(unitMs));
            return "-" + name.toLowerCase(Locale.ROOT);
        }
    }

    /** A list of levels, from coarse to fine. */
    record Levels(boolean recirculate, List<Level> list) {
        long maximumMs() {
            return list.get(0).maximumMs();
        }

        long smallestLeadMs() {
            return list.stream().mapToLong(Level::leadMs).min().orElseThrow();
        }
    }

    /** One of the topics of a level topic. */
    record Member(TopicName topic, String role, int partitions) {}

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
        } catch (ClassCastException | IllegalArgumentException | ArithmeticException error) {
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
        long window = number(value, "window_partitions", 1, 64);
        number(value, "hold_pause_ms", 1, Long.MAX_VALUE);
        if (value.containsKey("on_missing_target")) {
            choice(value, "on_missing_target", "hold", "dead-letter", "drop");
        }
        require(!targets.isEmpty(), "there are no targets");
        List<Levels> former = new ArrayList<>();
        if (value.get("former") instanceof List<?> lists) {
            lists.forEach(each -> former.add(levels((Map<?, ?>) each)));
        }
        return new Description(
                topic,
                levels(value),
                targets,
                choice(value, "mover", "service", "function").equals("function"),
                choice(value, "final_window", "broker", "tracker").equals("tracker"),
                (int) window,
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
            long unit = number(level, "unit_ms", 100, LONGEST_MS);
            long maximum = number(level, "maximum_ms", unit + 1, LONGEST_MS);
            found.add(new Level(unit, maximum, number(level, "lead_ms", 1, unit - 1)));
        }
        require(!found.isEmpty(), "there are no levels");
        for (int i = 1; i < found.size(); i++) {
            long coarser = found.get(i - 1).unitMs();
            require(found.get(i).unitMs() < coarser, "levels must go from coarse to fine");
            require(found.get(i).maximumMs() >= coarser, "there is a gap between levels");
        }
        String overflow = choice(value, "overflow", "reject", "recirculate");
        return new Levels(overflow.equals("recirculate"), found);
    }

    private static Object required(Map<?, ?> value, String name) {
        require(value.containsKey(name), name + " is missing");
        return value.get(name);
    }

    private static String choice(Map<?, ?> value, String name, String... choices) {
        Object found = required(value, name);
        require(List.of(choices).contains(found), name + " is " + found);
        return (String) found;
    }

    private static long number(Map<?, ?> value, String name, long least, long most) {
        Object found = required(value, name);
        require(found instanceof Long, name + " is " + found + ", not a whole number");
        long number = (Long) found;
        require(number >= least && number <= most, name + " is " + number);
        return number;
    }

    private static void require(boolean condition, String message) {
        if (!condition) {
            throw new IllegalArgumentException(message);
        }
    }

    TopicName levelTopic(int level) {
        return level == 0 ? topic : topic.withSuffix(levels.list().get(level).suffix());
    }

    TopicName windowTopic() {
        return topic.withSuffix("-window");
    }

    /** Returns all topics: levels from coarse to fine, then the others. */
    Collection<Member> members() {
        List<Member> found = new ArrayList<>();
        for (int i = 0; i < levels.list().size(); i++) {
            found.add(new Member(levelTopic(i), "level", levels.list().get(i).partitions()));
        }
        found.add(new Member(topic.withSuffix("-held"), "held", 1));
        found.add(new Member(topic.withSuffix("-DLQ"), "dead-letter", 1));
        if (tracker) {
            found.add(new Member(windowTopic(), "window", windowPartitions));
            found.add(new Member(topic.withSuffix("-window-log"), "log", windowPartitions));
            found.add(new Member(topic.withSuffix("-outcomes"), "outcomes", 1));
        }
        return found;
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

    /** Writes a duration without rounding: 3d, 1h30m, 250ms. */
    static String exactDuration(long ms) {
        long[] sizes = {86_400_000, 3_600_000, 60_000, 1000, 1};
        String[] names = {"d", "h", "m", "s", "ms"};
        StringBuilder found = new StringBuilder();
        for (int i = 0; i < sizes.length; i++) {
            if (ms >= sizes[i]) {
                found.append(ms / sizes[i]).append(names[i]);
                ms %= sizes[i];
            }
        }
        return found.isEmpty() ? "0s" : found.toString();
    }
}
