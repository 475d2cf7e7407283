package delaylevel.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import delaylevel.client.DelayLevelException.Reason;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.http.HttpClient;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.pulsar.client.api.Schema;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** The admin REST interface, with a server that answers what a test says. */
class AdminRestTest {
    private static final TopicName TOPIC = TopicName.parse("a/b/_ü-delay-level");
    private static final String LEVELS =
            "\"levels\":[{\"topic\":\"persistent://a/b/x\",\"partitions\":4,"
                    + "\"unit_ms\":1000,\"maximum_ms\":5000,\"lead_ms\":250}]";
    private static final String DESCRIPTION = "{\"version\":1,\"overflow\":\"reject\"," + LEVELS
            + ",\"targets\":[\"persistent://a/b/ü\"],\"mover\":\"service\",\"final_window\":"
            + "\"tracker\",\"topics\":{\"window\":\"persistent://a/b/w\"},\"reserve\":9,"
            + "\"window_partitions\":4}";

    private record Answer(int status, String body, String location) {}

    private final List<String> requests = new ArrayList<>();
    private final List<Answer> answers = new ArrayList<>();
    private HttpServer server;
    private String url;

    @BeforeEach
    void start() throws IOException {
        server = HttpServer.create(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0), 0);
        server.createContext("/", this::handle);
        server.start();
        url = "http://localhost:" + server.getAddress().getPort();
    }

    @AfterEach
    void stop() {
        server.stop(0);
    }

    private void handle(HttpExchange exchange) throws IOException {
        String body = new String(exchange.getRequestBody().readAllBytes(), StandardCharsets.UTF_8);
        requests.add(exchange.getRequestMethod() + " " + exchange.getRequestURI() + " "
                + exchange.getRequestHeaders().getFirst("Authorization") + " " + body);
        Answer answer = answers.remove(0);
        if (answer.location != null) {
            exchange.getResponseHeaders().set("Location", answer.location);
        }
        byte[] bytes = answer.body.getBytes(StandardCharsets.UTF_8);
        exchange.sendResponseHeaders(answer.status, bytes.length == 0 ? -1 : bytes.length);
        exchange.getResponseBody().write(bytes);
        exchange.close();
    }

    private AdminRest admin() {
        return new AdminRest(HttpClient.newHttpClient(), url + "/", () -> "secret\n");
    }

    private void answer(int status, String body) {
        answers.add(new Answer(status, body, null));
    }

    private static String withProperties(Map<String, Object> properties) {
        return Json.write(Map.of("partitions", 4, "properties", properties));
    }

    private void refused(Reason reason, String words) {
        DelayLevelException error =
                assertThrows(DelayLevelException.class, () -> admin().describe(TOPIC));
        assertEquals(reason, error.reason());
        assertTrue(error.getMessage().contains(words), error.getMessage());
        assertTrue(!error.getMessage().contains("secret"), error.getMessage());
    }

    @Test
    void theDescriptionIsReadThroughARedirectWithTheToken() {
        answers.add(new Answer(307, "", "/elsewhere?x=1"));
        answer(200, withProperties(Map.of(Description.DESCRIPTION, DESCRIPTION)));
        Description found = admin().describe(TOPIC);
        assertEquals(5000, found.levels().maximumMs());
        assertEquals(List.of("persistent://a/b/ü"), List.copyOf(found.targets()));
        assertEquals(
                List.of(
                        "GET /admin/v2/persistent/a/b/_%C3%BC-delay-level/partitions"
                                + "?checkAllowAutoCreation=false Bearer secret ",
                        "GET /elsewhere?x=1 Bearer secret "),
                requests);
    }

    @Test
    void aMissingOrUnfinishedLevelTopicIsNone() {
        answer(404, "");
        assertNull(admin().describe(TOPIC));
        answer(200, withProperties(Map.of(Description.PLAN, DESCRIPTION)));
        assertNull(admin().describe(TOPIC));
    }

    @Test
    void aForeignTopicIsRefused() {
        answer(200, "{\"partitions\":3}");
        refused(Reason.LEVEL_TOPIC, "is an ordinary topic");
        answer(200, withProperties(Map.of(Description.MEMBER_OF, "persistent://a/b/other")));
        refused(Reason.LEVEL_TOPIC, "belongs to the level topic persistent://a/b/other");
    }

    @Test
    void aDamagedDescriptionIsRefused() {
        for (String text : List.of("{", "[]", "7", "", DESCRIPTION.replace("250", "0"),
                DESCRIPTION.replace("1000", "1e3"), DESCRIPTION.replace("persistent://a", "http://a"))) {
            answer(200, withProperties(Map.of(Description.DESCRIPTION, text)));
            refused(Reason.LEVEL_TOPIC, "cannot be read");
        }
    }

    @Test
    void anErrorOfTheInterfaceIsNotAMissingTopic() {
        answer(401, "no");
        refused(Reason.ADMIN, "Check the admin token");
        answer(500, "boom");
        refused(Reason.ADMIN, "refused with 500: boom");
        answer(200, "<html>");
        refused(Reason.ADMIN, "no JSON object");
        for (int i = 0; i < 5; i++) {
            answers.add(new Answer(307, "", url + "/circle"));
        }
        refused(Reason.ADMIN, "redirected in a circle");
        server.stop(0);
        refused(Reason.ADMIN, "is the broker running");
    }

    @Test
    void theSchemaIsLookedUpInTheRegistry() {
        answer(200, "{\"getSchemaResponses\":[{\"version\":1,\"type\":\"STRING\",\"data\":\"\"},"
                + "{\"version\":0,\"type\":\"JSON\",\"data\":\"{}\"}]}");
        TopicName target = TopicName.parse("orders");
        assertEquals("STRING:e3b0c44298fc1c14", SchemaReference.of(admin(), target, Schema.STRING));
        assertEquals(
                List.of("GET /admin/v2/schemas/public/default/orders/schemas Bearer secret "),
                requests);
        assertNull(SchemaReference.of(admin(), target, Schema.BYTES));
        assertNull(SchemaReference.of(admin(), target, Schema.LOCAL_DATE));
        answer(404, "");
        DelayLevelException error = assertThrows(
                DelayLevelException.class,
                () -> SchemaReference.of(admin(), target, Schema.STRING));
        assertTrue(error.getMessage().contains("has no version of the STRING schema"));
    }
}
