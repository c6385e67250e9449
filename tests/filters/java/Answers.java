import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import org.apache.rocketmq.filter.expression.BooleanExpression;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.parser.SelectorParser;

/**
 * Evaluates filters with RocketMQ's parser. Input: a line of JSON {"expression", "properties": [{name: value}]}. Output:
 * "refused", or one letter per message: T, F, N (null) or X (evaluation failed).
 */
public final class Answers {
    private record Message(Map<String, Object> keyValues) implements EvaluationContext {
        @Override
        public Object get(String name) {
            return keyValues.get(name);
        }
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            out.println(answer(JSON.parseObject(line)));
        }
    }

    private static String answer(JSONObject question) {
        BooleanExpression filter;
        try {
            filter = SelectorParser.parse(question.getString("expression"));
        } catch (Exception refusal) {
            return "refused";
        }
        StringBuilder letters = new StringBuilder();
        for (Object properties : question.getJSONArray("properties")) {
            letters.append(letter(filter, new Message((JSONObject) properties)));
        }
        return letters.toString();
    }

    private static char letter(BooleanExpression filter, EvaluationContext message) {
        try {
            Object value = filter.evaluate(message);
            return value == null ? 'N' : value == Boolean.TRUE ? 'T' : 'F';
        } catch (Exception failure) {
            return 'X';
        }
    }
}
