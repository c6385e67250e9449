package mqproc.interop;

import com.alibaba.fastjson2.JSONObject;
import com.alibaba.fastjson2.JSONWriter;
import java.io.IOException;
import java.io.PrintStream;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HexFormat;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import org.apache.rocketmq.common.BoundaryType;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.filter.FilterAPI;
import org.apache.rocketmq.remoting.protocol.heartbeat.SubscriptionData;
import org.apache.rocketmq.store.DefaultMessageFilter;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.DispatchRequest;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.GetMessageStatus;
import org.apache.rocketmq.store.MessageFilter;
import org.apache.rocketmq.store.SelectMappedBufferResult;
import org.apache.rocketmq.store.queue.ConsumeQueueInterface;
import org.apache.rocketmq.store.queue.CqUnit;
import org.apache.rocketmq.store.queue.ReferredIterator;

/**
 * Everything that RocketMQ tells of an open store, a JSON object a line:
 *
 * <pre>
 * store      minPhyOffset, maxPhyOffset, earliestMessageTime
 * record     each record of the log, in order: checks, what lookMessageByOffset decodes
 * blank      the end of a file
 * bad        what is no record; the walk goes on where reput would
 * gap        where a file is missing, which ends the walk
 * queue      minOffset, maxOffset, units; alone: the offsets that give nothing when they alone are asked for
 * pull       getMessage from the queue's minimum to its maximum, without and with a tag
 * key        queryMessage of each key and unique id
 * time       getOffsetInQueueByTime around the store times of a queue's messages
 * </pre>
 */
final class StoreDump {
    private static final String GROUP = "interop";
    private static final int PHYSICAL_OFFSET_AT = 28;
    private static final int QUEUE_OFFSET_AT = 20;
    private static final int MESSAGES_OF_A_PULL = 32;
    private static final int MESSAGES_OF_A_KEY = 64;
    private static final int TIMES_OF_A_QUEUE = 24;
    private static final int TAGS_OF_A_TOPIC = 3;

    private final OpenStore opened;
    private final DefaultMessageStore store;
    /** Keys and tags by topic, store times by queue, as the walk through the log meets them. */
    private final Map<String, Set<String>> keys = new TreeMap<>();
    private final Map<String, Set<String>> tags = new TreeMap<>();
    private final Map<String, TreeSet<Long>> times = new TreeMap<>();
    private PrintStream out;
    private int lines;

    StoreDump(OpenStore opened) {
        this.opened = opened;
        this.store = opened.store;
    }

    /** Writes the file; returns its number of lines. */
    int writeTo(Path file) throws Exception {
        opened.waitForDispatch();
        try (PrintStream stream = new PrintStream(Files.newOutputStream(file), false, StandardCharsets.UTF_8)) {
            out = stream;
            print("store", "minPhyOffset", store.getMinPhyOffset(), "maxPhyOffset", store.getMaxPhyOffset(),
                "earliestMessageTime", store.getEarliestMessageTime());
            walkLog();
            askQueues();
            askKeys();
            if (stream.checkError()) {
                throw new IOException(file + " could not be written");
            }
        }
        return lines;
    }

    private void print(String kind, Object... fields) {
        JSONObject line = new JSONObject();
        line.put("kind", kind);
        for (int index = 0; index < fields.length; index += 2) {
            line.put((String) fields[index], fields[index + 1]);
        }
        out.println(line.toJSONString(JSONWriter.Feature.WriteNulls));
        lines++;
    }

    // The log

    /** Record by record, with the checks of recovery, going on where reput does. */
    private void walkLog() throws Exception {
        long offset = store.getMinPhyOffset();
        while (offset >= 0 && offset < store.getMaxPhyOffset()) {
            SelectMappedBufferResult file = store.getCommitLogData(offset);
            if (file == null) {
                print("gap", "offset", offset);
                return;
            }
            try {
                offset = walkFile(file.getByteBuffer(), offset);
            } finally {
                file.release();
            }
        }
    }

    private long walkFile(ByteBuffer data, long start) throws Exception {
        long offset = start;
        while (data.hasRemaining()) {
            int at = data.position();
            DispatchRequest found = check(data, false);
            int size = found.getMsgSize();
            if (found.isSuccess() && size == 0) {
                print("blank", "offset", offset, "size", data.getInt(at));
                return store.getCommitLog().rollNextFile(offset);
            }
            if (!found.isSuccess()) {
                long next = size > 0 ? offset + size : store.getCommitLog().rollNextFile(offset);
                print("bad", "offset", offset, "size", size, "next", next);
                return next;
            }
            data.position(at);
            boolean covered = check(data, true).isSuccess();
            printRecord(data, at, offset, found, covered);
            data.position(at + size);
            offset += size;
        }
        return offset;
    }

    /** With `whole` the CRC of the whole record is demanded in place of the body's. */
    private DispatchRequest check(ByteBuffer data, boolean whole) {
        opened.config.setForceVerifyPropCRC(whole);
        try {
            return store.getCommitLog().checkMessageAndReturnSize(data, true, false, true);
        } finally {
            opened.config.setForceVerifyPropCRC(false);
        }
    }

    private void printRecord(ByteBuffer data, int at, long offset, DispatchRequest found, boolean covered)
        throws Exception {
        byte[] record = new byte[found.getMsgSize()];
        data.get(at, record);
        MessageExt message = store.lookMessageByOffset(offset);
        if (message == null) {
            throw new IllegalStateException("the record at " + offset + " is intact, but cannot be looked up");
        }
        note(found, message);
        print("record",
            "offset", offset,
            "size", found.getMsgSize(),
            "sha256", HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(record)),
            "covered", covered,
            "tagsCode", found.getTagsCode(),
            "physicalOffset", found.getCommitLogOffset(),
            "messageId", message.getMsgId(),
            "topic", message.getTopic(),
            "queueId", message.getQueueId(),
            "queueOffset", message.getQueueOffset(),
            "flag", message.getFlag(),
            "sysFlag", message.getSysFlag(),
            "bornTimestamp", message.getBornTimestamp(),
            "bornHost", host(message.getBornHost()),
            "storeTimestamp", message.getStoreTimestamp(),
            "storeHost", host(message.getStoreHost()),
            "reconsumeTimes", message.getReconsumeTimes(),
            "preparedTransactionOffset", message.getPreparedTransactionOffset(),
            "bodyCrc", message.getBodyCRC(),
            "body", message.getBody() == null ? "" : Base64.getEncoder().encodeToString(message.getBody()),
            "properties", message.getProperties());
    }

    private void note(DispatchRequest found, MessageExt message) {
        Set<String> ofTopic = keys.computeIfAbsent(found.getTopic(), topic -> new LinkedHashSet<>());
        if (found.getUniqKey() != null) {
            ofTopic.add(found.getUniqKey());
        }
        if (found.getKeys() != null) {
            for (String key : found.getKeys().split(" ")) {
                if (!key.isEmpty()) {
                    ofTopic.add(key);
                }
            }
        }
        if (message.getTags() != null) {
            tags.computeIfAbsent(found.getTopic(), topic -> new TreeSet<>()).add(message.getTags());
        }
        times.computeIfAbsent(found.getTopic() + "/" + found.getQueueId(), queue -> new TreeSet<>())
            .add(found.getStoreTimestamp());
    }

    /** Address and port in hexadecimal, as a record has them: texts of IPv6 addresses differ. */
    private static String host(SocketAddress address) {
        InetSocketAddress found = (InetSocketAddress) address;
        return HexFormat.of().formatHex(found.getAddress().getAddress()) + ":" + found.getPort();
    }

    // Queues

    private void askQueues() throws Exception {
        for (var topic : new TreeMap<>(store.getConsumeQueueTable()).entrySet()) {
            for (var queue : new TreeMap<>(topic.getValue()).entrySet()) {
                askQueue(topic.getKey(), queue.getKey(), queue.getValue());
            }
        }
    }

    private void askQueue(String topic, int queueId, ConsumeQueueInterface queue) throws Exception {
        long min = store.getMinOffsetInQueue(topic, queueId);
        long max = store.getMaxOffsetInQueue(topic, queueId);
        print("queue", "topic", topic, "queueId", queueId, "minOffset", min, "maxOffset", max, "units",
            units(queue, min, max), "alone", emptyAlone(topic, queueId, min, max));
        pullAll(topic, queueId, min, max, "");
        int asked = 0;
        for (String tag : tags.getOrDefault(topic, Set.of())) {
            if (asked++ < TAGS_OF_A_TOPIC) {
                pullAll(topic, queueId, min, max, tag);
            }
        }
        askTimes(topic, queueId);
    }

    /** [physical offset, size, tags code] of each unit. */
    private static List<List<Long>> units(ConsumeQueueInterface queue, long min, long max) {
        List<List<Long>> units = new ArrayList<>();
        for (long offset = min; offset < max; offset = min + units.size()) {
            ReferredIterator<CqUnit> found = queue.iterateFrom(offset);
            if (found == null || !found.hasNext()) {
                break;
            }
            try {
                while (found.hasNext()) {
                    CqUnit unit = found.next();
                    units.add(List.of(unit.getPos(), (long) unit.getSize(), unit.getTagsCode()));
                }
            } finally {
                found.release();
            }
        }
        return units;
    }

    /** [offset, status] of queue offsets that give no message to a pull of one message. */
    private List<List<Object>> emptyAlone(String topic, int queueId, long min, long max) {
        List<List<Object>> empty = new ArrayList<>();
        for (long offset = min; offset < max; offset++) {
            String status = statusAlone(topic, queueId, offset);
            if (!status.equals(GetMessageStatus.FOUND.name())) {
                empty.add(List.of(offset, status));
            }
        }
        return empty;
    }

    private String statusAlone(String topic, int queueId, long offset) {
        try {
            GetMessageResult found = store.getMessage(GROUP, topic, queueId, offset, 1, null);
            found.release();
            return found.getStatus().name();
        } catch (RuntimeException error) {
            return error.getClass().getSimpleName();
        }
    }

    /** A pull that throws is printed with the exception as its status; a consumer would come no further. */
    private void pullAll(String topic, int queueId, long min, long max, String tag) throws Exception {
        MessageFilter filter = tag.isEmpty() ? null : new DefaultMessageFilter(subscription(topic, tag));
        long offset = min;
        while (offset < max) {
            GetMessageResult found;
            try {
                found = store.getMessage(GROUP, topic, queueId, offset, MESSAGES_OF_A_PULL, filter);
            } catch (RuntimeException error) {
                print("pull", "topic", topic, "queueId", queueId, "offset", offset, "tag", tag, "status",
                    error.getClass().getSimpleName(), "next", offset, "queueOffsets", List.of(), "physicalOffsets",
                    List.of());
                return;
            }
            List<Long> queueOffsets = new ArrayList<>();
            List<Long> physicalOffsets = new ArrayList<>();
            for (ByteBuffer message : found.getMessageBufferList()) {
                queueOffsets.add(message.getLong(QUEUE_OFFSET_AT));
                physicalOffsets.add(message.getLong(PHYSICAL_OFFSET_AT));
            }
            found.release();
            print("pull", "topic", topic, "queueId", queueId, "offset", offset, "tag", tag, "status",
                found.getStatus().name(), "next", found.getNextBeginOffset(), "queueOffsets", queueOffsets,
                "physicalOffsets", physicalOffsets);
            if (found.getNextBeginOffset() <= offset) {
                return;
            }
            offset = found.getNextBeginOffset();
        }
    }

    private static SubscriptionData subscription(String topic, String tag) throws Exception {
        return FilterAPI.buildSubscriptionData(topic, tag);
    }

    private void askTimes(String topic, int queueId) {
        Set<Long> met = times.getOrDefault(topic + "/" + queueId, new TreeSet<>());
        int every = Math.max(1, met.size() / TIMES_OF_A_QUEUE);
        TreeSet<Long> asked = new TreeSet<>();
        int index = 0;
        for (long time : met) {
            if (index++ % every == 0 || index == met.size()) {
                asked.addAll(List.of(time - 1, time, time + 1));
            }
        }
        for (long time : asked) {
            print("time", "topic", topic, "queueId", queueId, "time", time,
                "lower", store.getOffsetInQueueByTime(topic, queueId, time, BoundaryType.LOWER),
                "upper", store.getOffsetInQueueByTime(topic, queueId, time, BoundaryType.UPPER));
        }
    }

    // Keys

    private void askKeys() {
        keys.forEach((topic, ofTopic) -> ofTopic.forEach(key -> askKey(topic, key)));
    }

    private void askKey(String topic, String key) {
        var found = store.queryMessage(topic, key, MESSAGES_OF_A_KEY, 0, Long.MAX_VALUE);
        List<Long> physicalOffsets = new ArrayList<>();
        for (ByteBuffer message : found.getMessageBufferList()) {
            physicalOffsets.add(message.getLong(PHYSICAL_OFFSET_AT));
        }
        found.release();
        print("key", "topic", topic, "key", key, "physicalOffsets", physicalOffsets);
    }
}
