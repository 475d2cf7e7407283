package delaylevel.client;

import delaylevel.client.DelayLevelException.Reason;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.function.Supplier;

/** The part of the admin REST interface that a producer needs: it only reads. */
final class AdminRest {
    static final String PREFIX = "/admin/v2/persistent/";
    static final String PARTITIONS = "/partitions?checkAllowAutoCreation=false";
    private static final Duration PATIENCE = Duration.ofSeconds(30);
    private static final int HOPS = 5;

    private final HttpClient http;
    private final String url;
    private final Supplier<String> token;

    /**
     * Creates the client of an admin interface.
     *
     * @param token the source of the token, asked at each request; null for none
     */
    AdminRest(HttpClient http, String url, Supplier<String> token) {
        this.http = http;
        this.url = url.replaceAll("/+$", "");
        this.token = token;
    }

    /**
     * Returns the description of a level topic; null if it does not exist or is not finished.
     *
     * @throws DelayLevelException it is not a level topic, or is damaged, or cannot be read
     */
    Description describe(TopicName topic) {
        Map<String, String> properties = properties(topic);
        if (properties == null) {
            return null;
        }
        Description found = Description.read(topic, properties);
        if (found == null && !properties.containsKey(Description.PLAN)) {
            String owner = properties.get(Description.MEMBER_OF);
            throw new DelayLevelException(
                    Reason.LEVEL_TOPIC,
                    topic + " exists and "
                            + (owner == null
                                    ? "is an ordinary topic: it does not describe itself as a level "
                                            + "topic"
                                    : "belongs to the level topic " + owner)
                            + "; nothing was changed. Name another level topic");
        }
        return found;
    }

    /** Returns the first of these level topics that carries a business topic; null if none does. */
    TopicName firstFor(TopicName target, List<TopicName> names) {
        for (TopicName name : names) {
            Map<String, String> properties = properties(name);
            if (properties == null
                    || !name.toString().equals(properties.get(Description.MEMBER_OF))) {
                continue;
            }
            try {
                Description found = Description.read(name, properties);
                if (found == null || found.targets().contains(target.toString())) {
                    return name;
                }
            } catch (DelayLevelException unreadable) {
                return name; // whoever reads it next gets the error
            }
        }
        return null;
    }

    /** Returns all versions of the schema of a topic, oldest first. */
    List<SchemaReference.Version> schemas(TopicName topic) {
        Map<?, ?> answer = ask("/admin/v2/schemas/" + topic.path() + "/schemas");
        List<SchemaReference.Version> found = new ArrayList<>();
        if (answer != null && answer.get("getSchemaResponses") instanceof List<?> versions) {
            for (Object each : versions) {
                Map<?, ?> version = (Map<?, ?>) each;
                found.add(new SchemaReference.Version(
                        ((Number) version.get("version")).longValue(),
                        (String) version.get("type"),
                        version.get("data") instanceof String data ? data : ""));
            }
        }
        found.sort(Comparator.comparingLong(SchemaReference.Version::number));
        return found;
    }

    private Map<String, String> properties(TopicName topic) {
        Map<?, ?> answer = ask(PREFIX + topic.path() + PARTITIONS);
        if (answer == null) {
            return null;
        }
        Map<String, String> found = new HashMap<>();
        if (answer.get("properties") instanceof Map<?, ?> properties) {
            properties.forEach((name, value) -> found.put((String) name, String.valueOf(value)));
        }
        return found;
    }

    /** Returns the answer to a request; null for 404. */
    private Map<?, ?> ask(String path) {
        URI place = URI.create(url + path);
        HttpResponse<String> answer = null;
        for (int hop = 0; hop < HOPS; hop++) {
            HttpRequest.Builder request = HttpRequest.newBuilder(place)
                    .timeout(PATIENCE)
                    .header("Accept", "application/json")
                    .GET();
            if (token != null) {
                request.header("Authorization", "Bearer " + token.get().strip());
            }
            answer = send(request.build());
            String next = answer.headers().firstValue("Location").orElse(null);
            if ((answer.statusCode() != 307 && answer.statusCode() != 308) || next == null) {
                return read(path, answer);
            }
            URI redirected = place.resolve(next);
            if ("https".equals(place.getScheme()) && !"https".equals(redirected.getScheme())) {
                throw failed(path + " is redirected to " + redirected.getHost()
                        + " without TLS; the token was not sent there", null);
            }
            place = redirected;
        }
        throw failed(path + " is redirected in a circle: no broker owns the topic now", null);
    }

    private HttpResponse<String> send(HttpRequest request) {
        try {
            return http.send(request, BodyHandlers.ofString());
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
            throw failed("the request was interrupted", error);
        } catch (java.io.IOException error) {
            throw failed("it does not answer (" + error + "): is the broker running, and is this "
                    + "its web address?", error);
        }
    }

    private Map<?, ?> read(String path, HttpResponse<String> answer) {
        if (answer.statusCode() == 404) {
            return null;
        }
        if (answer.statusCode() / 100 == 2) {
            try {
                return (Map<?, ?>) Json.parse(answer.body());
            } catch (IllegalArgumentException | ClassCastException error) {
                throw failed("its answer to " + path + " is no JSON object", error);
            }
        }
        String advice = answer.statusCode() == 401 || answer.statusCode() == 403
                ? ". Check the admin token, and the rights of its role (docs/security.md)"
                : "";
        String reason = answer.body().substring(0, Math.min(200, answer.body().length()));
        throw failed(path + " was refused with " + answer.statusCode() + ": " + reason + advice, null);
    }

    private DelayLevelException failed(String what, Exception cause) {
        return new DelayLevelException(
                Reason.ADMIN, "the admin interface at " + url + ": " + what, cause);
    }
}
