package mqproc.interop;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;

/** A name server, and RocketMQ's own clients that find their broker by it: push consumers, a producer. */
final class BrokerClients {
    private static final int BEAT_MS = 1_000;
    private static final long ROUTE_NS = 60_000_000_000L;

    static {
        // Else a consumer sees queues that were made after it started only after 20 s.
        System.setProperty("rocketmq.client.rebalance.waitInterval", String.valueOf(BEAT_MS));
    }

    private final NamesrvController names;
    private final String address;
    private final Map<String, DefaultMQPushConsumer> consumers = new ConcurrentHashMap<>();
    private final Map<String, List<JSONObject>> consumed = new ConcurrentHashMap<>();
    private final List<String> checked = new ArrayList<>();
    private TransactionMQProducer producer;

    BrokerClients() throws Exception {
        var server = new NettyServerConfig();
        server.setListenPort(StoreBroker.freePort());
        address = "127.0.0.1:" + server.getListenPort();
        names = new NamesrvController(new NamesrvConfig(), server);
        if (!names.initialize()) {
            throw new IllegalStateException("the name server does not start");
        }
        names.start();
    }

    /** Of the name server. */
    String address() {
        return address;
    }

    private void configure(ClientConfig client, String group) {
        client.setNamesrvAddr(address);
        client.setInstanceName(group);
        client.setHeartbeatBrokerInterval(BEAT_MS);
        client.setPollNameServerInterval(BEAT_MS);
    }

    /** A consumer of the group starts. `refuse`: by body, with which level a message is refused the first time. */
    void consume(String group, String topic, JSONObject refuse) throws Exception {
        List<JSONObject> came = consumed.computeIfAbsent(group, name -> new ArrayList<>());
        var consumer = new DefaultMQPushConsumer(group);
        configure(consumer, group);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            MessageExt message = messages.get(0);
            String body = text(message);
            synchronized (came) {
                came.add(JSONObject.of("body", body, "times", message.getReconsumeTimes(), "queueId",
                    message.getQueueId(), "offset", message.getQueueOffset()));
                came.notifyAll();
            }
            if (message.getReconsumeTimes() > 0 || !refuse.containsKey(body)) {
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            }
            context.setDelayLevelWhenNextConsume(refuse.getIntValue(body));
            return ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
        consumers.put(group, consumer);
    }

    /** All that the group's consumers got: body, times, queueId, offset. Waits until there are so many. */
    JSONArray consumed(String group, int messages, long waitMs) throws InterruptedException {
        List<JSONObject> came = consumed.get(group);
        long deadline = System.currentTimeMillis() + waitMs;
        synchronized (came) {
            for (long left = waitMs; came.size() < messages && left > 0; left = deadline - System.currentTimeMillis()) {
                came.wait(left);
            }
            return new JSONArray(came);
        }
    }

    /** The group's consumer tells the broker its progress, and ends. */
    void endConsumer(String group) {
        consumers.remove(group).shutdown();
    }

    /** A producer starts that answers checks by body: true, false, or null when it does not know. */
    void produce(String group, String topic, JSONObject answers) throws Exception {
        producer = new TransactionMQProducer(group);
        configure(producer, group);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object answer) {
                return state((Boolean) answer);
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                synchronized (checked) {
                    checked.add(text(message));
                }
                return state(answers.getBoolean(text(message)));
            }
        });
        producer.start();
        // Checks are asked of producers that the broker knows; this one knows the broker from here on.
        fetchQueues(topic);
    }

    /** Asks the name server until it knows the topic: a broker tells it of its topics some time after it has started. */
    private void fetchQueues(String topic) throws Exception {
        long deadlineNs = System.nanoTime() + ROUTE_NS;
        while (true) {
            try {
                producer.fetchPublishMessageQueues(topic);
                return;
            } catch (MQClientException error) {
                if (System.nanoTime() > deadlineNs) {
                    throw error;
                }
                Thread.sleep(50);
            }
        }
    }

    private static LocalTransactionState state(Boolean answer) {
        if (answer == null) {
            return LocalTransactionState.UNKNOW;
        }
        return answer ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
    }

    /** Bodies of what the producer was asked about. */
    JSONArray checked() {
        synchronized (checked) {
            return new JSONArray(checked);
        }
    }

    /** Sends a message: at once, by `level`, at `deliverMs`, or as a transaction that ends so, if it does. */
    String put(JSONObject request) throws Exception {
        byte[] body = request.getString("body").getBytes(StandardCharsets.UTF_8);
        var message = new Message(request.getString("topic"), body);
        if (request.containsKey("commit")) {
            return producer.sendMessageInTransaction(message, request.getBoolean("commit")).getSendStatus().name();
        }
        if (request.containsKey("level")) {
            message.setDelayTimeLevel(request.getIntValue("level"));
        }
        if (request.containsKey("deliverMs")) {
            message.setDeliverTimeMs(request.getLongValue("deliverMs"));
        }
        return producer.send(message).getSendStatus().name();
    }

    private static String text(Message message) {
        return new String(message.getBody(), StandardCharsets.UTF_8);
    }

    void stop() {
        for (String group : List.copyOf(consumers.keySet())) {
            endConsumer(group);
        }
        if (producer != null) {
            producer.shutdown();
        }
    }

    void stopNames() {
        names.shutdown();
    }
}
