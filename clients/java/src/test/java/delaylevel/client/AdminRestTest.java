package delaylevel.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import delaylevel.client.DelayLevelException.Reason;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.pulsar.client.api.Schema;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** The texts of the admin REST client, tokens, and schemas. VectorsTest has the other answers. */
class AdminRestTest {
    private static final TopicName TOPIC = TopicName.parse("a/b/levels");

    private final List<Map<?, ?>> answers = new ArrayList<>();
    private Answering server;

    @BeforeEach
    void start() throws IOException {
        server = new Answering((path, number) -> answers.remove(0));
    }

    @AfterEach
    void stop() {
        server.close();
    }

    private void answer(long status, String body) {
        answers.add(Map.of("status", status, "body", body));
    }

    private void redirect(String place) {
        answers.add(Map.of("status", 307L, "body", "", "location", place));
    }

    private void refused(Reason reason, String words) {
        DelayLevelException error =
                assertThrows(DelayLevelException.class, () -> server.admin().describe(TOPIC));
        assertEquals(reason, error.reason());
        assertTrue(error.getMessage().contains(words), error.getMessage());
        assertTrue(!error.getMessage().contains("secret"), error.getMessage());
    }

    @Test
    void theTokenIsSentThroughARedirection() {
        redirect("/elsewhere");
        answer(404, "");
        assertNull(server.admin().describe(TOPIC));
        assertEquals(List.of("Bearer secret", "Bearer secret"), server.tokens);
    }

    @Test
    void everyErrorTellsWhatIsWrong() {
        answer(200, "{\"partitions\":3}");
        refused(Reason.LEVEL_TOPIC, "is an ordinary topic");
        answer(200, "{\"partitions\":3,\"properties\":{\"" + Description.MEMBER_OF
                + "\":\"persistent://a/b/other\"}}");
        refused(Reason.LEVEL_TOPIC, "belongs to the level topic persistent://a/b/other");
        answer(401, "no");
        refused(Reason.ADMIN, "Check the admin token");
        answer(500, "boom");
        refused(Reason.ADMIN, "refused with 500: boom");
        answer(200, "<html>");
        refused(Reason.ADMIN, "no JSON object");
        for (int i = 0; i < 5; i++) {
            redirect("/circle");
        }
        refused(Reason.ADMIN, "redirected in a circle");
        server.close();
        refused(Reason.ADMIN, "is the broker running");
    }

    @Test
    void theSchemaIsLookedUpInTheRegistry() {
        answer(200, "{\"getSchemaResponses\":[{\"version\":1,\"type\":\"STRING\",\"data\":\"\"},"
                + "{\"version\":0,\"type\":\"JSON\",\"data\":\"{}\"}]}");
        TopicName target = TopicName.parse("orders");
        AdminRest admin = server.admin();
        assertEquals("STRING:e3b0c44298fc1c14", SchemaReference.of(admin, target, Schema.STRING));
        assertEquals(
                List.of("/admin/v2/schemas/public/default/orders/schemas"), server.requests);
        assertNull(SchemaReference.of(admin, target, Schema.BYTES));
        assertNull(SchemaReference.of(admin, target, Schema.LOCAL_DATE));
        answer(404, "");
        DelayLevelException error = assertThrows(
                DelayLevelException.class,
                () -> SchemaReference.of(admin, target, Schema.STRING));
        assertTrue(error.getMessage().contains("has no version of the STRING schema"));
    }
}
