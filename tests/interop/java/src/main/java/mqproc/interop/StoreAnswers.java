package mqproc.interop;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.nio.ByteBuffer;
import java.util.List;
import org.apache.rocketmq.common.BoundaryType;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.filter.FilterAPI;
import org.apache.rocketmq.store.DefaultMessageFilter;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.MessageFilter;

/** Answers single questions about an open store, in the form of `answers` of the golden stores. */
final class StoreAnswers {
    private static final String GROUP = "interop";
    private static final int PHYSICAL_OFFSET_AT = 28;
    private static final int QUEUE_OFFSET_AT = 20;
    /** RocketMQ's own limit of a pull without a size. */
    private static final int PULL_BYTES = 128 << 20;
    private final DefaultMessageStore store;

    StoreAnswers(OpenStore opened) {
        store = opened.store;
    }

    JSONArray answerAll(JSONArray questions) throws Exception {
        JSONArray answers = new JSONArray();
        for (Object each : questions) {
            answers.add(answer((JSONObject) each));
        }
        return answers;
    }

    private JSONObject answer(JSONObject asked) throws Exception {
        String topic = asked.getString("topic");
        int queueId = asked.getIntValue("queueId");
        long offset = asked.getLongValue("offset");
        switch (asked.getString("op")) {
            case "getMessage":
                return pull(asked, topic, queueId, offset);
            case "queryMessage":
                return query(asked, topic);
            case "offsetByTime":
                return JSONObject.of("offset", offsetByTime(asked, topic, queueId));
            case "minMax":
                return JSONObject.of("minOffset", store.getMinOffsetInQueue(topic, queueId), "maxOffset",
                    store.getMaxOffsetInQueue(topic, queueId));
            case "storeTime":
                return JSONObject.of("timestamp", store.getMessageStoreTimeStamp(topic, queueId, offset));
            case "look":
                return look(asked.getLongValue("phyOffset"));
            default:
                throw new IllegalArgumentException("no such question: " + asked);
        }
    }

    private JSONObject pull(JSONObject asked, String topic, int queueId, long offset) throws Exception {
        int bytes = asked.containsKey("maxTotalMsgSize") ? asked.getIntValue("maxTotalMsgSize") : PULL_BYTES;
        MessageFilter filter = null;
        if (asked.containsKey("filter")) {
            filter = new DefaultMessageFilter(FilterAPI.buildSubscriptionData(topic, asked.getString("filter")));
        }
        GetMessageResult found = store.getMessage(GROUP, topic, queueId, offset, asked.getIntValue("maxMsgNums"), bytes,
            filter);
        JSONObject answer = JSONObject.of("status", found.getStatus().name(), "nextBeginOffset",
            found.getNextBeginOffset(), "minOffset", found.getMinOffset(), "maxOffset", found.getMaxOffset());
        answer.put("bufferTotalSize", found.getBufferTotalSize());
        answer.put("queueOffsets", longs(found.getMessageBufferList(), QUEUE_OFFSET_AT));
        answer.put("phyOffsets", longs(found.getMessageBufferList(), PHYSICAL_OFFSET_AT));
        found.release();
        return answer;
    }

    private static JSONArray longs(List<ByteBuffer> messages, int at) {
        JSONArray found = new JSONArray();
        for (ByteBuffer message : messages) {
            found.add(message.getLong(at));
        }
        return found;
    }

    private JSONObject query(JSONObject asked, String topic) {
        var found = store.queryMessage(topic, asked.getString("key"), asked.getIntValue("maxNum"),
            asked.getLongValue("begin"), asked.getLongValue("end"));
        JSONObject answer = JSONObject.of("phyOffsets", longs(found.getMessageBufferList(), PHYSICAL_OFFSET_AT),
            "indexLastUpdateTimestamp", found.getIndexLastUpdateTimestamp(), "indexLastUpdatePhyoffset",
            found.getIndexLastUpdatePhyoffset());
        found.release();
        return answer;
    }

    private long offsetByTime(JSONObject asked, String topic, int queueId) {
        long time = asked.getLongValue("timestamp");
        if (!asked.containsKey("boundary")) {
            return store.getOffsetInQueueByTime(topic, queueId, time);
        }
        return store.getOffsetInQueueByTime(topic, queueId, time, BoundaryType.valueOf(asked.getString("boundary")));
    }

    /** At an offset within a record RocketMQ takes any bytes for a length, and may throw. */
    private JSONObject look(long physicalOffset) {
        MessageExt message;
        try {
            message = store.lookMessageByOffset(physicalOffset);
        } catch (RuntimeException error) {
            message = null;
        }
        if (message == null) {
            return JSONObject.of("found", false);
        }
        return JSONObject.of("found", true, "topic", message.getTopic(), "queueId", message.getQueueId(), "queueOffset",
            message.getQueueOffset());
    }
}
