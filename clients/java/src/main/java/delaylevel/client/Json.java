package delaylevel.client;

import java.math.BigDecimal;
import java.math.BigInteger;
import java.math.MathContext;
import java.math.RoundingMode;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;

/**
 * JSON: a parser, and the canonical form of docs/wire.md. Values are maps, lists, strings, booleans,
 * null, {@link BigInteger} and {@link Double}.
 */
final class Json {
    /** The order of names in the canonical form. That of strings differs above U+FFFF. */
    static final Comparator<String> BY_CODE_POINT = Json::compareCodePoints;

    private static final int DEEPEST = 500;

    private final String text;
    private int at;
    private int depth;

    private Json(String text) {
        this.text = text;
    }

    /**
     * Parses a text.
     *
     * @throws IllegalArgumentException the text is not JSON
     */
    static Object parse(String text) {
        Json parser = new Json(text);
        Object value = parser.value();
        parser.space();
        if (parser.at < text.length()) {
            throw parser.damaged();
        }
        return value;
    }

    /** Returns the canonical form of the definition of a schema. */
    static String canonicalDefinition(String definition) {
        Object value;
        try {
            value = parse(definition);
        } catch (IllegalArgumentException notJson) {
            return definition;
        }
        return isEmpty(value) ? "" : write(value);
    }

    /**
     * Returns the canonical form of a definition without its notes (doc and aliases), by which the
     * registry takes definitions for equal.
     */
    static String essentials(String definition) {
        try {
            return write(withoutNotes(parse(definition)));
        } catch (IllegalArgumentException notJson) {
            return definition;
        }
    }

    private static Object withoutNotes(Object value) {
        if (value instanceof List<?> list) {
            List<Object> found = new ArrayList<>();
            list.forEach(item -> found.add(withoutNotes(item)));
            return found;
        }
        if (!(value instanceof Map<?, ?> map)) {
            return value;
        }
        Map<String, Object> found = new LinkedHashMap<>();
        map.forEach((name, item) -> {
            if (!name.equals("doc") && !name.equals("aliases")) {
                found.put((String) name, name.equals("default") ? item : withoutNotes(item));
            }
        });
        return found;
    }

    /** Returns a value as JSON in the canonical form. */
    static String write(Object value) {
        StringBuilder out = new StringBuilder();
        write(value, out);
        return out.toString();
    }

    private static boolean isEmpty(Object value) {
        return value == null
                || value.equals(false)
                || value.equals("")
                || (value instanceof BigInteger number && number.signum() == 0)
                || (value instanceof Double number && number == 0)
                || (value instanceof List<?> list && list.isEmpty())
                || (value instanceof Map<?, ?> map && map.isEmpty());
    }

    private static void write(Object value, StringBuilder out) {
        if (value instanceof Map<?, ?> map) {
            Map<String, Object> sorted = new TreeMap<>(BY_CODE_POINT);
            map.forEach((name, item) -> sorted.put((String) name, item));
            String separator = "{";
            for (Map.Entry<String, Object> entry : sorted.entrySet()) {
                writeText(entry.getKey(), out.append(separator));
                write(entry.getValue(), out.append(':'));
                separator = ",";
            }
            out.append(sorted.isEmpty() ? "{}" : "}");
        } else if (value instanceof List<?> list) {
            String separator = "[";
            for (Object item : list) {
                write(item, out.append(separator));
                separator = ",";
            }
            out.append(list.isEmpty() ? "[]" : "]");
        } else if (value instanceof String string) {
            writeText(string, out);
        } else if (value instanceof Double number) {
            writeDouble(number, out);
        } else {
            out.append(value);
        }
    }

    private static void writeText(String value, StringBuilder out) {
        out.append('"');
        for (int i = 0; i < value.length(); i++) {
            char each = value.charAt(i);
            int special = "\"\\\n\r\t\f\b".indexOf(each);
            if (special >= 0) {
                out.append('\\').append("\"\\nrtfb".charAt(special));
            } else if (each < ' ' || each > '~') {
                out.append(String.format("\\u%04x", (int) each));
            } else {
                out.append(each);
            }
        }
        out.append('"');
    }

    /** Writes the shortest digits that identify a double; Double.toString of Java 17 may write more. */
    private static void writeDouble(double value, StringBuilder out) {
        if (value == 0 || Double.isInfinite(value)) {
            out.append(value);
            return;
        }
        BigDecimal exact = new BigDecimal(value);
        BigDecimal shortest = exact;
        for (int digits = 1; digits <= 17; digits++) {
            shortest = exact.round(new MathContext(digits, RoundingMode.HALF_EVEN));
            if (shortest.doubleValue() == value) {
                break;
            }
        }
        shortest = shortest.stripTrailingZeros();
        int exponent = shortest.precision() - shortest.scale() - 1;
        if (exponent >= -4 && exponent <= 15) {
            String plain = shortest.toPlainString();
            out.append(plain).append(plain.contains(".") ? "" : ".0");
            return;
        }
        String digits = shortest.unscaledValue().abs().toString();
        out.append(value < 0 ? "-" : "").append(digits.charAt(0));
        if (digits.length() > 1) {
            out.append('.').append(digits, 1, digits.length());
        }
        out.append(String.format("e%s%02d", exponent < 0 ? "-" : "+", Math.abs(exponent)));
    }

    private static int compareCodePoints(String one, String other) {
        int[] left = one.codePoints().toArray();
        int[] right = other.codePoints().toArray();
        return java.util.Arrays.compare(left, right);
    }

    private Object value() {
        space();
        if (at >= text.length() || ++depth > DEEPEST) {
            throw damaged();
        }
        char first = text.charAt(at);
        Object found;
        if (first == '{') {
            found = object();
        } else if (first == '[') {
            found = array();
        } else if (first == '"') {
            found = string();
        } else if (first == '-' || (first >= '0' && first <= '9')) {
            found = number();
        } else {
            found = word();
        }
        depth--;
        return found;
    }

    private Map<String, Object> object() {
        Map<String, Object> found = new LinkedHashMap<>();
        at++;
        if (next('}')) {
            return found;
        }
        do {
            space();
            if (at >= text.length() || text.charAt(at) != '"') {
                throw damaged();
            }
            String name = string();
            require(':');
            found.put(name, value());
        } while (next(','));
        require('}');
        return found;
    }

    private List<Object> array() {
        List<Object> found = new ArrayList<>();
        at++;
        if (next(']')) {
            return found;
        }
        do {
            found.add(value());
        } while (next(','));
        require(']');
        return found;
    }

    private String string() {
        StringBuilder found = new StringBuilder();
        for (at++; at < text.length(); at++) {
            char each = text.charAt(at);
            if (each == '"') {
                at++;
                return found.toString();
            }
            if (each < ' ') {
                throw damaged();
            }
            if (each == '\\') {
                each = escaped();
            }
            found.append(each);
        }
        throw damaged();
    }

    private char escaped() {
        at++;
        int known = at < text.length() ? "\"\\/bfnrtu".indexOf(text.charAt(at)) : -1;
        if (known < 0) {
            throw damaged();
        }
        if (known < 8) {
            return "\"\\/\b\f\n\r\t".charAt(known);
        }
        String digits = at + 5 <= text.length() ? text.substring(at + 1, at + 5) : "";
        if (!digits.matches("[0-9a-fA-F]{4}")) {
            throw damaged();
        }
        at += 4;
        return (char) Integer.parseInt(digits, 16);
    }

    private Object number() {
        int start = at;
        while (at < text.length() && "+-.eE0123456789".indexOf(text.charAt(at)) >= 0) {
            at++;
        }
        String digits = text.substring(start, at);
        if (!digits.matches("-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][-+]?[0-9]+)?")) {
            throw damaged();
        }
        return digits.matches("-?[0-9]+") ? new BigInteger(digits) : (Object) Double.valueOf(digits);
    }

    private Object word() {
        if (take("true")) {
            return true;
        }
        if (take("false")) {
            return false;
        }
        if (take("null")) {
            return null;
        }
        throw damaged();
    }

    private boolean take(String word) {
        boolean found = text.startsWith(word, at);
        at += found ? word.length() : 0;
        return found;
    }

    private boolean next(char wanted) {
        space();
        boolean found = at < text.length() && text.charAt(at) == wanted;
        at += found ? 1 : 0;
        return found;
    }

    private void require(char wanted) {
        if (!next(wanted)) {
            throw damaged();
        }
    }

    private void space() {
        while (at < text.length() && " \t\n\r".indexOf(text.charAt(at)) >= 0) {
            at++;
        }
    }

    private IllegalArgumentException damaged() {
        return new IllegalArgumentException("not JSON at character " + at);
    }
}
