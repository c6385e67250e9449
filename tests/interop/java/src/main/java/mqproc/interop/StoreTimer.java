package mqproc.interop;

import com.alibaba.fastjson2.JSONObject;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.SelectMappedBufferResult;
import org.apache.rocketmq.store.stats.BrokerStatsManager;
import org.apache.rocketmq.store.timer.Slot;
import org.apache.rocketmq.store.timer.TimerCheckpoint;
import org.apache.rocketmq.store.timer.TimerMessageStore;
import org.apache.rocketmq.store.timer.TimerMetrics;

/** The timer of an open store: RocketMQ's TimerMessageStore over `timerwheel`, `timerlog` and `config/timercheck`. */
final class StoreTimer {
    private static final long TIMEOUT_MS = 60_000;
    private static final int DAY_SECONDS = 24 * 3600;

    private final DefaultMessageStore store;
    private final TimerMessageStore timer;

    StoreTimer(OpenStore opened, Path root) throws IOException {
        store = opened.store;
        Path config = root.resolve("config");
        var checkpoint = new TimerCheckpoint(config.resolve("timercheck").toString());
        var metrics = new TimerMetrics(config.resolve("timermetrics").toString());
        var statistics = new BrokerStatsManager("interop", false);
        timer = new TimerMessageStore(store, opened.config, checkpoint, metrics, statistics);
    }

    /** Loads as a broker does; then readMs, queueOffset, and each slot's chain: [slot, position, offset, size, magic]. */
    JSONObject load() {
        JSONObject state = new JSONObject();
        state.put("loaded", timer.load());
        state.put("readMs", timer.getCurrReadTimeMs());
        state.put("queueOffset", timer.getQueueOffset());
        state.put("messages", timer.getTimerWheel().getAllNum(timer.getCurrReadTimeMs()));
        state.put("units", units());
        return state;
    }

    private List<List<Long>> units() {
        List<List<Long>> units = new ArrayList<>();
        long begin = timer.getCurrReadTimeMs();
        long end = begin + 1000L * DAY_SECONDS * 7;
        for (long time = begin; time < end; time += timer.getPrecisionMs()) {
            Slot slot = timer.getTimerWheel().getSlot(time);
            for (long position = slot.lastPos; position >= 0; ) {
                position = addUnit(units, time, position);
            }
        }
        return units;
    }

    /** Returns the position of the unit before it. */
    private long addUnit(List<List<Long>> units, long slot, long position) {
        SelectMappedBufferResult found = timer.getTimerLog().getTimerMessage(position);
        try {
            ByteBuffer unit = found.getByteBuffer();
            unit.getInt();
            long previous = unit.getLong();
            long magic = unit.getInt();
            unit.getLong();
            unit.getInt();
            long offset = unit.getLong();
            int size = unit.getInt();
            MessageExt message = store.lookMessageByOffset(offset, size);
            if (message == null || !message.getTopic().equals(TimerMessageStore.TIMER_TOPIC)) {
                throw new IllegalStateException("the unit at " + position + " leads to no message that waits");
            }
            units.add(List.of(slot, position, offset, (long) size, magic));
            return previous;
        } finally {
            found.release();
        }
    }

    /** Runs until all of the timer's queue is filed, a topic's queue 0 has so many messages, and their slots are past. */
    JSONObject run(String topic, long messages) throws Exception {
        // A broker says so when it is, or becomes, the master.
        timer.setShouldRunningDequeue(true);
        timer.start();
        long deadline = System.currentTimeMillis() + TIMEOUT_MS;
        while (isBehind() || store.getMaxOffsetInQueue(topic, 0) < messages) {
            sleepBefore(deadline, topic);
        }
        // The timer goes on to the next slot only after a slot's messages are there.
        long delivered = System.currentTimeMillis();
        while (timer.getCurrReadTimeMs() <= delivered) {
            sleepBefore(deadline, topic);
        }
        JSONObject state = new JSONObject();
        state.put("queueOffset", timer.getCommitQueueOffset());
        state.put("delivered", store.getMaxOffsetInQueue(topic, 0));
        state.put("messages", timer.getTimerWheel().getAllNum(timer.getCurrReadTimeMs()));
        return state;
    }

    private void sleepBefore(long deadline, String topic) throws Exception {
        if (System.currentTimeMillis() > deadline) {
            throw new IllegalStateException("filed " + timer.getCommitQueueOffset() + ", " + topic + " has "
                + store.getMaxOffsetInQueue(topic, 0) + ", read to " + timer.getCurrReadTimeMs());
        }
        Thread.sleep(10);
    }

    private boolean isBehind() throws Exception {
        return timer.getCommitQueueOffset() < store.getMaxOffsetInQueue(TimerMessageStore.TIMER_TOPIC, 0);
    }

    /** Closes the checkpoint, too. */
    void close() {
        timer.shutdown();
    }
}
