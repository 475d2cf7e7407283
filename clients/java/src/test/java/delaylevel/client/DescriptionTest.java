package delaylevel.client;

import static org.junit.jupiter.api.Assertions.assertEquals;

import java.util.List;
import java.util.Set;
import org.junit.jupiter.api.Test;

/** Which descriptions are of the same level topic. */
class DescriptionTest {
    private static final Description.Levels DAYS = levels(3), MORE = levels(9);

    private static Description.Levels levels(int partitions) {
        long day = 86_400_000;
        return new Description.Levels(
                false,
                List.of(new Description.Level("t", partitions, day, (partitions + 1) * day, 600_000)));
    }

    private static Description described(
            Description.Levels levels, boolean tracker, int partitions, Description.Levels... former) {
        TopicName topic = TopicName.parse("persistent://public/default/t");
        return new Description(
                topic, levels, Set.of("o"), false, tracker, "w", partitions, 12288, List.of(former));
    }

    @Test
    void aLevelTopicStaysTheSameOnlyIfItIsExpanded() {
        Description known = described(DAYS, true, 4);
        Description expanded = described(MORE, true, 4, DAYS);
        for (Description other : List.of(
                described(MORE, true, 4), described(DAYS, false, 4), described(DAYS, true, 2))) {
            assertEquals(false, known.isSameAs(other), other::toString);
        }
        assertEquals(true, known.isSameAs(expanded));
        assertEquals(true, expanded.isSameAs(known));
        assertEquals(true, described(DAYS, false, 4).isSameAs(described(DAYS, false, 2)));
    }
}
