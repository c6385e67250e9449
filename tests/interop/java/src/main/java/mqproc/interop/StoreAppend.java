package mqproc.interop;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.net.InetSocketAddress;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExtBatch;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.PutMessageResult;

/**
 * Puts messages as a broker does: {"topic", "queueId", "body" as base64, "properties", "sysFlag", "bornHost",
 * "storeHost"}, or with "batch" in place of body and properties, a list of {"body", "properties"} that are stored
 * together. May be given: "propertiesString" in place of properties, flag, bornTimestamp, bornPort, storePort,
 * reconsumeTimes, preparedTransactionOffset; "properties" of a batch, which each of its messages gets.
 */
final class StoreAppend {
    private static final int BORN_PORT = 5000;
    private static final int STORE_PORT = 10911;
    private final OpenStore opened;

    StoreAppend(OpenStore opened) {
        this.opened = opened;
    }

    /** One answer for each message or batch: status, physicalOffset, queueOffset, count. Dispatch has followed. */
    JSONArray appendAll(JSONArray messages) throws InterruptedException {
        JSONArray answers = new JSONArray();
        for (Object each : messages) {
            answers.add(append((JSONObject) each));
        }
        opened.waitForDispatch();
        return answers;
    }

    private JSONObject append(JSONObject given) {
        boolean batch = given.containsKey("batch");
        PutMessageResult put;
        if (batch) {
            MessageExtBatch message = new MessageExtBatch();
            if (given.containsKey("properties")) {
                MessageAccessor.setProperties(message, properties(given));
                message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
            }
            message.setBody(MessageDecoder.encodeMessages(parts(given.getJSONArray("batch"))));
            put = opened.store.putMessages(addressed(message, given));
        } else {
            MessageExtBrokerInner message = addressed(new MessageExtBrokerInner(), given);
            message.setBody(given.getBytes("body"));
            setProperties(message, given);
            put = opened.store.putMessage(message);
        }
        JSONObject answer = new JSONObject();
        answer.put("status", put.getPutMessageStatus().name());
        if (put.getAppendMessageResult() != null) {
            answer.put("physicalOffset", put.getAppendMessageResult().getWroteOffset());
            answer.put("queueOffset", put.getAppendMessageResult().getLogicsOffset());
            answer.put("count", batch ? given.getJSONArray("batch").size() : 1);
        }
        return answer;
    }

    private static void setProperties(MessageExtBrokerInner message, JSONObject given) {
        if (given.containsKey("propertiesString")) {
            String text = given.getString("propertiesString");
            message.setPropertiesString(text);
            MessageAccessor.setProperties(message, MessageDecoder.string2messageProperties(text));
        } else {
            MessageAccessor.setProperties(message, properties(given));
            message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
        }
    }

    private static <M extends MessageExtBrokerInner> M addressed(M message, JSONObject given) {
        message.setTopic(given.getString("topic"));
        message.setQueueId(given.getIntValue("queueId"));
        message.setSysFlag(given.getIntValue("sysFlag"));
        message.setFlag(given.getIntValue("flag"));
        message.setReconsumeTimes(given.getIntValue("reconsumeTimes"));
        message.setPreparedTransactionOffset(given.getLongValue("preparedTransactionOffset"));
        Long bornTimestamp = given.getLong("bornTimestamp");
        message.setBornTimestamp(bornTimestamp == null ? System.currentTimeMillis() : bornTimestamp);
        message.setBornHost(new InetSocketAddress(given.getString("bornHost"), port(given, "bornPort", BORN_PORT)));
        message.setStoreHost(new InetSocketAddress(given.getString("storeHost"), port(given, "storePort", STORE_PORT)));
        // A broker sets the bits of the address kinds before it hands a message to the store.
        if (given.getString("bornHost").contains(":")) {
            message.setBornHostV6Flag();
        }
        if (given.getString("storeHost").contains(":")) {
            message.setStoreHostAddressV6Flag();
        }
        return message;
    }

    private static int port(JSONObject given, String name, int usual) {
        return given.containsKey(name) ? given.getIntValue(name) : usual;
    }

    private static List<Message> parts(JSONArray batch) {
        List<Message> messages = new ArrayList<>();
        for (Object each : batch) {
            Message message = new Message();
            message.setBody(((JSONObject) each).getBytes("body"));
            message.setFlag(((JSONObject) each).getIntValue("flag"));
            MessageAccessor.setProperties(message, properties((JSONObject) each));
            messages.add(message);
        }
        return messages;
    }

    private static Map<String, String> properties(JSONObject given) {
        Map<String, String> properties = new LinkedHashMap<>();
        given.getJSONObject("properties").forEach((name, value) -> properties.put(name, (String) value));
        return properties;
    }
}
