package mqproc.interop;

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;

/**
 * Opens stores with RocketMQ's own DefaultMessageStore and does what is asked of it, one JSON object a line.
 *
 * <pre>
 * {"id": 1, "op": "open", "store": "/path", "options": {"mappedFileSizeCommitLog": "65536"}}
 *                                                    -> loaded, started, error, minPhyOffset, maxPhyOffset
 * {"id": 2, "op": "dump", "store": "/path", "to": "/file"}        -> the number of lines, see StoreDump
 * {"id": 20, "op": "answers", "store": "/path", "questions": [...]}  -> an answer each, see StoreAnswers
 * {"id": 3, "op": "append", "store": "/path", "messages": [...]}  -> what each put answered, see StoreAppend
 * {"id": 4, "op": "timer", "store": "/path"}           -> loaded, readMs, queueOffset, messages, units, see StoreTimer
 * {"id": 5, "op": "deliver", "store": "/path", "topic": "t", "messages": 7}
 *                                                    -> queueOffset, delivered, messages: the timer has run
 * {"id": 6, "op": "close", "store": "/path"}                      -> clean: whether abort is gone
 * {"id": 7, "op": "broker", "store": "/path", "options": {}, "topic": "t", "group": "g"}
 *                                        -> a StoreBroker works; topic and group are made if they are named
 * {"id": 8, "op": "send", "store": "/path", "topic": "t", "bodies": ["a"], "tag": "x"}
 * {"id": 9, "op": "pop", "store": "/path", "topic": "t", "group": "g", "messages": 8, "invisibleMs": 1, "waitMs": 1}
 *                                                    -> body, times, handle a message
 * {"id": 10, "op": "ack", "store": "/path", "topic": "t", "group": "g", "handle": "..."}
 * {"id": 11, "op": "change", (the same), "invisibleMs": 1}        -> the new handle
 * {"id": 12, "op": "stop", "store": "/path"}                      -> clean: whether abort is gone
 * {"id": 13, "op": "state", "store": "/path", "topic": "t", "group": "g"}
 *                                                    -> progress, levels, queues, retryMaxTimes, ends
 * </pre>
 *
 * RocketMQ's own clients of such a broker, see BrokerClients:
 *
 * <pre>
 * {"id": 14, "op": "consume", "store": "/path", "topic": "t", "group": "g", "refuse": {"body": -1}}
 * {"id": 15, "op": "consumed", "store": "/path", "group": "g", "messages": 3, "waitMs": 1}
 *                                                    -> body, times, queueId, offset a message
 * {"id": 16, "op": "endConsumer", "store": "/path", "group": "g"}
 * {"id": 17, "op": "produce", "store": "/path", "topic": "t", "group": "g", "answers": {"body": true}}
 * {"id": 18, "op": "checked", "store": "/path"}                   -> bodies
 * {"id": 19, "op": "put", "store": "/path", "topic": "t", "body": "b", "level": 1, "deliverMs": 1, "commit": null}
 *                                                    -> the send's status; each of the last three may be left out
 * </pre>
 *
 * An answer is {"id", "result"} or {"id", "error"}. Requests run at the same time; for one store the asker waits for
 * an answer before the next request. The end of the input ends the program, whatever is open then is left as it is.
 */
public final class Main {
    private static final Map<Path, OpenStore> STORES = new ConcurrentHashMap<>();
    private static final Map<Path, StoreBroker> BROKERS = new ConcurrentHashMap<>();

    private Main() {
    }

    public static void main(String[] arguments) throws IOException {
        PrintStream answers = System.out;
        System.setOut(System.err);  // what RocketMQ or its logging prints is no answer
        ExecutorService workers = Executors.newCachedThreadPool();
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JSONObject request = JSON.parseObject(line);
            workers.execute(() -> answer(request, answers));
        }
        System.exit(0);
    }

    private static void answer(JSONObject request, PrintStream answers) {
        JSONObject answer = new JSONObject();
        answer.put("id", request.getIntValue("id"));
        try {
            answer.put("result", run(request));
        } catch (Throwable error) {
            var trace = new StringWriter();
            error.printStackTrace(new PrintWriter(trace));
            answer.put("error", trace.toString());
        }
        byte[] line = (answer.toJSONString() + "\n").getBytes(StandardCharsets.UTF_8);
        synchronized (answers) {
            answers.write(line, 0, line.length);
            answers.flush();
        }
    }

    private static Object run(JSONObject request) throws Exception {
        Path path = Path.of(request.getString("store"));
        switch (request.getString("op")) {
            case "open":
                return open(path, request.getJSONObject("options"));
            case "dump":
                return new StoreDump(STORES.get(path)).writeTo(Path.of(request.getString("to")));
            case "answers":
                return new StoreAnswers(STORES.get(path)).answerAll(request.getJSONArray("questions"));
            case "append":
                return new StoreAppend(STORES.get(path)).appendAll(request.getJSONArray("messages"));
            case "timer":
                return STORES.get(path).openTimer();
            case "deliver":
                return STORES.get(path).timer.run(request.getString("topic"), request.getLongValue("messages"));
            case "close":
                return STORES.remove(path).close();
            case "broker":
                return start(path, request);
            case "send":
                BROKERS.get(path).send(request.getString("topic"), request.getJSONArray("bodies"),
                    request.getString("tag"));
                return true;
            case "pop":
                return BROKERS.get(path).pop(request);
            case "ack":
                BROKERS.get(path).ack(request.getString("group"), request.getString("topic"),
                    request.getString("handle"));
                return true;
            case "change":
                return BROKERS.get(path).change(request.getString("group"), request.getString("topic"),
                    request.getString("handle"), request.getLongValue("invisibleMs"));
            case "stop":
                return BROKERS.remove(path).stop();
            case "state":
                return BROKERS.get(path).state(request.getString("topic"), request.getString("group"));
            default:
                return runClients(BROKERS.get(path).clients(), request);
        }
    }

    /** What RocketMQ's own clients of a broker are asked. */
    private static Object runClients(BrokerClients clients, JSONObject request) throws Exception {
        String group = request.getString("group");
        switch (request.getString("op")) {
            case "consume":
                clients.consume(group, request.getString("topic"), request.getJSONObject("refuse"));
                return true;
            case "consumed":
                return clients.consumed(group, request.getIntValue("messages"), request.getLongValue("waitMs"));
            case "endConsumer":
                clients.endConsumer(group);
                return true;
            case "produce":
                clients.produce(group, request.getString("topic"), request.getJSONObject("answers"));
                return true;
            case "checked":
                return clients.checked();
            case "put":
                return clients.put(request);
            default:
                throw new IllegalArgumentException("no such operation: " + request.getString("op"));
        }
    }

    private static synchronized boolean start(Path path, JSONObject request) throws Exception {
        StoreBroker broker = new StoreBroker(path, request.getJSONObject("options"));
        if (request.containsKey("topic")) {
            broker.make(request.getString("topic"), request.getString("group"));
        }
        BROKERS.put(path, broker);
        return true;
    }

    /** One after the other: RocketMQ's stores share statistics that are no matter of several threads. */
    private static synchronized JSONObject open(Path path, JSONObject options) throws IOException {
        OpenStore opened = new OpenStore(path, options);
        JSONObject state = opened.open();
        if (state.getBooleanValue("started")) {
            STORES.put(path, opened);
        }
        return state;
    }
}
