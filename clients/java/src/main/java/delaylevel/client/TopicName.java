package delaylevel.client;

import delaylevel.client.DelayLevelException.Reason;
import java.net.URLEncoder;
import java.nio.charset.StandardCharsets;
import java.util.List;

/** A persistent topic. */
record TopicName(String tenant, String namespace, String local) {
    static final String SCHEME = "persistent://";

    /** Parses a short or full name. */
    static TopicName parse(String topic) {
        int scheme = topic.indexOf("://");
        if (scheme >= 0 && !topic.startsWith(SCHEME)) {
            throw new DelayLevelException(
                    Reason.INVALID_INPUT,
                    "topic '" + topic + "': only persistent topics keep delayed messages; name it "
                            + "persistent://tenant/namespace/topic");
        }
        String[] parts = topic.substring(scheme < 0 ? 0 : SCHEME.length()).split("/", -1);
        if (parts.length == 1 && scheme < 0) {
            parts = new String[] {"public", "default", parts[0]};
        }
        if (parts.length != 3 || List.of(parts).contains("")) {
            throw new DelayLevelException(
                    Reason.INVALID_INPUT,
                    "topic '" + topic + "' is not a topic name: give topic, "
                            + "tenant/namespace/topic or persistent://tenant/namespace/topic");
        }
        return new TopicName(parts[0], parts[1], parts[2]);
    }

    /**
     * Returns the names under which the level topic of this business topic is searched for, that of
     * a new one first.
     *
     * @param levelNamespace tenant/namespace of the level topic; null for that of this topic
     */
    List<TopicName> levelTopics(String levelNamespace) {
        if (levelNamespace == null || levelNamespace.equals(tenant + "/" + namespace)) {
            return List.of(
                    new TopicName(tenant, namespace, "_" + local + "-delay-level"),
                    new TopicName(tenant, namespace, local + "-delay-level"));
        }
        String[] parts = levelNamespace.split("/", -1);
        if (parts.length != 2 || List.of(parts).contains("")) {
            throw new DelayLevelException(
                    Reason.INVALID_INPUT,
                    "'" + levelNamespace + "' is not a namespace: write tenant/namespace");
        }
        String origin = tenant + "." + namespace + "." + local;
        return List.of(new TopicName(parts[0], parts[1], "_" + origin + "-delay-level"));
    }

    /** Returns tenant/namespace/topic, percent-encoded. */
    String path() {
        return encode(tenant) + "/" + encode(namespace) + "/" + encode(local);
    }

    private static String encode(String part) {
        return URLEncoder.encode(part, StandardCharsets.UTF_8).replace("+", "%20");
    }

    @Override
    public String toString() {
        return SCHEME + tenant + "/" + namespace + "/" + local;
    }
}
