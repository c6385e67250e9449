package mqproc.interop;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.io.IOException;
import java.net.ServerSocket;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ThreadLocalRandom;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.filter.ExpressionType;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.CommandCustomHeader;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyRemotingClient;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.RequestCode;
import org.apache.rocketmq.remoting.protocol.ResponseCode;
import org.apache.rocketmq.remoting.protocol.header.AckMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ChangeInvisibleTimeRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ChangeInvisibleTimeResponseHeader;
import org.apache.rocketmq.remoting.protocol.header.ExtraInfoUtil;
import org.apache.rocketmq.remoting.protocol.header.PopMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.PopMessageResponseHeader;
import org.apache.rocketmq.remoting.protocol.header.SendMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** A whole broker on a store, a client of it that receives messages by POP requests, and RocketMQ's own clients. */
final class StoreBroker {
    private static final int TIMEOUT_MS = 10_000;
    /** Just above the ports of well-known services; the broker takes the one two below, too. */
    private static final int LOWEST_PORT = 12_000;
    private static final int OUTGOING_PORTS = 32_000;

    static {
        System.setProperty("tls.server.mode", "disabled");  // Making a certificate takes seconds.
        // As a broker's main does: else the name server takes it for an old one, and reads no topics of it.
        System.setProperty(RemotingCommand.REMOTING_VERSION_KEY, String.valueOf(MQVersion.CURRENT_VERSION));
    }

    private final Path root;
    private final BrokerConfig config = new BrokerConfig();
    private final BrokerController broker;
    private final NettyRemotingClient client = new NettyRemotingClient(new NettyClientConfig());
    private final String address;
    private final BrokerClients clients = new BrokerClients();
    private final JSONObject levels;

    StoreBroker(Path root, JSONObject options) throws Exception {
        this.root = root;
        var store = new MessageStoreConfig();
        store.setStorePathRootDir(root.toString());
        store.setStorePathCommitLog(root.resolve("commitlog").toString());
        store.setEnableCompaction(false);
        config.setBrokerIP1("127.0.0.1");
        config.setNamesrvAddr(clients.address());
        Properties properties = new Properties();
        options.forEach((name, value) -> properties.setProperty(name, value.toString()));
        MixAll.properties2Object(properties, store);
        MixAll.properties2Object(properties, config);
        var server = new NettyServerConfig();
        server.setListenPort(freePort());
        address = "127.0.0.1:" + server.getListenPort();
        broker = new BrokerController(config, server, new NettyClientConfig(), store);
        if (!broker.initialize()) {
            throw new IllegalStateException(root + ": the broker does not load it");
        }
        levels = textual(broker.getScheduleMessageService().getOffsetTable());
        broker.start();
        client.start();
    }

    /**
     * A port that is free, and the one two below it, where a broker listens too. Not one of those that the system gives
     * to outgoing connections: such a one may be taken again before it is used.
     */
    static int freePort() throws IOException {
        for (int tries = 0; tries < 1_000; tries++) {
            int port = ThreadLocalRandom.current().nextInt(LOWEST_PORT, OUTGOING_PORTS);
            if (isFree(port) && isFree(port - 2)) {
                return port;
            }
        }
        throw new IOException("no free port");
    }

    private static boolean isFree(int port) {
        try (var socket = new ServerSocket(port)) {
            return socket.isBound();
        } catch (IOException taken) {
            return false;
        }
    }

    /** Makes a topic of one queue, and a group. */
    void make(String topic, String group) {
        broker.getTopicConfigManager().updateTopicConfig(new TopicConfig(topic, 1, 1));
        var settings = new SubscriptionGroupConfig();
        settings.setGroupName(group);
        broker.getSubscriptionGroupManager().updateSubscriptionGroupConfig(settings);
    }

    void send(String topic, JSONArray bodies, String tag) throws Exception {
        for (Object body : bodies) {
            var header = new SendMessageRequestHeader();
            header.setProducerGroup("interop");
            header.setTopic(topic);
            header.setDefaultTopic(topic);
            header.setDefaultTopicQueueNums(1);
            header.setQueueId(0);
            header.setSysFlag(0);
            header.setBornTimestamp(System.currentTimeMillis());
            header.setFlag(0);
            header.setReconsumeTimes(0);
            header.setProperties(tag == null ? "" : MessageDecoder.messageProperties2String(Map.of("TAGS", tag)));
            call(RequestCode.SEND_MESSAGE, header, ((String) body).getBytes(StandardCharsets.UTF_8));
        }
    }

    /** Messages of a topic's queue, or of its retry topic's: body, times, handle. None within `waitMs`: an empty list. */
    JSONArray pop(JSONObject request) throws Exception {
        var header = new PopMessageRequestHeader();
        header.setConsumerGroup(request.getString("group"));
        header.setTopic(request.getString("topic"));
        header.setQueueId(0);
        header.setMaxMsgNums(request.getIntValue("messages"));
        header.setInvisibleTime(request.getLongValue("invisibleMs"));
        header.setPollTime(request.getLongValue("waitMs"));
        header.setBornTime(System.currentTimeMillis());
        header.setInitMode(0);
        if (request.containsKey("tag")) {
            header.setExpType(ExpressionType.TAG);
            header.setExp(request.getString("tag"));
        }
        RemotingCommand answer = client.invokeSync(address, RemotingCommand.createRequestCommand(
            RequestCode.POP_MESSAGE, header), TIMEOUT_MS + request.getLongValue("waitMs"));
        if (answer.getCode() == ResponseCode.POLLING_TIMEOUT || answer.getCode() == ResponseCode.PULL_NOT_FOUND) {
            return new JSONArray();
        }
        checked(answer);
        var told = (PopMessageResponseHeader) answer.decodeCommandCustomHeader(PopMessageResponseHeader.class);
        var starts = ExtraInfoUtil.parseStartOffsetInfo(told.getStartOffsetInfo());
        JSONArray messages = new JSONArray();
        for (MessageExt message : MessageDecoder.decodes(ByteBuffer.wrap(answer.getBody()))) {
            String handle = message.getProperty("POP_CK");
            if (handle == null) {
                long start = starts.get(ExtraInfoUtil.getStartOffsetInfoMapKey(message.getTopic(), 0));
                handle = ExtraInfoUtil.buildExtraInfo(start, told.getPopTime(), told.getInvisibleTime(),
                    told.getReviveQid(), message.getTopic(), config.getBrokerName(), 0, message.getQueueOffset());
            }
            messages.add(JSONObject.of("body", new String(message.getBody(), StandardCharsets.UTF_8),
                "times", message.getReconsumeTimes(), "handle", handle));
        }
        return messages;
    }

    void ack(String group, String topic, String handle) throws Exception {
        String[] parts = ExtraInfoUtil.split(handle);
        var header = new AckMessageRequestHeader();
        header.setConsumerGroup(group);
        header.setTopic(topic);
        header.setQueueId(ExtraInfoUtil.getQueueId(parts));
        header.setOffset(ExtraInfoUtil.getQueueOffset(parts));
        header.setExtraInfo(handle);
        call(RequestCode.ACK_MESSAGE, header, null);
    }

    /** The message's new handle. */
    String change(String group, String topic, String handle, long invisibleMs) throws Exception {
        String[] parts = ExtraInfoUtil.split(handle);
        var header = new ChangeInvisibleTimeRequestHeader();
        header.setConsumerGroup(group);
        header.setTopic(topic);
        header.setQueueId(ExtraInfoUtil.getQueueId(parts));
        header.setOffset(ExtraInfoUtil.getQueueOffset(parts));
        header.setExtraInfo(handle);
        header.setInvisibleTime(invisibleMs);
        RemotingCommand answer = call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header, null);
        var told = (ChangeInvisibleTimeResponseHeader) answer.decodeCommandCustomHeader(
            ChangeInvisibleTimeResponseHeader.class);
        long offset = ExtraInfoUtil.getQueueOffset(parts);
        return ExtraInfoUtil.buildExtraInfo(offset, told.getPopTime(), told.getInvisibleTime(), told.getReviveQid(),
            topic, config.getBrokerName(), ExtraInfoUtil.getQueueId(parts), offset);
    }

    BrokerClients clients() {
        return clients;
    }

    /**
     * What the broker has of the config files: offsets by queue, and by level as they were when it started; a topic's
     * and a group's settings; where the topic's queues end.
     */
    JSONObject state(String topic, String group) throws Exception {
        TopicConfig settings = broker.getTopicConfigManager().selectTopicConfig(topic);
        var groups = broker.getSubscriptionGroupManager().getSubscriptionGroupTable();
        return JSONObject.of(
            "progress", textual(broker.getConsumerOffsetManager().queryOffset(group, topic)),
            "levels", levels,
            "queues", settings == null ? null : settings.getWriteQueueNums(),
            "retryMaxTimes", groups.containsKey(group) ? groups.get(group).getRetryMaxTimes() : null,
            "ends", ends(topic, settings));
    }

    /** JSON's keys are text. */
    private static JSONObject textual(Map<Integer, Long> numbers) {
        JSONObject texts = new JSONObject();
        if (numbers != null) {
            numbers.forEach((number, value) -> texts.put(number.toString(), value));
        }
        return texts;
    }

    private JSONObject ends(String topic, TopicConfig settings) throws Exception {
        JSONObject ends = new JSONObject();
        for (int queue = 0; settings != null && queue < settings.getReadQueueNums(); queue++) {
            ends.put(String.valueOf(queue), broker.getMessageStore().getMaxOffsetInQueue(topic, queue));
        }
        return ends;
    }

    private RemotingCommand call(int code, CommandCustomHeader header, byte[] body) throws Exception {
        RemotingCommand request = RemotingCommand.createRequestCommand(code, header);
        request.setBody(body);
        return checked(client.invokeSync(address, request, TIMEOUT_MS));
    }

    private static RemotingCommand checked(RemotingCommand answer) {
        if (answer.getCode() != ResponseCode.SUCCESS) {
            throw new IllegalStateException("code " + answer.getCode() + ": " + answer.getRemark());
        }
        return answer;
    }

    JSONObject stop() {
        clients.stop();
        client.shutdown();
        broker.shutdown();
        clients.stopNames();
        return JSONObject.of("clean", !Files.exists(root.resolve("abort")));
    }
}
