package delaylevel.client;

import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.http.HttpClient;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.function.BiFunction;

/** An admin interface that answers what a test says: status, body, and location of a redirection. */
final class Answering implements AutoCloseable {
    final List<String> requests = new ArrayList<>();
    final List<String> tokens = new ArrayList<>();
    private final BiFunction<String, Integer, Map<?, ?>> answer;
    private final HttpServer server;

    /** Starts a server. The function gives the answer by the path and the number of the request. */
    Answering(BiFunction<String, Integer, Map<?, ?>> answer) throws IOException {
        this.answer = answer;
        server = HttpServer.create(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0), 0);
        server.createContext("/", this::handle);
        server.start();
    }

    String url() {
        return "http://localhost:" + server.getAddress().getPort();
    }

    AdminRest admin() {
        return new AdminRest(HttpClient.newHttpClient(), url() + "/", () -> "secret\n");
    }

    private void handle(HttpExchange exchange) throws IOException {
        requests.add(exchange.getRequestURI().toString());
        tokens.add(exchange.getRequestHeaders().getFirst("Authorization"));
        Map<?, ?> found = answer.apply(requests.get(requests.size() - 1), requests.size() - 1);
        if (found.containsKey("location")) {
            exchange.getResponseHeaders().set("Location", (String) found.get("location"));
        }
        byte[] body = ((String) found.get("body")).getBytes(StandardCharsets.UTF_8);
        exchange.sendResponseHeaders((int) (long) found.get("status"), body.length == 0 ? -1 : body.length);
        exchange.getResponseBody().write(body);
        exchange.close();
    }

    @Override
    public void close() {
        server.stop(0);
    }
}
