package delaylevel.client;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonParseException;
import com.google.gson.ToNumberPolicy;
import com.google.gson.stream.JsonReader;
import com.google.gson.stream.JsonToken;
import java.io.IOException;
import java.io.StringReader;

/** JSON as maps, lists, strings, booleans, null, {@link Long} and {@link Double}. */
final class Json {
    private static final Gson GSON = new GsonBuilder()
            .setObjectToNumberStrategy(ToNumberPolicy.LONG_OR_DOUBLE)
            .disableHtmlEscaping()
            .serializeNulls()
            .create();

    private Json() {}

    /**
     * Parses a text. The library's own methods for texts accept more than JSON.
     *
     * @throws IllegalArgumentException the text is not JSON
     */
    static Object parse(String text) {
        try (JsonReader reader = new JsonReader(new StringReader(text))) {
            Object value = GSON.getAdapter(Object.class).read(reader);
            if (reader.peek() == JsonToken.END_DOCUMENT) {
                return value;
            }
        } catch (IOException | JsonParseException | IllegalStateException error) {
            throw new IllegalArgumentException("not JSON: " + error.getMessage(), error);
        }
        throw new IllegalArgumentException("not JSON: there is more behind it");
    }

    /** Returns a value as JSON. */
    static String write(Object value) {
        return GSON.toJson(value);
    }
}
